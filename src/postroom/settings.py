"""All settings and their precedence: defaults < postroom.toml < environment < flags (or arguments).

Rule 1: this module looks for nothing itself; the file and the environment are arguments.
Rule 2: an invalid value is refused with the name it was given under, and never replaced by a default.
Rule 3: an empty variable counts as not set.

The Python API reads no file, and from the environment only the `Queue` settings for missing arguments. The
command line also reads postroom.toml; relative paths in it are relative to that file.
"""

import re
import tomllib
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Final, Literal, TypeAlias, get_args, get_origin, get_type_hints

import msgspec
from msgspec import UNSET, Meta

from postroom.errors import InvalidSetting, reason, shown_address
from postroom.message import DEFAULT_BODY_THRESHOLD, Durability

DEFAULT_SESSION = "default"
DEFAULT_AGENT_ID = "anonymous"
SECONDS_MAX = 86_400  # a wait of more than a day is a typing error
DAYS_MAX = 36_500  # of a retention: a hundred years
RATE_MAX = 1_000_000.0  # calls a second

ADDRESS: Final = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")
"""The start of a URL such as s3://bucket. As a path it would name a folder `s3:`."""

_WANTS: Final[dict[object, str]] = {Path: "a path", bool: "1 or 0, true or false"}

Environment: TypeAlias = Literal["dev", "staging", "prod"]
Redaction: TypeAlias = Literal["none", "medium", "full"]
Results: TypeAlias = Literal["full", "digest", "off"]
Seconds: TypeAlias = Annotated[
    float,
    Meta(gt=0, le=SECONDS_MAX, extra={"wants": f"a number of seconds above 0 and at most {SECONDS_MAX}"}),
]
Positive: TypeAlias = Annotated[int, Meta(gt=0)]
Port: TypeAlias = Annotated[int, Meta(ge=0, le=65535, extra={"wants": "a port from 0 to 65535"})]


def _wants(what: str) -> Meta:
    """What a setting takes, as errors and the reference say it, where its type does not say it."""
    return Meta(extra={"wants": what})


# A setting has its type, its description, and the environment variables that set it: the first one set wins.


class BusSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The `[bus]` table."""

    path: Annotated[Path | None, "The bus file.", "POSTROOM_BUS"] = None
    lock_timeout_s: Annotated[
        Seconds, "How long a writer waits for the lock before it gives up.", "POSTROOM_BUS_LOCK_TIMEOUT_S"
    ] = 10.0
    poll_interval_s: Annotated[
        Seconds,
        "How often a follower checks the file where the system cannot wake it.",
        "POSTROOM_BUS_POLL_INTERVAL_S",
    ] = 0.2
    rotate_bytes: Annotated[
        Positive | None,
        _wants("a whole number of bytes above 0"),
        "Archive the file before a write would make it larger than this. Not set: never.",
        "POSTROOM_BUS_ROTATE_BYTES",
    ] = None
    durability: Annotated[
        Durability,
        "When an append counts as stored: os (page cache), group (shared fsync), fsync.",
        "POSTROOM_BUS_DURABILITY",
    ] = "os"


class QueueSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The `[queue]` table."""

    root: Annotated[
        Path,
        "The folder of the queue. Not set: `$ZOS_HOME/agent-mq`, else "
        "`$XDG_DATA_HOME/postroom/queue`, else `~/.local/share/postroom/queue`.",
        "POSTROOM_QUEUE_ROOT",
        "ZOS_MQ_ROOT",
    ]
    session: Annotated[
        str,
        _wants("a name"),
        "The session used when none is given.",
        "POSTROOM_QUEUE_SESSION",
        "ZOS_MQ_SESSION",
    ] = DEFAULT_SESSION
    agent_id: Annotated[
        str,
        _wants("a name"),
        "The sender used when none is given.",
        "POSTROOM_QUEUE_AGENT_ID",
        "ZOS_MQ_AGENT_ID",
    ] = DEFAULT_AGENT_ID
    body_threshold: Annotated[
        int,
        Meta(ge=0),
        _wants("a whole number of bytes, 0 or more"),
        "Bodies of more UTF-8 bytes than this go to a side file.",
        "POSTROOM_QUEUE_BODY_THRESHOLD",
        "ZOS_MQ_BODY_THRESHOLD",
    ] = DEFAULT_BODY_THRESHOLD
    disabled: Annotated[
        bool,
        "The kill switch: nothing is sent, polled or expired, and nothing is lost.",
        "POSTROOM_QUEUE_DISABLED",
        "ZOS_MQ_DISABLED",
    ] = False
    durability: Annotated[
        Durability,
        "When a send counts as stored: os (page cache), group (shared fsync), fsync.",
        "POSTROOM_QUEUE_DURABILITY",
    ] = "os"


class AuditSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The `[audit]` table."""

    folder: Annotated[Path | None, "The folder of the audit stream.", "POSTROOM_AUDIT"] = None
    environment: Annotated[
        Environment,
        "The environment. It selects the redaction: dev none, staging medium, prod full.",
        "POSTROOM_ENVIRONMENT",
    ] = "prod"
    redaction: Annotated[
        Redaction | None,
        "How much is redacted before an event is written. Not set: chosen by `environment`.",
        "POSTROOM_AUDIT_REDACTION",
    ] = None
    patterns: Annotated[
        dict[str, str],
        _wants("a table of names and regular expressions"),
        "Further redaction rules: a name and a regular expression for each.",
    ] = {}
    fields: Annotated[
        list[str], _wants("a list of names"), "Further names of fields whose values are redacted."
    ] = []
    token_key_file: Annotated[
        Path | None,
        "A file with a secret. A redacted value is then replaced by a token, the same for the same value.",
        "POSTROOM_AUDIT_TOKEN_KEY_FILE",
    ] = None
    key_file: Annotated[
        Path | None,
        "The key file of `postroom audit key`. Payloads are then kept unredacted, encrypted.",
        "POSTROOM_AUDIT_KEY_FILE",
    ] = None
    payloads: Annotated[
        bool, "Whether events include the message bodies, after redaction.", "POSTROOM_AUDIT_PAYLOADS"
    ] = True
    results: Annotated[
        Results,
        "What the event of a completed message says about its result: nothing, size and SHA-256, or also the "
        "result itself, after redaction.",
        "POSTROOM_AUDIT_RESULTS",
    ] = "digest"
    seal_bytes: Annotated[
        int,
        Meta(gt=0, le=2**28),
        _wants("a whole number of bytes up to 268435456"),
        "A segment is sealed before it exceeds this size.",
        "POSTROOM_AUDIT_SEAL_BYTES",
    ] = 128 * 1024 * 1024
    seal_after_s: Annotated[
        Seconds,
        "A segment is sealed when its first event was written this long ago.",
        "POSTROOM_AUDIT_SEAL_AFTER_S",
    ] = 60.0
    publish: Annotated[
        str | None,
        _wants("a URL"),
        "Where sealed segments are copied to: any URL that fsspec supports.",
        "POSTROOM_AUDIT_PUBLISH",
    ] = None
    keep_days: Annotated[
        Annotated[float, Meta(gt=0, le=DAYS_MAX)] | None,
        _wants(f"a number of days above 0 and at most {DAYS_MAX:,}"),
        "How many days the shipper keeps sealed segments, before it removes them. Not set: 90 days with "
        "`archive` or `publish`, else without limit.",
        "POSTROOM_AUDIT_KEEP_DAYS",
    ] = None
    archive: Annotated[
        str | None,
        _wants("a URL"),
        "Where segments are copied to before they are removed: any URL that fsspec supports. A segment "
        "that is not there stays.",
        "POSTROOM_AUDIT_ARCHIVE",
    ] = None
    backlog_max: Annotated[
        Positive,
        _wants("a whole number above 0"),
        "How many events of a store may wait to be shipped before new messages are limited.",
        "POSTROOM_AUDIT_BACKLOG_MAX",
    ] = 1_000_000
    when_behind: Annotated[
        Literal["slow", "refuse"],
        "What happens to new messages above `backlog_max`: they are slowed down or refused. "
        "Set it where the shipper runs; the shipper stores it for all clients of the store.",
        "POSTROOM_AUDIT_WHEN_BEHIND",
    ] = "slow"


class AlertSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The `[alerts]` table."""

    webhook: Annotated[
        Annotated[str, Meta(pattern="^https?://[^/]")] | None,
        _wants("a URL that begins with http:// or https://"),
        "Where alerts are posted to, as JSON. It is tried again until the answer is a success.",
        "POSTROOM_ALERTS_WEBHOOK",
    ] = None
    secret_file: Annotated[
        Path | None,
        "A file with the secret that signs what is posted: the header `X-Postroom-Signature` has the "
        "HMAC-SHA256 of the body.",
        "POSTROOM_ALERTS_SECRET_FILE",
    ] = None
    command: Annotated[
        list[str],
        _wants("a list of a program and its arguments"),
        "A program that gets each alert, as JSON on its standard input. It is run again until it succeeds.",
    ] = []


class UpSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The `[up]` table."""

    data: Annotated[
        Path | None,
        "The data folder of everything that `postroom up` starts, and of commands without "
        "`--data` and `--url`. `restore`, `verify`, `mail serve`, `audit`, `engine work` and `engine "
        "load` do not take it: there `--data` is something else, or changes what the command does.",
        "POSTROOM_DATA",
    ] = None
    host: Annotated[
        str,
        _wants("a host name or an address"),
        "The address to listen on. Another one than loopback needs TLS.",
        "POSTROOM_HOST",
    ] = "127.0.0.1"
    http_port: Annotated[
        Port,
        "The port of HTTP: Tasks, Engine, buses and the live page. 0 picks a free one.",
        "POSTROOM_HTTP_PORT",
    ] = 8800
    nats_port: Annotated[Port, "The port of NATS: Mail. 0 picks a free one.", "POSTROOM_NATS_PORT"] = 4222
    store: Annotated[
        str | None,
        _wants("the address of a store"),
        "The store of Tasks and Engine, such as postgres://user@host/db. Not set: the file "
        "queue.db of the data folder.",
        "POSTROOM_UP_STORE",
    ] = None
    page: Annotated[bool, "Whether HTTP serves the live page.", "POSTROOM_UP_PAGE"] = True
    mcp: Annotated[bool, "Whether HTTP serves MCP at /mcp.", "POSTROOM_UP_MCP"] = True
    allowed_hosts: Annotated[
        str,
        _wants("names with commas between them"),
        "Host names, separated by commas, that the page and MCP accept besides localhost and the "
        "names of the certificate: the public name of a server behind a proxy.",
        "POSTROOM_ALLOWED_HOSTS",
    ] = ""
    http: Annotated[bool, "Whether Tasks, Engine and buses are served over HTTP.", "POSTROOM_UP_HTTP"] = True
    mail: Annotated[bool, "Whether Mail is served.", "POSTROOM_MAIL"] = True
    audit: Annotated[bool, "Whether the events are shipped to the audit stream.", "POSTROOM_UP_AUDIT"] = True
    app: Annotated[
        str | None,
        _wants("MODULE:NAME"),
        "An engine as MODULE:NAME. Workers then run its handlers.",
        "POSTROOM_APP",
    ] = None
    token_rate: Annotated[
        float,
        Meta(ge=0, le=RATE_MAX),
        _wants(f"a number from 0 to {RATE_MAX:,.0f}"),
        "Calls a second that a token without a rate of its own may make, on HTTP and on NATS. 0: no limit.",
        "POSTROOM_TOKEN_RATE",
    ] = 0.0
    page_redaction: Annotated[
        Redaction,
        "What the live page hides in texts that senders and workers write: none, medium "
        "(secrets and personal data) or full (all text). `[audit]` may add patterns and fields.",
        "POSTROOM_PAGE_REDACTION",
    ] = "medium"
    tls_cert: Annotated[
        Path | None,
        "The certificate of HTTP and NATS. Without one, both speak in the clear.",
        "POSTROOM_TLS_CERT",
    ] = None
    tls_key: Annotated[
        Path | None, "The key of the certificate, if it is in another file.", "POSTROOM_TLS_KEY"
    ] = None


class EncryptionSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The `[encryption]` table."""

    key_file: Annotated[
        Path | None,
        "The key file of `postroom keys create`. What Tasks, Engine and Mail store is then encrypted.",
        "POSTROOM_KEY_FILE",
    ] = None


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """All settings."""

    bus: BusSettings
    queue: QueueSettings
    audit: AuditSettings
    up: UpSettings
    alerts: AlertSettings
    encryption: EncryptionSettings


