"""`postroom move`: take a store to another address."""

from pathlib import Path

import click

from postroom.cli.shell import Shell, json_option


@click.command()
@click.argument("source", metavar="FROM")
@click.argument("target", metavar="[TO]", required=False)
@click.option(
    "--undo",
    is_flag=True,
    help="Let FROM take writes again, after a move that was killed half-way. TO has to be empty.",
)
@click.option(
    "--force",
    is_flag=True,
    help="With --undo: do not look at TO. If it holds messages, both stores deliver them.",
)
@click.pass_obj
def move(shell: Shell, source: str, target: str | None, undo: bool, force: bool) -> None:
    """Move a live store from SQLite to PostgreSQL, with leases, keys, dead letters and events.

    FROM refuses writes from the moment of the copy; it can still be read. Workers and senders continue at TO:
    ids, leases and positions of the audit stream stay as they are. Every record is compared before the move
    is over. When it fails and TO is empty, FROM takes writes again. Otherwise FROM stays as it is: empty TO,
    then use --undo.

    \b
    Example:
      postroom move sqlite:///run/queue.db postgres://app@db.internal/postroom
      postroom move --undo sqlite:///run/queue.db postgres://app@db.internal/postroom
    """
    from postroom.contracts.move import end_move, move_store
    from postroom.errors import StoreMoved, shown_address
    from postroom.stores.open import SQLITE

    path = source.removeprefix(SQLITE)
    if path == source or not Path(path).exists():
        raise click.ClickException(
            f"there is no store at {shown_address(path)}: FROM is named as in sqlite:///run/queue.db"
        )
    shell.show_warnings()
    if force and not undo:
        raise click.UsageError("--force is for --undo")
    if undo:
        if target is None and not force:
            raise click.UsageError("say where the move went, so that TO can be checked: --undo FROM TO")
        end_move(source, None if force else target)
        shell.output.facts({"store": source}, f"{source} takes writes again")
        return
    if target is None:
        raise click.UsageError("say where to: postroom move FROM TO")
    try:
        copied = move_store(source, target)
    except StoreMoved as error:
        raise click.ClickException(
            f"{error}. If that move was killed half-way: postroom move --undo {source} TO"
        ) from None
    said = f"{copied['records']} records, {copied['events']} events and {copied['cells']} cells were moved"
    said += " and compared; start your processes with the new address"
    shell.output.facts({**copied, "verified": True}, said)


move.params.append(json_option())
