"""Every error that postroom raises on purpose, in one tree, by contract.

    PostroomError
    ├── Rejected       the caller's fault: the same call will fail again
    ├── Unavailable    postroom's or the machine's fault: a retry can succeed
    └── QueueError     base of the errors of `Queue`, each of which is `Rejected` or `Unavailable`, too

Rule 1: an error explains itself in one line, and has its facts as attributes.
Rule 2: the library, the servers and the clients raise the same classes. What a client raises has the text of
        the server's answer: that is the argument `message`.
Rule 3: the module imports only the standard library, because the task client needs it.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

VALUE_CHARS_MAX = 200
NAME_RULE = "1 to 128 ASCII letters, digits, '.', '_' or '-', starting with a letter or digit"


def shown(value: object) -> str:
    """A value as an error sentence names it: its `repr`, cut to `VALUE_CHARS_MAX` characters."""
    if isinstance(value, str | bytes) and len(value) > VALUE_CHARS_MAX:
        return f"{value[:VALUE_CHARS_MAX]!r}... ({len(value)} long)"
    try:
        text = repr(value)
    except Exception:  # noqa: BLE001 - a very long number, or a class with a broken `__repr__`
        return f"an object of type {type(value).__name__}"
    return clipped(text)


_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*(?::/+|//+)")
_WITH_TOKENS = ("nats", "tls", "http")
"""Schemes whose addresses may have a token in the place of the user name."""
_OPTION = re.compile(r"([?&;][^=&;]*(?i:pass|pwd|secret|token|key|sig|credential)[^=&;]*=)[^&;]*")
_PORTS = re.compile(r"(?:\[[^\]]*\]?|[^:/?#]*)(?::[0-9]*)?(?:,[^,:]*(?::[0-9]*)?)*(?:[/?#].*)?", re.DOTALL)


def shown_address(text: str) -> str:
    """An address without its password, for an error. The address may be mistyped.

    The password is everything from the first colon after the scheme up to the last @: a slash or an @ in it
    may be the typing error. Without an @, it is the text in the place of the port, unless that is a port.
    """
    place, found, ledger = text.partition("ledger=")
    if found:  # of a store in a broker: an address within an address
        return shown_address(place) + found + shown_address(ledger)
    match = _SCHEME.match(text)
    scheme = match[0] if match else ""
    rest = text[len(scheme) :]
    user, at, hosts = rest.rpartition("@")
    name, colon, _ = user.partition(":")
    if at and scheme.startswith(_WITH_TOKENS) and (colon or "/" not in user):
        rest = hosts
    elif at and colon:
        rest = f"{name}@{hosts}"
    elif not at and scheme.endswith("://") and not _PORTS.fullmatch(rest):
        rest = rest.partition(":")[0]
    return _OPTION.sub(r"\1***", scheme + rest)


def clipped(reason: object) -> str:
    """The text of another error, cut to `VALUE_CHARS_MAX` characters."""
    text = str(reason)
    return text if len(text) <= VALUE_CHARS_MAX else f"{text[:VALUE_CHARS_MAX]}..."


class PostroomError(Exception):
    """Base of all errors raised by postroom."""

    http_status = 0
    """The status of the answer that the error stands for; 0 for an error that came in no answer."""


class Rejected(PostroomError):
    """The caller's fault. Never retry the same call."""


class Unavailable(PostroomError):
    """Postroom's or the machine's fault. A retry can succeed."""


# ---- messages, names and settings ------------------------------------------------------------------------


class InvalidMessage(Rejected, ValueError):
    """A message that breaks a rule of its contract."""


class InvalidName(Rejected, ValueError):
    """A name outside the allowed alphabet."""

    def __init__(self, kind: str, name: object) -> None:
        self.kind = kind
        self.name = name
        super().__init__(f"{kind} {shown(name)} is not allowed: use {NAME_RULE}")


class InvalidSetting(Rejected, ValueError):
    """A wrong value of an environment variable or of a key of postroom.toml."""


# ---- files and stores ------------------------------------------------------------------------------------


class UnsafePath(Rejected, ValueError):
    """A symlink, a special file, or a path outside of its root. Postroom does not follow it."""


