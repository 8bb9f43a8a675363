"""The view of dead letters: lists, patterns, and a replay with a preview of what would happen."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Final

import msgspec
from msgspec import UNSET, Meta, UnsetType

from postroom.calls.fields import LETTERS_MAX, Id, Name, Text
from postroom.core.gate import visible_org
from postroom.core.names import unscoped
from postroom.engine import dlq
from postroom.engine.dlq import DeadLetter, FoundLetters
from postroom.engine.inspection import EngineStatus, status_of
from postroom.engine.rules import holds
from postroom.engine.rules.operations import Operations
from postroom.engine.rules.routes import Routes, chosen
from postroom.page.messages import PageSize, read
from postroom.page.redaction import shown_by, shown_name, shown_text
from postroom.server.http.exchange import HttpReply, HttpRequest
from postroom.server.http.task_server import TaskServer
from postroom.server.routes.engine_handlers import operated_org, visible

LETTERS_DEFAULT: Final = 50
PATTERNS_SHOWN_MAX: Final = 50
SAMPLED_MAX: Final = 500  # dead letters that patterns are computed from
LOOKED_MAX: Final = 1_000  # dead letters that one list or preview looks at
PART_NOTE: Final = f"only the first {LOOKED_MAX:,} dead letters were looked at: preview again for the rest"

_encode = msgspec.json.Encoder().encode


class LettersViewQuery(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`GET /page/dead-letters`: `after` is the id of the last dead letter of the previous page."""

    org_id: Name | UnsetType = UNSET
    type: Text | UnsetType = UNSET
    error_type: Text | UnsetType = UNSET
    after: Id | UnsetType = UNSET
    limit: PageSize = LETTERS_DEFAULT

    @property
    def filters(self) -> dict[str, object]:
        """The filters that the caller set."""
        return {name: value for name, value in msgspec.structs.asdict(self).items() if value is not UNSET}


