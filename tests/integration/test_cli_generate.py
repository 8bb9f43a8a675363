"""`postroom pipeline generate` and `postroom verify`, with real segments and a real store."""

import hashlib
import json
import os
from collections import Counter
from decimal import Decimal
from pathlib import Path
from typing import get_args

import pytest

from postroom import Tasks
from postroom.audit.segment_writer import SegmentSink
from postroom.audit.verify import verify as verify_chain
from postroom.contracts.feeds import StoreFeed
from postroom.core.formats.events import AuditEvent, from_line, to_line
from postroom.message import EventKind
from postroom.pipeline.generator.world import MODELS, REQUESTS, RESPONSES
from postroom.stores.base import Outbox
from tests.integration.commandline import isolate, postroom, run, run_on_terminal
from tests.quick import quick_path

__all__ = ["quick_path"]  # a fixture

SAMPLE = 20_000
EXIT_USAGE = 2


@pytest.fixture(autouse=True)
def _own_folder(monkeypatch: pytest.MonkeyPatch, quick_path: Path) -> None:
    isolate(monkeypatch, quick_path)


def lines_of(folder: Path) -> list[bytes]:
    files = sorted(folder.glob("date=*/hour=*/*.jsonl"), key=lambda path: path.name)
    return [line for path in files for line in path.read_bytes().splitlines(keepends=True)]


