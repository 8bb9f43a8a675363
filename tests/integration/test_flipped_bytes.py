"""One changed byte in a data folder: `verify` names the file, and where it is."""

import shutil
from pathlib import Path

import pytest

from postroom import Mail, Tasks
from postroom.page.sessions import Sessions
from tests.integration.commandline import isolate, postroom
from tests.integration.test_manifest import post
from tests.integration.ups import running
from tests.waiting import until

FOREIGN = "---\nmsg_id: m-1\nts: 2026-11-15T01:01:12.3Z\ntype: FACT\nproject_id: p\n---\nforeign words\n\n"


@pytest.fixture(autouse=True)
def own_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    isolate(monkeypatch, tmp_path)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that was served and stopped cleanly, with data of every kind."""
    data = tmp_path_factory.mktemp("served") / "run"
    (data / "buses").mkdir(parents=True)
    (data / "buses" / "foreign.yaml").write_text(FOREIGN)
    assert postroom("tasks", "agent", "add", "builder", "--data", data).code == 0
    Sessions(data).begin("0" * 64, "acme")
    with running(data) as up:
        post(up, "/queue/enqueue", {"agent": "triage", "payload": "task words"})
        post(
            up, "/engine/messages", {"type": "tool_call", "org_id": "acme", "payload": {"n": "engine words"}}
        )
        post(up, "/bus/news/messages", {"type": "FACT", "project_id": "p", "body": "bus words"})
        with Mail(up.nats, token=up.token or "") as mail:
            mail.send(mail.create(ttl_s=3600), "mail words")
        until(lambda: any(b"triage" in path.read_bytes() for path in (data / "audit").rglob("*.jsonl")))
    assert up.process.returncode == 0
    with Tasks.open(f"sqlite:///{data / 'queue.db'}") as tasks:
        [task] = tasks.claim(agent="triage")
        tasks.complete(task.task_id, task.lease, "result words")
    return data


@pytest.fixture
def data(served: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(served, tmp_path / "run"))


def flip(data: Path, pattern: str, value: bytes) -> str:
    """Change one byte of a value: a letter becomes another one. Returns the name of the file."""
    [path] = data.glob(pattern)
    content = path.read_bytes()
    place = content.index(value) + len(value) // 2
    path.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
    return path.relative_to(data).as_posix()


@pytest.mark.parametrize(
    ("pattern", "value"),
    [
        ("queue.db", b'"task words"'),
        ("queue.db", b'"result words"'),
        ("queue.db", b"engine words"),
        ("buses/news.yaml", b"bus words"),
        ("buses/news.yaml", b"FACT"),
        ("buses/foreign.yaml", b"foreign words"),
        ("mail/mail-*.log", b"mail words"),
        ("audit/date=*/hour=*/*.jsonl", b"triage"),
        ("audit/_chain.jsonl", b"sha256"),
        ("audit/_index/*.idx", b""),
        ("audit.head", b"hash"),
        ("tokens.json", b"admin"),
        ("agents.json", b"builder"),
        ("sessions.json", b"acme"),
        ("folder-manifest.json", b"news"),
    ],
)
def test_verify_names_the_file_of_a_changed_byte(data: Path, pattern: str, value: bytes) -> None:
    clean = postroom("verify", "--data", data)
    assert clean.code == 0, clean.out
    name = flip(data, pattern, value)
    verified = postroom("verify", "--data", data)
    assert verified.code == 1
    assert any(name in line["sentence"] for line in verified.lines[:-1]), verified.out
    assert postroom("doctor", "--data", data).code == 4


def test_changed_byte_of_a_queue_is_found_by_its_own_check(tmp_path: Path) -> None:
    root = tmp_path / "queue"
    send = ("queue", "send", "--root", root, "--topic", "broadcast")
    assert postroom(*send, "--body", "queue words").code == 0
    assert postroom(*send, "--body", "side words " * 1_000).code == 0
    assert postroom("queue", "check", "--root", root).code == 0
    flip(root, "sessions/default/*.jsonl", b"queue words")
    flip(root, "sessions/default/bodies/*.txt", b"side words")
    checked = postroom("queue", "check", "--root", root)
    assert checked.code == 1
    assert checked.line["unreadable"], checked.out
    assert checked.line["bodies"], checked.out
