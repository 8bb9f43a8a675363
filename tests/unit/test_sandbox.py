"""Sandboxes: limits, isolation where the machine has it, and the pool of warm ones."""

import asyncio
import contextlib
import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from postroom import Sandbox
from postroom.core.goals.sandbox_rules import bytes_of, needs_sandbox
from postroom.core.lifecycle.breaker import Breaker
from postroom.errors import InvalidMessage, InvalidSetting, SandboxUnavailable
from postroom.sandbox import Completed, SandboxPool
from postroom.sandbox.pool import BREAKER, IDLE_S, Creations
from postroom.sandbox.sandbox import OUTPUT_BYTES_MAX, MockSandbox, bubblewrap_trouble
from tests.waiting import eventually, until

PYTHON = "/usr/bin/python3" if Path("/usr/bin/python3").exists() else sys.executable
needs_bubblewrap = pytest.mark.skipif(
    bool(bubblewrap_trouble()), reason=f"no isolation on this machine: {bubblewrap_trouble()}"
)
KINDS = ["process", pytest.param("bubblewrap", marks=needs_bubblewrap)]


def run(kind: Any, *argv: Any, limits: Any = None, **options: Any) -> Any:
    async def story() -> Any:
        async with await Sandbox.open(kind).create(limits) as box:
            return await box.run([*argv], **options)

    return asyncio.run(story())


@pytest.mark.parametrize("kind", KINDS)
def test_a_program_runs_and_gives_its_output_and_exit_code(kind: Any) -> None:
    done = run(kind, "sh", "-c", "cat; echo out; echo err >&2; exit 3", stdin=b"in\n", timeout_s=20)
    assert done == Completed(3, "in\nout\n", "err\n")


@pytest.mark.parametrize("kind", KINDS)
def test_a_program_that_runs_too_long_is_killed(kind: Any) -> None:
    done = run(kind, "sh", "-c", "sleep 60 & sleep 60", limits={"time": 0.2})
    assert (done.exit_code, done.timed_out) == (124, True)
    assert run(kind, "sleep", "60", timeout_s=0.2).timed_out


@pytest.mark.parametrize("kind", KINDS)
def test_memory_is_limited(kind: Any) -> None:
    done = run(kind, PYTHON, "-c", "x = bytearray(400_000_000); print(len(x))", limits={"memory": "200MB"})
    assert done.exit_code != 0
    assert "MemoryError" in done.stderr
    assert run(kind, PYTHON, "-c", "print(1)", limits={"memory": "200MB"}).stdout == "1\n"


@pytest.mark.parametrize("kind", KINDS)
def test_output_is_bounded_and_does_not_block_the_program(kind: Any) -> None:
    done = run(kind, "sh", "-c", f"head -c {OUTPUT_BYTES_MAX * 2} /dev/zero; echo end >&2")
    assert len(done.stdout) == OUTPUT_BYTES_MAX
    assert done.stderr == "end\n"


@pytest.mark.parametrize("kind", KINDS)
def test_a_reset_removes_what_runs_left_behind(kind: Any) -> Any:
    async def story() -> Any:
        async with await Sandbox.open(kind).create() as box:
            await box.run(["sh", "-c", "mkdir -p a/b; echo 1 > a/b/c; echo 2 > d; ln -s / root"])
            before = (await box.run(["sh", "-c", "echo *"])).stdout
            await box.reset()
            return before, (await box.run(["ls"])).stdout

    assert asyncio.run(story()) == ("a d root\n", "")


@pytest.mark.parametrize("kind", KINDS)
def test_a_program_does_not_get_the_environment_of_its_caller(kind: Any, monkeypatch: Any) -> None:
    monkeypatch.setenv("POSTROOM_SECRET", "x")
    assert "POSTROOM_SECRET" not in run(kind, "env").stdout