def digest_of(folder: Path) -> str:
    """Every file of a history, with its name."""
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            digest.update(str(path.relative_to(folder)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


# ---- what is made --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[bytes], list[AuditEvent]]:
    folder = tmp_path_factory.mktemp("sample")
    done = postroom("pipeline", "generate", "--messages", SAMPLE, "--seed", 1, "--out", folder)
    assert (done.code, done.errors) == (0, "")
    lines = lines_of(folder)
    assert done.line["lines"] == len(lines)
    assert verify_chain(folder) == []
    return lines, [from_line(line) for line in lines]


def test_every_line_is_encoded_by_the_schema(sample: tuple[list[bytes], list[AuditEvent]]) -> None:
    lines, stream = sample
    assert [line for line, event in zip(lines, stream, strict=True) if to_line(event) != line] == []
    assert all(event.event_id == f"{event.source}#{event.seq}" for event in stream)


def test_every_kind_of_event_is_generated(sample: tuple[list[bytes], list[AuditEvent]]) -> None:
    _, stream = sample
    assert {event.kind for event in stream} == set(get_args(EventKind))
    assert {event.type for event in stream} == {*REQUESTS, *RESPONSES, ""}
    assert {event.priority for event in stream} == {0, 1, 2, 3, None}


def test_traffic_is_uneven_late_and_repeated(sample: tuple[list[bytes], list[AuditEvent]]) -> None:
    lines, stream = sample
    by_org = Counter(event.org_id for event in stream if event.org_id).most_common()
    assert by_org[0][1] > 10 * by_org[-1][1]
    assert len(set(lines)) < len(lines)
    newest_us, late_us = 0, 0
    for event in stream:
        newest_us = max(newest_us, event.ts_us)
        late_us = max(late_us, newest_us - event.ts_us)
    assert late_us > 10 * 60 * 1_000_000


def test_children_follow_their_parents_in_one_trace(sample: tuple[list[bytes], list[AuditEvent]]) -> None:
    _, stream = sample
    created = {event.message_id: event for event in stream if event.kind == "created"}
    children = [event for event in created.values() if event.parent_message_id in created]
    assert len(children) > SAMPLE // 2
    for child in children:
        parent = created[child.parent_message_id]
        assert (child.trace_id, child.goal_id, child.org_id) == (
            parent.trace_id,
            parent.goal_id,
            parent.org_id,
        )
        assert child.ts_us > parent.ts_us


def test_costs_of_calls_are_exact(sample: tuple[list[bytes], list[AuditEvent]]) -> None:
    _, stream = sample
    prices = {model.name: model for model in MODELS}
    calls = [event for event in stream if event.cost_usd is not None]
    assert calls
    for call in calls:
        model = prices[call.model]
        nano = call.tokens_in * model.in_nano + call.tokens_out * model.out_nano
        assert call.cost_usd == Decimal(nano) / 10**9


def test_dead_letters_have_several_error_types(sample: tuple[list[bytes], list[AuditEvent]]) -> None:
    _, stream = sample
    dead = {event.message_id: event for event in stream if event.kind == "dead_letter"}
    families = Counter(event.error_type for event in dead.values())
    assert len(families) > 4
    assert len({event.error for event in dead.values()}) > 0.8 * len(dead)


# ---- the same again ------------------------------------------------------------------------------------

PINNED = "16cfe53c308ed609a8e5313c6ef29551539f75493a13aa64222b7ef50d818be5"
"""The hash of the lines changes only with the generator, not with the Python version or the machine."""


def test_a_seed_gives_the_same_bytes() -> None:
    for name, hash_seed in (("a", "1"), ("b", "2")):
        arguments = ("pipeline", "generate", "--messages", 300, "--seed", 9, "--out", name, "--faults")
        assert run("postroom", *arguments, env={**os.environ, "PYTHONHASHSEED": hash_seed}).code == 0
    assert digest_of(Path("a")) == digest_of(Path("b"))
    assert hashlib.sha256(b"".join(lines_of(Path("a")))).hexdigest() == PINNED


def test_another_seed_gives_another_history() -> None:
    for seed in (1, 2):
        assert (
            postroom("pipeline", "generate", "--messages", 20, "--seed", seed, "--out", f"h{seed}").code == 0
        )
    assert set(lines_of(Path("h1"))).isdisjoint(lines_of(Path("h2")))


def test_a_folder_that_is_not_empty_is_refused() -> None:
    Path("out").mkdir()
    Path("out/mine").touch()
    done = postroom("pipeline", "generate", "--messages", 5, "--seed", 1, "--out", "out")
    assert (done.code, done.error) == (
        EXIT_USAGE,
        f"postroom: {Path('out').absolute()} is not empty: a history needs a folder of its own",
    )


# ---- verify --------------------------------------------------------------------------------------------


def test_a_clean_history_and_a_broken_one() -> None:
    for name, options in (("clean", ()), ("broken", ("--faults",))):
        postroom("pipeline", "generate", "--messages", 400, "--seed", 5, "--out", name, *options)
    done = postroom("verify", "clean")
    clean = {"clean": True, "violations": 0, "events": 1835, "sources": 3, "accepted": 400, "open": 0}
    assert (done.code, done.line, done.errors) == (0, clean, "")
    assert postroom("verify", "clean", "--json") == done
    done = postroom("verify", "broken", "--json")
    planted = [json.loads(line) for line in Path("broken/_faults.jsonl").read_text().splitlines()]
    *found, summary = done.lines
    assert (done.code, summary["clean"], summary["violations"]) == (1, False, len(planted))
    assert sorted((one["rule"], one["message_id"]) for one in found) == sorted(
        (one["rule"], one["message_id"]) for one in planted
    )
    assert all(one["event_ids"] and one["sentence"] for one in found)
    done = postroom("verify", "broken", "--horizon-s", "0")
    assert "lost" not in {one["rule"] for one in done.lines[:-1]}


def test_a_terminal_gets_the_summary_as_a_sentence() -> None:
    for name, options in (("clean", ()), ("broken", ("--faults",))):
        postroom("pipeline", "generate", "--messages", 400, "--seed", 5, "--out", name, *options)
    for name, words in (("clean", "clean: "), ("broken", " violations in ")):
        last = run_on_terminal("postroom", "verify", name).out.splitlines()[-1]
        assert words in last
        assert "messages accepted" in last


def test_a_time_range_of_a_history_is_verified() -> None:
    postroom("pipeline", "generate", "--messages", 400, "--seed", 6, "--out", "h")
    since, until = "2025-01-09T00:00:00Z", "2025-01-10T12:00:00Z"
    assert postroom("verify", "h", "--since", since, "--until", until).code == 0
    assert postroom("verify", "h", "--since", until).code == 0
    done = postroom("verify", "h", "--since", "yesterday")
    assert done.code == EXIT_USAGE
    assert "Invalid value for '--since': 'yesterday' is not an RFC 3339 time" in done.error


def ship(tasks: Tasks, folder: Path, *, up_to: int = 1_000) -> None:
    feed = StoreFeed(tasks.store, "tasks", outbox=Outbox())
    with SegmentSink(folder, durability="os") as sink:
        sink.write(feed.read(sink.position(feed.source), up_to))


def test_open_messages_must_be_in_the_store(quick_path: Path) -> None:
    url = f"sqlite:///{quick_path}/queue.db"
    with Tasks.open(url) as tasks:
        ids = tasks.enqueue_many([{"agent": "a", "payload": n} for n in range(3)])
        [task] = tasks.claim(agent="a")
        ship(tasks, Path("audit"))
        tasks.complete(task.task_id, task.lease)  # not shipped, but not lost
    assert postroom("verify", "audit", "--store", url).code == 0
    _forget(quick_path / "queue.db", ids[2])
    done = postroom("verify", "audit", "--store", url)
    assert (done.code, len(done.lines)) == (1, 2)
    assert (done.lines[0]["rule"], done.lines[0]["message_id"]) == ("lost", ids[2])


def _forget(database: Path, message_id: str) -> None:
    """Remove a record from the database directly."""
    import apsw

    connection = apsw.Connection(str(database))
    number = message_id.rpartition("-")[2]
    tables = [row[0] for row in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
    for table in tables:
        columns = {row[1] for row in connection.execute(f"PRAGMA table_info({table})")}
        if "seq" in columns and table != "events":
            connection.execute(f"DELETE FROM {table} WHERE seq = ?", (int(number),))  # noqa: S608
    connection.close()


def test_a_store_that_was_not_shipped_is_refused(quick_path: Path) -> None:
    postroom("pipeline", "generate", "--messages", 20, "--seed", 1, "--out", "h")
    url = f"sqlite:///{quick_path}/other.db"
    done = postroom("verify", "h", "--store", url)
    assert (done.code, done.error) == (1, f"postroom: there is no store at {url}")
    with Tasks.open(url) as tasks:
        tasks.enqueue(agent="a", payload=1)
    done = postroom("verify", "h", "--store", url)
    assert done.code == 1
    assert done.error.startswith(f"postroom: {url} was not shipped to this stream")
