"""Whose a bus is: names of organizations, unknown owners, shares, removal, and data of earlier versions."""

import json
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from postroom import Bus, Tasks
from postroom.calls.server import PostToBus
from postroom.errors import BusFull, InvalidMessage, NotAllowed, TooMany, Unavailable, UnknownBus
from postroom.logs import busfile
from postroom.message import BusMessage
from postroom.server.access.registry import Identity
from postroom.server.folder import bus_owners, buses
from postroom.server.folder.bus_owners import BusKey, take_over
from postroom.server.folder.buses import BUSES_AN_AGENT_MAX, BUSES_AN_ORGANIZATION_MAX, Buses, BusLimits
from tests.integration.commandline import postroom
from tests.integration.servers import Server, serving
from tests.postgresserver import database, postgres, store_url
from tests.smalldisk import small_disk

__all__ = ["database", "postgres", "small_disk"]  # fixtures

ADA, ANN = Identity("ada", "agent", org="acme"), Identity("ann", "agent", org="acme")
ZOE = Identity("zoe", "agent", org="zeta")
ZETA_OPERATOR = Identity("zed", "operator", org="zeta")
PLAIN = Identity("plain", "agent")
BOSS = Identity("boss", "operator")
BYTES_MAX = 60_000
EARLIER = "bus-makers.json"


@pytest.fixture(params=["memory", "sqlite", "postgres"])
def tasks(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Tasks]:
    with Tasks.open(store_url(request, tmp_path)) as opened:
        yield opened


@pytest.fixture
def data(tmp_path: Path) -> Path:
    folder = tmp_path / "data"
    folder.mkdir()
    return folder


@pytest.fixture
def opened(tasks: Tasks, data: Path) -> Iterator[Buses]:
    found = Buses(data, tasks.store, "os", BYTES_MAX)
    yield found
    found.close()


def post(opened: Buses, name: str, caller: Identity, body: str = "news", org_id: str = "") -> str:
    return opened.append(PostToBus(bus=name, type="note", project_id="p", body=body, org_id=org_id), caller)


def bodies(opened: Buses, name: str, caller: Identity, org_id: str = "") -> list[str]:
    return [message.body for message in opened.read(name, "", 100, caller, org_id)]


# ---- names -------------------------------------------------------------------------------------------


def test_two_organizations_have_a_bus_of_the_same_name(opened: Buses) -> None:
    post(opened, "plan", ADA, "of acme")
    post(opened, "plan", ZOE, "of zeta")
    post(opened, "plan", ANN, "of acme, too")
    assert bodies(opened, "plan", ADA) == ["of acme", "of acme, too"]
    assert bodies(opened, "plan", ZOE) == bodies(opened, "plan", ZETA_OPERATOR) == ["of zeta"]
    assert bodies(opened, "plan", PLAIN) == []
    assert bodies(opened, "plan", BOSS, "zeta") == ["of zeta"]
    with pytest.raises(InvalidMessage, match="several organizations have a bus 'plan'"):
        opened.read("plan", "", 100, BOSS)
    with pytest.raises(NotAllowed, match="for its organization only"):
        opened.read("plan", "", 100, ADA, "zeta")
    assert opened.names(ADA) == {"acme": ["plan"], "": []}
    assert opened.names(BOSS) == {"": [], "acme": ["plan"], "zeta": ["plan"]}
    assert opened.names(PLAIN) == {"": []}


def test_a_bus_of_an_operator_is_shared_by_all(opened: Buses) -> None:
    post(opened, "all", BOSS, "from the operator")
    for caller in (ADA, ZOE, PLAIN):
        post(opened, "all", caller, caller.name)
    assert bodies(opened, "all", ZETA_OPERATOR) == ["from the operator", "ada", "zoe", "plain"]
    assert opened.names(ZOE)[""] == ["all"]


def test_an_organization_cannot_take_the_name_of_a_bus_for_everybody(opened: Buses) -> None:
    post(opened, "rules", ADA, "of acme")
    post(opened, "rules", BOSS, "of the operator")
    assert bodies(opened, "rules", ADA) == ["of acme"]
    assert bodies(opened, "rules", ZOE) == bodies(opened, "rules", BOSS) == ["of the operator"]
    post(opened, "rules", BOSS, "for acme alone", "acme")
    assert bodies(opened, "rules", ADA) == ["of acme", "for acme alone"]


