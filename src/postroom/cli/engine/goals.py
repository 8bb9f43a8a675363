"""For operators: `postroom engine goals`, `graph`, `decisions` and `conflicts`."""

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click

from postroom.cli.engine.options import default_data_option
from postroom.cli.engine.places import Place, conflicts_of, on_folder, on_place, open_engine, plain
from postroom.cli.shell import HELP_OPTIONS, Shell, add_json_option

if TYPE_CHECKING:
    from postroom.goals.engine import Engine

goal_argument = click.argument("goal_id", metavar="GOAL_ID")
decision_argument = click.argument("decision_id", metavar="DECISION_ID")
rule_argument = click.argument("rule_id", metavar="RULE_ID")
folder_option = default_data_option


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
@click.argument("org_id", metavar="ORGANIZATION")
@click.option("--goal", "goal_id", metavar="GOAL_ID", help="The id of the goal.  [default: a new one]")
@folder_option
@click.pass_obj
def start(shell: Shell, org_id: str, goal_id: str | None, data: Path | None) -> None:
    """Start a goal of an organization, and print its id.

    \b
    Example:
      postroom engine goals start acme --goal trip-7 --data run
    """
    with open_engine(shell, shell.data_place(data), None, create=True) as engine:
        started = engine.blocking.goals.start(org_id, goal_id)
    shell.output.facts({"goal_id": started}, started)


@goals.command()
@goal_argument
@on_folder
def complete(shell: Shell, engine: "Engine", goal_id: str) -> None:
    """Complete a goal: its facts in the knowledge graph become visible to everybody.

    A fact that somebody else has changed since the goal began is decided by the adviser or a person; the goal
    is MERGING until then.

    \b
    Example:
      postroom engine goals complete trip-7 --data run
    """
    status = engine.blocking.goals.complete(goal_id)
    facts = {"goal_id": goal_id, "state": status.state, "decisions": status.decisions}
    shell.output.facts(facts, f"goal {goal_id} is {status.state}")


@goals.command()
@goal_argument
@click.option("--reason", default="", metavar="TEXT", help="Why the goal failed.")
@on_folder
def fail(shell: Shell, engine: "Engine", goal_id: str, reason: str) -> None:
    """End a goal as failed: drop its branch of the graph, and cancel its open messages.

    \b
    Example:
      postroom engine goals fail trip-7 --reason 'no flight left' --data run
    """
    status = engine.blocking.goals.fail(goal_id, reason)
    shell.output.facts({"goal_id": goal_id, "state": status.state}, f"goal {goal_id} is {status.state}")


@goals.command()
@click.argument("checkpoint_id", metavar="CHECKPOINT_ID")
@click.option(
    "--accept-irreversible", "accepted", multiple=True, metavar="KEY",
    help="Leave this effect as it is, although it cannot be undone. May be repeated.",
)  # fmt: skip
@click.option("--forget-learning", is_flag=True, help="Do not put what failed into the context.")
@on_folder
def rollback(
    shell: Shell, engine: "Engine", checkpoint_id: str, accepted: tuple[str, ...], forget_learning: bool
) -> None:
    """Roll a goal back to a checkpoint, or resume a rollback that was interrupted.

    Workers undo the effects. The goal is ROLLING_BACK until they have.

    \b
    Example:
      postroom engine goals rollback 'trip-7#3' --data run
    """
    status = engine.blocking.goals.rollback(checkpoint_id, not forget_learning, accept_irreversible=accepted)
    facts = {"goal_id": status.goal_id, "state": status.state, "undoing": status.undoing}
    shell.output.facts(
        facts, f"goal {status.goal_id} is {status.state}, {len(status.undoing)} effects to undo"
    )


# ---- graph -------------------------------------------------------------------------------------------


@click.group(context_settings=HELP_OPTIONS)
def graph() -> None:
    """The knowledge graph of a data folder.

    \b
    Example:
      postroom engine graph save paris '{"population": 2}' --edge in france --data run
      postroom engine graph get paris --data run
    """


goal_option = click.option("--goal", "goal_id", metavar="GOAL_ID", help="As this goal sees it.")
org_option = click.option("--org", "org_id", metavar="NAME", help="As this organization sees it.")


@graph.command(name="get")
@click.argument("node_id", metavar="NODE_ID")
@goal_option
@org_option
@on_folder
def get_node(shell: Shell, engine: "Engine", node_id: str, goal_id: str | None, org_id: str | None) -> None:
    """Show a node with its properties, its edges and its version.

    Organizations may use the same node id. Without --org and --goal, the shared node is shown, else that of
    the only organization that has one.

    \b
    Example:
      postroom engine graph get paris --data run
      postroom engine graph get paris --org acme --data run
      postroom engine graph get paris --goal trip-7 --data run
    """
    view = engine.graph.main(org_id) if goal_id is None else engine.graph.branch(goal_id, org_id)
    node = engine.blocking.wait(view.get(node_id))
    if node is None:
        raise click.ClickException(f"there is no node {node_id!r}")
    facts = {
        "node_id": node.node_id, "org_id": node.org_id, "properties": node.properties, "edges": node.edges,
        "version": node.version,
    }  # fmt: skip
    shell.output.document(facts)


@graph.command(name="save")
@click.argument("node_id", metavar="NODE_ID")
@click.argument("properties", metavar="JSON")
@click.option(
    "--edge", "edges", multiple=True, type=(str, str), metavar="LABEL NODE_ID", help="An edge to add."
)
@click.option("--org", "org_id", metavar="NAME", help="The organization that owns it.  [default: shared]")
@folder_option
@click.pass_obj
def save_node(
    shell: Shell,
    node_id: str,
    properties: str,
    edges: tuple[tuple[str, str], ...],
    org_id: str | None,
    data: Path | None,
) -> None:
    """Save a node of main: these properties replace those it had.

    \b
    Example:
      postroom engine graph save paris '{"population": 2}' --edge in france --data run
    """
    try:
        decoded = json.loads(properties)
    except ValueError as error:
        raise click.UsageError(f"the properties are not JSON: {error}") from None
    with open_engine(shell, shell.data_place(data), None, create=True) as engine:
        node = engine.blocking.wait(engine.graph.main(org_id or "").save(node_id, decoded, edges))
    shell.output.facts({"node_id": node_id, "version": node.version}, f"{node_id} has version {node.version}")


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
