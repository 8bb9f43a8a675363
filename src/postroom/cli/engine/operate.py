"""For operators: look at the queue, explain and cancel messages, pause and resume deliveries."""

import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import click

from postroom.cli.engine.options import filters_of, message_argument, org_option, type_option, where_options
from postroom.cli.engine.places import Place, on_place, open_place, plain
from postroom.cli.shell import Shell, Stopped, parse_wait, reader_gone

WATCH_EVERY_S_DEFAULT = 1.0
LISTED_DEFAULT = 100
BAR_COLUMNS = 30
ORGANIZATIONS_NAMED = 5  # organizations listed for one breaker
CLEAR_SCREEN = "\x1b[H\x1b[2J"
COLUMNS = [
    "organization", "P0", "P1", "P2", "P3", "waiting", "delayed", "stage", "in_flight", "done", "dead",
    "paused",
]  # fmt: skip
ENDED = ("COMPLETED", "CANCELLED", "EXPIRED", "DEAD_LETTER", "QUARANTINED")
DEAD = ("DEAD_LETTER", "QUARANTINED")


@click.command()
@on_place
@click.option("--watch", is_flag=True, help="Show it again and again, until Ctrl-C.")
@click.option(
    "--every-s", type=parse_wait, default=WATCH_EVERY_S_DEFAULT, show_default=True, metavar="S",
    help="The pause of --watch.",
)  # fmt: skip
def status(shell: Shell, place: Place, watch: bool, every_s: float) -> None:
    """Show the state of the queue.

    For each organization: the messages that wait in each priority, how many are delayed by a time or a
    breaker, the stage of backpressure, and how many are in flight, done and dead. Then workers, breakers and
    pauses. With --watch a terminal shows a live view with the progress; a pipe gets one JSON line for each
    look.

    \b
    Example:
      postroom engine status --data run
      postroom engine status --data run --watch
      postroom engine status --url http://127.0.0.1:8800 | jq .organizations.acme.depth
    """
    if not watch:
        print_status(shell, plain(place.status()))
        return
    try:
        watch_status(shell, place, every_s)
    except Stopped:
        return


def watch_status(shell: Shell, place: Any, every_s: float) -> None:
    """Print the state of the queue until a signal, or until nobody reads it."""
    before: tuple[float, int] | None = None
    while not reader_gone():
        facts = plain(place.status())
        looked, done = time.monotonic(), _ended(facts)
        rate = None if before is None else (done - before[1]) / max(looked - before[0], 1e-9)
        before = looked, done
        if shell.output.readable:
            shell.output.text(CLEAR_SCREEN + progress_line(facts, rate))
        print_status(shell, facts)
        shell.output.flush()
        time.sleep(every_s)


def print_status(shell: Shell, facts: Mapping[str, Any]) -> None:
    if not shell.output.readable:
        shell.output.json_line(facts)
        return
    rows = [_row(name, found) for name, found in facts["organizations"].items()]
    shell.output.rows(COLUMNS, rows, empty="there is no message yet")
    for line in _remarks(facts):
        shell.output.sentence(line)


def _row(name: str, found: Mapping[str, Any]) -> dict[str, Any]:
    states = found["states"]
    return {
        "organization": name,
        **{f"P{lane}": count for lane, count in enumerate(found["lanes"])},
        "waiting": found["depth"],
        "delayed": states.get("SCHEDULED", 0) + states.get("RETRYING", 0),
        "stage": found["stage"],
        "in_flight": states.get("PROCESSING", 0),
        "done": states.get("COMPLETED", 0),
        "dead": sum(states.get(state, 0) for state in DEAD),
        "paused": "yes" if found["paused"] else "no",
    }


def _remarks(facts: Mapping[str, Any]) -> Iterator[str]:
    workers = facts["workers"]
    slots = sum(each["slots"] for each in workers.values())
    for reason in facts["verdict"]["reasons"]:
        yield f"{reason['level']}: {reason['what']}; {reason['why']}"
    yield f"{len(workers)} workers with {slots} slots, {facts['wanted_workers']} wanted"
    for service, found in facts["breakers"].items():
        if found["state"] != "closed":
            whose = ", ".join(found["organizations"][:ORGANIZATIONS_NAMED]) or "all organizations"
            yield (
                f"the breaker of service {service} for {whose} is {found['state']} "
                f"for {found['opens_again_s']:.0f} s"
            )
    for pause in facts["pauses"]:
        yield f"{scope_text(pause['org_id'], pause['type'])} is paused"


def progress_line(facts: Mapping[str, Any], rate: float | None) -> str:
    """How much of all messages has ended, and how fast they end."""
    done, total = _ended(facts), sum(sum(each["states"].values()) for each in facts["organizations"].values())
    share = done / total if total else 1.0
    filled = round(share * BAR_COLUMNS)
    speed = "" if rate is None else f"  {rate:.1f} a second"
    return f"[{'#' * filled}{'.' * (BAR_COLUMNS - filled)}] {share:4.0%}  {done} of {total} ended{speed}"


def _ended(facts: Mapping[str, Any]) -> int:
    organizations = facts["organizations"].values()
    return sum(each["states"].get(state, 0) for each in organizations for state in ENDED)


