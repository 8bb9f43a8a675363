"""The routes with which admins make, list, revoke and rotate tokens."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from postroom import Tasks
from postroom.server.access.registry import Agents
from tests.integration.commandline import finish, start
from tests.integration.test_token_permissions import World
from tests.waiting import until

LOG = "server.log"


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    data = tmp_path_factory.mktemp("tokens") / "run"
    data.mkdir()
    Agents(data).add("old-hand")
    with (data.parent / LOG).open("wb") as log:
        process = start("postroom", "tasks", "serve", "--data", data, "--port", 0, stderr=log)
    try:
        assert process.stdout is not None
        yield World(json.loads(process.stdout.readline())["url"], data)
    finally:
        process.terminate()
        finish(process)


@pytest.fixture
def of_acme(world: World) -> str:
    return world.tokens.create("admin", "acme").token


def listed(world: World, token: str) -> dict[str, dict[str, Any]]:
    status, answer = world.call(token, "/tokens")
    assert status == 200, answer
    return {line["token_id"]: line for line in answer["tokens"]}


def test_an_admin_makes_a_token_that_is_answered_once(world: World) -> None:
    wanted = {"role": "agent", "org": "acme", "agent": "maker", "expires_s": 60, "only_message": ["lead"]}
    status, made = world.call(world.admin, "/tokens", wanted)
    assert status == 201
    caller = world.call(made["token"], "/whoami")[1]
    assert caller == {"name": "maker", "role": "agent", "org": "acme"}
    line = listed(world, world.admin)[made["token_id"]]
    assert (line["agent"], line["only_message"], line["valid"]) == ("maker", ["lead"], True)
    assert made["token"] not in json.dumps(listed(world, world.admin))
    assert "sha256" not in json.dumps(line)


def test_a_revoked_token_ends_and_a_rotated_one_has_a_successor(world: World) -> None:
    made = world.agent("turner")
    status, second = world.call(world.admin, f"/tokens/{made.token_id}/rotate", {"overlap_s": 600})
    assert status == 201
    for token in (made.token, second["token"]):
        assert world.call(token, "/whoami")[1]["name"] == "turner"
    for token_id in (made.token_id, second["token_id"]):
        assert world.call(world.admin, f"/tokens/{token_id}/revoke", {}) == (202, {"token_id": token_id})
        assert world.call(world.admin, f"/tokens/{token_id}/revoke", {})[0] == 404
    until(lambda: world.call(second["token"], "/whoami")[0] == 401)


def log_of(world: World) -> str:
    return (world.data.parent / LOG).read_text()


def test_each_change_of_an_admin_is_a_line_in_the_log_without_the_token(world: World) -> None:
    admin = world.tokens.create("admin", "acme", "chief")
    first = world.call(admin.token, "/tokens", {"role": "agent", "agent": "logged"})[1]
    second = world.call(admin.token, f"/tokens/{first['token_id']}/rotate", {})[1]
    world.call(admin.token, f"/tokens/{second['token_id']}/revoke", {})

    def lines() -> list[dict[str, Any]]:
        complete = [line for line in log_of(world).splitlines(keepends=True) if line.endswith("}\n")]
        found = [json.loads(line) for line in complete]
        return [line for line in found if line.get("admin_token_id") == admin.token_id]

    until(lambda: len(lines()) == 3)
    facts = {
        "task_id": "", "agent": "chief", "admin_token_id": admin.token_id,
        "role": "agent", "token_org": "acme", "token_agent": "logged",
    }  # fmt: skip
    old_id, new_id = first["token_id"], second["token_id"]
    assert [{name: value for name, value in line.items() if name != "ts"} for line in lines()] == [
        {"event": "token_created", **facts, "token_id": old_id},
        {"event": "token_rotated", **facts, "token_id": old_id, "new_token_id": new_id},
        {"event": "token_revoked", **facts, "token_id": new_id},
    ]
    assert not [one for one in (admin.token, first["token"], second["token"]) if one in log_of(world)]


def ends_of(world: World, admin: str, path: str, body: Any) -> tuple[str, str]:
    """The expiry of a token that a call makes, and the call's new token."""
    status, made = world.call(admin, path, body)
    assert status == 201, made
    return listed(world, world.admin)[made["token_id"]]["expires"], made["token"]