def test_no_two_names_share_a_file(opened: Buses, data: Path) -> None:
    post(opened, "a", BOSS, "of nobody")
    post(opened, "b", Identity("x", "agent", org="a.yaml"), "of an organization")
    assert bodies(opened, "a", BOSS) == ["of nobody"]
    assert [path.relative_to(data).as_posix() for path in bus_owners.bus_files(data)] == [
        "buses/@a.yaml/b.yaml", "buses/a.yaml",
    ]  # fmt: skip


# ---- before anything is read -------------------------------------------------------------------------


def test_a_call_on_the_bus_of_another_organization_opens_no_file(
    opened: Buses, tasks: Tasks, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An existing bus and a missing one: the same answer after the same steps."""
    since = post(opened, "secret", ADA, "x" * 10_000)
    steps: list[str] = []
    read = tasks.store.read
    monkeypatch.setattr(tasks.store, "read", lambda work: steps.append("store") or read(work))  # type: ignore[func-returns-value]
    monkeypatch.setattr(Buses, "_bus", lambda *_: steps.append("file"))
    monkeypatch.setattr(busfile, "archives", lambda *_: steps.append("folder") or [])  # type: ignore[func-returns-value]
    monkeypatch.setattr(Path, "stat", lambda *_, **__: steps.append("file"))

    def tried(name: str, caller: Identity) -> tuple[Any, ...]:
        steps.clear()
        answers = [
            opened.read(name, "", 100, caller),
            opened.read(name, since, 100, caller),
            opened.newest(name, 100, caller),
            opened.follow(name, since, caller).page(10, 1_000),
        ]
        return *answers, [*steps]

    for caller in (ZOE, ZETA_OPERATOR, PLAIN):
        assert tried("secret", caller) == tried("absent", caller)
        assert "file" not in steps
        assert "folder" not in steps


def test_removing_a_foreign_bus_is_answered_like_a_missing_one(opened: Buses) -> None:
    post(opened, "plan", ADA)
    refusals = []
    for name in ("plan", "absent"):
        with pytest.raises(UnknownBus) as raised:
            opened.remove(name, ZOE)
        refusals.append(str(raised.value).replace(name, "NAME"))
    assert refusals[0] == refusals[1]
    assert bodies(opened, "plan", ADA) == ["news"]


# ---- unknown owners ----------------------------------------------------------------------------------


def test_only_operators_use_a_bus_whose_owner_is_unknown(opened: Buses, tasks: Tasks, data: Path) -> None:
    post(opened, "plan", ADA, "of acme")
    with Bus(data / "buses" / "planted.yaml") as planted:
        planted.append(type="note", project_id="p", body="planted")
    tasks.store.write(lambda transaction: bus_owners.OWNERS.put(transaction, None, "acme", "plan"))
    for name in ("plan", "planted"):
        for caller in (ADA, ZOE, PLAIN):
            assert bodies(opened, name, caller) == []
            assert opened.names(caller).get(caller.org) == []
    for name, caller in (("plan", ADA), ("planted", PLAIN)):
        with pytest.raises(NotAllowed, match="it is unknown whose bus"):
            post(opened, name, caller)
    assert bodies(opened, "plan", BOSS, "acme") == ["of acme"]
    assert bodies(opened, "planted", BOSS) == ["planted"]
    post(opened, "planted", BOSS)
    assert bodies(opened, "planted", ZOE) == []  # a post gives it to nobody


def test_a_damaged_record_of_an_owner_opens_nothing(opened: Buses, tasks: Tasks) -> None:
    post(opened, "plan", ADA, "of acme")
    kind = bus_owners.OWNERS.name
    [(key, value)] = tasks.store.read(lambda transaction: transaction.cells.page(kind))

    def put(key: str, value: bytes | None) -> None:
        tasks.store.write(lambda transaction: transaction.cells.put(kind, key, value))

    for place in range(len(value)):
        for flipped in (value[place] ^ 1, value[place] ^ 0x80):
            put(key, value[:place] + bytes([flipped]) + value[place + 1 :])
            for caller in (ZOE, PLAIN):
                assert bodies(opened, "plan", caller) == []
            assert bodies(opened, "plan", BOSS, "acme") == ["of acme"]
    put(key, None)
    for place, char in enumerate(key):
        damaged = key[:place] + chr(ord(char) ^ 1) + key[place + 1 :]
        put(damaged, value)
        for caller in (ZOE, PLAIN, ADA):
            assert bodies(opened, "plan", caller) == []
        put(damaged, None)


# ---- shares ------------------------------------------------------------------------------------------


def test_an_organization_creates_a_limited_number_of_buses(tasks: Tasks, data: Path) -> None:
    opened = Buses(data, tasks.store, "os", BYTES_MAX, limits=BusLimits(of_organization=3))
    for number in range(3):
        post(opened, f"b{number}", Identity(f"agent{number}", "agent", org="acme"))
    for caller in (ADA, Identity("op", "operator", org="acme")):
        with pytest.raises(TooMany, match="'acme' may have at most 3 buses"):
            post(opened, "one-more", caller)
    post(opened, "b0", ANN)
    post(opened, "one-more", ZOE)
    post(opened, "one-more", BOSS)
    post(opened, "one-more", BOSS, org_id="beta")
    opened.remove("b0", BOSS, "acme")
    post(opened, "again", ADA)
    opened.close()
    assert BUSES_AN_AGENT_MAX < BUSES_AN_ORGANIZATION_MAX < buses.BUSES_MAX


def test_an_organization_has_a_share_of_the_bytes(opened: Buses, data: Path) -> None:
    def fill(caller: Identity) -> None:
        for number in range(2 * buses.FULL_BUSES_AN_ORGANIZATION_MAX):
            for _ in range(BYTES_MAX // 3_000 - 1):
                post(opened, f"b{number}", caller, "x" * 2_400)

    with pytest.raises(BusFull, match="together"):
        fill(ADA)
    used = sum(path.stat().st_size for path in (data / "buses" / "@acme").iterdir())
    share = BYTES_MAX * buses.FULL_BUSES_AN_ORGANIZATION_MAX
    assert share * 0.8 < used <= share
    post(opened, "b0", ZOE, "x" * 2_400)
    post(opened, "all", BOSS, "x" * 2_400)
    with pytest.raises(BusFull, match="'acme' may have at most"):
        post(opened, "all-mine", ANN, "x" * 2_400)
    opened.remove("b0", ADA)
    post(opened, "all-mine", ANN, "x" * 2_400)


def test_one_organization_leaves_half_of_the_disk_to_the_others(small_disk: Path) -> None:
    with Tasks.open("memory://") as tasks:
        opened = Buses(small_disk, tasks.store, "os", 1 << 30)

        def post_many(caller: Identity, count: int) -> None:
            for _ in range(count):
                post(opened, "plan", caller, "x" * 200_000)

        with pytest.raises(BusFull, match="together"):
            post_many(ADA, 1_000)
        post_many(ZOE, 10)
        opened.close()


# ---- removal -----------------------------------------------------------------------------------------


def test_its_creator_and_operators_remove_a_bus(opened: Buses, tasks: Tasks, data: Path) -> None:
    for _ in range(10):
        post(opened, "plan", ADA, "x" * 5_000)
    path = BusKey("acme", "plan").path(data)
    assert busfile.archives(path)
    with pytest.raises(NotAllowed, match="only the agent that created the bus 'plan' and operators"):
        opened.remove("plan", ANN)
    assert opened.remove("plan", ADA) == BusKey("acme", "plan")
    assert not BusKey("acme", "plan").exists(data)
    assert bodies(opened, "plan", ADA) == opened.names(ADA)["acme"] == []
    [event] = [event for event in tasks.events(limit=100) if event.kind == "deleted"]
    assert (event.type, event.detail["bus"], event.detail["org_id"], event.detail["who"]) == (
        "bus", "plan", "acme", "ada",
    )  # fmt: skip
    assert event.detail["bytes"] > 50_000
    post(opened, "plan", ANN, "begun again")
    assert bodies(opened, "plan", ADA) == ["begun again"]
    opened.remove("plan", Identity("op", "operator", org="acme"))
    post(opened, "plan", ANN)
    opened.remove("plan", BOSS, "acme")
    post(opened, "all", BOSS)
    for caller in (ADA, ZETA_OPERATOR, PLAIN):
        with pytest.raises(NotAllowed):
            opened.remove("all", caller)
    opened.remove("all", BOSS)
    with pytest.raises(UnknownBus, match="there is no bus 'all'"):
        opened.remove("all", BOSS)


def test_a_follower_of_a_removed_bus_ends(opened: Buses) -> None:
    post(opened, "plan", ADA, "one")
    follower = opened.follow("plan", "", ANN)
    assert [message.body for message in follower.page(10, 1_000)] == ["one"]
    opened.remove("plan", ADA)
    post(opened, "plan", ANN, "another bus")
    with pytest.raises(buses.BusRemoved):
        follower.page(10, 1_000)


def test_a_follower_waits_for_a_bus_that_it_may_read(opened: Buses) -> None:
    follower = opened.follow("later", "", ZOE)

    def page() -> list[BusMessage]:
        return follower.page(10, 1_000)

    assert page() == []
    post(opened, "later", ADA, "of acme")
    assert page() == []
    post(opened, "later", BOSS, "for everybody")
    assert [message.body for message in page()] == ["for everybody"]


# ---- folders of earlier versions -----------------------------------------------------------------------


def earlier(data: Path, creators: dict[str, str] | bytes, *names: str) -> None:
    for name in names:
        with Bus(data / "buses" / f"{name}.yaml") as bus:
            bus.append(type="note", project_id="p", body=f"old {name}")
            bus.rotate()
            bus.append(type="note", project_id="p", body=f"new {name}")
    content = creators if isinstance(creators, bytes) else json.dumps(creators).encode()
    (data / EARLIER).write_bytes(content)


def knows(name: str) -> bool:
    return name == "plain"


def test_the_owners_of_an_earlier_version_are_taken_over(opened: Buses, tasks: Tasks, data: Path) -> None:
    earlier(data, {"plan": "acme/ada", "free": "plain"}, "plan", "free", "all")
    for _ in range(2):  # the second time, there is nothing to do
        take_over(data, tasks.store, knows)
    assert bodies(opened, "plan", ANN) == ["old plan", "new plan"]
    assert bodies(opened, "plan", ZOE) == []
    assert bodies(opened, "free", ZOE) == ["old free", "new free"]
    assert bodies(opened, "all", ZOE) == ["old all", "new all"]
    assert not (data / EARLIER).exists()
    assert json.loads((data / f"{EARLIER}.taken-over").read_bytes())["plan"] == "acme/ada"
    opened.remove("plan", ADA)


def test_a_take_over_that_was_killed_is_repeated(
    opened: Buses, tasks: Tasks, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    earlier(data, {"plan": "acme/ada", "more": "acme/ada"}, "more", "plan")
    rename = Path.rename
    for calls in range(5):
        left = iter(range(calls))

        def renamed(path: Path, target: Path, left: Iterator[int] = left) -> Path:
            if next(left, None) is None:
                raise KeyboardInterrupt
            return rename(path, target)

        monkeypatch.setattr(Path, "rename", renamed)
        try:
            take_over(data, tasks.store, knows)
        except KeyboardInterrupt:
            continue
    monkeypatch.undo()
    take_over(data, tasks.store, knows)
    assert opened.names(ADA)["acme"] == ["more", "plan"]
    assert bodies(opened, "plan", ANN) == ["old plan", "new plan"]


def test_no_flipped_byte_of_an_earlier_version_opens_a_bus(opened: Buses, tmp_path: Path) -> None:
    whole = json.dumps({"plan": "acme/ada"}).encode()
    for place in range(len(whole)):
        data = tmp_path / f"flip{place}"
        damaged = whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :]
        earlier(data, damaged, "plan")
        with Tasks.open("memory://") as tasks:
            unreadable = None
            try:
                take_over(data, tasks.store, knows)
            except Unavailable as error:
                unreadable = error
            here = Buses(data, tasks.store, "os", BYTES_MAX, unreadable)
            for caller in (ZOE, PLAIN):
                if unreadable is not None:
                    with pytest.raises(Unavailable, match=f"cannot be read from {EARLIER}: only operators"):
                        bodies(here, "plan", caller)
                else:
                    assert bodies(here, "plan", caller) == [], damaged
            here.close()


def test_operators_use_the_buses_while_the_owners_cannot_be_read(tmp_path: Path) -> None:
    data = tmp_path / "data"
    earlier(data, b'{"plan": "tri', "plan")
    with serving(data) as server:
        refused = server.get("triage", "/bus/plan/messages")
        assert (refused.status, refused.json["error"]) == (503, "Unavailable")
        assert refused.json["message"].startswith("who owns the buses cannot be read from bus-makers.json")
        assert server.get("triage", "/bus").status == 503
        assert len(server.get("boss", "/bus/plan/messages").json["messages"]) == 2
        assert (data / EARLIER).read_bytes() == b'{"plan": "tri'
        (data / EARLIER).write_text('{"plan": "triage"}')
        server.end()
        server.start()
        assert len(server.get("review", "/bus/plan/messages").json["messages"]) == 2


# ---- over HTTP ---------------------------------------------------------------------------------------

NEWS = {"type": "INFO", "project_id": "demo", "body": "hello"}


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    with serving(tmp_path / "data") as running:
        for name, org in (("ada", "acme"), ("ann", "acme"), ("zoe", "zeta")):
            running.tokens[name] = running.agents.add(name, org=org)
        yield running


def test_a_restart_without_the_store_leaves_the_buses_to_operators(server: Server) -> None:
    assert server.post("ada", "/bus/plan/messages", **NEWS).status == 201
    server.end()
    connection = sqlite3.connect(server.data / "queue.db")
    with connection:
        assert connection.execute("DELETE FROM cells WHERE kind = 'bus.owner'").rowcount == 1
    connection.close()
    server.start()
    for who in ("ada", "zoe", "triage"):
        assert server.get(who, "/bus/plan/messages").json == {"messages": []}
        assert server.get(who, "/bus").json == {"buses": []}
    assert server.get("boss", "/bus").json == {"buses": [], "organizations": {"acme": ["plan"]}}
    assert len(server.get("boss", "/bus/plan/messages?org_id=acme").json["messages"]) == 1


def test_a_removed_bus_ends_its_streams_with_a_one_line_error(server: Server) -> None:
    assert server.post("ada", "/bus/plan/messages", **NEWS).status == 201
    with server.stream("ann", "/bus/plan/messages") as stream:
        assert stream.take(1)[0].event == "message"
        refused = server.post("ann", "/bus/plan/remove")
        assert (refused.status, refused.json["error"]) == (403, "NotAllowed")
        assert server.post("zoe", "/bus/plan/remove").json == {
            "error": "UnknownBus", "message": "there is no bus 'plan'",
        }  # fmt: skip
        answer = server.send("ada", "POST", "/bus/plan/remove")
        assert (answer.status, answer.json) == (202, {"bus": "plan", "org_id": "acme"})
        [removed] = stream.take(1)
        assert (removed.event, removed.data) == ("removed", {"message": "the bus 'plan' was removed"})
        assert stream.next() is None
    assert server.send("boss", "POST", "/bus/plan/remove?org_id=acme").status == 404


def test_a_command_removes_a_bus(server: Server) -> None:
    assert server.post("ada", "/bus/plan/messages", **NEWS).status == 201
    words = ("bus", "remove", "plan", "--url", f"http://127.0.0.1:{server.port}", "--token")
    assert "there is no bus 'plan'" in postroom(*words, server.tokens["zoe"]).errors
    removed = postroom(*words, server.tokens["boss"], "--org-id", "acme")
    assert removed.line == {"bus": "plan", "org_id": "acme"}
    assert server.get("ada", "/bus").json == {"buses": []}