Table: TypeAlias = (
    type[BusSettings]
    | type[QueueSettings]
    | type[AuditSettings]
    | type[UpSettings]
    | type[AlertSettings]
    | type[EncryptionSettings]
)


class Setting(msgspec.Struct, frozen=True):
    """One setting: how its values are checked, and its row in the reference."""

    key: str
    type: Any
    default: Any
    variables: tuple[str, ...]
    """The environment variables that set it; the first one set wins."""
    wants: str
    description: str


@cache
def described(table: Table) -> tuple[Setting, ...]:
    """The settings of one table, in the order of its fields."""
    hints = get_type_hints(table, include_extras=True)
    found = []
    for field in msgspec.structs.fields(table):
        hint = hints[field.name]
        said = [meta.extra["wants"] for meta in hint.__metadata__ if isinstance(meta, Meta) and meta.extra]
        wants = said[-1] if said else _wanted(hint.__origin__)
        description, *variables = (text for text in hint.__metadata__ if isinstance(text, str))
        default = None if field.default is msgspec.NODEFAULT else field.default
        found.append(Setting(field.name, hint, default, tuple(variables), wants, description))
    return tuple(found)


def _wanted(kind: Any) -> str:
    """What a type takes: its words, or the text in `_WANTS`."""
    parts = get_args(kind)
    if None in parts or type(None) in parts:
        return _wanted(parts[0])
    return f"{', '.join(parts[:-1])} or {parts[-1]}" if get_origin(kind) is Literal else _WANTS.get(kind, "")


def load(config: Path | None, environ: Mapping[str, str]) -> Settings:
    """The settings from the environment, then the file (if given), then the defaults."""
    tables = {} if config is None else _read(config)
    settings = {}
    for field in msgspec.structs.fields(Settings):
        set_here = ((setting.key, _one(setting, environ, UNSET)) for setting in described(field.type))
        in_environment = {key: value for key, value in set_here if value is not UNSET}
        given = {**tables.get(field.name, {}), **in_environment}
        if field.type is QueueSettings and "root" not in given:
            given["root"] = _default_root(environ)
        settings[field.name] = field.type(**given)
    return Settings(**settings)


def template() -> str:
    """A settings file with every setting as a comment: its meaning, its default and its variable."""
    lines = ["# Settings of postroom. Remove the # of a line to set it.", ""]
    for field in msgspec.structs.fields(Settings):
        lines.append(f"[{field.name}]")
        for setting in described(field.type):
            variable = f" Variable: {setting.variables[0]}." if setting.variables else ""
            lines.append(f"# {setting.description}{variable}")
            shown = setting.wants if setting.default is None else setting.default
            lines.append(f"# {setting.key} = {msgspec.json.encode(shown).decode()}")
        lines.append("")
    return "\n".join(lines)


def queue_root(environ: Mapping[str, str]) -> Path:
    """The folder for a `Queue` that was given none."""
    found = _one(_queue_setting("root"), environ, UNSET)
    return _default_root(environ) if found is UNSET else Path(found)


def queue_body_threshold(environ: Mapping[str, str]) -> int:
    """The body threshold for a `Queue` that was given none."""
    return int(_one(_queue_setting("body_threshold"), environ))


def queue_disabled(environ: Mapping[str, str]) -> bool:
    """The kill switch. Every call checks it, so the common case reads only the two variables."""
    if environ.get("POSTROOM_QUEUE_DISABLED") or environ.get("ZOS_MQ_DISABLED"):
        return _one(_queue_setting("disabled"), environ) is True
    return False


def queue_session(environ: Mapping[str, str]) -> str:
    """The session for a call that names none."""
    return str(_one(_queue_setting("session"), environ))


