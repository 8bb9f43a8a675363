"""What the audit stream says about the results of completed messages: size and digest, or the result itself.

Rule 1: a result is read when its event is shipped, so that completing a message costs no more than before.
Rule 2: an event whose result is gone or cannot be read is shipped without it.
"""

import hashlib
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Final

import msgspec

from postroom.contracts.feeds import RESULT_DIGEST, ShownResult
from postroom.engine.agents.answer_parts import UNDECODABLE, whole_answer
from postroom.engine.rules.cells import joined
from postroom.engine.rules.operations import Operations
from postroom.engine.rules.policy import Policy
from postroom.errors import MessageFailed, UnreadableValue
from postroom.message import Event, org_of
from postroom.stores.base import CHUNKS
from postroom.stores.store import Store
from postroom.stores.transaction import Transaction

RESULTS_A_READ_MAX: Final = 100  # results of up to `RESULT_BYTES_MAX` that are in memory together
RESULT_SHIPPED_BYTES_MAX: Final = 64 * 1024  # of a longer result, the stream has only size and digest

_canonical: Final = msgspec.json.Encoder(order="sorted").encode


def shown_results(store: Store, completed: Sequence[Event], *, whole: bool) -> dict[int, ShownResult]:
    """What the stream says about the results of these messages, by the `seq` of their events."""
    found: dict[int, ShownResult] = {}
    for start in range(0, len(completed), RESULTS_A_READ_MAX):
        some = completed[start : start + RESULTS_A_READ_MAX]
        found |= store.read(partial(_read, completed=some, whole=whole))
    return found


def _read(transaction: Transaction, completed: Sequence[Event], *, whole: bool) -> dict[int, ShownResult]:
    results = transaction.records.results([event.message_id for event in completed])
    has_chunks = bool(transaction.cells.page(CHUNKS, "", 1))
    found: dict[int, ShownResult] = {}
    for event in completed:
        result = results.get(event.message_id)
        if result is None:
            continue
        with suppress(UnreadableValue, MessageFailed, *UNDECODABLE):
            if has_chunks and _is_streamed(transaction, event):
                answer = whole_answer(Operations(transaction, Policy()), event.message_id)
            else:
                answer = msgspec.json.decode(result)
            found[event.seq] = shown_result(answer, whole=whole)
    return found


def _is_streamed(transaction: Transaction, event: Event) -> bool:
    """Whether parts of the answer are stored, such as chunks."""
    prefix = joined(event.message_id, event.attempt)
    first = transaction.cells.page(CHUNKS, prefix, 1) if org_of(event.queue) else []
    return any(key.startswith(prefix) for key, _ in first)


def shown_result(answer: Any, *, whole: bool) -> ShownResult:
    """Size and digest of a result as canonical JSON: sorted names, no spaces. With `whole`, also its text."""
    data = _canonical(answer)
    is_shown = whole and len(data) <= RESULT_SHIPPED_BYTES_MAX
    return ShownResult(
        {"result_bytes": len(data), RESULT_DIGEST: hashlib.sha256(data).hexdigest()},
        data.decode() if is_shown else "",
    )
