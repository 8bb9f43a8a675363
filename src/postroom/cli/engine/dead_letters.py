"""For operators: `postroom engine dlq`, the dead letters."""

import json
import shutil
from pathlib import Path
from typing import Any

import click

from postroom.cli.engine.options import (
    PRIORITY,
    filters_of,
    message_argument,
    org_option,
    type_option,
    where_options,
)
from postroom.cli.engine.places import Place, on_place, open_place, plain
from postroom.cli.render import COLUMN_GAP
from postroom.cli.shell import HELP_OPTIONS, Shell, add_json_option, together

LIST_DEFAULT = 100
REASON_CHARS_MIN = 20

message_arguments = click.argument("message_ids", metavar="[MESSAGE_ID]...", nargs=-1)
filter_options = together(
    org_option,
    type_option,
    click.option("--error-type", metavar="NAME", help="Only those whose last error is of this class."),
    click.option("--goal", "goal_id", metavar="GOAL_ID", help="Only those of this goal."),
    click.option("--agent", "agent_id", metavar="NAME", help="Only those of this agent."),
    click.option("--service", metavar="NAME", help="Only those whose last attempt called this service."),
    click.option("--failure", metavar="TEXT", help="Only those with this text in the failure reason."),
    click.option("--since", metavar="TIME", help="Only those that died since TIME (RFC 3339)."),
    click.option("--until", metavar="TIME", help="Only those that died until TIME (RFC 3339)."),
)
page_option = click.option(
    "--limit", type=click.IntRange(1, 1_000), default=LIST_DEFAULT, show_default=True, metavar="N",
    help="At most N of them.",
)  # fmt: skip
limit_option = click.option(
    "--limit", type=click.IntRange(1), metavar="N", help="At most N of them.  [default: all that match]"
)
dry_run_option = click.option("--dry-run", is_flag=True, help="Change nothing, only print the ids.")
all_option = click.option("--all", "every", is_flag=True, help="Every dead letter.")


@click.group(context_settings=HELP_OPTIONS)
def dlq() -> None:
    """Dead letters: messages that failed for good, and quarantined ones.

    \b
    Example:
      postroom engine dlq list --data run --org acme
      postroom engine dlq replay --data run --org acme --error-type TimeoutError --rate 5
    """


@dlq.command(name="list")
@on_place
@filter_options
@page_option
def list_letters(shell: Shell, place: Place, /, **options: Any) -> None:
    """List dead letters, in the order they were accepted.

    \b
    Example:
      postroom engine dlq list --data run --type tool_call --since 2026-11-17T08:00:00Z
    """
    letters = [*map(_fields, place.dlq.list(**filters_of(options)))]
    if not shell.output.readable:
        for letter in letters:
            shell.output.json_line(letter)
        return
    rows = [
        {
            "message_id": letter["message_id"],
            **{name: letter["original_message"].get(name) or "" for name in ("org_id", "type")},
        }
        for letter in letters
    ]
    names = ("message_id", "org_id", "type")
    used = sum(max(map(len, (name, *(row[name] for row in rows)))) + len(COLUMN_GAP) for name in names)
    room = max(REASON_CHARS_MIN, shutil.get_terminal_size().columns - used)
    for row, letter in zip(rows, letters, strict=True):
        text = letter["failure_reason"]
        row["failure_reason"] = text if len(text) <= room else f"{text[: room - 3]}..."
    shell.output.rows([*names, "failure_reason"], rows, empty="there is no such dead letter")


@dlq.command()
@message_argument
@on_place
def show(shell: Shell, place: Place, message_id: str) -> None:
    """Show a dead letter with its message and all its errors.

    \b
    Example:
      postroom engine dlq show 0190163d-8694-739b-aea5-966c26f8ad91 --data run
    """
    letter = _fields(place.dlq.show(message_id))
    if not shell.output.readable:
        shell.output.json_line(letter)
        return
    errors, message = letter.pop("error_history"), letter.pop("original_message")
    body = json.dumps(message, indent=2, ensure_ascii=False)
    shell.output.record([letter.pop("message_id"), letter.pop("state")], letter, body)
    columns = ["attempt", "timestamp", "error_type", "error", "worker_id"]
    shell.output.rows(columns, errors, empty="no error was recorded")