@click.command(name="list")
@on_place
@org_option
@click.option("--state", metavar="STATE", help="Only messages in this state, such as QUEUED or DEAD_LETTER.")
@type_option
@click.option("--goal", "goal_id", metavar="GOAL_ID", help="Only messages of this goal.")
@click.option("--agent", "agent_id", metavar="NAME", help="Only messages of this agent.")
@click.option("--since", metavar="TIME", help="Only messages accepted since TIME (RFC 3339).")
@click.option("--text", metavar="TEXT", help="An id, or text in the message or its error.")
@click.option("--cursor", metavar="CURSOR", help="The cursor of the previous page.")
@click.option(
    "--limit", type=click.IntRange(1, 1_000), default=LISTED_DEFAULT, show_default=True, metavar="N",
    help="At most N of them.",
)  # fmt: skip
def list_messages(shell: Shell, place: Place, /, **options: Any) -> None:
    """List messages, the newest first.

    The list ends when no cursor is printed. A page may be short, because one call looks at a bounded number
    of messages.

    \b
    Example:
      postroom engine list --data run --org acme --state DEAD_LETTER --text timeout
    """
    found = plain(place.list(**filters_of(options)))
    if not shell.output.readable:
        shell.output.json_line(found)
        return
    columns = ["message_id", "org_id", "state", "type", "priority", "attempt", "created_at", "error_type"]
    shell.output.rows(columns, found["messages"], empty="no message fits")
    if found["cursor"]:
        shell.output.sentence(f"the list goes on: --cursor {found['cursor']}")


@click.command()
@message_argument
@on_place
def explain(shell: Shell, place: Place, message_id: str) -> None:
    """Say why a message does not move: which rule holds it, and what would release it.

    \b
    Example:
      postroom engine explain 0190163d-8694-739b-aea5-966c26f8ad91 --data run
    """
    text = place.explain(message_id)
    shell.output.facts({"message_id": message_id, "explanation": text}, text)


@click.command()
@message_argument
@on_place
def cancel(shell: Shell, place: Place, message_id: str) -> None:
    """Cancel a message. Its running handler is cancelled within a second.

    \b
    Example:
      postroom engine cancel 0190163d-8694-739b-aea5-966c26f8ad91 --data run
    """
    place.cancel(message_id)
    shell.output.facts({"message_id": message_id, "action": "cancel"}, f"{message_id} is cancelled")


@click.command()
@where_options
@org_option
@type_option
@click.option("--kill", is_flag=True, help="Also refuse submits, and cancel running handlers.")
@click.pass_obj
def pause(
    shell: Shell,
    data: Path | None,
    url: str | None,
    token: str | None,
    org_id: str | None,
    type_name: str | None,
    kill: bool,
) -> None:
    """Stop deliveries: of an organization, of a type, of both together, or all of them.

    Submits are still accepted. With --kill (not together with --type) they are refused, running handlers are
    cancelled, and their messages are released.

    \b
    Example:
      postroom engine pause --data run --org acme
      postroom engine pause --data run --type model_call
      postroom engine pause --data run --kill
    """
    if kill and type_name:
        raise click.UsageError("--kill is for an organization or for everything, not for a type")
    scope = {"org_id": org_id or "", "type": type_name or ""}
    with open_place(shell, data, url, token) as place:
        place.pause(**scope, kill=kill)
    facts = {**scope, "kill": kill, "action": "pause"}
    shell.output.facts(facts, f"{scope_text(**scope)} is {'killed' if kill else 'paused'}")


@click.command()
@on_place
@org_option
@type_option
def resume(shell: Shell, place: Place, org_id: str | None, type_name: str | None) -> None:
    """End a pause of the same scope. The output says when nothing was paused there.

    An organization without messages and without a pause is refused, because its name is probably a typing
    error.

    \b
    Example:
      postroom engine resume --data run --org acme
    """
    scope = {"org_id": org_id or "", "type": type_name or ""}
    before = plain(place.status())
    known = {*before["organizations"], *(each["org_id"] for each in before["pauses"])}
    if org_id and org_id not in known:
        raise click.ClickException(f"nothing was paused: organization {org_id} has no messages and no pause")
    place.resume(**scope)
    after = plain(place.status())["pauses"]
    was_paused = any(each not in after for each in before["pauses"])
    pauses = [each for each in after if _overlap(each, scope)]
    still = "".join(f"; {scope_text(each['org_id'], each['type'])} is still paused" for each in pauses)
    facts = {**scope, "action": "resume", "was_paused": was_paused, "pauses": pauses}
    said = "is no longer paused" if was_paused else "was not paused"
    shell.output.facts(facts, f"{scope_text(**scope)} {said}{still}")


def _overlap(pause: Mapping[str, Any], scope: Mapping[str, str]) -> bool:
    """Whether a message can belong to both scopes. An empty name stands for all."""
    return all(pause[name] == scope[name] or not pause[name] or not scope[name] for name in scope)


def scope_text(org_id: str, type: str) -> str:  # noqa: A002 - the contract's word
    """The organization and type that a pause affects."""
    whose = f"organization {org_id}" if org_id else "all organizations"
    return f"type {type} of {whose}" if type else whose if org_id else "the whole queue"


COMMANDS = (status, list_messages, explain, cancel, pause, resume)
