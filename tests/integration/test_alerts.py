"""Alerts reach a webhook and a command, also after a kill of the server."""

import hashlib
import hmac
import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from postroom import Engine
from postroom.server.access.registry import Agents
from tests import warmpython
from tests.waiting import HANG_GUARD_S, until

SECRET = b"a secret of sixteen bytes or more"


class Receiver(ThreadingHTTPServer):
    """A webhook that answers with the status that the test sets."""

    def __init__(self) -> None:
        self.status = 204
        self.posts: list[tuple[int, dict[str, str], bytes]] = []
        super().__init__(("127.0.0.1", 0), _Handler)

    @property
    def accepted(self) -> list[dict[str, Any]]:
        return [json.loads(body) for status, _, body in self.posts if status < 300]


class _Handler(BaseHTTPRequestHandler):
    server: Receiver

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        status = self.server.status
        self.server.posts.append((status, dict(self.headers), body))
        self.send_response(status)
        self.send_header("Location", "/elsewhere")
        self.end_headers()

    def log_message(self, *_: object) -> None: ...


@contextmanager
def receiving() -> Iterator[Receiver]:
    receiver = Receiver()
    thread = Thread(target=receiver.serve_forever, daemon=True)
    thread.start()
    try:
        yield receiver
    finally:
        receiver.shutdown()
        receiver.server_close()


def settings(folder: Path, receiver: Receiver) -> Path:
    (folder / "secret").write_bytes(SECRET + b"\n")
    path = folder / "postroom.toml"
    command = [sys.executable, "-c", "import sys; open(sys.argv[1], 'a').write(sys.stdin.read() + '\\n')"]
    path.write_text(
        f'[alerts]\nwebhook = "http://127.0.0.1:{receiver.server_port}/hook?key=k"\n'
        f'secret_file = "secret"\ncommand = {json.dumps([*command, str(folder / "told")])}\n'
    )
    return path


@contextmanager
def serving(folder: Path, config: Path) -> Iterator["subprocess.Popen[bytes]"]:
    command = ["-m", "postroom.cli.main", "--config", str(config), "--json", "tasks", "serve"]
    with (folder / "log").open("ab") as log:
        process = warmpython.popen(
            [sys.executable, *command, "--data", str(folder / "run"), "--port", "0"],
            stdout=subprocess.PIPE,
            stderr=log,
        )
    assert process.stdout is not None
    assert process.stdout.readline(), "the server did not start"
    try:
        yield process
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
        process.communicate(timeout=HANG_GUARD_S)


def postroom(config: Path, *words: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "postroom.cli.main", "--config", str(config), "--json", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=HANG_GUARD_S, check=False)


@pytest.mark.statement("poison-alert")
def test_alert_is_told_once_with_its_end_and_survives_kills_of_the_server(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    Agents(run).add("boss", role="operator")
    with receiving() as receiver:
        receiver.status = 503
        config = settings(tmp_path, receiver)
        with serving(tmp_path, config) as server, Engine.open(f"sqlite:///{run}/queue.db") as engine:
            for _ in range(3):
                engine.blocking.pause(org_id="acme")
            until(lambda: [one.error for one in engine.blocking.alerts() if one.error])
            server.kill()
            receiver.status = 307  # a redirect is no success, and is not followed
            tried = len(receiver.posts)
            with serving(tmp_path, config) as second:
                until(lambda: len(receiver.posts) > tried)
                until(lambda: [one for one in engine.blocking.alerts() if one.error.endswith("307")])
                second.kill()
        receiver.status = 204
        with serving(tmp_path, config), Engine.open(f"sqlite:///{run}/queue.db") as engine:
            until(lambda: receiver.accepted)
            engine.blocking.resume(org_id="acme")
            until(lambda: len(receiver.accepted) > 1)
            [listed] = [
                json.loads(line)
                for line in postroom(config, "alerts", "list", "--data", str(run)).stdout.splitlines()
            ]
            kinds = [event for event in engine.store.events(0, 1000) if event.kind == "alert_sent"]
    firing, resolved = receiver.accepted
    assert (firing["status"], firing["alert"], firing["org_id"], firing["count"]) == (
        "firing", "Paused", "acme", 3,
    )  # fmt: skip
    assert (resolved["status"], bool(resolved["resolved"])) == ("resolved", True)
    assert len({json.loads(body)["id"] for _, _, body in receiver.posts}) == 2
    for _, headers, body in receiver.posts:
        signature = hmac.new(SECRET, body, hashlib.sha256).hexdigest()
        assert headers["X-Postroom-Signature"] == f"sha256={signature}"
    told = [json.loads(line) for line in (tmp_path / "told").read_text().splitlines()]
    assert [one["status"] for one in told] == ["firing", "resolved"]
    assert (listed["name"], bool(listed["resolved_us"])) == ("Paused", True)
    sent = sorted((event.detail["sink"], event.detail["status"]) for event in kinds)
    assert sent == [
        ("command", "firing"),
        ("command", "resolved"),
        ("webhook", "firing"),
        ("webhook", "resolved"),
    ]
    assert b"key=k" not in (tmp_path / "log").read_bytes()


def test_alerts_test_says_for_each_sink_whether_it_accepts(tmp_path: Path) -> None:
    with receiving() as receiver:
        config = settings(tmp_path, receiver)
        well = postroom(config, "alerts", "test")
        receiver.status = 500
        ill = postroom(config, "alerts", "test")
    assert (well.returncode, ill.returncode) == (0, 1)
    assert [json.loads(line)["accepted"] for line in well.stdout.splitlines()] == [True, True]
    webhook, command = [json.loads(line) for line in ill.stdout.splitlines()]
    assert (webhook["accepted"], command["accepted"]) == (False, True)
    assert webhook["error"].endswith("answered 500")
    assert "key=k" not in ill.stdout


def test_settings_of_alerts_are_checked(tmp_path: Path) -> None:
    config = tmp_path / "postroom.toml"
    for text, code, said in (
        ('webhook = "ftp://host/x"', 2, "alerts.webhook must be a URL that begins with http:// or https://"),
        ('command = "mail"', 2, "alerts.command must be a list of a program and its arguments"),
        ('webhook = "http://h/"\nsecret_file = "none"', 2, "cannot read the secret of alerts"),
        ("", 1, "nobody is told of alerts"),
    ):
        config.write_text(f"[alerts]\n{text}\n")
        done = postroom(config, "alerts", "test")
        assert done.returncode == code
        assert said in done.stderr