class LockTimeout(Unavailable, TimeoutError):
    """Another process held the lock for the whole timeout."""

    def __init__(self, path: Path | str, timeout_s: float, holder: str = "") -> None:
        self.path = path
        self.timeout_s = timeout_s
        self.holder = holder
        """The process that holds the lock, such as " (process 7)"; empty when it is unknown."""
        super().__init__(f"could not lock {path} within {timeout_s:g} s: another process{holder} holds it")


class WriteFailed(Unavailable, OSError):
    """A write or fsync failed. The message is not acknowledged."""

    def __init__(self, path: Path | str, cause: OSError, *, rolled_back: bool = True) -> None:
        self.path = path
        self.rolled_back = rolled_back
        rest = "nothing was stored" if rolled_back else "the data may or may not be stored"
        reason = cause.strerror or str(cause)
        OSError.__init__(self, cause.errno, f"could not write {path}: {reason}; {rest}")

    def __str__(self) -> str:
        return str(self.strerror)


class HandleDead(Unavailable):
    """An earlier fsync failed, so this handle acknowledges nothing more."""

    def __init__(self, path: Path | str) -> None:
        self.path = path
        super().__init__(f"an earlier fsync of {path} failed: call reopen() before writing again")


class StoreUnwritable(WriteFailed):
    """The system refuses writes next to a store's file. SQLite needs them even to read a store in use."""

    def __init__(self, path: Path | str, cause: OSError) -> None:
        super().__init__(path, cause)
        self.strerror = f"{path} cannot be opened: {cause.strerror}; even reading a store needs write access"


class StoreUnreachable(Unavailable):
    """The database of a store does not answer. `rolled_back`: it is certain that nothing was stored."""

    def __init__(self, url: str, reason: str, *, rolled_back: bool) -> None:
        self.url = url
        self.rolled_back = rolled_back
        rest = "nothing was stored" if rolled_back else "the data may or may not be stored"
        super().__init__(f"{url} does not answer: {reason}; {rest}")


class StoreRefused(Unavailable):
    """The database of a store refuses this client. A retry fails until somebody changes a setting."""

    def __init__(self, url: str, reason: str) -> None:
        self.url = url
        super().__init__(f"{url} refuses the connection: {reason}; nothing was stored")


class StoreMoved(Rejected):
    """The store was moved to another address. It can be read, but takes no more writes."""

    def __init__(self, url: str, to: str) -> None:
        self.to = to
        super().__init__(f"{url} was moved to {to}, and takes no more writes: use that address")


class StoreDamaged(Unavailable):
    """The database does not hold what postroom wrote."""


class DataLost(Unavailable):
    """A data folder has lost something. Nothing was started or changed."""


class KeyMissing(Unavailable):
    """Stored values are encrypted, and their key was not given. Nothing was read or written."""


class KeyInUse(Rejected):
    """A key cannot be retired: stored values need it, or it encrypts new ones. Nothing was changed."""


class UnreadableValue(Unavailable):
    """A stored value cannot be decrypted. It stays as it is."""

    def __init__(self, place: str, key: str) -> None:
        self.place = place
        super().__init__(
            f"{place} cannot be decrypted with the key {key!r}: the stored bytes were changed, or belong to "
            "another record"
        )


# ---- Bus -------------------------------------------------------------------------------------------------


class SinceIdNotFound(Rejected, LookupError):
    """The id after which a reader wants to continue is not in the log."""

    def __init__(self, since_id: str, path: Path, archive: Path | None = None) -> None:
        self.since_id = since_id
        self.path = path
        self.archive = archive
        where = (
            f"it was rotated into {archive.name}; pass archives=True (--archives) to read on from there"
            if archive
            else "it is not in this bus"
        )
        super().__init__(f"since id {shown(since_id)} not found in {path}: {where}")


class UnknownBus(Rejected, LookupError):
    """The caller can see no bus of this name."""

    def __init__(self, name: str, message: str = "") -> None:
        self.name = name
        super().__init__(message or f"there is no bus {shown(name)}")


class BusFull(Unavailable):
    """A bus is at its limit, or the disk is nearly full. Nothing was stored."""

    def __init__(self, reason: str, retry_after_s: float) -> None:
        self.retry_after_s = retry_after_s
        super().__init__(reason)


# ---- Queue -----------------------------------------------------------------------------------------------


class QueueError(PostroomError):
    """Base of the errors of `Queue`."""


class TopicError(QueueError, Rejected, ValueError):
    """A topic outside the closed set."""


