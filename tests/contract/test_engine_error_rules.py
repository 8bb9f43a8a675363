"""Rules of a deployment for errors: retries by the class of an error, or by what caused it."""

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from postroom import NEVER, Breaker, Policy, Retry, ToolFailed
from postroom.engine.work.error_rules import rule_of
from postroom.errors import InvalidSetting, RateLimited, ValidationError
from tests.engines import EngineUnderTest

SLOW = Retry(max_retries=8, delay_s=60, jitter=0)
FEW = Retry(max_retries=1, delay_s=2, jitter=0)


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A library with a module for its errors, which it imports when they are asked for."""
    folder = tmp_path / "vendorlib"
    folder.mkdir()
    (folder / "_errors.py").write_text(
        "class RateLimitError(Exception): ...\nclass Late(RateLimitError): ...\n"
    )
    (folder / "__init__.py").write_text(
        "from importlib import import_module\n"
        "def __getattr__(name):\n"
        "    if name != 'RateLimitError': raise AttributeError(name)\n"
        "    return import_module('vendorlib._errors').RateLimitError\n"
    )
    (folder / "other.py").write_text("from vendorlib._errors import RateLimitError as Limited\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in [name for name in sys.modules if name.startswith("vendorlib")]:
        monkeypatch.delitem(sys.modules, name)
    import vendorlib._errors  # type: ignore[import-not-found]

    found: ModuleType = vendorlib._errors
    return found


def caused_by(cause: BaseException, error: BaseException) -> BaseException:
    error.__cause__ = cause
    return error


def found(error: BaseException, rules: dict[Any, Retry], *, with_causes: bool = True) -> Retry | None:
    return rule_of(error, rules, with_causes=with_causes)


def test_rule_is_found_by_class_by_base_and_by_name(library: ModuleType) -> None:
    late = library.Late("x")
    assert found(late, {library.RateLimitError: SLOW}) is SLOW
    assert found(late, {"vendorlib.RateLimitError": SLOW}) is SLOW
    assert found(late, {"vendorlib._errors.RateLimitError": SLOW}) is SLOW
    assert found(late, {"vendorlib.RateLimitError": SLOW, "vendorlib._errors.Late": FEW}) is FEW
    assert found(TimeoutError(), {"builtins.OSError": SLOW}) is SLOW
    assert found(TimeoutError(), {"socket.timeout": SLOW}) is SLOW
    assert found(TimeoutError(), {"vendorlib.RateLimitError": SLOW, ValueError: FEW}) is None


def test_library_that_is_not_imported_is_not_imported_for_a_rule(library: ModuleType) -> None:
    assert found(library.Late("x"), {"vendorlib.other.Limited": SLOW}) is None
    assert "vendorlib.other" not in sys.modules
    import vendorlib.other  # type: ignore[import-not-found]  # noqa: F401

    assert found(library.Late("x"), {"vendorlib.other.Limited": SLOW}) is SLOW


def test_cause_of_an_error_is_looked_up_after_the_error() -> None:
    wrapped = caused_by(caused_by(TimeoutError(), ConnectionError()), RuntimeError())
    assert found(wrapped, {TimeoutError: SLOW}) is SLOW
    assert found(wrapped, {TimeoutError: SLOW, RuntimeError: FEW}) is FEW
    assert found(wrapped, {TimeoutError: SLOW}, with_causes=False) is None
    loop = RuntimeError()
    assert found(caused_by(loop, loop), {TimeoutError: SLOW}) is None


def test_error_of_a_fallback_is_not_caused_by_the_one_before_it() -> None:
    error = ConnectionError()
    error.__context__ = ValueError()
    assert found(error, {ValueError: NEVER}) is None


def failing_world(error: BaseException, **rules: Any) -> EngineUnderTest:
    world = EngineUnderTest("memory://", Policy(breaker=Breaker(failures=1), **rules))

    @world.engine.handler("tool_call", service="slack")
    async def run(_message: Any, _ctx: Any) -> None:
        raise error

    return world


def retried(error: BaseException, rules: dict[Any, Retry], **fields: Any) -> tuple[list[float], bool]:
    """The pauses after the failures of one message, and whether its breaker has opened."""
    world = failing_world(error, errors=rules)
    handle = world.submit(**fields)
    for _ in range(20):
        world.run_all()
        world.clock.advance(400)
    info = world.wait(world.engine.get(handle.message_id))
    assert info.state == "DEAD_LETTER"
    has_opened = "slack" in world.wait(world.engine.status()).breakers
    world.close()
    pauses = [event.detail["delay_s"] for event in info.history if event.kind == "retry_scheduled"]
    return pauses, has_opened


def test_never_ends_a_message_at_once_and_is_no_failure_of_the_service() -> None:
    assert retried(ConnectionError("bad arguments"), {ConnectionError: NEVER}) == ([], False)
    assert retried(ConnectionError("down"), {ConnectionError: Retry(max_retries=0)}) == ([], True)


def test_rule_says_that_errors_of_mcp_tools_are_the_fault_of_the_caller() -> None:
    error = ToolFailed("slack", "post", "no such channel")
    assert retried(error, {}) == ([], True)
    assert retried(error, {"postroom.ToolFailed": NEVER}) == ([], False)


@pytest.mark.statement("retry-by-error")
def test_rule_of_an_error_replaces_that_of_its_type() -> None:
    assert retried(KeyError("x"), {LookupError: FEW})[0] == [2.0]
    assert retried(KeyError("x"), {LookupError: SLOW})[0] == [60.0, 120.0, 240.0, *[300.0] * 5]
    assert retried(KeyError("x"), {LookupError: SLOW}, max_retries=2)[0] == [60.0, 120.0]
    assert retried(caused_by(KeyError("x"), RuntimeError()), {LookupError: FEW})[0] == [2.0]


def test_errors_that_postroom_knows_have_rules_only_by_their_own_class() -> None:
    assert retried(caused_by(TimeoutError(), ValidationError("x")), {TimeoutError: SLOW})[0] == []
    assert retried(ValidationError("x"), {ValidationError: FEW})[0] == [2.0]
    assert retried(RateLimited("x"), {RateLimited: FEW})[0] == [2.0]  # not after 60 s
    assert retried(RateLimited("x", retry_after_s=7), {RateLimited: FEW})[0] == [7.0]


def test_rule_of_a_handler_may_allow_more_retries_than_its_type() -> None:
    world = EngineUnderTest("memory://")

    @world.engine.handler("tool_call", retry=Retry(max_retries=7, delay_s=0))
    async def run(_message: Any, _ctx: Any) -> None:
        raise ConnectionError

    handles = [world.submit(), world.submit(max_retries=1)]
    world.run_all()
    assert [world.wait(world.engine.get(one.message_id)).attempt for one in handles] == [8, 2]
    world.close()


@pytest.mark.parametrize(
    "errors",
    [{"TimeoutError": NEVER}, {"a..b": NEVER}, {5: NEVER}, {int: NEVER}, {TimeoutError: 3}, {"a.b": None}, 5],
)
def test_wrong_rule_of_an_error_is_refused(errors: Any) -> None:
    with pytest.raises(InvalidSetting, match="errors"):
        Policy(errors=errors)
