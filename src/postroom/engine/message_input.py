"""The input of a submit: its keywords are checked once and become a message that can be stored.

Rule 1: everything is checked here. Each refusal is a typed error of one line.
"""

import re
import uuid
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any, Final, Protocol

import msgspec
from msgspec.structs import replace

from postroom.calls.fields import DELAY_S_MAX, KEY_CHARS_MAX, RETRIES_MAX, TEXT_CHARS_MAX, TOKENS_MAX
from postroom.calls.submit import CreatedBy, ResourceLimits, SubmitFields
from postroom.contracts.tasks.task_input import check_durability, checked_text, encoded
from postroom.core.goals import conflicts
from postroom.core.goals.conflicts import Operation
from postroom.core.lifecycle import versions
from postroom.core.lifecycle.lifecycle import NANOS_PER_S
from postroom.core.lifecycle.versions import Migration
from postroom.core.names import is_name, scoped, unscoped
from postroom.core.times import epoch_ns_of, parse_utc
from postroom.core.tokens.token_rules import TokenRules
from postroom.engine.messages import (
    NO_PAYLOAD,
    Body,
    digest_of,
    encode_body,
    new_id,
)
from postroom.engine.rules.policy import Policy
from postroom.errors import (
    InvalidExpiry,
    InvalidMessage,
    InvalidName,
    InvalidParent,
    InvalidPriority,
    PostroomError,
    UnknownType,
    ValidationError,
    clipped,
    shown,
)
from postroom.message import ENGINE_PREFIX, Durability, Envelope

PRIORITY_DEFAULT: Final = 2
PRIORITY_LAST: Final = 3
EXTRA_FIELDS_MAX: Final = 64
MODELS_MAX: Final = 100
EXPIRES_S_MAX: Final = 100 * 366 * 86_400
HOPS_MAX: Final = 1_000_000
MEMORY_TEXT: Final = re.compile(r"[1-9]\d{0,8}\s?(B|KB|MB|GB|TB|KiB|MiB|GiB|TiB)", re.ASCII)
TRACEPARENT: Final = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}", re.ASCII)
CONTEXT_BYTES_MAX: Final = 64 * 1024


FIELDS: Final = frozenset(SubmitFields.__annotations__)
REQUIRED: Final = SubmitFields.__required_keys__
_IGNORED: Final = frozenset({"created_at", "retry_count", "accepted_priority", "state"})
"""Fields of a returned message that a submit of the same fields may repeat."""


class Prepared(msgspec.Struct, frozen=True, kw_only=True):
    """A checked message, ready to be stored."""

    envelope: Envelope
    body: Body
    org_id: str
    payload: bytes
    context: bytes
    """A context that is stored apart, as JSON; empty for one that is in the body."""
    digest: str
    """Of the type and the payload, to tell a repeated submit from another message."""
    given_digest: str = ""
    """The same before a migration; empty when none ran."""

    def repeats(self, digest: str) -> bool:
        """Whether the message with this digest may be the same one, stored before or after a migration."""
        return digest in (self.digest, self.given_digest)


class Shapes(Protocol):
    """Tells the shape of a payload by the handler that will get it."""

    def shape_of(self, type_name: str, service: str, payload: bytes) -> Any:
        """The shape of the payload of a message that names this service; None for that of its type."""


