"""The buses of a task server: their limits, and streams whose archives are removed."""

import fcntl
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from postroom import Bus
from postroom.server.folder.buses import BUSES_AN_AGENT_MAX
from postroom.server.http.task_server import BUS_THREADS
from tests.integration.servers import Answer, Server, serving
from tests.smalldisk import filled, small_disk
from tests.waiting import until

__all__ = ["small_disk"]

BUS_MAX_BYTES = 60_000
BODY = "x" * 2_000
PATH = "/bus/news/messages"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    with serving(tmp_path / "data", bus_max_bytes=BUS_MAX_BYTES) as running:
        yield running


def post(server: Server, body: str = BODY, path: str = PATH) -> Answer:
    return server.send("triage", "POST", path, {"type": "INFO", "project_id": "demo", "body": body})


def fill(server: Server) -> list[str]:
    """Post until the bus is full. Returns the ids."""
    msg_ids = []
    while (answer := post(server)).status == 201:
        msg_ids.append(answer.json["msg_id"])
    assert answer.status == 507, answer
    return msg_ids


def health(server: Server) -> Any:
    """The reply of `/health`, which is refreshed after a moment."""
    answer = server.get(None, "/health")
    assert answer.status == 200
    return answer.json


def files(server: Server) -> list[Path]:
    return sorted((server.data / "buses").glob("news.yaml*"))


def archives(server: Server) -> list[Path]:
    """Oldest first."""
    return Bus(server.data / "buses" / "news.yaml").archives()


def read_all(server: Server) -> list[str]:
    msg_ids: list[str] = []
    page: list[dict[str, Any]] = [{}]
    while page:
        since = f"&since={msg_ids[-1]}" if msg_ids else ""
        page = server.get("review", f"{PATH}?limit=3{since}").json["messages"]
        msg_ids += [message["msg_id"] for message in page]
    return msg_ids


def test_a_bus_with_its_archives_is_bounded_and_stays_readable(server: Server) -> None:
    msg_ids = fill(server)
    assert len(archives(server)) >= 2
    assert BUS_MAX_BYTES * 0.8 < sum(file.stat().st_size for file in files(server)) <= BUS_MAX_BYTES
    assert read_all(server) == msg_ids
    with server.stream("review", PATH) as stream:
        assert [message.id for message in stream.take(len(msg_ids))] == msg_ids


def test_a_post_to_a_full_bus_is_refused_and_health_reports_it(server: Server) -> None:
    assert server.get(None, "/health").json == {"status": "ok"}
    fill(server)
    refused = post(server)
    assert (refused.status, refused.json["error"]) == (507, "BusFull")
    assert refused.json["message"] == (
        f"bus 'news' and its archives may have at most {BUS_MAX_BYTES} bytes: "
        "an operator has to move archives away"
    )
    assert int(refused.headers["retry-after"]) >= 1
    until(lambda: health(server)["status"] == "degraded")
    assert set(health(server)["parts"]) == {"buses"}
    assert "news" not in str(health(server))
    assert post(server, path="/bus/other/messages").status == 201


def test_an_archive_that_is_moved_away_makes_room(server: Server) -> None:
    fill(server)
    until(lambda: health(server)["status"] == "degraded")
    archives(server)[0].rename(server.data / "elsewhere")
    until(lambda: health(server) == {"status": "ok"})
    assert post(server).status == 201


def test_a_stream_is_reset_when_its_position_was_removed(server: Server) -> None:
    msg_ids = fill(server)
    first, *_ = archives(server)
    gone = first.read_text().count("msg_id: ")
    assert 0 < gone < len(msg_ids)
    with server.stream("triage", PATH, Last_Event_ID=msg_ids[0]) as stream:
        assert stream.take(1)[0].id == msg_ids[1]
    first.unlink()
    assert server.get("triage", f"{PATH}?since={msg_ids[0]}").status == 404
    with server.stream("triage", PATH, Last_Event_ID=msg_ids[0]) as stream:
        [reset, following] = stream.take(2)
        assert (reset.event, reset.id, reset.data) == ("reset", "", {"since": msg_ids[0]})
        assert (following.event, following.id) == ("message", msg_ids[gone])