def test_what_an_expiring_admin_makes_ends_with_its_own_token(world: World) -> None:
    admin = world.tokens.create("admin", expires_s=3_600)
    lasting, long = world.tokens.create("admin"), world.tokens.create("operator", expires_s=86_400)
    end = listed(world, world.admin)[admin.token_id]["expires"]
    for body in ({"role": "admin"}, {"role": "operator", "expires_s": 86_400}):
        assert ends_of(world, admin.token, "/tokens", body)[0] == end
    assert ends_of(world, admin.token, "/tokens", {"role": "admin", "expires_s": 60})[0] < end
    for token_id in (lasting.token_id, long.token_id, admin.token_id):
        path = f"/tokens/{token_id}/rotate"
        assert ends_of(world, admin.token, path, {"overlap_s": 600})[0] == end, token_id
    own_end, successor = ends_of(world, admin.token, f"/tokens/{admin.token_id}/rotate", {"overlap_s": 600})
    assert ends_of(world, successor, "/tokens", {"role": "admin"})[0] <= own_end <= end


def test_an_admin_of_one_organization_keeps_to_it(world: World, of_acme: str) -> None:
    foreign = world.tokens.create("agent", "other", "bob")
    assert {line["org"] for line in listed(world, of_acme).values()} == {"acme"}
    assert foreign.token_id in listed(world, world.admin)
    for call in ("revoke", "rotate"):
        refused = world.call(of_acme, f"/tokens/{foreign.token_id}/{call}", {})
        unknown = world.call(of_acme, f"/tokens/none/{call}", {})
        assert refused[0] == unknown[0] == 404
        assert refused[1]["message"].replace(foreign.token_id, "none") == unknown[1]["message"]
    for org in ("other", "acme-2"):
        assert world.call(of_acme, "/tokens", {"role": "admin", "org": org})[0] == 403
    for role in ("admin", "operator"):  # without an organization, it is that of the admin, and never all
        made = world.call(of_acme, "/tokens", {"role": role})[1]
        assert world.call(made["token"], "/whoami")[1]["org"] == "acme"
    everywhere = world.call(world.admin, "/tokens", {"role": "admin"})[1]
    assert world.call(everywhere["token"], "/whoami")[1]["org"] == ""


def test_an_admin_of_one_organization_gives_no_right_over_tasks_of_other_organizations(
    world: World, of_acme: str
) -> None:
    world.tokens.create("agent", "other", "theirs")
    world.tokens.create("agent", "acme", "ours")
    for right in ("may_send_to", "may_claim", "may_read"):
        body = {"role": "agent", "agent": "grabber"}
        for name in ("theirs", "old-hand", "nobody", "ours"):  # no answer tells whether others use a name
            status, made = world.call(of_acme, "/tokens", {**body, right: [name]})
            assert (status, sorted(made)) == (201, ["token", "token_id"])
    world.call(world.admin, "/queue/enqueue", {"agent": "@other:theirs", "payload": "of theirs"})
    world.call(world.admin, "/queue/enqueue", {"agent": "old-hand", "payload": "of none"})
    for name in ("theirs", "old-hand"):
        claiming: dict[str, Any] = {
            "role": "agent",
            "agent": "grabber",
            "may_claim": [name],
            "may_read": [name],
        }
        made = world.call(of_acme, "/tokens", claiming)[1]
        assert world.call(made["token"], "/queue/next", {"agent": name})[0] == 204
        assert world.call(made["token"], f"/tasks?agent={name}")[1] == {"tasks": []}
        twin = world.call(of_acme, "/tokens", {"role": "agent", "agent": name})[1]
        assert world.call(twin["token"], "/queue/next", {})[0] == 204


@pytest.mark.parametrize("role", ["agent", "operator"])
def test_other_roles_are_refused_and_each_refusal_is_an_event(world: World, role: str) -> None:
    made = world.tokens.create(role, "acme", f"no-{role}")
    calls: list[tuple[str, Any]] = [("/tokens", None), ("/tokens", {"role": "admin"})]
    calls += [(f"/tokens/x/{call}", {}) for call in ("revoke", "rotate")]
    assert [world.call(made.token, path, body)[0] for path, body in calls] == [403] * len(calls)
    assert role in world.call(made.token, "/tokens")[1]["message"]

    def refused() -> set[str]:
        with Tasks.open(f"sqlite:///{world.data / 'queue.db'}") as tasks:
            details = [one.detail for one in tasks.store.events() if one.kind == "rejected" and one.detail]
        return {each["call"] for each in details if each.get("token_id") == made.token_id}

    until(lambda: {"GET /tokens", "POST /tokens", "POST /tokens/{id}/revoke"} <= refused())


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"role": "king"},
        {"role": "agent"},
        {"role": "admin", "may_claim": ["a"]},
        {"role": "admin", "expires_s": 0},
        {"role": "admin", "rate": -1},
        {"role": "admin", "secret": "x"},
        {"role": "agent", "org": "acme", "agent": "a b"},
    ],
)
def test_a_body_that_does_not_fit_is_refused(world: World, body: dict[str, Any]) -> None:
    before = len(listed(world, world.admin))
    assert world.call(world.admin, "/tokens", body)[0] == 400
    assert len(listed(world, world.admin)) == before
