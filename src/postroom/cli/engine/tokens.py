"""For operators: the token budgets of models."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import click

from postroom.cli.engine.options import where_options
from postroom.cli.engine.places import open_place, token_budgets
from postroom.cli.shell import Shell

COLUMNS = ["provider", "model", "limit", "used", "reserved", "free", "borrowed", "resets_in_s", "window"]


@click.command()
@where_options
@click.option("--app", metavar="MODULE:ENGINE", help="With --data: an app whose budgets hold.")
@click.pass_obj
def tokens(shell: Shell, data: Path | None, url: str | None, token: str | None, app: str | None) -> None:
    """Show the token budgets of models.

    For each model: its limit, and how much of it is used, reserved, free and borrowed. Then what each
    organization used, has reserved, borrowed and was refused. Without --app, the limits of a data folder are
    those of the last reservation.

    \b
    Example:
      postroom engine tokens --data run --app app:engine
      postroom engine tokens --url http://127.0.0.1:8800 --json | jq .providers
    """
    with open_place(shell, data, url, token, app=app) as place:
        facts = token_budgets(place)
    if not shell.output.readable:
        shell.output.json_line(facts)
        return
    shell.output.rows(COLUMNS, [*_rows(facts)], empty="no model has a budget")
    for line in _remarks(facts):
        shell.output.sentence(line)


def _models(facts: Mapping[str, Any]) -> Iterator[tuple[str, str, Mapping[str, Any]]]:
    for provider, found in facts["providers"].items():
        for name, model in found["models"].items():
            yield provider, name, model


def _rows(facts: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    for provider, name, model in _models(facts):
        shown = {column: model[column] for column in COLUMNS[2:]}
        shown["resets_in_s"] = round(model["resets_in_s"])
        yield {"provider": provider, "model": name, **shown}


def _remarks(facts: Mapping[str, Any]) -> Iterator[str]:
    for _, name, model in _models(facts):
        if model["blocked_s"]:
            yield f"the provider of {name} asked for a pause of {model['blocked_s']:.0f} s"
        for org_id, did in model["organizations"].items():
            words = [f"{count} {verb}" for verb, count in did.items() if count]
            if words:
                yield f"organization {org_id}, {name}: {', '.join(words)}"


COMMANDS = (tokens,)
