"""For senders of messages: `postroom engine submit`."""

import json
from pathlib import Path
from typing import Any

import click

from postroom.cli.engine.options import PRIORITY, where_options
from postroom.cli.engine.places import Place, open_place, result_of, submitted
from postroom.cli.shell import Shell, parse_wait
from postroom.cli.tasks.options import read_json
from postroom.errors import MessageFailed, UnknownType


@click.command()
@where_options
@click.option("--type", "type_name", required=True, metavar="TYPE", help="The type, such as tool_call.")
@click.option("--org", "org_id", metavar="NAME", help="The organization. An agent's token names it already.")
@click.option("--payload", metavar="JSON", help="What is to be done, a JSON object.")
@click.option("--payload-file", metavar="FILE", help="Read the payload from a file; - is stdin.")
@click.option("--agent", "agent_id", metavar="NAME", help="The agent that the message is for.")
@click.option("--priority", type=PRIORITY, metavar="N", help="0 (real time) to 3 (bulk).  [default: 2]")
@click.option("--key", "idempotency_key", metavar="TEXT", help="A second submit with it gives the first one.")
@click.option("--delay-s", type=parse_wait, metavar="S", help="Hold the message back for S seconds.")
@click.option("--ordering-key", metavar="TEXT", help="Messages with the same key run one after the other.")
@click.option("--max-retries", type=click.IntRange(0, 1000), metavar="N", help="[default: by the type]")
@click.option("--tokens", type=click.IntRange(0), metavar="N", help="Tokens to reserve when it is claimed.")
@click.option("--model", "models", multiple=True, metavar="NAME", help="A model it may use; repeatable.")
@click.option("--app", metavar="MODULE:ENGINE", help="An app: its types, rules, and store unless --data.")
@click.option("--wait-s", type=parse_wait, metavar="S", help="Wait up to S seconds for the result, too.")
@click.pass_obj
def submit(
    shell: Shell,
    /,
    data: Path | None,
    url: str | None,
    token: str | None,
    type_name: str,
    payload: str | None,
    payload_file: str | None,
    app: str | None,
    wait_s: float | None,
    **options: Any,
) -> None:
    """Store a message and print its id.

    With --wait-s the result is printed, too. The exit code is 1 when the message ends without a result, or
    not in time.

    \b
    Example:
      postroom engine submit --data run --type tool_call --org acme --payload '{"tool": "search"}'
      postroom engine submit --data run --type model_call --org acme --priority 0 --payload-file call.json
      postroom engine submit --url http://127.0.0.1:8800 --type tool_call --payload '{}' --wait-s 30
    """
    given = {name: value for name, value in options.items() if value not in (None, ())}
    if url is None and "org_id" not in given:
        raise click.UsageError("--data and --app need --org, the organization of the message")
    fields = {"type": type_name, "payload": read_json("--payload", payload, payload_file), **given}
    with open_place(shell, data, url, token, app=app, create=True) as place:
        message_id = _submit(place, fields, has_app=app is not None)
        if wait_s is None:
            shell.output.facts({"message_id": message_id}, message_id)
            return
        try:
            result = result_of(place, message_id, wait_s)
        except TimeoutError:
            shell.output.facts({"message_id": message_id}, message_id)
            raise click.ClickException(f"message {message_id} has not ended within {wait_s:g} s") from None
        except MessageFailed:
            shell.output.facts({"message_id": message_id}, message_id)
            raise
        print_result(shell, message_id, result)


def _submit(place: Place, fields: dict[str, Any], *, has_app: bool) -> str:
    try:
        return submitted(place, fields)
    except UnknownType as error:
        if has_app:
            raise
        raise click.UsageError(f"{error}. --app MODULE:ENGINE brings the types of an app") from None


def print_result(shell: Shell, message_id: str, result: Any) -> None:
    if shell.output.readable:
        shell.output.record([message_id], {}, json.dumps(result, indent=2, ensure_ascii=False))
    else:
        shell.output.json_line({"message_id": message_id, "result": result})


COMMANDS = (submit,)
