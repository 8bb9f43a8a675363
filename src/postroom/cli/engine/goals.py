"""For operators: `postroom engine goals`, `graph`, `decisions` and `conflicts`."""

import functools
import json
from typing import Any

import click

from postroom.cli.engine.places import Place, conflicts_of, on_place, plain
from postroom.cli.shell import HELP_OPTIONS, Shell, add_json_option

goal_argument = click.argument("goal_id", metavar="GOAL_ID")
decision_argument = click.argument("decision_id", metavar="DECISION_ID")
rule_argument = click.argument("rule_id", metavar="RULE_ID")
on_new_place = functools.partial(on_place, create=True)


# ---- goals -------------------------------------------------------------------------------------------


@click.group(context_settings=HELP_OPTIONS)
def goals() -> None:
    """Goals: work of many messages, with checkpoints for a rollback.

    \b
    Example:
      postroom engine goals list --data run
      postroom engine goals checkpoints trip-7 --data run
      postroom engine goals rollback 'trip-7#3' --data run
    """


@goals.command(name="list")
@on_place
def list_goals(shell: Shell, place: Place) -> None:
    """List goals and their states.

    \b
    Example:
      postroom engine goals list --data run
    """
    rows = plain(place.goals.list())
    columns = ["goal_id", "org_id", "state", "open_messages", "checkpoints", "effects"]
    shell.output.rows(columns, rows, "there is no goal yet")


@goals.command()
@goal_argument
@on_place
def show(shell: Shell, place: Place, goal_id: str) -> None:
    """Show a goal: its state, what failed last, and what it waits for.

    \b
    Example:
      postroom engine goals show trip-7 --data run
    """
    shell.output.document(plain(place.goals.status(goal_id)))


@goals.command()
@goal_argument
@on_place
def checkpoints(shell: Shell, place: Place, goal_id: str) -> None:
    """List the checkpoints of a goal, the oldest first.

    \b
    Example:
      postroom engine goals checkpoints trip-7 --data run
    """
    rows = plain(place.goals.checkpoints(goal_id))
    shell.output.rows(["checkpoint_id", "reason", "message_id"], rows, "there is no checkpoint")


@goals.command()
@goal_argument
@on_place
def effects(shell: Shell, place: Place, goal_id: str) -> None:
    """List the effects of a goal, the oldest first, and what undoes each of them.

    \b
    Example:
      postroom engine goals effects trip-7 --data run
    """
    rows = plain(place.goals.effects(goal_id))
    shown = rows
    if shell.output.readable:
        shown = [{**row, "undone_by": (row.get("reversal") or {}).get("type", "nothing")} for row in rows]
    shell.output.rows(["key", "reversal_class", "undone_by", "message_id"], shown, "there is no effect")


@goals.command()
@click.argument("org_id", metavar="ORGANIZATION")
@click.option("--goal", "goal_id", metavar="GOAL_ID", help="The id of the goal.  [default: a new one]")
@on_new_place
def start(shell: Shell, place: Place, org_id: str, goal_id: str | None) -> None:
    """Start a goal of an organization, and print its id.

    \b
    Example:
      postroom engine goals start acme --goal trip-7 --data run
    """
    started = place.goals.start(org_id, goal_id)
    shell.output.facts({"goal_id": started}, started)


@goals.command()
@goal_argument
@on_place
def complete(shell: Shell, place: Place, goal_id: str) -> None:
    """Complete a goal: its facts in the knowledge graph become visible to everybody.

    A fact that somebody else has changed since the goal began is decided by the adviser or a person; the goal
    is MERGING until then.

    \b
    Example:
      postroom engine goals complete trip-7 --data run
    """
    status = plain(place.goals.complete(goal_id))
    facts = {"goal_id": goal_id, "state": status["state"], "decisions": status["decisions"]}
    shell.output.facts(facts, f"goal {goal_id} is {status['state']}")


@goals.command()
@goal_argument
@click.option("--reason", default="", metavar="TEXT", help="Why the goal failed.")
@on_place
def fail(shell: Shell, place: Place, goal_id: str, reason: str) -> None:
    """End a goal as failed: drop its branch of the graph, and cancel its open messages.

    \b
    Example:
      postroom engine goals fail trip-7 --reason 'no flight left' --data run
    """
    state = plain(place.goals.fail(goal_id, reason))["state"]
    shell.output.facts({"goal_id": goal_id, "state": state}, f"goal {goal_id} is {state}")


@goals.command()
@goal_argument
@click.option("--reason", default="manual", show_default=True, metavar="TEXT", help="Why it is taken.")
@on_place
def checkpoint(shell: Shell, place: Place, goal_id: str, reason: str) -> None:
    """Take a checkpoint of a goal now, and print its id.

    \b
    Example:
      postroom engine goals checkpoint trip-7 --reason 'before the payment' --data run
    """
    taken = plain(place.goals.checkpoint(goal_id, reason))["checkpoint_id"]
    shell.output.facts({"checkpoint_id": taken}, taken)