class QueueDisabledError(QueueError, Unavailable, RuntimeError):
    """The kill switch is on: nothing is sent."""


class DamagedState(QueueError, Unavailable):
    """A cursor, topic list or journal that cannot be trusted."""


# ---- Tasks -----------------------------------------------------------------------------------------------


class UnknownAgent(Rejected, LookupError):
    """No agent of this name is registered."""

    def __init__(self, name: str) -> None:
        self.name = name
        super().__init__(f"there is no agent {shown(name)}")


class AgentExists(Rejected):
    """An agent of this name is registered already. Nothing was changed."""

    def __init__(self, name: str) -> None:
        self.name = name
        super().__init__(f"agent {shown(name)} exists already: remove it first")


class UnknownTask(Rejected, LookupError):
    """The caller can see no task with this id."""

    def __init__(self, task_id: str, message: str = "") -> None:
        self.task_id = task_id
        super().__init__(message or f"there is no task {shown(task_id)}")


class QueueFull(Unavailable):
    """A queue is at its `max_depth`. Nothing was stored."""

    def __init__(self, queue: str, depth: int, max_depth: int, retry_after_s: float) -> None:
        self.queue = queue
        self.depth = depth
        self.max_depth = max_depth
        self.retry_after_s = retry_after_s
        super().__init__(
            f"queue {shown(queue)} holds {depth} of at most {max_depth} waiting tasks: "
            f"try again in {retry_after_s:g} s"
        )


class StaleLease(Rejected):
    """The lease has ended or belongs to another worker. Nothing was changed."""

    def __init__(self, task_id: str, lease: int, message: str = "") -> None:
        self.task_id = task_id
        self.lease = lease
        super().__init__(
            message or f"lease {lease} of task {shown(task_id)} is no longer valid: stop working on it"
        )


RETRIED = "DEAD_LETTER, CANCELLED, EXPIRED and QUARANTINED"


class WrongState(Rejected):
    """The state of a task does not allow the call. Nothing was changed. In a client, `state` is empty."""

    def __init__(self, task_id: str, verb: str, state: str, message: str = "") -> None:
        self.task_id = task_id
        self.verb = verb
        self.state = state
        rule = f", and only {RETRIED} can be retried" if verb == "retry" else ""
        super().__init__(message or f"cannot {verb} task {shown(task_id)}: it is {state}{rule}")


class NotHeld(Rejected):
    """A client was never given this task, so it has no lease to send."""

    def __init__(self, task_id: str) -> None:
        self.task_id = task_id
        super().__init__(f"this client was not given task {shown(task_id)}: pass its lease")


class NoResult(PostroomError):
    """A task that a client asked for has no result. `task` is the `TaskView` that it saw last."""

    def __init__(self, task: Any) -> None:
        self.task = task
        cause = f": {task.errors[-1]}" if task.errors else ""
        end = f"ended as {task.status}{cause}" if task.ended else f"did not end in time: it is {task.status}"
        super().__init__(f"task {task.task_id} of {task.agent} {end}")


# ---- Engine ----------------------------------------------------------------------------------------------


class InvalidPriority(InvalidMessage):
    """A priority that is not a whole number from 0 to 3."""


class InvalidExpiry(InvalidMessage):
    """An expiry in the past, without a time zone, or before the end of the delay."""


class InvalidParent(InvalidMessage):
    """A message that names itself as its parent."""


class UnknownType(InvalidMessage):
    """No message type of this name is registered."""

    def __init__(self, type_name: object, known: Iterable[str], message: str = "") -> None:
        self.type_name = type_name
        types = ", ".join(sorted(known))
        super().__init__(message or f"there is no message type {shown(type_name)}: the types are {types}")


class UnsupportedVersion(InvalidMessage):
    """A message version that is neither of the current major version nor of the previous one."""

    def __init__(self, version: object, current: str, message: str = "") -> None:
        self.version = version
        super().__init__(
            message
            or f"version {shown(version)} is not supported: use {current} or a version of the previous "
            "major version"
        )


class ValidationError(InvalidMessage):
    """The payload of a message does not fit its type. A handler that raises this is not retried."""


class KeyReused(InvalidMessage):
    """An idempotency key was used before with different content."""

    def __init__(self, key: str, message_id: str, message: str = "") -> None:
        self.key = key
        self.message_id = message_id
        super().__init__(
            message
            or f"idempotency key {shown(key)} belongs to message {message_id}, which has different content"
        )