class Registry:
    """The message types of an engine, the shapes of their payloads, and the migrations of old versions."""

    def __init__(
        self,
        types: tuple[str, ...],
        *,
        urgent: Durability = "os",
        payload_keys: Mapping[str, tuple[str, ...]] | None = None,
        shapes: Shapes | None = None,
    ) -> None:
        """`urgent` is the durability class of P0 messages that name none."""
        self._shapes = shapes
        self._urgent = urgent
        self.payload_keys = dict(payload_keys or {})
        """Type -> the only keys that its payload may have."""
        self.types: dict[str, Any] = dict.fromkeys(types)
        """Type -> the shape of its payload; None for any object."""
        self.migrations: dict[int, Migration] = {}

    def share(self, other: "Registry") -> None:
        """Use the types and migrations of another engine, also later ones."""
        self.types, self.payload_keys, self.migrations = other.types, other.payload_keys, other.migrations

    def prepare(self, fields: Mapping[str, Any], policy: Policy, wall_us: int) -> Prepared:
        """Check the keywords of a submit."""
        is_plain = type(fields) is dict and fields.keys() <= FIELDS  # nearly always
        if not (is_plain or (isinstance(fields, Mapping) and all(isinstance(name, str) for name in fields))):
            raise InvalidMessage(
                f"a message is given by the keywords of submit, not by {type(fields).__name__}"
            )
        given = self._migrated(fields, policy)
        if len(given) > len(FIELDS) + len(_IGNORED) + EXTRA_FIELDS_MAX:  # before a long list of names is made
            raise InvalidMessage(f"a message has at most {EXTRA_FIELDS_MAX} fields that are not known")
        extra: dict[str, Any] = {}
        if not given.keys() <= FIELDS:
            extra = {name: given.pop(name) for name in given.keys() - FIELDS}
            extra = {name: value for name, value in extra.items() if name not in _IGNORED}
        if extra:
            version = fields.get("version") or policy.version
            if not versions.may_have_unknown_fields(version, policy.version):
                names = shown(", ".join(sorted(extra)))
                raise InvalidMessage(f"a message of version {version} has no field {names}")
            if len(extra) > EXTRA_FIELDS_MAX:
                raise InvalidMessage(f"a message has at most {EXTRA_FIELDS_MAX} fields that are not known")
            _object("the unknown fields", extra)
        if not given.keys() >= REQUIRED:
            missing = sorted(REQUIRED - given.keys())
            raise InvalidMessage(f"a message needs {' and '.join(missing)}")
        prepared = self._prepared(given, extra, policy, wall_us)
        if given.get("version") != fields.get("version"):  # a migration ran
            prepared = replace(prepared, given_digest=_digest_before(fields))
        return prepared

    def _migrated(self, fields: Mapping[str, Any], policy: Policy) -> dict[str, Any]:
        """The fields in the current version. A migration meets whatever callers send, so it may raise."""
        try:
            return versions.migrated(dict(fields), self.migrations, policy.version)
        except PostroomError:
            raise
        except Exception as error:
            what = f"{type(error).__name__}: {clipped(error)}"
            text = f"the migration of version {fields.get('version')} failed: {what}"
            raise ValidationError(text) from error

    def _prepared(
        self, given: dict[str, Any], extra: dict[str, Any], policy: Policy, wall_us: int
    ) -> Prepared:
        get, type_name, org_id = given.get, given["type"], given["org_id"]
        if not isinstance(type_name, str) or type_name not in self.types:
            raise UnknownType(type_name, self.types)
        if not isinstance(org_id, str) or not is_name(org_id):
            raise InvalidName("org_id", org_id)
        payload = self._payload(type_name, get("service"), given["payload"])
        message_id = _message_id(get("message_id"), org_id)
        parent = _text("parent_message_id", get("parent_message_id", ""))
        if parent and unscoped(org_id, parent) == unscoped(org_id, message_id):
            raise InvalidParent(f"message {message_id} names itself as its parent")
        delay_ns = _delay_ns(get("delay_s", 0))
        expires_us = _expires_us(get("expires_at"), wall_us, delay_ns)
        context = b"" if get("context") is None else _encoded_object("context", given["context"])
        if len(context) <= CONTEXT_BYTES_MAX:
            context = b""  # the body holds it
        body = _body(
            get, payload=payload, context=context, extra=extra, expires_us=expires_us,
            version=get("version") or policy.version,
        )  # fmt: skip
        durability = get("durability")
        check_durability(durability)
        priority = get("priority", PRIORITY_DEFAULT)
        if type(priority) is not int or not 0 <= priority <= PRIORITY_LAST:
            raise InvalidPriority(
                f"priority must be a whole number from 0 to {PRIORITY_LAST}, not {shown(priority)}"
            )
        if policy.token_rules is not None and (body.tokens or body.models):
            _check_budget(policy.token_rules, body, priority)
        max_retries = get("max_retries")
        if max_retries is None:
            max_retries = policy.retry_of(type_name).max_retries
        envelope = Envelope(
            queue=ENGINE_PREFIX + org_id,
            payload=b"",
            message_id=message_id,
            type=type_name,
            parent_message_id=parent,
            priority=priority,
            max_retries=_whole("max_retries", max_retries, RETRIES_MAX),
            delay_ns=delay_ns,
            ttl_ns=(expires_us - wall_us) * 1000 if expires_us else 0,
            durability=durability or (self._urgent if priority == 0 else "group"),
            facts=_facts(body),
        )
        digest = digest_of(type_name, payload)
        return Prepared(
            envelope=envelope, body=body, org_id=org_id, payload=payload, context=context, digest=digest
        )

    def _payload(self, type_name: str, service: object, payload: Any) -> bytes:
        if not isinstance(payload, dict | msgspec.Struct):
            kind = type(payload).__name__
            raise ValidationError(f"the payload of {type_name} must be a JSON object, not {kind}")
        data = encoded("the payload", payload)
        shape = None
        if self._shapes is not None:
            shape = self._shapes.shape_of(type_name, service if isinstance(service, str) else "", data)
        if shape is not None or self.types[type_name] is not None:
            self.shaped(type_name, data, shape)
        else:
            self._check_keys(type_name, payload)
        return data

    def shaped(self, type_name: str, data: bytes, shape: Any = None) -> Any:
        """The payload in the shape of its handler, or else of its type; a plain object without either."""
        shape = self.types.get(type_name) if shape is None else shape
        try:
            payload = msgspec.json.decode(data) if shape is None else msgspec.json.decode(data, type=shape)
        except msgspec.DecodeError as error:
            raise ValidationError(f"the payload of {type_name} does not fit: {clipped(error)}") from None
        if shape is None:
            self._check_keys(type_name, payload)
        return payload

    def _check_keys(self, type_name: str, payload: Any) -> None:
        """Refuse a key that the default handler of a type does not know."""
        known = self.payload_keys.get(type_name)
        if known is None:
            return
        given = msgspec.to_builtins(payload) if isinstance(payload, msgspec.Struct) else payload
        unknown = next((key for key in given if key not in known), None)
        if unknown is not None:
            from difflib import get_close_matches  # noqa: PLC0415 - only an error needs it

            similar = get_close_matches(str(unknown)[:TEXT_CHARS_MAX], known, 1)
            more = f"did you mean {similar[0]!r}?" if similar else f"its keys are {', '.join(known)}"
            raise ValidationError(f"unknown key {shown(unknown)} of {type_name}; {more}")


