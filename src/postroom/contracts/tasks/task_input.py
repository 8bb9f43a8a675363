"""Checks of the arguments of `Tasks`. Every refusal is an `InvalidMessage`."""

import math
from collections.abc import Iterable
from typing import Any

import msgspec

from postroom.calls.fields import (
    CLAIM_MAX,
    JSON_DEPTH_MAX,
    KEY_CHARS_MAX,
    LEASE_S_MAX,
    NUMBER_MAX,
    RESULT_BYTES_MAX,
    RETRIES_MAX,
    TEXT_CHARS_MAX,
)
from postroom.core.fieldfaults import unencodable
from postroom.core.formats.jsoninput import is_nested_deeper
from postroom.core.lifecycle.lifecycle import NANOS_PER_S
from postroom.core.names import checked_scoped_name, split_scoped
from postroom.core.times import checked_seconds
from postroom.errors import InvalidMessage, UnknownTask, shown
from postroom.stores.transaction import Claim

LEASE_S_MIN = 0.001
SURELY_FLAT_BYTES = 2 * JSON_DEPTH_MAX  # a level takes at least two brackets
PAGE_MAX = 100_000
NO_RESULT = b"null"

_encode = msgspec.json.Encoder().encode


def encoded(what: str, value: Any) -> bytes:
    """Encode a value as JSON. Raises when JSON cannot hold it."""
    try:
        data = _encode(value)
        if len(data) > SURELY_FLAT_BYTES and is_nested_deeper(data, JSON_DEPTH_MAX):
            raise InvalidMessage(f"{what} is nested more than {JSON_DEPTH_MAX} levels deep")
        # The encoder writes infinity and NaN as null; `find` takes half the time of `in`.
        if data.find(b"null") >= 0 and value is not None:
            _check_numbers(what, msgspec.to_builtins(value))
    except (TypeError, ValueError, UnicodeEncodeError, RecursionError) as error:
        raise InvalidMessage(f"{what} cannot be written as JSON: {unencodable(error)}") from None
    return data


def _check_numbers(what: str, value: Any) -> None:
    level = [value]
    while level:
        if any(isinstance(each, float) and not math.isfinite(each) for each in level):
            raise InvalidMessage(f"{what} holds an infinite number or NaN, which JSON cannot hold")
        level = [
            inner for outer in level if isinstance(outer, dict | list | tuple) for inner in _parts(outer)
        ]


def _parts(outer: Any) -> Iterable[Any]:
    return outer.values() if isinstance(outer, dict) else outer


def check_durability(durability: object) -> None:
    """Raise unless it is a durability class, or None for the default."""
    if durability not in (None, "os", "group", "fsync"):
        raise InvalidMessage(f"durability must be one of os, group, fsync, not {shown(durability)}")


def check_page(after: object, limit: object) -> None:
    """Raise unless `after` and `limit` describe a page of a list."""
    if type(after) is not int or not 0 <= after <= NUMBER_MAX:
        raise InvalidMessage(f"after must be the number of the last entry seen, or 0, not {shown(after)}")
    if type(limit) is not int or not 1 <= limit <= PAGE_MAX:
        raise InvalidMessage(f"limit must be from 1 to {PAGE_MAX}, not {shown(limit)}")


def checked_id(task_id: object) -> str:
    """Return a task id. Raises `UnknownTask` for text that is not ASCII, because every id is."""
    if not isinstance(task_id, str) or not task_id.isascii():
        raise UnknownTask(task_id)  # type: ignore[arg-type]
    return task_id


def checked_token(lease: object) -> int:
    """Return the token of a lease."""
    if type(lease) is not int:
        raise InvalidMessage(f"lease must be the number that claim gave, not {shown(lease)}")
    return lease


def checked_text(name: str, value: object, *, limit: int | None = TEXT_CHARS_MAX) -> str:
    """Return a text of limited length."""
    if not isinstance(value, str):
        raise InvalidMessage(f"{name} must be text, not {type(value).__name__}")
    if limit is not None and len(value) > limit:
        raise InvalidMessage(f"{name} has {len(value)} characters, and the limit is {limit}")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise InvalidMessage(f"{name} holds lone surrogates, which are not Unicode text") from None
    return value


def checked_key(key: object, sender: str) -> str:
    """Return an idempotency key as it is stored. Keys are separate for each sender.

    A key without a sender is stored unchanged, unless it looks like one with a sender.
    """
    text = checked_text("idempotency_key", key, limit=KEY_CHARS_MAX)
    if not text:
        raise InvalidMessage("idempotency_key is empty: leave it out instead")
    return f"@{sender}:{text}" if sender or text.startswith("@") else text


def checked_retries(max_retries: object) -> int:
    if type(max_retries) is not int or not 0 <= max_retries <= RETRIES_MAX:
        raise InvalidMessage(f"max_retries must be from 0 to {RETRIES_MAX}, not {shown(max_retries)}")
    return max_retries


def checked_result(value: Any) -> bytes:
    """Encode a result as JSON."""
    data = encoded("the result", value)
    if len(data) > RESULT_BYTES_MAX:
        raise InvalidMessage(f"the result has {len(data)} bytes, and the limit is {RESULT_BYTES_MAX}")
    return data


def checked_results(finished: Iterable[tuple[str, int, Any]]) -> dict[str, tuple[int, bytes]]:
    """Return finished tasks as id to lease token and encoded result."""
    results: dict[str, tuple[int, bytes]] = {}
    for each in finished:
        try:
            task_id, lease, result = each
        except (TypeError, ValueError):
            raise InvalidMessage(f"a finished task is (task_id, lease, result), not {shown(each)}") from None
        if (
            type(task_id) is not str or not task_id.isascii() or type(lease) is not int
        ):  # skip two calls in the usual case
            task_id, lease = checked_id(task_id), checked_token(lease)
        if task_id in results:
            raise InvalidMessage("a task is in the list twice: it can be completed once")
        results[task_id] = lease, NO_RESULT if result is None else checked_result(result)
    return results


def checked_terms(agent: str, limit: int, lease_s: float, worker: str | None) -> Claim:
    """Return the terms of a claim."""
    checked_scoped_name("agent", agent)
    check_claim_limit(limit)
    checked_seconds("lease_s", lease_s, LEASE_S_MAX, shortest_s=LEASE_S_MIN)
    holder = split_scoped(agent)[1] if worker is None else checked_text("worker", worker)
    return Claim(agent, holder, limit, round(lease_s * NANOS_PER_S))


def check_claim_limit(limit: object, name: str = "limit", least: int = 1) -> None:
    """Raise unless `limit` tasks can be claimed at once."""
    if type(limit) is not int or not least <= limit <= CLAIM_MAX:
        raise InvalidMessage(f"{name} must be from {least} to {CLAIM_MAX}, not {shown(limit)}")
