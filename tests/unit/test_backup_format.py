"""Names, formats and manifests of backups."""

import pytest
from msgspec.structs import replace

from postroom.core.formats.backup_format import (
    FORMAT,
    BackupHead,
    BackupManifest,
    MemberInfo,
    checked_head,
    checked_manifest,
    checked_name,
    difference,
    encoded,
)
from postroom.errors import Rejected, StoreDamaged

MEMBER = MemberInfo("mail/a.log", 3, "ab" * 32)
MANIFEST = BackupManifest(FORMAT, "1.0", "2026-11-18T08:00:00+00:00", {"store": 6}, [MEMBER])


@pytest.mark.parametrize(
    "name", ["queue.db", "audit/date=2026-11-18/hour=08/00000001-ab.jsonl", "ä.yaml", "..a"]
)
def test_a_relative_name_is_accepted(name: str) -> None:
    assert checked_name(name) == name


@pytest.mark.parametrize(
    "name",
    [
        "",
        "/etc/passwd",
        "../x",
        "a/../../x",
        "a//b",
        "./a",
        "a/.",
        "a\\b",
        "a\0b",
        "a\nb",
        "x" * 1025,
        "manifest.json",
    ],
)
def test_a_name_that_may_lead_out_of_the_folder_is_refused(name: str) -> None:
    with pytest.raises(Rejected, match="may lead out of the folder"):
        checked_name(name)
    with pytest.raises(Rejected):
        checked_manifest(encoded(replace(MANIFEST, members=[replace(MEMBER, name=name)])), {"store": 6})


def test_newer_formats_are_refused_with_a_one_line_error() -> None:
    head = BackupHead(FORMAT, "1.0", "now")
    assert checked_head(encoded(head)) == head
    with pytest.raises(Rejected, match="it has format 2 and was written by postroom 9"):
        checked_head(encoded(BackupHead(FORMAT + 1, "9", "now")))
    assert checked_manifest(encoded(MANIFEST), {"store": 6}) == MANIFEST
    with pytest.raises(Rejected, match="its part store has format 6"):
        checked_manifest(encoded(MANIFEST), {"store": 5})
    with pytest.raises(Rejected, match="its part lake has format 1"):
        checked_manifest(encoded(replace(MANIFEST, formats={"lake": 1})), {"store": 6})
    with pytest.raises(StoreDamaged, match="its manifest cannot be read"):
        checked_manifest(b"{}", {})


@pytest.mark.parametrize(
    ("found", "words"),
    [
        ([MEMBER], ""),
        ([], "mail/a.log is missing"),
        ([MEMBER, MEMBER], "is in it twice"),
        ([MEMBER, replace(MEMBER, name="b")], "b is not in its manifest"),
        ([replace(MEMBER, bytes=4)], "differs from the manifest"),
        ([replace(MEMBER, sha256="cd" * 32)], "differs from the manifest"),
    ],
)
def test_an_archive_has_exactly_what_its_manifest_says(found: list[MemberInfo], words: str) -> None:
    fault = difference(MANIFEST, found)
    assert words in fault
    assert bool(fault) == bool(words)