class LettersReplay(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`POST /page/replay`: by ids, or by the filters of the list. A preview changes nothing."""

    message_ids: Annotated[list[Id], Meta(min_length=1, max_length=LETTERS_MAX)] | None = None
    org_id: Name | None = None
    type: Text | None = None
    error_type: Text | None = None
    is_preview: bool = True

    @property
    def filters(self) -> dict[str, object]:
        """The filters that the caller set."""
        names = ("org_id", "type", "error_type")
        chosen = {name: value for name in names if (value := getattr(self, name)) is not None}
        return {**chosen, "limit": LETTERS_MAX}


class LetterPattern(msgspec.Struct, frozen=True):
    """Dead letters of the same organization, type and error."""

    org_id: str
    type: str
    error_type: str
    error: str
    """That of the newest one."""
    count: int
    quarantined: int
    newest: str


class LetterRow(msgspec.Struct, frozen=True):
    """A dead letter in the list."""

    message_id: str
    org_id: str
    type: str
    state: str
    error_type: str
    error: str
    at: str
    can_replay: bool


class Preview(msgspec.Struct, frozen=True):
    """What a replay would do."""

    message_ids: list[str]
    kinds: dict[str, int]
    """How many messages of each organization and type."""
    left_out: dict[str, int]
    """Why dead letters that fit the filters stay, and how many."""
    notes: list[str]
    """What holds the messages up after the replay."""


async def find(server: TaskServer, request: HttpRequest) -> HttpReply:
    query: LettersViewQuery = request.call
    filters, scope = query.filters, visible_org(request.identity)
    if scope is not None:
        if not scope or filters.get("org_id", scope) != scope:
            return HttpReply(200, _encode({"letters": [], "after": "", "patterns": [], "sampled": 0}))
        filters = {**filters, "org_id": scope}
    wanted = dlq.checked_filters(filters)
    of_patterns = {name: filters[name] for name in ("org_id",) if name in filters}
    sampled = dlq.checked_filters({**of_patterns, "limit": SAMPLED_MAX})

    def work(operations: Operations) -> tuple[FoundLetters, list[DeadLetter]]:
        if wanted.after is not None:
            after = visible(operations, wanted.after, request.identity).message_id
            return dlq.search(operations, msgspec.structs.replace(wanted, after=after), LOOKED_MAX, None), []
        sample = dlq.letters(operations, sampled, None)
        return dlq.search(operations, wanted, LOOKED_MAX, None), sample

    found, sample = await read(server, request, work)

    def shown() -> dict[str, Any]:
        return {
            "letters": [_line(request, letter) for letter in found.letters],
            "after": unscoped(request.identity.org, found.last),
            "patterns": [
                msgspec.structs.replace(
                    one,
                    type=shown_name(request, one.type),
                    error_type=shown_name(request, one.error_type),
                    error=shown_text(request, one.error),
                )
                for one in patterns(sample)
            ],
            "sampled": SAMPLED_MAX if len(sample) == SAMPLED_MAX else 0,
        }

    return await shown_by(server, request, shown)


def patterns(letters: Sequence[DeadLetter]) -> list[LetterPattern]:
    """Dead letters that are alike, the most frequent first."""
    groups: dict[tuple[str, str, str], list[DeadLetter]] = {}
    for letter in letters:
        groups.setdefault(_pattern_of(letter), []).append(letter)
    found = [
        LetterPattern(
            *key,
            error=_last_error(alike[-1])["error"],
            count=len(alike),
            quarantined=sum(letter.state == "QUARANTINED" for letter in alike),
            newest=max(letter.dlq_timestamp for letter in alike),
        )
        for key, alike in groups.items()
    ]
    return sorted(found, key=lambda one: (-one.count, one.org_id, one.type))[:PATTERNS_SHOWN_MAX]


def _pattern_of(letter: DeadLetter) -> tuple[str, str, str]:
    message = letter.original_message
    return str(message.get("org_id", "")), str(message.get("type", "")), _last_error(letter)["error_type"]


def _last_error(letter: DeadLetter) -> Mapping[str, Any]:
    return letter.error_history[-1] if letter.error_history else {"error_type": "", "error": ""}


def _line(request: HttpRequest, letter: DeadLetter) -> LetterRow:
    org_id, kind, error_type = _pattern_of(letter)
    message_id = unscoped(request.identity.org, letter.message_id)
    return LetterRow(
        message_id, org_id, shown_name(request, kind), letter.state, shown_name(request, error_type),
        shown_text(request, str(_last_error(letter)["error"])), letter.dlq_timestamp, letter.can_replay,
    )  # fmt: skip


# ---- replays ---------------------------------------------------------------------------------------


async def replay(server: TaskServer, request: HttpRequest) -> HttpReply:
    """Preview or do a replay. A preview names the messages, and the replay that follows sends their ids."""
    body: LettersReplay = request.call
    core = server.engine.core

    def look(operations: Operations) -> Preview:
        chosen, is_part = _chosen(operations, request, body)
        pauses = holds.paused(operations.transaction)
        status = status_of(operations, core.policy)
        seen = preview(
            chosen, status, pauses, core.handlers.registered, is_named=body.message_ids is not None
        )
        return msgspec.structs.replace(seen, notes=[*seen.notes, PART_NOTE]) if is_part else seen

    seen = await read(server, request, look)
    if not body.is_preview:
        await server.engine.dlq.replay(seen.message_ids)
        for message_id in seen.message_ids:
            server.server_log.write("replayed", task_id=message_id, agent=request.identity.name)
        server.wake_streams()

    def shown() -> Preview:
        kinds = {shown_text(request, kind): count for kind, count in seen.kinds.items()}
        notes = [shown_text(request, note) for note in seen.notes]
        message_ids = [unscoped(request.identity.org, message_id) for message_id in seen.message_ids]
        return msgspec.structs.replace(seen, message_ids=message_ids, kinds=kinds, notes=notes)

    return await shown_by(server, request, shown)


def _chosen(
    operations: Operations, request: HttpRequest, body: LettersReplay
) -> tuple[list[DeadLetter], bool]:
    """The dead letters of a replay, and whether more of them may fit its filters."""
    identity = request.identity
    if body.message_ids is None:
        filters = dict(body.filters)
        org_id = operated_org(identity, "letter.replay", body.org_id or "")
        if org_id:
            filters["org_id"] = org_id
        found = dlq.search(operations, dlq.checked_filters(filters), LOOKED_MAX, None)
        return found.letters, bool(found.last)
    named = dict.fromkeys(visible(operations, one, identity).message_id for one in body.message_ids)
    return [dlq.letter_by_id(operations, message_id, None) for message_id in named], False


def preview(
    letters: Sequence[DeadLetter],
    status: EngineStatus,
    pauses: Sequence[tuple[str, ...]],
    routes: Routes,
    *,
    is_named: bool,
) -> Preview:
    """What a replay of these dead letters would do. A quarantined one is replayed only by its id."""
    refusals = [dlq.refusal_of(letter, is_named=is_named) for letter in letters]
    chosen = [letter for letter, why in zip(letters, refusals, strict=True) if not why]
    left_out = Counter(filter(None, refusals))
    kinds = Counter(_pattern_of(letter)[:2] for letter in chosen)
    return Preview(
        [letter.message_id for letter in chosen],
        {f"{org_id}: {kind}": count for (org_id, kind), count in sorted(kinds.items())},
        dict(left_out),
        _notes(
            {(*_pattern_of(letter)[:2], _service_of(letter, routes)) for letter in chosen}, status, pauses
        ),
    )


def _service_of(letter: DeadLetter, routes: Routes) -> str:
    """The service that a message names, or else that of its handler. Payloads are not read for it."""
    named = str(letter.original_message.get("service") or "")
    known = routes.get(str(letter.original_message.get("type")))
    route = chosen(known, named, bytes) if known else None
    return named or (route.service if route else "")


def _notes(
    calls: set[tuple[str, str, str]], status: EngineStatus, pauses: Sequence[tuple[str, ...]]
) -> list[str]:
    """Reasons why messages of these organizations, types and services wait."""
    notes = {
        f"{kind} of {org_id} is paused: its messages wait for a resume"
        for org_id, kind, _ in calls
        if {("", ""), (org_id, ""), ("", kind), (org_id, kind)} & set(pauses)
    }
    for org_id, kind, service in calls:
        found = status.breakers.get(service)
        is_held = found is not None and found.state == "open" and found.organizations in ([], [org_id])
        if found is not None and is_held:
            notes.add(
                f"the breaker of {service} is open: {kind} waits {found.opens_again_s:.0f} s for a probe"
            )
    if calls and not status.workers:
        notes.add("no worker is running: the messages wait until one starts")
    return sorted(notes)