def stored(prepared: Prepared, inline_bytes_max: int) -> Envelope:
    """The envelope with its body. A payload above the limit is referred to."""
    body = prepared.body
    if len(prepared.payload) > inline_bytes_max:
        body = replace(body, payload=NO_PAYLOAD, payload_ref=prepared.digest)
    return replace(prepared.envelope, payload=encode_body(body))


def _digest_before(fields: Mapping[str, Any]) -> str:
    """Digest of the message as submitted, before any migration; empty if it lacked a type or a payload."""
    try:
        return digest_of(fields["type"], encoded("the payload", fields["payload"]))
    except (KeyError, AttributeError, InvalidMessage):
        return ""


# ---- checks ----------------------------------------------------------------------------------------


def _whole(name: str, value: object, largest: int) -> int:
    if type(value) is not int or not 0 <= value <= largest:
        raise InvalidMessage(f"{name} must be a whole number from 0 to {largest}, not {shown(value)}")
    return value


def _message_id(message_id: object, org_id: str) -> str:
    """A UUID, as it was given: alone, or within the organization."""
    if message_id is None:
        return ""
    try:
        given = unscoped(org_id, message_id)  # type: ignore[arg-type]
        number = str(uuid.UUID(given))
        return number if given == message_id else scoped(org_id, number)
    except (ValueError, TypeError, AttributeError):
        raise InvalidMessage(f"message_id must be a UUID, not {shown(message_id)}") from None