def test_a_running_stream_survives_the_removal_of_its_position(server: Server) -> None:
    first = post(server).json["msg_id"]
    with server.stream("triage", PATH) as stream:
        assert stream.take(1)[0].id == first
        for file in files(server):
            file.unlink()
        second = post(server).json["msg_id"]
        seen = stream.take(1)
        if seen[0].event == "reset":
            assert seen[0].data == {"since": first}
            seen = stream.take(1)
        assert seen[0].id == second


def test_posts_stop_before_the_disk_is_full(small_disk: Path) -> None:
    with serving(small_disk / "data") as server:
        assert post(server).status == 201
        with filled(small_disk, 500_000):
            refused = post(server)
            assert (refused.status, refused.json["error"]) == (507, "BusFull")
            until(lambda: health(server)["status"] == "degraded")
            assert set(health(server)["parts"]) == {"disk"}
        until(lambda: health(server) == {"status": "ok"})
        assert post(server).status == 201


def test_a_refusal_says_that_the_disk_is_full(small_disk: Path) -> None:
    with serving(small_disk / "data") as server:
        server.enqueue()
        with filled(small_disk, 100_000):
            refused = server.post("boss", "/queue/enqueue", agent="triage", payload="x" * 500_000)
            assert (refused.status, refused.json["error"]) == (503, "WriteFailed")
            said = refused.json["message"]
            assert said.startswith("the disk of the server is full: nothing was stored")
            assert str(small_disk) not in said
        server.enqueue(payload="x" * 500_000)


def test_a_locked_bus_delays_only_its_own_posts(server: Server) -> None:
    assert post(server).status == 201
    with (server.data / "buses" / "news.yaml").open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        held_up = [threading.Thread(target=post, args=(server,)) for _ in range(2 * BUS_THREADS)]
        for thread in held_up:
            thread.start()
        message = {"type": "INFO", "project_id": "demo"}
        assert server.send("review", "POST", "/bus/other/messages", message).status == 201
        assert all(thread.is_alive() for thread in held_up)
        fcntl.flock(file, fcntl.LOCK_UN)
        for thread in held_up:
            thread.join()


def test_an_agent_creates_a_limited_number_of_buses(server: Server) -> None:
    def made(who: str, name: str) -> Answer:
        return server.send(who, "POST", f"/bus/{name}/messages", {"type": "INFO", "project_id": "demo"})

    assert {made("triage", f"mine-{number}").status for number in range(BUSES_AN_AGENT_MAX)} == {201}
    server.end()
    server.start()  # the creator of a bus is remembered
    refused = made("triage", "one-more")
    assert (refused.status, refused.json["error"]) == (429, "TooMany")
    assert refused.json["message"].startswith(f"'triage' may have at most {BUSES_AN_AGENT_MAX} buses")
    assert not (server.data / "buses" / "one-more.yaml").exists()
    assert made("triage", "mine-0").status == 201
    assert made("review", "theirs").status == 201
    assert made("boss", "one-more").status == 201
    assert made("triage", "one-more").status == 201
    for file in (server.data / "buses").glob("mine-0.yaml*"):
        file.unlink()
    assert made("triage", "again").status == 201


def test_a_just_rotated_bus_does_not_count_as_new(server: Server) -> None:
    assert post(server).status == 201
    [file] = files(server)
    file.rename(file.with_name("news.yaml.20260101-000000.archived"))
    message = {"type": "INFO", "project_id": "demo"}
    for number in range(BUSES_AN_AGENT_MAX):
        assert server.send("review", "POST", f"/bus/b{number}/messages", message).status == 201
    assert server.send("review", "POST", PATH, message).status == 201


def test_a_stream_misses_nothing_while_it_is_written_to(server: Server) -> None:
    """Several pages long when the stream begins, and growing while it is read."""
    count = 150
    msg_ids = [post(server, "").json["msg_id"] for _ in range(count // 3)]
    with server.stream("review", PATH) as stream:
        for _ in range(count - len(msg_ids)):
            msg_ids.append(post(server, "").json["msg_id"])
            if len(msg_ids) % 10 == 0:
                assert stream.next() is not None
        seen = [message.id for message in stream.take(count - (count - count // 3) // 10)]
    assert seen == msg_ids[-len(seen) :]