@goals.command()
@click.argument("checkpoint_id", metavar="CHECKPOINT_ID")
@click.option(
    "--accept-irreversible", "accepted", multiple=True, metavar="KEY",
    help="Leave this effect as it is, although it cannot be undone. May be repeated.",
)  # fmt: skip
@click.option("--forget-learning", is_flag=True, help="Do not put what failed into the context.")
@on_place
def rollback(
    shell: Shell, place: Place, checkpoint_id: str, accepted: tuple[str, ...], forget_learning: bool
) -> None:
    """Roll a goal back to a checkpoint, or resume a rollback that was interrupted.

    Workers undo the effects. The goal is ROLLING_BACK until they have.

    \b
    Example:
      postroom engine goals rollback 'trip-7#3' --data run
    """
    status = plain(place.goals.rollback(checkpoint_id, not forget_learning, accept_irreversible=accepted))
    facts = {name: status[name] for name in ("goal_id", "state", "undoing")}
    said = f"goal {facts['goal_id']} is {facts['state']}, {len(facts['undoing'])} effects to undo"
    shell.output.facts(facts, said)


@goals.command()
@goal_argument
@click.argument("value", metavar="[JSON]", required=False)
@click.option(
    "--version", "expect_version", type=click.IntRange(min=0), metavar="N",
    help="The version that JSON replaces: a context that was changed meanwhile stays.",
)  # fmt: skip
@on_place
def context(shell: Shell, place: Place, goal_id: str, value: str | None, expect_version: int | None) -> None:
    """Show the context of a goal with its version, or replace it.

    \b
    Example:
      postroom engine goals context trip-7 --data run
      postroom engine goals context trip-7 '{"to": "Rome"}' --version 1 --data run
    """
    if (value is None) != (expect_version is None):
        raise click.UsageError("to replace the context, name the JSON and its --version")
    if value is None or expect_version is None:
        found, version = place.goals.context(goal_id)
        shell.output.document({"context": found, "version": version})
        return
    new = place.goals.set_context(goal_id, _decoded("the context is", value), expect_version)
    shell.output.facts({"goal_id": goal_id, "version": new}, f"the context has version {new}")


def _decoded(what: str, text: str) -> Any:
    """A JSON argument."""
    try:
        return json.loads(text)
    except ValueError as error:
        raise click.UsageError(f"{what} not JSON: {error}") from None


# ---- graph -------------------------------------------------------------------------------------------


@click.group(context_settings=HELP_OPTIONS)
def graph() -> None:
    """The knowledge graph.

    \b
    Example:
      postroom engine graph save paris '{"population": 2}' --edge in france --data run
      postroom engine graph get paris --data run
    """


goal_option = click.option("--goal", "goal_id", metavar="GOAL_ID", help="As this goal sees it.")
org_option = click.option("--org", "org_id", metavar="NAME", help="As this organization sees it.")
edge_option = click.option(
    "--edge", "edges", multiple=True, type=(str, str), metavar="LABEL NODE_ID", help="An edge to add."
)


def _view(place: Place, goal_id: str | None, org_id: str | None) -> Any:
    return place.graph.main(org_id) if goal_id is None else place.graph.branch(goal_id, org_id)


@graph.command(name="get")
@click.argument("node_id", metavar="NODE_ID")
@goal_option
@org_option
@on_place
def get_node(shell: Shell, place: Place, node_id: str, goal_id: str | None, org_id: str | None) -> None:
    """Show a node with its properties, its edges and its version.

    Organizations may use the same node id. Without --org and --goal, the shared node is shown, else that of
    the only organization that has one.

    \b
    Example:
      postroom engine graph get paris --data run
      postroom engine graph get paris --org acme --data run
      postroom engine graph get paris --goal trip-7 --data run
    """
    node = plain(_view(place, goal_id, org_id).get(node_id))
    if node is None:
        raise click.ClickException(f"there is no node {node_id!r}")
    defaults: dict[str, Any] = {"org_id": "", "properties": {}, "edges": [], "version": 0}
    shell.output.document({"node_id": node_id} | {name: node.get(name, defaults[name]) for name in defaults})


@graph.command(name="save")
@click.argument("node_id", metavar="NODE_ID")
@click.argument("properties", metavar="JSON")
@edge_option
@goal_option
@click.option("--org", "org_id", metavar="NAME", help="The organization that owns it.  [default: shared]")
@on_new_place
def save_node(
    shell: Shell,
    place: Place,
    node_id: str,
    properties: str,
    edges: tuple[tuple[str, str], ...],
    goal_id: str | None,
    org_id: str | None,
) -> None:
    """Save a node: these properties replace those it had.

    \b
    Example:
      postroom engine graph save paris '{"population": 2}' --edge in france --data run
      postroom engine graph save paris '{"population": 2}' --goal trip-7 --data run
    """
    decoded = _decoded("the properties are", properties)
    owner = org_id if goal_id else org_id or ""
    version = plain(_view(place, goal_id, owner).save(node_id, decoded, edges))["version"]
    shell.output.facts({"node_id": node_id, "version": version}, f"{node_id} has version {version}")