def _delay_ns(delay_s: object) -> int:
    if isinstance(delay_s, bool) or not isinstance(delay_s, int | float) or not 0 <= delay_s <= DELAY_S_MAX:
        raise InvalidMessage(
            f"delay_s must be a number of seconds from 0 to {DELAY_S_MAX:g}, not {shown(delay_s)}"
        )
    return round(delay_s * NANOS_PER_S)


def _expires_us(expires_at: object, wall_us: int, delay_ns: int) -> int:
    if expires_at is None:
        return 0
    try:
        moment = parse_utc(expires_at) if isinstance(expires_at, str) else expires_at
        expires_us = epoch_ns_of(moment) // 1000 if isinstance(moment, datetime) else 0
    except InvalidMessage as error:
        raise InvalidExpiry(f"expires_at must be a time with a time zone: {clipped(error)}") from None
    if not isinstance(moment, datetime):
        raise InvalidExpiry(f"expires_at must be a time with a time zone: it is {type(moment).__name__}")
    if expires_us <= wall_us:
        raise InvalidExpiry(f"expires_at {moment.isoformat()} is in the past")
    if expires_us - wall_us > EXPIRES_S_MAX * 1_000_000:
        raise InvalidExpiry(f"expires_at {moment.isoformat()} is too far away: leave it out instead")
    if delay_ns // 1000 >= expires_us - wall_us:
        raise InvalidExpiry(
            f"delay_s ends after expires_at {moment.isoformat()}: the message would never be delivered"
        )
    return expires_us


def _body(
    get: Callable[..., Any],
    *,
    payload: bytes,
    context: bytes,
    extra: dict[str, Any],
    expires_us: int,
    version: str,
) -> Body:
    user_id, agent_id = _text("user_id", get("user_id", "")), _text("agent_id", get("agent_id", ""))
    on_dead, goal_id, task_id = get("on_dead", "continue"), get("goal_id"), get("task_id")
    if on_dead not in ("continue", "stop"):
        raise InvalidMessage(f'on_dead must be "continue" or "stop", not {shown(on_dead)}')
    if on_dead == "stop" and not get("ordering_key"):
        raise InvalidMessage(
            'on_dead="stop" needs an ordering_key: a dead letter stops the messages of its key'
        )
    operation = get("operation")
    if operation is None:
        operation = conflicts.of_memory(get("type"), get("payload"))
    if operation is not None and not isinstance(operation, Operation):
        try:
            operation = conflicts.checked(operation)
        except ValueError as error:
            raise InvalidMessage(str(error)) from None
    traceparent = _text("traceparent", get("traceparent", ""))
    if traceparent and TRACEPARENT.fullmatch(traceparent) is None:
        raise InvalidMessage(f"traceparent is not of the form of W3C Trace Context: {shown(traceparent)}")
    return Body(
        payload=msgspec.Raw(payload),
        version=version,
        goal_id=new_id() if goal_id is None else checked_text("goal_id", goal_id),
        task_id=new_id() if task_id is None else checked_text("task_id", task_id),
        created_by=_creator(get("created_by"), user_id, agent_id),
        user_id=user_id,
        agent_id=agent_id,
        expires_us=expires_us,
        context={} if context else get("context") or {},
        context_ref=digest_of("context", context) if context else "",
        metadata=_object("metadata", get("metadata")),
        resource_limits=_resource_limits(get("resource_limits")),
        token_needs=_object("token_needs", get("token_needs")),
        model_preferences=_texts("model_preferences", get("model_preferences")),
        tokens=_whole("tokens", get("tokens", 0), TOKENS_MAX),
        models=_texts("models", get("models")),
        service=_text("service", get("service", "")),
        idempotency_key=_key("idempotency_key", get("idempotency_key")),
        ordering_key=_key("ordering_key", get("ordering_key")),
        on_dead=on_dead,
        traceparent=traceparent,
        tracestate=_text("tracestate", get("tracestate", ""), KEY_CHARS_MAX),
        hop=_whole("hop", get("hop", 0), HOPS_MAX),
        in_goal=goal_id is not None,
        operation=operation,
        extra=extra,
    )


