"""`postroom backup` and `postroom restore`: a data folder in one file, and back."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import click

from postroom.cli.render import warn
from postroom.cli.shell import (
    DATA_DEFAULT,
    HELP_OPTIONS,
    Shell,
    StoreAddress,
    json_option,
    path_option,
    place_option,
)

if TYPE_CHECKING:
    from postroom.settings import Settings

MIB = 1 << 20


STORE_ELSEWHERE = (
    "is not in the archive. On PostgreSQL, use pg_dump --schema=postroom, "
    "and compare the restored one with the audit stream: postroom verify DIR/audit --store URL"
)


@click.command(context_settings=HELP_OPTIONS)
@place_option(f"The data folder.  {DATA_DEFAULT}")
@path_option("--out", metavar="FILE", text="The archive to write. It must not exist.", required=True)
@click.option(
    "--with-keys", is_flag=True, help="Include key files of the folder. Keep such an archive secret."
)
@click.pass_obj
def backup(shell: Shell, data: Path | None, out: Path, with_keys: bool) -> None:
    """Copy a data folder into one archive, while servers use it.

    The archive is a tar file with the store, the mail, the buses, the audit stream, the registry and the
    settings, and a manifest with the SHA-256 of each file. It is read back before it gets its name. Key files
    stay out: an archive that holds its key protects nothing. The ones that were left out are listed.

    \b
    Example:
      postroom backup --data run --out run.tar
      postroom backup --data run --out /mnt/backups/run-$(date +%F).tar --json
    """
    from postroom.server.folder.backup import back_up
    from postroom.server.folder.layout import DATABASE
    from postroom.stores.sqlite.snapshot import address_after_move

    place = shell.data_place(data)
    if isinstance(place, StoreAddress):
        raise click.UsageError(f"{place} is a database: back it up with pg_dump --schema=postroom")
    done = back_up(
        place,
        out,
        settings_file=shell.config_file(),
        key_files=key_files(shell.settings),
        with_keys=with_keys,
        report=_progress(shell),
    )
    manifest = done.manifest
    moved_to = address_after_move(place / DATABASE)
    if shell.settings.up.store is not None:
        warn(shell.program, f"warning: the store of the settings {STORE_ELSEWHERE}")
    elif moved_to:
        warn(
            shell.program, f"warning: queue.db was moved to {moved_to}, and the store there {STORE_ELSEWHERE}"
        )
    facts = {
        "out": str(out), "bytes": done.bytes, "files": len(manifest.members), "formats": manifest.formats,
        "left_out": manifest.left_out, "postroom": manifest.postroom, "created": manifest.created,
        "verified": True, "encrypted": done.is_encrypted,
    }  # fmt: skip
    left = f"; left out: {', '.join(manifest.left_out)}" if manifest.left_out else ""
    if done.is_encrypted:
        left += "; it is encrypted as the folder is, and useless without the key file, which is not in it"
    said = f"{len(manifest.members)} files of {place} are in {out} ({done.bytes:,} bytes), and were compared"
    shell.output.facts(facts, said + left)


@click.command(context_settings=HELP_OPTIONS)
@path_option("--from", "archive", metavar="FILE", text="The archive of `postroom backup`.", required=True)
@path_option("--data", metavar="DIR", text="The new data folder.", required=True)
@click.pass_obj
def restore(shell: Shell, archive: Path, data: Path) -> None:
    """Restore a backup into a new data folder.

    Every hash is compared before the first byte is written. The folder must not exist, or be empty; it gets
    its name when it is whole. Messages that were in work at the time of the backup run again when their
    leases end. Never start servers on the old folder and on the restored one.

    \b
    Example:
      postroom restore --from run.tar --data restored
      postroom verify --data restored
    """
    from postroom.core.formats.backup_format import SETTINGS
    from postroom.server.folder.backup import restore as restore_archive

    manifest = restore_archive(archive, data, report=_progress(shell))
    has_settings = any(member.name == SETTINGS for member in manifest.members)
    facts = {
        "data": str(data), "files": len(manifest.members), "bytes": manifest.bytes,
        "postroom": manifest.postroom, "created": manifest.created, "left_out": manifest.left_out,
        "settings": str(data / SETTINGS) if has_settings else None,
    }  # fmt: skip
    said = f"{len(manifest.members)} files of {manifest.created} are in {data}"
    said += f"; the settings were {data / SETTINGS}" if has_settings else ""
    said += f"; not in the backup: {', '.join(manifest.left_out)}" if manifest.left_out else ""
    shell.output.facts(facts, said)


def key_files(settings: "Settings") -> list[Path]:
    """The files that the settings name as keys."""
    found = []
    for table in (settings.audit, settings.up, settings.encryption):
        for name in table.__struct_fields__:
            value = getattr(table, name)
            if (name.endswith("key_file") or name == "tls_key") and value is not None:
                found.append(Path(value))
    return found


def _progress(shell: Shell) -> Callable[[str, int], None]:
    """Print the progress on a terminal."""
    done: Counter[str] = Counter()

    def report(what: str, nbytes: int) -> None:
        done[what] += nbytes
        shell.note_progress(f"{what}: {done[what] // MIB:,} MiB")

    return report


for _command in (backup, restore):
    _command.params.append(json_option())