@graph.command(name="update")
@click.argument("node_id", metavar="NODE_ID")
@click.argument("changes", metavar="JSON")
@edge_option
@goal_option
@org_option
@on_place
def update_node(
    shell: Shell,
    place: Place,
    node_id: str,
    changes: str,
    edges: tuple[tuple[str, str], ...],
    goal_id: str | None,
    org_id: str | None,
) -> None:
    """Change some properties of a node; null removes one.

    \b
    Example:
      postroom engine graph update paris '{"population": 3}' --data run
    """
    decoded = _decoded("the changes are", changes)
    version = plain(_view(place, goal_id, org_id).update(node_id, decoded, edges=edges))["version"]
    shell.output.facts({"node_id": node_id, "version": version}, f"{node_id} has version {version}")


# ---- decisions ---------------------------------------------------------------------------------------


@click.group(context_settings=HELP_OPTIONS)
def decisions() -> None:
    """Decisions that wait for a person, and rules that follow from decisions.

    \b
    Example:
      postroom engine decisions list --data run
      postroom engine decisions answer 5c0d… wait --data run
    """


@decisions.command(name="list")
@on_place
def list_decisions(shell: Shell, place: Place) -> None:
    """List open decisions, the oldest first.

    \b
    Example:
      postroom engine decisions list --data run
    """
    rows = plain(place.decisions.list())
    shown = rows
    if shell.output.readable:
        shown = [{**row, "options": ", ".join(row["question"]["options"])} for row in rows]
    columns = ["decision_id", "kind", "org_id", "state", "options", "proposed"]
    shell.output.rows(columns, shown, "no decision is waiting")


@decisions.command(name="show")
@decision_argument
@on_place
def show_decision(shell: Shell, place: Place, decision_id: str) -> None:
    """Show a decision: question, facts, answer and reasoning.

    \b
    Example:
      postroom engine decisions show 5c0d8a52-0c0b-4c0e-9c50-3f1f6a1c7f10 --data run
    """
    shell.output.document(plain(place.decisions.show(decision_id)))


@decisions.command(name="answer")
@decision_argument
@click.argument("choice", metavar="CHOICE")
@on_place
def answer_decision(shell: Shell, place: Place, decision_id: str, choice: str) -> None:
    """Answer a question with one of its options.

    \b
    Example:
      postroom engine decisions answer 5c0d8a52-0c0b-4c0e-9c50-3f1f6a1c7f10 wait --data run
    """
    place.decisions.answer(decision_id, choice)
    facts = {"decision_id": decision_id, "choice": choice}
    shell.output.facts(facts, f"{decision_id} is decided: {choice}")


@decisions.command()
@on_place
def rules(shell: Shell, place: Place) -> None:
    """List the rules that are in force, and how many messages each holds.

    A rule was learned from the same decision for the same pattern, five times in a row, or it holds messages
    like those that failed for good.

    \b
    Example:
      postroom engine decisions rules --data run
    """
    columns = ["rule_id", "org_id", "kind", "pattern", "choice", "held"]
    shell.output.rows(columns, plain(place.decisions.rules()), "no rule is in force")


@decisions.command()
@rule_argument
@on_place
def held(shell: Shell, place: Place, rule_id: str) -> None:
    """List the messages that a rule holds, the oldest first.

    \b
    Example:
      postroom engine decisions held 5c0d8a52-0c0b-4c0e-9c50-3f1f6a1c7f10 --data run
    """
    rows = [{"message_id": message_id} for message_id in place.decisions.held(rule_id)]
    shell.output.rows(["message_id"], rows, "the rule holds no message")


@decisions.command()
@rule_argument
@on_place
def forget(shell: Shell, place: Place, rule_id: str) -> None:
    """Remove a rule. The adviser is asked again, and workers get the messages that the rule held.

    \b
    Example:
      postroom engine decisions forget 5c0d8a52-0c0b-4c0e-9c50-3f1f6a1c7f10 --data run
    """
    place.decisions.forget(rule_id)
    shell.output.facts({"rule_id": rule_id}, f"rule {rule_id} is removed")


# ---- conflicts ---------------------------------------------------------------------------------------


@click.command()
@on_place
def conflicts(shell: Shell, place: Place) -> None:
    """List the operations that are under way, and the messages that wait for them.

    \b
    Example:
      postroom engine conflicts --data run
    """
    found = conflicts_of(place)
    if not shell.output.readable:
        shell.output.json_line(found)
        return
    rows = [
        {**one, "target": one["operation"]["target"], "mode": one["operation"].get("mode", "exclusive")}
        for one in found["active"]
    ]
    columns = ["message_id", "org_id", "target", "mode"]
    shell.output.rows(columns, rows, empty="no operation is under way")
    for one in found["waiting"]:
        shell.output.sentence(
            f"message {one['message_id']} waits for {one['other']} ({one['kind']} {one['what']})"
        )


COMMANDS = (conflicts,)
GROUPS = (goals, graph, decisions)
for _group in GROUPS:
    add_json_option(_group)