@dlq.command()
@message_arguments
@where_options
@filter_options
@limit_option
@all_option
@dry_run_option
@click.option("--priority", type=PRIORITY, metavar="N", help="Replay with this priority.")
@click.option(
    "--rate", "rate_per_s", type=click.FloatRange(min=0.001, max=1_000_000), metavar="N",
    help="Replay at most N messages a second.",
)  # fmt: skip
@click.pass_obj
def replay(
    shell: Shell,
    /,
    message_ids: tuple[str, ...],
    data: Path | None,
    url: str | None,
    token: str | None,
    every: bool,
    dry_run: bool,
    priority: int | None,
    rate_per_s: float | None,
    **options: Any,
) -> None:
    """Queue dead letters again, each with all its retries.

    Takes ids, or all that match the filters. Quarantined messages are replayed by their ids only.

    \b
    Example:
      postroom engine dlq replay 0190163d-8694-739b-aea5-966c26f8ad91 --data run
      postroom engine dlq replay --data run --org acme --error-type TimeoutError --dry-run
      postroom engine dlq replay --data run --all --priority 3 --rate 5
    """
    filters = chosen_filters(message_ids, every, options)
    with open_place(shell, data, url, token) as place:
        done = place.dlq.replay(
            list(message_ids) or None, dry_run=dry_run, priority=priority, rate_per_s=rate_per_s, **filters
        )
    ends = "would be replayed" if dry_run else "wait again, with all their retries"
    if shell.output.readable:
        for message_id in done.message_ids:
            shell.output.sentence(message_id)
        shell.output.sentence(f"{done.replayed} dead letters {ends}")
        if done.reasons:
            why = "; ".join(f"{reason}: {count}" for reason, count in done.reasons.items())
            shell.output.sentence(f"{done.refused} refused, {done.left} left ({why})")
    else:
        shell.output.json_line(plain(done))


@dlq.command()
@message_arguments
@where_options
@filter_options
@limit_option
@all_option
@dry_run_option
@click.pass_obj
def purge(
    shell: Shell,
    /,
    message_ids: tuple[str, ...],
    data: Path | None,
    url: str | None,
    token: str | None,
    every: bool,
    dry_run: bool,
    **options: Any,
) -> None:
    """Forget dead letters for good.

    \b
    Example:
      postroom engine dlq purge 0190163d-8694-739b-aea5-966c26f8ad91 --data run
      postroom engine dlq purge --data run --until 2026-08-01T00:00:00Z --dry-run
    """
    filters = chosen_filters(message_ids, every, options)
    with open_place(shell, data, url, token) as place:
        purged = place.dlq.purge(list(message_ids) or None, dry_run=dry_run, **filters)
    if shell.output.readable:
        for message_id in purged:
            shell.output.sentence(message_id)
        shell.output.sentence(f"{len(purged)} dead letters {'would be' if dry_run else 'are'} forgotten")
    else:
        for message_id in purged:
            shell.output.json_line({"message_id": message_id})


def _fields(letter: Any) -> dict[str, Any]:
    """A dead letter as JSON values."""
    from postroom.engine.dlq import as_json

    return letter if isinstance(letter, dict) else as_json(letter)


def chosen_filters(message_ids: tuple[str, ...], every: bool, options: dict[str, Any]) -> dict[str, Any]:
    """Filters that choose dead letters; empty when ids do. Nothing is chosen by accident."""
    filters = filters_of(options)
    by_filter = bool(filters.keys() - {"limit"}) or every
    if by_filter == bool(message_ids):
        raise click.UsageError(
            "name dead letters by MESSAGE_ID, or choose them: --org, --type, --error-type, --goal, --agent, "
            "--service, --failure, --since, --until, or --all"
        )
    return filters if by_filter else {}


add_json_option(dlq)
