"""A data folder from which something vanished: `verify` and `doctor` say what, and `up` refuses to start."""

import json
import shutil
import signal
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest

from postroom import Tasks
from postroom.core.formats.manifest import MANIFEST_FILE
from tests.integration.commandline import finish, isolate, postroom, start
from tests.integration.ups import Running, running
from tests.waiting import HANG_GUARD_S, until

TRANSIENT = ("up.lock", f"{MANIFEST_FILE}.lock", "queue.db-wal", "queue.db-shm")


@pytest.fixture(autouse=True)
def own_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    isolate(monkeypatch, tmp_path)


def post(up: Running, path: str, body: object) -> None:
    headers = {"authorization": f"Bearer {up.token}", "content-type": "application/json"}
    request = urllib.request.Request(up.http + path, json.dumps(body).encode(), headers)  # noqa: S310
    with urllib.request.urlopen(request, timeout=HANG_GUARD_S) as answer:  # noqa: S310
        assert answer.status < 300


def fill(up: Running) -> None:
    post(up, "/queue/enqueue", {"agent": "triage", "payload": "hello"})
    post(up, "/bus/news/messages", {"type": "FACT", "project_id": "p", "body": "a fact"})


def manifest_of(data: Path) -> dict[str, object]:
    return dict(json.loads((data / MANIFEST_FILE).read_text()))


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that was served and stopped cleanly."""
    data = tmp_path_factory.mktemp("served") / "run"
    with running(data) as up:
        fill(up)
        until(lambda: any(path.stat().st_size for path in (data / "audit").rglob("*.jsonl")))
    assert up.process.returncode == 0
    return data


@pytest.fixture
def data(served: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(served, tmp_path / "run"))


def sealed(data: Path) -> Path:
    [segment] = (data / "audit").glob("date=*/hour=*/*.jsonl")
    return segment


def remove_store(data: Path) -> str:
    for name in ("queue.db", "queue.db-wal", "queue.db-shm"):
        (data / name).unlink(missing_ok=True)
    return "queue.db"


def remove_mail(data: Path) -> str:
    for path in (data / "mail").glob("mail-*.log"):
        path.unlink()
    return "mail"


def remove_mail_folder(data: Path) -> str:
    shutil.rmtree(data / "mail")
    return "mail"


def cut_mail(data: Path) -> str:
    newest = max((data / "mail").glob("mail-*.log"))
    newest.write_bytes(newest.read_bytes()[:-1])
    return "mail"


def remove_bus(data: Path) -> str:
    (data / "buses" / "news.yaml").unlink()
    return "buses/news.yaml"


def cut_bus(data: Path) -> str:
    path = data / "buses" / "news.yaml"
    path.write_bytes(path.read_bytes()[:-10])
    return "buses/news.yaml"


def remove_tokens(data: Path) -> str:
    (data / "tokens.json").unlink()
    return "tokens.json"


def remove_segment(data: Path) -> str:
    sealed(data).unlink()
    return "audit"


def cut_segment(data: Path) -> str:
    path = sealed(data)
    path.write_bytes(path.read_bytes()[:-1])
    return "audit"


def remove_stream(data: Path) -> str:
    shutil.rmtree(data / "audit")
    (data / "audit.head").unlink()
    return "audit"


def recreate_store(data: Path) -> str:
    name = remove_store(data)
    with Tasks.open(f"sqlite:///{data / 'queue.db'}") as tasks:
        tasks.enqueue(agent="triage", payload="another")
    return name


def remove_manifest(data: Path) -> str:
    (data / MANIFEST_FILE).unlink()
    return MANIFEST_FILE


def flip_manifest(data: Path) -> str:
    path = data / MANIFEST_FILE
    path.write_text(path.read_text().replace('"bytes": ', '"bytes": 1', 1))
    return MANIFEST_FILE


HTTP_ONLY = ("--no-mail", "--no-audit")
"""For starts of which only the judgement of the folder matters: `up` makes it before it starts any part."""

LOSSES = (
    remove_store, remove_mail, remove_mail_folder, cut_mail, remove_bus, cut_bus, remove_tokens,
    remove_segment, cut_segment, remove_stream, recreate_store, remove_manifest, flip_manifest,
)  # fmt: skip


@pytest.mark.parametrize("damage", LOSSES)
def test_verify_and_doctor_name_what_vanished(data: Path, damage: Callable[[Path], str]) -> None:
    clean = postroom("verify", "--data", data)
    assert clean.code == 0, clean.out
    name = damage(data)
    verified = postroom("verify", "--data", data)
    assert verified.code == 1
    assert any(line["sentence"].startswith(name) for line in verified.lines[:-1]), verified.out
    assert postroom("doctor", "--data", data).code == 4


@pytest.mark.parametrize("damage", LOSSES)
def test_doctor_names_a_loss_without_reading_the_files(data: Path, damage: Callable[[Path], str]) -> None:
    assert postroom("doctor", "--data", data, "--quick").code != 4
    name = damage(data)
    found = postroom("doctor", "--data", data, "--quick")
    assert found.code == 4
    assert any(name in finding["what"] for finding in found.line["findings"]), found.out


@pytest.mark.parametrize("damage", LOSSES)
def test_up_refuses_a_folder_with_a_loss_until_it_is_accepted(
    data: Path, damage: Callable[[Path], str]
) -> None:
    name = damage(data)
    before = sorted(path.name for path in data.iterdir())
    refused = finish(start("postroom", "up", "--data", data, "--http-port", 0, "--nats-port", 0))
    assert refused.code == 1
    assert name in refused.error
    assert "postroom restore" in refused.error
    assert f"postroom up --data {data} --accept-loss {name}" in refused.error
    assert {path.name for path in data.iterdir()} - set(before) <= {*TRANSIENT}
    with running(data, "--accept-loss", name) as up:
        assert up.is_ready()
        parts = up.get("/health", None)[1]["parts"]
        assert set(parts.values()) == {"running"}
    assert [one["name"] for one in manifest_of(data)["accepted"]] == [name]  # type: ignore[attr-defined]
    assert postroom("verify", "--data", data).code == 0
    with running(data, *HTTP_ONLY) as up:
        assert up.is_ready()


def test_loss_that_is_none_is_not_accepted(data: Path) -> None:
    up = ("postroom", "up", "--data", data, "--http-port", 0, "--nats-port", 0)
    refused = finish(start(*up, "--accept-loss", "queue.db"))
    assert refused.code == 2
    assert "nothing of queue.db is missing" in refused.errors


def test_folder_whose_store_is_elsewhere_is_whole(tmp_path: Path) -> None:
    data, store = tmp_path / "run", f"sqlite:///{tmp_path / 'elsewhere.db'}"
    with running(data, "--store", store) as up:
        fill(up)
    verified = postroom("verify", "--data", data)
    assert verified.code == 0, verified.out
    for options in ((), ("--quick",)):
        [found] = [
            each
            for each in postroom("doctor", "--data", data, *options).line["findings"]
            if each["check"] == "stores"
        ]
        assert found["level"] == "ok", found
    refused = finish(start("postroom", "up", "--data", data, "--http-port", 0, "--nats-port", 0))
    assert refused.code == 1
    assert "give its address with --store" in refused.error


def test_a_bus_that_is_removed_while_up_is_killed_is_missed(tmp_path: Path) -> None:
    data = tmp_path / "run"
    with running(data) as up:
        fill(up)
        until(lambda: "buses/news.yaml" in manifest_of(data)["files"])  # type: ignore[operator]
        up.process.send_signal(signal.SIGKILL)
        up.process.wait(HANG_GUARD_S)
    assert postroom("verify", "--data", data).code == 0
    (data / "buses" / "news.yaml").unlink()
    assert "buses/news.yaml" in postroom("verify", "--data", data).out


def test_old_folder_gets_a_manifest_and_a_log_line(data: Path) -> None:
    forget_manifest(data)
    assert postroom("verify", "--data", data).code == 0
    up = start("postroom", "up", "--data", data, "--http-port", 0, "--nats-port", 0)
    assert up.stdout is not None
    assert up.stdout.readline()
    up.terminate()
    log = [json.loads(line) for line in finish(up).errors.splitlines()]
    assert any(MANIFEST_FILE in line.get("text", "") for line in log)
    remove_bus(data)
    assert postroom("verify", "--data", data).code == 1


def forget_manifest(data: Path) -> None:
    """Make the folder one of a release without a manifest."""
    (data / MANIFEST_FILE).unlink()
    with Tasks.open(f"sqlite:///{data / 'queue.db'}") as tasks:
        tasks.store.write(lambda transaction: transaction.cells.put("manifest", "", None))


@pytest.mark.parametrize("damage", [remove_store, recreate_store])
def test_old_folder_is_refused_when_its_stream_names_a_lost_store(
    data: Path, damage: Callable[[Path], str]
) -> None:
    forget_manifest(data)
    name = damage(data)
    if damage is recreate_store:
        remove_store(data)
        with Tasks.open(f"sqlite:///{data / 'queue.db'}") as tasks:
            tasks.status()  # an empty store
    assert postroom("verify", "--data", data).code == 1
    refused = finish(start("postroom", "up", "--data", data, "--http-port", 0, "--nats-port", 0))
    assert refused.code == 1
    assert name in refused.error
    with running(data, "--accept-loss", name, *HTTP_ONLY) as up:
        assert up.is_ready()


def test_rotated_and_archived_buses_are_not_a_loss(data: Path) -> None:
    assert postroom("bus", "rotate", "--bus", data / "buses" / "news.yaml").code == 0
    assert postroom("verify", "--data", data).code == 0
    with running(data, *HTTP_ONLY) as up:
        assert up.is_ready()
    [archive] = (data / "buses").glob("*.archived")
    archive.unlink()  # an operator moved it away
    assert postroom("verify", "--data", data).code == 0


def test_restored_folder_verifies_and_starts(data: Path, tmp_path: Path) -> None:
    with running(data) as up:
        out = tmp_path / "run.tar"
        assert postroom("backup", "--data", data, "--out", out).code == 0
        assert up.is_ready()
    again = tmp_path / "again"
    assert postroom("restore", "--from", out, "--data", again).code == 0
    assert postroom("verify", "--data", again).code == 0
    with running(again) as up:
        assert up.is_ready()


def test_rest_of_a_stream_with_a_loss_stays_next_to_the_new_one(data: Path) -> None:
    segment = sealed(data)
    content = segment.read_bytes()
    remove_segment(data)
    with running(data, "--accept-loss", "audit") as up:
        assert up.is_ready()
    [rest] = data.glob("audit.damaged-*")
    assert segment.name in (rest / "_chain.jsonl").read_text()
    restored = rest / segment.relative_to(data / "audit")
    restored.write_bytes(content)
    assert postroom("audit", "verify", rest).code == 0


# ---- as strict as `audit verify` ---------------------------------------------------------------------


def flip_segment(data: Path) -> None:
    path = sealed(data)
    path.write_bytes(path.read_bytes().replace(b"triage", b"tria9e", 1))


def extend_segment(data: Path) -> None:
    path = sealed(data)
    path.write_bytes(path.read_bytes() + path.read_bytes())


def add_segment(data: Path) -> None:
    path = sealed(data)
    shutil.copy(path, path.with_name("00000002-0123456789ab.jsonl"))


def link_segment(data: Path) -> None:
    path = sealed(data)
    path.rename(data / "elsewhere.jsonl")
    path.symlink_to(data / "elsewhere.jsonl")


def move_segment(data: Path) -> None:
    path = sealed(data)
    (data / "audit" / "date=2020-01-01" / "hour=00").mkdir(parents=True)
    path.rename(data / "audit" / "date=2020-01-01" / "hour=00" / path.name)


def flip_index(data: Path) -> None:
    path = data / "audit" / "_index" / "00000001.idx"
    path.write_bytes(path.read_bytes()[:-1] + b"!")


def remove_index(data: Path) -> None:
    (data / "audit" / "_index" / "00000001.idx").unlink()


def add_index(data: Path) -> None:
    shutil.copy(data / "audit" / "_index" / "00000001.idx", data / "audit" / "_index" / "00000009.idx")


def flip_chain(data: Path) -> None:
    path = data / "audit" / "_chain.jsonl"
    path.write_text(path.read_text().replace("sha256", "sha255", 1))


def empty_chain(data: Path) -> None:
    (data / "audit" / "_chain.jsonl").write_bytes(b"")


def remove_chain(data: Path) -> None:
    (data / "audit" / "_chain.jsonl").unlink()


def rename_stream(data: Path) -> None:
    (data / "audit" / "_stream").write_text("audit-00000000\n")


def change_head(data: Path) -> None:
    path = data / "audit.head"
    path.write_text(path.read_text().replace('"segment":1', '"segment":2'))


def damage_head(data: Path) -> None:
    (data / "audit.head").write_text("{")


def forge_stream(data: Path) -> None:
    """Another stream, whole in itself, where only the store knows the old one."""
    other = data / "other"
    assert postroom("audit", "ship", "--bus", data / "buses" / "news.yaml", "--to", other, "--once").code == 0
    shutil.rmtree(data / "audit")
    other.rename(data / "audit")
    (data / "other.head").rename(data / "audit.head")


@pytest.mark.parametrize(
    "damage",
    [
        flip_segment, cut_segment, extend_segment, remove_segment, add_segment, link_segment, move_segment,
        flip_index, remove_index, add_index, flip_chain, empty_chain, remove_chain, rename_stream,
        change_head, damage_head, forge_stream, remove_stream,
    ],
)  # fmt: skip
def test_verify_finds_all_that_audit_verify_finds(data: Path, damage: Callable[[Path], object]) -> None:
    stream, store = data / "audit", ("--store", f"sqlite:///{data / 'queue.db'}")
    damage(data)
    for options in ((), store):
        strict = postroom("audit", "verify", stream, *options)
        found = postroom("verify", stream, *options)
        assert found.code or not strict.code, (strict.out, strict.errors, found.out, found.errors)
        sentences = [line["sentence"] for line in found.lines if "sentence" in line]
        for finding in strict.lines if strict.code == 1 else ():
            assert f"{finding['file']}: {finding['reason']}" in sentences
    assert postroom("verify", stream, *store).code != 0
    assert postroom("verify", "--data", data).code == 1
