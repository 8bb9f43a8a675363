"""The manifest of a data folder: what the folder must hold at least.

Rule 1: only what is already durable is noted. A crash, even of the machine, leaves at least that much, so
        anything that is missing was removed or damaged.
Rule 2: a mark only grows. It is dropped when the removal of its file is explained, or an operator accepts the
        loss.
"""

from collections.abc import Sequence

import msgspec

from postroom.core.formats.checksummed import checksum_fits, with_checksum
from postroom.core.formats.jsoninput import guarded

MANIFEST_FILE = "folder-manifest.json"
ACCEPTED_MAX = 100  # the newest accepted losses, which the manifest keeps
SHOWN_MAX = 5  # losses that an error lists

# Names of losses. A bus and a registry have the names of their files.
STORE = "queue.db"
SERVER = "store"
STREAM = "audit"
MAIL = "mail"


class FileMark(msgspec.Struct, frozen=True):
    """The beginning of a file that is only appended to."""

    bytes: int
    crc32: int
    """Of these bytes."""


NOTHING_NOTED = FileMark(0, 0)
"""The file has to exist."""


class StoreMark(msgspec.Struct, frozen=True):
    """A store, and the number of an event that it has reached."""

    identity: str
    newest_event: int


class StreamMark(msgspec.Struct, frozen=True):
    """The last sealed segment of the audit stream."""

    stream: str
    segment: int
    hash: str


class AcceptedLoss(msgspec.Struct, frozen=True):
    """A loss that an operator accepted."""

    name: str
    reasons: tuple[str, ...]
    accepted_us: int


class Loss(msgspec.Struct, frozen=True):
    """Something that the manifest names and the folder does not hold."""

    name: str
    """What `--accept-loss` takes: a store, or a part with all its files."""
    file: str
    reason: str

    @property
    def sentence(self) -> str:
        """The file and the reason."""
        return f"{self.file}: {self.reason}"


class Manifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The content of the file."""

    folder_id: str
    """Stored in the store, too: a store with another id, or with one and no manifest, shows a loss."""
    store: StoreMark | None = None
    """The store in the folder."""
    server: StoreMark | None = None
    """The store on a server that the folder was last served with."""
    stream: StreamMark | None = None
    registries: tuple[str, ...] = ()
    """Files that carry a checksum of their own."""
    files: dict[str, FileMark] = {}
    """Buses, segments of the mail log, and open segments of the audit stream."""
    accepted: tuple[AcceptedLoss, ...] = ()
    crc32: int = 0


_decode = guarded(msgspec.json.Decoder(Manifest).decode)


def encode_manifest(manifest: Manifest) -> bytes:
    """The file."""
    fields = msgspec.structs.asdict(manifest)
    del fields["crc32"]
    return with_checksum(fields)


def decode_manifest(data: bytes) -> Manifest | None:
    """The manifest; None when the file was changed."""
    try:
        return _decode(data) if checksum_fits(data) else None
    except msgspec.DecodeError:
        return None


def without(manifest: Manifest, losses: Sequence[Loss], now_us: int) -> Manifest:
    """The manifest after the losses were accepted."""
    names = dict.fromkeys(loss.name for loss in losses)
    files = {loss.file for loss in losses}
    accepted = [
        AcceptedLoss(name, tuple(loss.sentence for loss in losses if loss.name == name)[:SHOWN_MAX], now_us)
        for name in names
    ]
    return msgspec.structs.replace(
        manifest,
        store=None if STORE in names else manifest.store,
        server=None if SERVER in names else manifest.server,
        stream=None if STREAM in names else manifest.stream,
        registries=tuple(name for name in manifest.registries if name not in files),
        files={name: mark for name, mark in manifest.files.items() if name not in files},
        accepted=(*manifest.accepted, *accepted)[-ACCEPTED_MAX:],
    )


def refusal(folder: str, losses: Sequence[Loss]) -> str:
    """Why a folder is not served, and what restores it or accepts the loss."""
    names = dict.fromkeys(loss.name for loss in losses)
    shown = "; ".join(loss.sentence for loss in losses[:SHOWN_MAX])
    more = f"; and {len(losses) - SHOWN_MAX} more" if len(losses) > SHOWN_MAX else ""
    accept = " ".join(f"--accept-loss {name}" for name in names)
    return (
        f"{folder} lacks data that it held: {shown}{more}. Restore a backup with `postroom restore --from "
        f"FILE --data NEW_DIR`, or go on without that data with `postroom up --data {folder} {accept}`"
    )