class ResultGone(Rejected):
    """The message of an idempotency key has ended, and its result is no longer kept. Nothing was stored."""

    def __init__(self, key: str, message_id: str, message: str = "") -> None:
        self.key = key
        self.message_id = message_id
        gone = f"idempotency key {shown(key)} belongs to message {message_id}, whose result is no longer kept"
        super().__init__(message or gone)


class EffectUnknown(Rejected):
    """An earlier attempt began an effect, and its outcome is unknown. Nothing was run."""

    def __init__(self, message_id: str, key: str) -> None:
        self.message_id = message_id
        self.key = key
        super().__init__(
            f"effect {shown(key)} of message {message_id} was begun by an earlier attempt, and its outcome "
            'is unknown: pass probe= or on_unknown="run"'
        )


class MessageFailed(Rejected):
    """A message ended without a result."""

    def __init__(
        self, message_id: str, state: str, error_history: Sequence[Mapping[str, Any]], message: str = ""
    ) -> None:
        self.message_id = message_id
        self.state = state
        self.error_history = error_history
        last = f": {error_history[-1]['error']}" if error_history else ""
        super().__init__(message or f"message {message_id} ended as {state}{last}")


class TokensExhausted(MessageFailed):
    """No model had the tokens that a message asked for, or its handler used up its reservation."""


class ToolFailed(Rejected):
    """A tool of an MCP server answered with an error. The call is not retried: the tool has run."""

    def __init__(self, service: str, tool: str, reason: str, *, is_callers_fault: bool = False) -> None:
        self.service = service
        self.tool = tool
        self.reason = reason
        self.is_callers_fault = is_callers_fault
        """Whether the error says nothing of the health of the service."""
        super().__init__(f"tool {tool!r} of {service} failed: {reason}")


class Overloaded(Unavailable):
    """Backpressure refuses a submit. Nothing was stored."""

    def __init__(self, reason: str, retry_after: float, message: str = "") -> None:
        self.retry_after = self.retry_after_s = retry_after
        super().__init__(message or f"{reason}: try again in {retry_after:.3g} s")


class RateLimited(Unavailable):
    """A service refused a call because of its rate limit. Raise it in a handler to be retried later."""

    def __init__(
        self, reason: str = "the service limits the rate of calls", *, retry_after_s: float | None = None
    ) -> None:
        self.retry_after_s = retry_after_s
        super().__init__(reason)


class SandboxUnavailable(Unavailable):
    """A sandbox could not be created. The message is deferred."""

    def __init__(self, reason: str, retry_after_s: float) -> None:
        self.retry_after_s = retry_after_s
        super().__init__(f"no sandbox: {reason}")


class TargetBusy(Unavailable):
    """Another operation works on the target of an effect. The message is deferred; nothing was run."""

    def __init__(self, target: str, other: str, message: str = "") -> None:
        self.target = target
        self.other = other
        self.retry_after_s = 1.0
        super().__init__(message or f"message {other} works on {shown(target)}")


# ---- goals -----------------------------------------------------------------------------------------------


class GuardTripped(Rejected):
    """A goal has reached one of its limits. Nothing was stored."""

    def __init__(self, goal_id: str, what: str, used: float, limit: float, message: str = "") -> None:
        self.goal_id = goal_id
        self.what = what
        super().__init__(message or f"goal {goal_id} has used {used:g} of at most {limit:g} {what}")


class BudgetSpent(MessageFailed):
    """A message ended before its next attempt, because its goal had reached a limit of its guard."""


def failure_of(message_id: str, state: str, error_history: Sequence[Mapping[str, Any]]) -> MessageFailed:
    """The error of a message that ended without a result."""
    match error_history[-1].get("error_type") if error_history else None:
        case "TokensExhausted":
            return TokensExhausted(message_id, state, error_history)
        case "GuardTripped":
            return BudgetSpent(message_id, state, error_history)
        case _:
            return MessageFailed(message_id, state, error_history)


class UnknownGoal(Rejected, LookupError):
    """No goal of this id was started."""

    def __init__(self, goal_id: object, message: str = "") -> None:
        self.goal_id = goal_id
        super().__init__(message or f"there is no goal {goal_id!r}: start it first")


class UnknownNode(Rejected, LookupError):
    """The caller can see no node with this id."""

    def __init__(self, node_id: object, message: str = "") -> None:
        self.node_id = node_id
        super().__init__(message or f"there is no node {node_id!r}: save it first")


