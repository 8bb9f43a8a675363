"""`postroom move`: take a store to another address."""

from pathlib import Path

import click

from postroom.cli.shell import Shell


@click.command()
@click.argument("source", metavar="FROM")
@click.argument("target", metavar="[TO]", required=False)
@click.option(
    "--undo",
    is_flag=True,
    help="Let FROM take writes again, after a move that was killed half-way. After a complete move, both "
    "stores would deliver the same messages.",
)
@click.pass_obj
def move(shell: Shell, source: str, target: str | None, undo: bool) -> None:
    """Move a live store from SQLite to PostgreSQL, with leases, keys, dead letters and events.

    FROM refuses writes from the moment of the copy; it can still be read. Workers and senders continue at TO:
    ids, leases and positions of the audit stream stay as they are. Every record is compared before the move
    is over. When it fails, FROM takes writes again. TO is empty then, unless the comparison failed: drop its
    schema before the next try.

    \b
    Example:
      postroom move sqlite:///run/queue.db postgres://app@db.internal/postroom
    """
    from postroom.contracts.move import end_move, move_store
    from postroom.errors import StoreMoved
    from postroom.stores.open import SQLITE

    path = source.removeprefix(SQLITE)
    if path == source or not Path(path).exists():
        raise click.ClickException(f"there is no store at {path}: FROM is named as in sqlite:///run/queue.db")
    shell.show_warnings()
    if undo:
        end_move(source)
        shell.output.facts({"store": source}, f"{source} takes writes again")
        return
    if target is None:
        raise click.UsageError("say where to: postroom move FROM TO")
    try:
        copied = move_store(source, target)
    except StoreMoved as error:
        raise click.ClickException(
            f"{error}. If that move was killed half-way: postroom move --undo {source}"
        ) from None
    said = f"{copied['records']} records, {copied['events']} events and {copied['cells']} cells were moved"
    said += " and compared; start your processes with the new address"
    shell.output.facts({**copied, "verified": True}, said)
