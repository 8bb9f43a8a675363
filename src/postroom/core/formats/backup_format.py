"""The format of a backup: a tar archive with a manifest.

The members, in this order: `postroom-backup.json` (a `BackupHead`), the files of the data folder,
`manifest.json` (a `BackupManifest`), and `manifest.sha256`. The manifest is last, because hashes are known
only after the files are written. A truncated archive therefore has none.

Rule 1: the names of files are relative paths without `..`. Any other name is refused.
Rule 2: an archive of a newer format, or with files of newer formats, is refused.
"""

import re
from collections.abc import Iterable, Mapping

import msgspec

from postroom.core.formats.jsoninput import guarded
from postroom.errors import Rejected, StoreDamaged

FORMAT = 1
HEAD = "postroom-backup.json"
MANIFEST = "manifest.json"
MANIFEST_HASH = "manifest.sha256"
OWN_NAMES = (HEAD, MANIFEST, MANIFEST_HASH)
SETTINGS = "backup-settings.toml"
"""The settings file that was in use. It is restored under this name, and read by nothing."""
NAME_BYTES_MAX = 1_024
MEMBERS_MAX = 1_000_000

_CONTROL = re.compile(r"[\x00-\x1f\x7f]")


class BackupHead(msgspec.Struct, frozen=True):
    """The first member: what the archive is."""

    format: int
    postroom: str
    created: str


class MemberInfo(msgspec.Struct, frozen=True):
    """A file of the data folder."""

    name: str
    bytes: int
    sha256: str


class BackupManifest(msgspec.Struct, frozen=True):
    """What the archive holds."""

    format: int
    postroom: str
    created: str
    formats: dict[str, int]
    """The formats of the stores."""
    members: list[MemberInfo]
    left_out: list[str] = []
    """Files of the folder that are not in the archive: key files, symlinks, copies of upgrades."""

    @property
    def bytes(self) -> int:
        """The size of all files."""
        return sum(member.bytes for member in self.members)


_decode_head = guarded(msgspec.json.Decoder(BackupHead).decode)
_decode_manifest = guarded(msgspec.json.Decoder(BackupManifest).decode)


def encoded(value: BackupHead | BackupManifest) -> bytes:
    """The content of the member."""
    return msgspec.json.format(msgspec.json.encode(value), indent=1) + b"\n"


def checked_head(data: bytes) -> BackupHead:
    """The head of an archive that this version can read."""
    try:
        head = _decode_head(data)
    except msgspec.DecodeError as error:
        raise StoreDamaged(f"its head cannot be read: {error}") from None
    if head.format > FORMAT:
        raise Rejected(
            f"it has format {head.format} and was written by postroom {head.postroom}: this version reads "
            f"formats up to {FORMAT}, so upgrade it"
        )
    return head


def checked_manifest(data: bytes, known_formats: Mapping[str, int]) -> BackupManifest:
    """The manifest of an archive whose stores this version can use."""
    try:
        manifest = _decode_manifest(data)
    except msgspec.DecodeError as error:
        raise StoreDamaged(f"its manifest cannot be read: {error}") from None
    for part, found in manifest.formats.items():
        if found > known_formats.get(part, 0):
            raise Rejected(
                f"its part {part} has format {found}, written by postroom {manifest.postroom}: this version "
                f"knows formats up to {known_formats.get(part, 0)}, so upgrade it"
            )
    for member in manifest.members:
        checked_name(member.name)
    return manifest


def checked_name(name: str) -> str:
    """A name that stays inside the folder into which the archive is restored."""
    parts = name.split("/")
    if (
        not name
        or len(name.encode("utf-8", "surrogatepass")) > NAME_BYTES_MAX
        or any(part in ("", ".", "..") for part in parts)
        or "\\" in name
        or _CONTROL.search(name)
        or name in OWN_NAMES
    ):
        raise Rejected(f"the member {name[:NAME_BYTES_MAX]!r} may lead out of the folder")
    return name


def difference(manifest: BackupManifest, found: Iterable[MemberInfo]) -> str:
    """How the files of an archive differ from its manifest; empty when they are the same."""
    expected = {member.name: member for member in manifest.members}
    seen: set[str] = set()
    for member in found:
        wanted = expected.get(member.name)
        if wanted is None:
            return f"{member.name} is not in its manifest"
        if member.name in seen:
            return f"{member.name} is in it twice"
        if member != wanted:
            return f"{member.name} differs from the manifest"
        seen.add(member.name)
    missing = sorted(expected.keys() - seen)
    return f"{missing[0]} is missing" if missing else ""