class UnknownCheckpoint(Rejected, LookupError):
    """No checkpoint has this id."""

    def __init__(self, checkpoint_id: object, message: str = "") -> None:
        self.checkpoint_id = checkpoint_id
        super().__init__(
            message or f"there is no checkpoint {checkpoint_id!r}: its id has the form GOAL_ID#NUMBER"
        )


class UnknownDecision(Rejected, LookupError):
    """No decision, or no learned rule, has this id."""

    def __init__(self, decision_id: object, what: str = "decision") -> None:
        self.decision_id = decision_id
        super().__init__(f"there is no {what} {decision_id!r}")


class GoalEnded(Rejected):
    """The state of a goal does not allow the call. Nothing was changed."""

    def __init__(self, goal_id: str, state: str, verb: str, message: str = "") -> None:
        self.goal_id = goal_id
        self.state = state
        super().__init__(message or f"cannot {verb} goal {goal_id!r}: it is {state}")


class ContextChanged(Rejected):
    """The context of a goal was changed meanwhile. Nothing was stored; read it again."""

    def __init__(self, goal_id: str, expected: int, version: int, message: str = "") -> None:
        self.goal_id = goal_id
        self.version = version
        super().__init__(message or f"the context of goal {goal_id!r} has version {version}, not {expected}")


class RollbackRefused(Rejected):
    """A rollback would pass effects that cannot be undone. Nothing was changed."""

    def __init__(self, goal_id: str, irreversible: Iterable[str], message: str = "") -> None:
        self.goal_id = goal_id
        self.irreversible = list(irreversible)
        super().__init__(
            message
            or f"the rollback of goal {goal_id!r} passes effects that cannot be undone: "
            f"{', '.join(self.irreversible)}; name them in accept_irreversible to leave them as they are"
        )


class GraphUnavailable(Unavailable):
    """The server of the knowledge graph does not answer, or every try lost to another writer."""


# ---- Coordinator -----------------------------------------------------------------------------------------


class Bounced(Rejected):
    """A message cannot reach its recipient. Nothing was stored."""

    def __init__(self, recipient: str, reason: str, message: str = "") -> None:
        self.recipient = recipient
        self.reason = reason
        super().__init__(message or f"the message to agent {recipient!r} bounced: {reason}")


class AgentReplaced(Rejected):
    """The same agent was registered again later. Only the newest registration may act for the agent."""

    def __init__(self, agent_id: str, message: str = "") -> None:
        self.agent_id = agent_id
        super().__init__(
            message
            or f"agent {agent_id!r} was registered again elsewhere: only the newest registration is valid"
        )


class StreamRestarted(PostroomError):
    """The attempt that streamed an answer failed, and the next attempt starts the answer again.

    Discard the chunks of the earlier attempt. The same iterator continues with the new one.
    """

    def __init__(self, request_id: str, attempt: int) -> None:
        self.request_id = request_id
        self.attempt = attempt
        super().__init__(
            f"the answer to {request_id} begins again with attempt {attempt}: earlier chunks do not count"
        )


class CoordinatorStopped(Unavailable):
    """The coordinator was stopped. Requests stay open: register again, and resume them."""

    def __init__(self, request_id: str) -> None:
        self.request_id = request_id
        rest = f": the answer to {request_id} is kept for a registration elsewhere" if request_id else ""
        super().__init__(f"the coordinator has been stopped or was not started{rest}")


# ---- servers and their clients ---------------------------------------------------------------------------


class HarnessRefused(Rejected):
    """A harness refuses a call. `status` is the HTTP status; 0 for an answer that breaks the protocol."""

    def __init__(self, status: int, message: str) -> None:
        self.status = self.http_status = status
        super().__init__(message)


class NotAllowed(HarnessRefused):
    """The token is not known to the harness, or does not allow the call."""


class Unreachable(Unavailable):
    """A harness does not answer, or asks the client to retry later."""

    def __init__(self, message: str, retry_after_s: float = 0.0) -> None:
        self.retry_after_s = retry_after_s
        super().__init__(message)