@pytest.mark.statement("isolation-namespaces")
@needs_bubblewrap
def test_bubblewrap_has_no_network_no_files_and_no_processes_of_other_users() -> None:
    home = run("bubblewrap", "ls", "/root", "/home", "/var").stdout
    assert home == ""
    interfaces = run("bubblewrap", "cat", "/proc/net/dev").stdout.splitlines()[2:]
    assert [line.split(":")[0].strip() for line in interfaces] == ["lo"]
    assert run("bubblewrap", "sh", "-c", f"kill -0 {os.getpid()}").exit_code != 0
    assert run("bubblewrap", "sh", "-c", "touch /usr/x").exit_code != 0


@needs_bubblewrap
def test_bubblewrap_leaves_no_privileges_to_a_worker_that_runs_as_root() -> None:
    """Whether a file is writable is asked, never tried: these settings are those of the whole machine."""
    asked = "id -u; grep CapEff /proc/self/status; test -w /proc/sys/kernel/core_pattern; echo $?"
    asked += "; test -w /proc/sysrq-trigger; echo $?"
    assert run("bubblewrap", "sh", "-c", asked).stdout.split() == [
        "65534", "CapEff:", "0000000000000000", "1", "1",
    ]  # fmt: skip


@needs_bubblewrap
def test_bubblewrap_ends_what_a_program_left_running() -> None:
    """Also a program with a session of its own, which is in no process group of the run."""
    name = f"sleep {60 + os.getpid()}"
    done = run("bubblewrap", "sh", "-c", f"setsid {name} & echo started", timeout_s=20)
    assert done.stdout == "started\n"
    until(lambda: not any(name in line for line in commands()))