def _check_budget(rules: TokenRules, body: Body, priority: int) -> None:
    """Refuse models without a budget, and more tokens than any of the models can ever give."""
    unknown = [name for name in body.models if name not in rules.named]
    if unknown:
        known = ", ".join(sorted({rule.name for rule in rules.models}))
        raise InvalidMessage(f"there is no model {unknown[0]!r}: the models with a budget are {known}")
    most = max(rule.reach[priority] for rule in rules.candidates(body.models))
    if body.tokens > most:
        raise InvalidMessage(
            f"a message of P{priority} that asks for {body.tokens} tokens would never run: "
            f"its models give at most {most}"
        )


def _text(name: str, value: object, limit: int = TEXT_CHARS_MAX) -> str:
    return "" if value == "" or value is None else checked_text(name, value, limit=limit)


def _creator(created_by: object, user_id: str, agent_id: str) -> CreatedBy:
    if created_by is None:
        if agent_id:
            return CreatedBy("agent", agent_id)
        return CreatedBy("user", user_id) if user_id else CreatedBy("system", "postroom")
    try:
        creator = msgspec.convert(created_by, CreatedBy, from_attributes=True)
    except (msgspec.ValidationError, UnicodeEncodeError) as error:
        raise InvalidMessage(
            f"created_by must be an object with a type (user, agent or system) and an id: {clipped(error)}"
        ) from None
    checked_text("the id of created_by", creator.id)
    return creator


def _object(name: str, value: dict[str, Any] | None) -> dict[str, Any]:
    if value is None:
        return {}
    size = len(_encoded_object(name, value))
    if size > CONTEXT_BYTES_MAX:
        raise InvalidMessage(f"{name} has {size} bytes, and at most {CONTEXT_BYTES_MAX} are kept")
    return value


def _encoded_object(name: str, value: object) -> bytes:
    if not isinstance(value, dict):
        raise InvalidMessage(f"{name} must be a JSON object, not {type(value).__name__}")
    return encoded(name, value)


def _texts(name: str, value: object) -> list[str]:
    if value is None:
        return []
    if not isinstance(value, list | tuple):
        raise InvalidMessage(f"{name} must be a list of texts, not {type(value).__name__}")
    if len(value) > MODELS_MAX:
        raise InvalidMessage(f"{name} has {len(value)} entries, and the limit is {MODELS_MAX}")
    return [checked_text(name, each) for each in value]


def _resource_limits(value: object) -> ResourceLimits | None:
    if value is None:
        return None
    try:
        limits = msgspec.convert(value, ResourceLimits, from_attributes=True)
    except (msgspec.ValidationError, UnicodeEncodeError) as error:
        raise InvalidMessage(f"resource_limits does not fit: {clipped(error)}") from None
    if limits.time is not None and not 0 < limits.time <= DELAY_S_MAX:
        raise InvalidMessage(
            f"resource_limits.time must be a positive number of seconds, not {shown(limits.time)}"
        )
    if limits.memory is not None and MEMORY_TEXT.fullmatch(limits.memory) is None:
        raise InvalidMessage(
            f'resource_limits.memory must be a text such as "1GB", not {shown(limits.memory)}'
        )
    return limits


def _key(name: str, value: object) -> str:
    if value is None:  # as of most messages
        return ""
    text = _text(name, value, KEY_CHARS_MAX)
    if not text.isprintable():
        raise InvalidMessage(f"{name} must be printable text, not {shown(text)}")
    return text


def _facts(body: Body) -> dict[str, Any]:
    """The facts in the first event of a message, for the audit stream."""
    facts = {
        "goal_id": body.goal_id,
        "task_id": body.task_id,
        "user_id": body.user_id,
        "agent_id": body.agent_id,
        "service": body.service,
        "trace_id": body.traceparent[3:35],
        "span_id": body.traceparent[36:52],
        "sender": body.created_by.id,
    }
    return {name: value for name, value in facts.items() if value}
