"""`postroom doctor`: looks for trouble in a data folder, and says how to mend it."""

from pathlib import Path
from typing import TYPE_CHECKING

import click

from postroom.cli.render import Style
from postroom.cli.shell import DATA_DEFAULT, HELP_OPTIONS, Shell, StoreAddress, json_option, place_option
from postroom.core.text import visible_line
from postroom.errors import PostroomError

if TYPE_CHECKING:
    from postroom.core.health.diagnosis import Finding
    from postroom.core.health.facts import Facts, MoveFacts
    from postroom.core.health.health import Level

INDENT = " " * 9
COLOURS: dict[str, Style] = {"ok": "green", "warning": "cyan", "problem": "red"}
EXIT_WARNINGS = 3
EXIT_PROBLEMS = 4


@click.command(context_settings=HELP_OPTIONS)
@place_option(f"The data folder, or the address of a store (postgres://...).  {DATA_DEFAULT}")
@click.option("--quick", is_flag=True, help="Do not read the stores whole.")
@click.pass_obj
def doctor(shell: Shell, data: Path | None, quick: bool) -> int:
    """Check a data folder for problems, and print the command that repairs each.

    Checks the environment, permissions, disk, clock, ports and parts of `up`; reads every store whole; looks
    for stuck leases, messages in quarantine, a backlog, a shipper that lags, and tokens that expire soon.
    Nothing is changed, and servers may run meanwhile. The exit code is 0 when all is well, 3 with warnings, 4
    with problems, 1 when there is no data folder, and 2 after a usage error.

    \b
    Example:
      postroom doctor --data run
      postroom doctor --data run --quick --json
      postroom doctor --data postgres://app@db.internal/postroom
    """
    import msgspec

    from postroom.core.health.diagnosis import diagnose, worst

    place = shell.data_place(data)
    findings = diagnose(_facts(shell, place, deep=not quick))
    level = worst(findings)
    if shell.output.readable:
        _show(shell, place, findings, level)
    else:
        found = msgspec.to_builtins(findings)
        shell.output.json_line({"data": str(place), "status": level, "findings": found})
    return {"ok": 0, "warning": EXIT_WARNINGS, "problem": EXIT_PROBLEMS}[level]


def _facts(shell: Shell, place: Path, *, deep: bool) -> "Facts":
    import msgspec

    from postroom.server.folder.diagnosis import facts_of_folder
    from postroom.server.folder.layout import checked_data_folder
    from postroom.stores.open import POSTGRES

    if isinstance(place, StoreAddress):
        return _facts_of_store(place, deep=deep)
    settings = shell.settings.up
    facts = facts_of_folder(checked_data_folder(place), settings, deep=deep, report=shell.note)
    if settings.store is not None and settings.store.startswith(POSTGRES):
        return _with_store(facts, settings.store, deep=deep, moved=None)
    if facts.moved is None:
        return facts
    try:  # `moved` is None when the settings name a broker, whose ledger the address is
        moved = facts.moved if settings.store is None else None
        return _with_store(facts, facts.moved.to, deep=deep, moved=moved)
    except (PostroomError, click.ClickException) as error:
        fault = error.message if isinstance(error, click.ClickException) else str(error)
        return msgspec.structs.replace(facts, moved=msgspec.structs.replace(facts.moved, fault=fault))


def _with_store(facts: "Facts", url: str, *, deep: bool, moved: "MoveFacts | None") -> "Facts":
    """The facts about a folder, and about a store on a server that is used instead of the store in it."""
    import msgspec

    used = _facts_of_store(StoreAddress.of(url), deep=deep)
    return msgspec.structs.replace(
        facts,
        moved=moved,
        store=used.store,
        database=used.database,
        clock=used.clock,
        encryption=used.encryption,
        faults=(*facts.faults, *used.faults),
        checked=(*facts.checked, *used.checked),
    )


def _facts_of_store(place: StoreAddress, *, deep: bool) -> "Facts":
    from postroom.server.folder.diagnosis import facts_of_other_format, facts_of_store
    from postroom.stores.open import POSTGRES
    from postroom.stores.postgres.connection import versions
    from postroom.stores.postgres.store import PostgresStore
    from postroom.system.crypto.encryption import key_file_encryption

    if not place.url.startswith(POSTGRES):
        raise click.UsageError(f"{place} is a broker, which holds no records: give the place of its ledger")
    found, newest = versions(place.url)
    if not found:  # opening it would make it
        raise click.ClickException(f"there is no store at {place}")
    if found != newest:
        return facts_of_other_format(str(place), found, newest)
    store = PostgresStore(place.url, encryption=key_file_encryption(None))
    store.notes_keys = False
    try:
        return facts_of_store(store, str(place), deep=deep)
    finally:
        store.close()


def _show(shell: Shell, place: Path, findings: "list[Finding]", level: "Level") -> None:
    """A line for each check; a finding with advice has two more."""
    output = shell.output
    for finding in findings:
        level_text = output.style(f"{finding.level:<8}", COLOURS[finding.level])
        output.text(f"{level_text} {visible_line(f'{finding.check}: {finding.what}')}")
        if finding.why:
            output.sentence(f"{INDENT}{finding.why}")
        if finding.command:
            output.sentence(f"{INDENT}{finding.command}")
    counts = {each: sum(finding.level == each for finding in findings) for each in ("problem", "warning")}
    found = [f"{n} {each}{'' if n == 1 else 's'}" for each, n in counts.items() if n]
    output.sentence(f"{place} is well" if level == "ok" else f"{place} has {' and '.join(found)}")


doctor.params.append(json_option())
