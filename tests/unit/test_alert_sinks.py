"""Sinks of alerts end in time, and what they say holds no secret."""

import socket
import sys
import time
from pathlib import Path
from threading import Event, Thread
from urllib.parse import urlsplit

import pytest

from postroom.errors import InvalidSetting
from postroom.server.telemetry.alert_sinks import SAID_CHARS_MAX, post, run, sinks_of
from postroom.settings import AlertSettings
from tests.waiting import until


@pytest.mark.parametrize(
    "rest",
    ["user:hunter2@h/", "h:hunter2/", "h:99999/hunter2", "[::1/hunter2", "hun ter2/", "?hunter2", "h:0/"],
)
def test_webhook_without_a_usable_address_is_refused_at_the_start(rest: str) -> None:
    with pytest.raises(InvalidSetting, match="webhook must have a host") as refused:
        sinks_of(AlertSettings(webhook=f"http://{rest}"))
    assert "hunter2" not in str(refused.value)


def test_failed_webhook_is_named_by_its_host_alone() -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        port = closed.getsockname()[1]
    failure = post(urlsplit(f"http://127.0.0.1:{port}/services/hunter2"), b"{}", b"")
    assert failure.startswith(f"http://127.0.0.1:{port} cannot be reached")
    assert "hunter2" not in failure


def test_webhook_that_answers_without_end_is_left() -> None:
    gone = Event()

    def drip(listening: socket.socket) -> None:
        connection, _ = listening.accept()
        with connection:
            try:
                while True:
                    connection.sendall(b"H")
                    time.sleep(0.02)
            except OSError:
                gone.set()

    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = Thread(target=drip, args=(listening,), daemon=True)
        thread.start()
        url = urlsplit(f"http://127.0.0.1:{listening.getsockname()[1]}/")
        assert "cannot be reached" in post(url, b"{}", b"", within_s=0.2)
        until(gone.is_set)


def test_late_command_ends_with_what_it_started(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    script = f"sleep 3600 & echo $! > {pid}; wait"
    assert run(["sh", "-c", script], b"{}", within_s=1.0) == "sh did not end within 1 s"
    child = Path("/proc", pid.read_text().strip(), "stat")
    until(lambda: not child.exists() or child.read_text().split()[2] == "Z")


def test_command_that_leaves_a_child_behind_has_accepted_the_notice(tmp_path: Path) -> None:
    told = tmp_path / "told"
    assert run(["sh", "-c", f"cat > {told}; sleep 5 &"], b"{}", within_s=60.0) == ""
    assert told.read_bytes() == b"{}"


def test_output_of_a_command_is_read_and_not_kept() -> None:
    script = "import sys; sys.stderr.write('e' * 5_000_000); print('o' * 5_000_000); sys.exit(3)"
    failure = run([sys.executable, "-c", script], b"{}", within_s=60.0)
    assert failure.endswith("ended with 3: " + "e" * SAID_CHARS_MAX)


def test_command_that_cannot_be_started_is_one_sentence() -> None:
    assert "cannot be run" in run(["a\0b"], b"{}")
    assert run(["/nowhere/at/all"], b"{}").endswith("No such file or directory")