class UnknownToken(Rejected, LookupError):
    """No token has this id. Nothing was changed.

    A token that was passed instead of an id is not repeated. `known_id` is its id, if the caller may know it.
    """

    def __init__(self, token_id: str, message: str = "", known_id: str = "") -> None:
        is_secret = token_id.startswith("pr_")
        self.token_id = known_id if is_secret else token_id
        its_id = f"its id is {known_id}" if known_id else "`postroom token list` shows the ids"
        said = (
            f"this is a token, not the id of a token: {its_id}"
            if is_secret
            else f"there is no token {token_id!r}"
        )
        super().__init__(message or said)


class NoEntry(PostroomError):
    """A route, tool or command names no entry of the table of permissions. Its server does not start."""

    def __init__(self, named_by: str, action: str) -> None:
        super().__init__(
            f"{named_by} names the permission {action!r}, which is not in the table of core.gate: "
            "nothing is served without one"
        )


class TooMany(Unavailable):
    """One caller has used up its share. Others are not affected. Nothing was done."""

    def __init__(self, name: str, what: str, each_max: int, retry_after_s: float) -> None:
        self.retry_after_s = retry_after_s
        super().__init__(f"{shown(name)} may have at most {each_max} {what} at a time: try again later")


class RateExceeded(Unavailable):
    """A token exceeds its rate limit. Nothing was done."""

    def __init__(self, name: str, rate: float, retry_after_s: float) -> None:
        self.retry_after_s = retry_after_s
        often = f"{rate:g} calls a second" if rate >= 1 else f"one call in {1 / rate:g} s"
        super().__init__(
            f"the token of {shown(name)} may make at most {often}: try again in {retry_after_s:.3g} s"
        )


# ---- Mail ------------------------------------------------------------------------------------------------


class MailRefused(Rejected):
    """A mail server refuses a call. `code` has the meaning of an HTTP status."""

    def __init__(self, code: int, text: str) -> None:
        self.code = code
        super().__init__(text)


class MailUnavailable(Unavailable):
    """A mail server is unreachable, does not answer, or is full."""


# ---- Audit and Pipeline ----------------------------------------------------------------------------------


class UnknownMessage(UnknownTask):
    """No event of an audit stream names this id."""

    def __init__(self, message_id: str, folder: Path) -> None:
        self.folder = folder
        super().__init__(message_id, f"no event in {folder} names {shown(message_id)}")


class SinkAhead(Rejected):
    """The audit stream is ahead of a source, so the source was restored to an older state."""

    def __init__(self, source: str, held: int, newest: int) -> None:
        super().__init__(
            f"the audit stream has events of {source} up to number {held}, but the source ends at {newest}: "
            "it was restored to an older state, so ship it to a new folder"
        )


class ShippedElsewhere(Rejected):
    """The store ships its events to another stream, or the stream belongs to another store."""


class AuditBehind(Unavailable):
    """The backlog of the audit stream is too long. Nothing was stored."""

    def __init__(self, waiting: int, backlog_max: int, retry_after_s: float) -> None:
        self.retry_after_s = retry_after_s
        super().__init__(
            f"{waiting} events wait for the audit stream, and the limit is {backlog_max}: "
            f"try again in {retry_after_s:g} s"
        )


class TableChanged(Unavailable):
    """Another writer committed to a table after it was read. Nothing was committed."""

    def __init__(self, table: str) -> None:
        self.table = table
        super().__init__(f"another writer changed table {table} after it was read, so nothing was committed")


# ---- exit codes and reasons ------------------------------------------------------------------------------

EXIT_OK = 0
EXIT_RUNTIME = 1
EXIT_USAGE = 2

EXIT_CODES: dict[type[BaseException], int] = {
    # Usage errors. `UnsafePath` and `SinceIdNotFound` are not: the same call can succeed once a file changed.
    InvalidMessage: EXIT_USAGE,
    InvalidName: EXIT_USAGE,
    InvalidSetting: EXIT_USAGE,
    TopicError: EXIT_USAGE,
    PostroomError: EXIT_RUNTIME,
}
"""The exit code of an error is that of the first class in its MRO that is listed here."""


def reason(error: BaseException) -> str:
    """The text of a decoder's error, in plain words."""
    if isinstance(error, UnicodeDecodeError):
        return f"byte {error.start} (0x{error.object[error.start]:02x}) is not UTF-8 text"
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    return str(error)


def exit_code(error: BaseException) -> int:
    return next((EXIT_CODES[kind] for kind in type(error).__mro__ if kind in EXIT_CODES), EXIT_RUNTIME)
