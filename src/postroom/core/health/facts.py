"""What `postroom doctor` has looked at: the facts that `diagnosis` concludes from."""

from collections.abc import Mapping

import msgspec

from postroom.core.health.health import HealthFacts

OPEN_FILES_MIN = 1_024


class EnvironmentFacts(msgspec.Struct, frozen=True):
    """The programs, and the limits of the process."""

    postroom: str
    python: str
    sqlite: str
    sqlite_fault: str = ""
    """Why the SQLite library cannot be used; empty when it can."""
    open_files_max: int = OPEN_FILES_MIN


class FolderFacts(msgspec.Struct, frozen=True):
    """The data folder, and the disk below it."""

    path: str
    mode: int
    is_writable: bool
    is_read_only: bool = False
    """Whether its file system takes no writes."""
    foreign: tuple[str, ...] = ()
    """Files that this user cannot read and write."""
    free_bytes: int = 0
    total_bytes: int = 0
    reserve_bytes: int = 0
    """Below this, servers refuse posts to a bus: the rest is for the store."""
    filesystem: str = ""


class ClockFacts(msgspec.Struct, frozen=True):
    """The wall clock."""

    now_us: int
    newest_us: int = 0
    """The time of the newest event in a store; 0 without events."""


class PortFacts(msgspec.Struct, frozen=True):
    """A port that `postroom up` is configured to listen on."""

    part: str
    address: str
    is_taken: bool


class ServerFacts(msgspec.Struct, frozen=True):
    """`postroom up` of the folder."""

    is_running: bool
    parts: Mapping[str, str] = {}
    """The state of each part."""
    broken: Mapping[str, str] = {}
    """The parts that do not work, and why."""
    restarts: Mapping[str, int] = {}
    ports: tuple[PortFacts, ...] = ()
    """Looked at only while `up` does not run."""


class BacklogFacts(msgspec.Struct, frozen=True):
    """The queue of an agent or of an organization."""

    name: str
    depth: int
    """Messages that wait and delayed ones: `depth_max` limits both."""
    depth_max: int
    delayed: int = 0
    oldest_s: float | None = None
    """How long the oldest ready message of an agent has waited."""
    dead_letters: int = 0
    quarantined: int = 0
    is_engine: bool = False

    @property
    def waiting(self) -> int:
        """Messages that a worker could claim."""
        return self.depth - self.delayed


class LeaseFacts(msgspec.Struct, frozen=True):
    """A message in flight, and its lease."""

    message_id: str
    queue: str
    worker_id: str
    claimed_s: float
    late_s: float = 0.0
    """How long ago the lease ended without being swept."""
    is_engine: bool = False


class ShipperFacts(msgspec.Struct, frozen=True):
    """The outbox of a store."""

    waiting: int
    backlog_max: int
    oldest_s: float = 0.0
    """The age of the oldest event that is not shipped."""
    refuses: bool = False


class StoreFacts(msgspec.Struct, frozen=True):
    """A store of messages."""

    name: str
    format: int
    newest_format: int
    faults: tuple[str, ...] = ()
    has_clock: bool = True
    queues: tuple[BacklogFacts, ...] = ()
    flow: HealthFacts = HealthFacts()
    """How the messages of organizations flow."""
    leases: tuple[LeaseFacts, ...] = ()
    """Those that ended or began long ago."""
    shipper: ShipperFacts | None = None
    """None when its events are not shipped."""
    quarantined_rows: int = 0
    """Rows of events that cannot be read. Their bytes are kept."""
    is_folder: bool = True
    """Whether the store is in the data folder, and not on a server."""


class DatabaseFacts(msgspec.Struct, frozen=True):
    """The server of a store on PostgreSQL."""

    psql: str
    """Its address, as psql takes it."""
    schema: str
    wrong_counters: tuple[str, ...] = ()
    broken_indexes: tuple[str, ...] = ()
    missing_indexes: Mapping[str, str] = {}
    """With the statement that makes each."""
    oldest_s: float = 0.0
    """The age of the oldest open transaction that the role can see."""
    oldest_pid: int = 0
    oldest_program: str = ""
    dead_rows: Mapping[str, tuple[int, int]] = {}
    """Old versions of rows, and rows, of each table, as the server estimates them."""
    hears: bool | None = None
    """Whether LISTEN works; None when it is switched off."""


class FileFault(msgspec.Struct, frozen=True):
    """A file of the folder that is damaged, or that cannot be checked without its key."""

    part: str
    file: str
    reason: str
    is_locked: bool = False
    """Whether only its key is missing."""


class EncryptionFacts(msgspec.Struct, frozen=True):
    """Values that are encrypted at rest, by the newest key of the key file and otherwise."""

    key: str
    """The name of the newest key."""
    plain: int = 0
    outdated: int = 0
    """Values that an earlier key encrypted."""


class TokenFacts(msgspec.Struct, frozen=True):
    """A token of the folder."""

    token_id: str
    role: str
    agent: str
    expires_us: int | None
    is_demo: bool = False
    """Whether the demo made it, for a day at most."""


class CertificateFacts(msgspec.Struct, frozen=True):
    """The certificate that the servers use."""

    path: str
    ends_us: int


class MoveFacts(msgspec.Struct, frozen=True):
    """The store of a data folder that was moved to a server. The file is a copy that is no longer in use."""

    path: str
    to: str
    fault: str = ""
    """Why the store at the new address could not be looked at; empty when it was."""


class Facts(msgspec.Struct, frozen=True):
    """Everything that the doctor looked at."""

    data: str
    """The folder or the address, as the commands take it."""
    environment: EnvironmentFacts
    clock: ClockFacts
    folder: FolderFacts | None = None
    server: ServerFacts | None = None
    store: StoreFacts | None = None
    """The store in use, or the file of a store that was moved and cannot be looked at."""
    moved: MoveFacts | None = None
    """None also when the settings name the store in use."""
    database: DatabaseFacts | None = None
    """None when the store is a file."""
    faults: tuple[FileFault, ...] = ()
    tokens: tuple[TokenFacts, ...] | None = None
    """None when the folder has no registry that can be read."""
    certificate: CertificateFacts | None = None
    """None without TLS."""
    mail_files_waiting: int = 0
    breach: str = ""
    """The newest file in which `pipeline check` says what broke an expectation, for an hour."""
    encryption: EncryptionFacts | None = None
    """None without encryption, and when nothing was read whole."""
    copies: tuple[str, ...] = ()
    """Copies of stores that an upgrade has left."""
    checked: tuple[str, ...] = ()
    """The parts whose files were read whole."""