def queue_agent_id(environ: Mapping[str, str]) -> str:
    """The sender for a call that names none."""
    return str(_one(_queue_setting("agent_id"), environ))


@cache
def _queue_setting(key: str) -> Setting:
    return next(setting for setting in described(QueueSettings) if setting.key == key)


def _default_root(environ: Mapping[str, str]) -> Path:
    if environ.get("ZOS_HOME"):
        return Path(environ["ZOS_HOME"], "agent-mq")
    refused = "there is no home folder for the queue: set POSTROOM_QUEUE_ROOT"
    return xdg_folder(environ, "XDG_DATA_HOME", ".local/share", refused) / "queue"


def xdg_folder(environ: Mapping[str, str], variable: str, below_home: str, refused: str) -> Path:
    """Postroom's folder below an XDG base folder; `InvalidSetting(refused)` when there is no home folder."""
    folder = Path(environ.get(variable, ""))
    if not folder.is_absolute():  # the XDG rule: a relative path is ignored
        try:
            folder = Path(environ.get("HOME") or Path.home(), below_home)
        except RuntimeError:
            raise InvalidSetting(refused) from None
    return folder / "postroom"


def _one(setting: Setting, environ: Mapping[str, str], default: object = None) -> Any:
    for variable in setting.variables:
        if text := environ.get(variable):
            return _checked(setting, variable, text, strict=False)
    return setting.default if default is None else default


def _checked(setting: Setting, name: str, value: object, *, strict: bool) -> Any:
    try:
        return msgspec.convert(value, setting.type, strict=strict, dec_hook=_path)
    except (msgspec.ValidationError, ValueError):
        found = repr(shown_address(value) if isinstance(value, str) else value)
        raise InvalidSetting(f"{name} must be {setting.wants}, not {found}") from None


def is_address(text: str) -> bool:
    """Whether a text that should be a path is an address, such as the mistyped postgres//u:x@h/d."""
    return ADDRESS.match(text) is not None or (text[:1] not in "/.~" and shown_address(text) != text)


def _path(kind: type, value: object) -> Path:
    if kind is not Path or not isinstance(value, str) or not value or "\0" in value or is_address(value):
        raise ValueError
    return Path(value)


def _read(config: Path) -> dict[str, dict[str, Any]]:
    """The tables of a postroom.toml, with every value checked."""
    try:
        document = tomllib.loads(config.read_text("utf-8"))
    except OSError as error:
        raise InvalidSetting(f"cannot read {shown_address(str(config))}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:  # ValueError also for a number with too many digits
        raise InvalidSetting(f"{config} is not TOML: {reason(error)}") from None
    kinds = {field.name: field.type for field in msgspec.structs.fields(Settings)}
    _refuse_unknown(config, document, kinds, "")
    return {
        name: dict(_entries(config, name, table, described(kinds[name]))) for name, table in document.items()
    }


def _entries(
    config: Path, name: str, table: object, settings: tuple[Setting, ...]
) -> Iterator[tuple[str, Any]]:
    if not isinstance(table, dict):
        raise InvalidSetting(f"{config}: {name} must be a table, not {table!r}")
    known = {setting.key: setting for setting in settings}
    _refuse_unknown(config, table, known, f"{name}.")
    for key, value in table.items():
        # 1 and 0 are accepted for true and false, as in the environment; a text is not accepted for a number.
        checked = _checked(known[key], f"{config}: {name}.{key}", value, strict=not isinstance(value, int))
        yield key, _resolved(config, checked) if isinstance(checked, Path) else checked


def _resolved(config: Path, path: Path) -> Path:
    """The path with `~` expanded, relative to the folder of the settings file."""
    try:
        return config.parent / path.expanduser()
    except RuntimeError:
        raise InvalidSetting(f"{config}: {str(path)!r} names a home folder that does not exist") from None


def _refuse_unknown(config: Path, found: Mapping[str, Any], known: Mapping[str, Any], prefix: str) -> None:
    for key in found:
        if key not in known:
            names = ", ".join(prefix + name for name in known)
            raise InvalidSetting(f"{config}: unknown key {prefix + key!r}; known are {names}")
