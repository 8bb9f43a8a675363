"""`postroom keys`: the keys that encrypt what Tasks, Engine and Mail store."""

import os
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from postroom.cli.shell import (
    DATA_DEFAULT,
    HELP_OPTIONS,
    KEY_FILE_VARIABLE,
    Shell,
    StoreAddress,
    add_json_option,
    as_path,
    path_option,
    place_option,
    together,
)

if TYPE_CHECKING:
    from postroom.server.folder.key_rotation import EncryptedData

key_file_option = path_option(
    "--key-file", metavar="FILE",
    text="The key file.  [default: $POSTROOM_KEY_FILE, else key_file in [encryption] of the settings]",
)  # fmt: skip
place_options = together(
    place_option(f"The data folder, or the address of a store.  {DATA_DEFAULT}"),
    key_file_option,
)
name_option = click.option("--name", metavar="NAME", help="The name of the new key.  [default: the date]")


@click.group(context_settings=HELP_OPTIONS)
def keys() -> None:
    """The keys that encrypt stored payloads, results, events and mail.

    The first key of a key file encrypts, and all of them decrypt. Without its keys, encrypted data is lost:
    keep a copy of the key file, away from the data.

    \b
    Example:
      postroom keys create postroom.keys
      postroom up --data run --key-file postroom.keys
      postroom keys rotate --data run --key-file postroom.keys
    """


@keys.command()
@click.argument("file", type=click.Path(), callback=as_path, metavar="FILE")
@name_option
@click.pass_obj
def create(shell: Shell, file: Path, name: str | None) -> None:
    """Create a key file with one new key, readable by its owner only. Existing files are not overwritten.

    \b
    Example:
      postroom keys create postroom.keys
    """
    from postroom.server.folder.layout import check_key_place
    from postroom.system.crypto.key_file import add_key

    check_key_place(file)
    if file.exists():
        raise click.ClickException(f"{file} exists already, and stays as it is: add a key with `keys rotate`")
    chosen = name or _new_name(())
    add_key(file, chosen)
    shell.output.facts(
        {"key_file": str(file), "key": chosen},
        f"{file} has the key {chosen}: keep a copy of it, away from the data",
    )


@keys.command(name="list")
@place_options
@click.pass_obj
def list_keys(shell: Shell, data: Path | None, key_file: Path | None) -> None:
    """List the keys, newest first. With --data, also how many values need each of them.

    \b
    Example:
      postroom keys list --key-file postroom.keys
      postroom keys list --data run --key-file postroom.keys
    """
    from postroom.server.folder.key_rotation import key_uses

    path = _key_file(shell, key_file)
    for use in key_uses(path) if data is None else _data(shell, data, path).uses():
        facts = {
            "key": use.name, "fingerprint": use.fingerprint, "current": use.is_current, "values": use.values,
        }  # fmt: skip
        name = f"{use.name} ({use.fingerprint})" if use.fingerprint else "not encrypted"
        said = f"{name}: encrypts new values" if use.is_current else name
        shell.output.facts(facts, said if use.values is None else f"{said}, {use.values} values")


@keys.command()
@place_options
@name_option
@click.pass_obj
def rotate(shell: Shell, data: Path | None, key_file: Path | None, name: str | None) -> None:
    """Add a key, and encrypt every stored value with it while servers and workers go on.

    Running processes use the new key at once. After a rotation that was killed, `keys encrypt` continues it.

    \b
    Example:
      postroom keys rotate --data run --key-file postroom.keys
      postroom keys retire 2026-10-01 --data run --key-file postroom.keys
    """
    from postroom.system.crypto.key_file import add_key, read_keys

    path = _key_file(shell, key_file)
    place = shell.data_place(data)
    chosen = name or _new_name(tuple(read_keys(path)))
    _data(shell, place, path).check()  # refuses a wrong place or key file before a key is added
    add_key(path, chosen)
    _encrypt(shell, place, path)


@keys.command()
@place_options
@click.pass_obj
def encrypt(shell: Shell, data: Path | None, key_file: Path | None) -> None:
    """Encrypt every stored value with the newest key: after encryption was turned on, or a killed rotation.

    Servers and workers go on meanwhile. When values were not encrypted before, the file of the store is
    rewritten at the end, so that no free page keeps them; writers wait for that.

    \b
    Example:
      postroom keys encrypt --data run --key-file postroom.keys
    """
    _encrypt(shell, shell.data_place(data), _key_file(shell, key_file))


def _encrypt(shell: Shell, place: Path, path: Path) -> None:
    found = _data(shell, place, path)
    done = found.convert(
        lambda progress: shell.note_progress(
            f"{progress.rows:,} rows, {progress.converted:,} values encrypted"
        )
    )
    name = found.encryption.names[found.encryption.current]
    waiting, copies = found.waiting_mail(), found.plain_copies()
    facts: dict[str, Any] = {
        "key": name,
        "converted": 0 if done is None else done.converted,
        "unreadable": 0 if done is None else done.unreadable,
        "mail_waiting": waiting,
        "plain_copies": copies,
    }
    said = f"{facts['converted']} values were encrypted with the key {name}"
    if facts["unreadable"]:
        said += f"; {facts['unreadable']} values cannot be decrypted, and stay: see `postroom verify`"
    if waiting:
        said += f"; {waiting} records of Mail follow within a minute, when a mail server runs"
    if copies:
        said += f"; copies that upgrades have left are not encrypted, remove them: {', '.join(copies)}"
    shell.output.facts(facts, said)


@keys.command()
@click.argument("name", metavar="NAME")
@place_options
@click.pass_obj
def retire(shell: Shell, name: str, data: Path | None, key_file: Path | None) -> None:
    """Remove a key from the key file. Refused while a stored value needs it.

    A backup that was made before the key was replaced always needs it: keep the key with such a backup.

    \b
    Example:
      postroom keys retire 2026-10-01 --data run --key-file postroom.keys
    """
    path = _key_file(shell, key_file)
    _data(shell, shell.data_place(data), path).retire(name)
    shell.output.facts({"key": name, "retired": True}, f"the key {name} is removed from {path}")


def _key_file(shell: Shell, given: Path | None) -> Path:
    """The key file that an option, the environment or the settings name. It must exist."""
    if given is not None:
        shell.use_key_file(given)
    found = given or os.environ.get(KEY_FILE_VARIABLE)
    if not found:
        raise click.UsageError(
            f"name the key file: --key-file FILE, {KEY_FILE_VARIABLE}, or key_file in [encryption] of the "
            "settings"
        )
    if not Path(found).exists():
        raise click.ClickException(f"there is no key file {found}: `postroom keys create {found}` makes one")
    return Path(found)


def _data(shell: Shell, place: Path, path: Path) -> "EncryptedData":
    from postroom.server.folder.key_rotation import EncryptedData
    from postroom.server.folder.layout import checked_data_folder
    from postroom.system.crypto.encryption import Encryption

    encryption = Encryption(path)
    if isinstance(place, StoreAddress):
        return EncryptedData(encryption, None, place.url)
    return EncryptedData(encryption, checked_data_folder(place), shell.settings.up.store)


def _new_name(taken: tuple[str, ...]) -> str:
    """The date, with a number when there is a key of that name."""
    today = f"{datetime.now(UTC):%Y-%m-%d}"
    names = (today, *(f"{today}.{n}" for n in range(2, len(taken) + 3)))
    return next(name for name in names if name not in taken)


add_json_option(keys)