def commands() -> list[str]:
    """The command lines of all processes."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            found.append(path.read_text().replace("\0", " "))
    return found


def test_a_destroyed_sandbox_runs_nothing() -> None:
    async def story() -> None:
        box = await Sandbox.open("process").create()
        await box.destroy()
        await box.destroy()
        with pytest.raises(SandboxUnavailable):
            await box.run(["true"])

    asyncio.run(story())


@pytest.mark.statement("isolation-mock")
def test_mock_keeps_what_it_was_asked_to_run() -> None:
    async def story() -> None:
        box = Sandbox.open("mock")
        assert isinstance(box, MockSandbox)
        with pytest.raises(SandboxUnavailable):
            await box.run(["x"])
        await box.create({"time": 1})
        box.answers["python"] = Completed(1, "", "boom")
        assert (await box.run(["python", "-c", "1"])).exit_code == 1
        assert (await box.run(["cat"], stdin=b"x")).stdout == "x"
        assert box.runs == [["python", "-c", "1"], ["cat"]]

    asyncio.run(story())


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(InvalidSetting):
        Sandbox.open("vm")
    for limits in ({"memory": "much"}, {"time": -1}, {"disk": 1}, 7):
        with pytest.raises(InvalidMessage):
            run("process", "true", limits=limits)
    for argv in ("true", [], [1], ["a\0b"]):
        with pytest.raises(InvalidMessage):
            asyncio.run(_run_mock(argv))


async def _run_mock(argv: Any) -> Any:
    box = await Sandbox.open("mock").create()
    return await box.run(argv)


# ---- the pool --------------------------------------------------------------------------------------


class Failing(MockSandbox):
    """Cannot be created while `is_down`."""

    is_down = False
    made = 0

    async def create(self, resource_limits: Any = None) -> Any:
        if Failing.is_down:
            raise SandboxUnavailable("the host is full", 1.0)
        Failing.made += 1
        await asyncio.sleep(0)  # others run meanwhile
        return await super().create(resource_limits)


@pytest.fixture
def pool_of() -> Any:
    Failing.is_down, Failing.made = False, 0

    def make(**options: Any) -> Any:
        rule, clock = options.pop("rule", BREAKER), options.get("clock", time.monotonic)
        return SandboxPool(Failing, creations=Creations(rule, clock=clock), **options)

    return make


@pytest.mark.statement("sandbox-pool")
def test_a_pool_gives_warm_sandboxes_and_recycles_them(pool_of: Any) -> None:
    async def story() -> None:
        pool = pool_of(size=2, uses_max=3)
        await pool.fill()
        assert pool.status.warm == 2
        for _ in range(4):
            async with pool.sandbox() as box:
                await box.run(["x"])
        assert Failing.made == 2
        for _ in range(4):
            async with pool.sandbox():
                pass
        await eventually(lambda: pool.status.warm == 2)
        assert pool.status.recycled == 2
        await pool.close()
        assert pool.status.warm == 0

    asyncio.run(story())


@pytest.mark.statement("sandbox-pool")
def test_an_old_or_unhealthy_sandbox_does_not_go_back(pool_of: Any) -> None:
    now = [0.0]

    async def story() -> None:
        pool = pool_of(size=1, age_s_max=10, clock=lambda: now[0])
        await pool.fill()
        async with pool.sandbox() as box:
            box.answers["true"] = Completed(1, "", "")
        assert pool.status.recycled == 1
        await eventually(lambda: pool.status.warm == 1)
        now[0] = 20.0
        async with pool.sandbox() as young:
            assert young is not box
        await eventually(lambda: pool.status.recycled == 2)

    asyncio.run(story())


def test_creations_that_fail_open_a_breaker(pool_of: Any) -> None:
    now = [0.0]

    async def story() -> None:
        pool = pool_of(size=0, rule=Breaker(failures=2, window_s=60, cooldown_s=30), clock=lambda: now[0])
        Failing.is_down = True
        for _ in range(2):
            with pytest.raises(SandboxUnavailable, match="the host is full"):
                await pool.sandbox().__aenter__()
        Failing.is_down = False
        with pytest.raises(SandboxUnavailable, match="none is tried") as refused:
            await pool.sandbox().__aenter__()
        assert refused.value.retry_after_s == pytest.approx(30)
        now[0] = 31.0
        async with pool.sandbox():
            pass
        assert pool.status.breaker == "closed"

    asyncio.run(story())


def test_an_idle_sandbox_that_breaks_is_replaced(pool_of: Any) -> None:
    """A P0 message must not be the one that finds out."""
    now = [0.0]

    async def story() -> None:
        pool = pool_of(size=2, age_s_max=100, clock=lambda: now[0])
        await pool.fill()
        async with pool.sandbox() as broken:
            pass
        broken.is_created = False  # as when somebody has removed its folder
        await pool.tend()
        assert pool.status.recycled == 0, "a sandbox that was just probed is probed again"
        now[0] = IDLE_S
        await pool.tend()
        assert (pool.status.recycled, pool.status.warm) == (1, 2)
        now[0] = 100.0
        await pool.tend()
        await eventually(lambda: pool.status.recycled == 2)
        await eventually(lambda: pool.status.warm == 2)
        assert Failing.made == 4
        await pool.close()

    asyncio.run(story())


def test_fills_at_the_same_time_create_no_more_than_the_size(pool_of: Any) -> None:
    async def story() -> None:
        pool = pool_of(size=2)
        await asyncio.gather(*(pool.fill() for _ in range(5)))
        assert (pool.status.warm, Failing.made) == (2, 2)

    asyncio.run(story())


def test_a_sandbox_that_is_given_back_to_a_closed_pool_is_destroyed(pool_of: Any) -> None:
    async def story() -> None:
        pool = pool_of(size=1)
        async with pool.sandbox() as box:
            await pool.close()
        assert not box.is_created
        assert pool.status.warm == 0

    asyncio.run(story())


@pytest.mark.parametrize(("text", "size"), [("1B", 1), ("256MB", 256_000_000), ("1 GiB", 2**30)])
def test_amounts_of_memory(text: Any, size: Any) -> None:
    assert bytes_of(text) == size
    with pytest.raises(ValueError, match="256MB"):
        bytes_of(f"-{text}")


@pytest.mark.statement("sandbox-need")
@pytest.mark.parametrize(
    ("tools", "needed"),
    [([], False), (["search", "calendar"], False), (["run_python"], True), ([{"name": "shell"}], True),
     ([{"name": "shell", "sandbox": False}], False), ([{"name": "x", "sandbox": True}], True),
     (["decode"], False)],
)  # fmt: skip
def test_the_need_of_a_sandbox_is_found_from_the_tools(tools: Any, needed: Any) -> None:
    assert needs_sandbox(tools) is needed
