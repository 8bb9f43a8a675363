"""`postroom alerts`: what people are told of, and whether they can be told."""

from pathlib import Path
from typing import Any

import click

from postroom.cli.engine.options import where_options
from postroom.cli.engine.places import call, open_place
from postroom.cli.shell import HELP_OPTIONS, Shell, add_json_option

COLUMNS = ["alert", "organization", "state", "raised", "since", "sent", "text"]


@click.group(context_settings=HELP_OPTIONS)
def alerts() -> None:
    """What people are told of: poison, a deep queue, a full disk, a token or certificate about to end.

    A server posts alerts to the webhook, and runs the command, of [alerts] in the settings.

    \b
    Example:
      postroom alerts list --data run
      postroom alerts test
    """


@alerts.command("list")
@where_options
@click.pass_obj
def list_alerts(shell: Shell, data: Path | None, url: str | None, token: str | None) -> None:
    """List active alerts, and those resolved in the last seven days.

    \b
    Example:
      postroom alerts list --data run
      postroom alerts list --url http://127.0.0.1:8800 | jq 'select(.resolved_us == 0)'
    """
    from postroom.calls.server import ListAlerts

    with open_place(shell, data, url, token) as place:
        found: list[dict[str, Any]] = call(place, ListAlerts())
    if not shell.output.readable:
        for one in found:
            shell.output.json_line(one)
        return
    rows = [_row(one) for one in sorted(found, key=lambda one: -one["last_us"])]
    shell.output.rows(COLUMNS, rows, empty="there are no alerts")


def _row(alert: dict[str, Any]) -> dict[str, Any]:
    from postroom.core.times import utc_text

    state = "over" if alert["resolved_us"] else "goes on"
    told = [name for name, number in alert["sent"].items() if number == alert["notice"]]
    return {
        "alert": alert["name"], "organization": alert["org_id"], "state": state, "raised": alert["count"],
        "since": utc_text(alert["first_us"] * 1000), "sent": ", ".join(told) or alert["error"],
        "text": alert["text"],
    }  # fmt: skip


@alerts.command("test")
@click.pass_obj
def test_alerts(shell: Shell) -> None:
    """Send a test alert to the webhook and the command of the settings now.

    Ends with 1 when one of them does not accept it.

    \b
    Example:
      postroom alerts test
    """
    import time

    from postroom.message import Alert
    from postroom.server.telemetry.alert_sinks import notice_of, sinks_of

    sinks = sinks_of(shell.settings.alerts)
    if not sinks:
        raise click.ClickException("nobody is told of alerts: set webhook or command in [alerts]")
    now_us = time.time_ns() // 1000
    notice = notice_of(Alert(name="Test", text="postroom alerts test", first_us=now_us, last_us=now_us))
    failures = {name: send(notice) for name, send in sinks.items()}
    for name, failure in failures.items():
        facts = {"sink": name, "accepted": not failure, "error": failure}
        shell.output.facts(facts, f"{name}: {failure or 'accepted'}")
    if any(failures.values()):
        shell.output.flush()
        raise SystemExit(1)


add_json_option(alerts)
