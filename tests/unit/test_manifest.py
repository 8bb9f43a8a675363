"""The manifest of a data folder: what is noted, and which removals are explained."""

import zlib
from pathlib import Path

import pytest

from postroom.contracts.bus import Bus
from postroom.core.formats.checksummed import checksum_fits, with_checksum
from postroom.core.formats.manifest import (
    MANIFEST_FILE,
    SHOWN_MAX,
    FileMark,
    Loss,
    Manifest,
    decode_manifest,
    encode_manifest,
    refusal,
)
from postroom.errors import DataLost
from postroom.server.folder.manifest import Comparison, ManifestKeeper, keeping, read_manifest

NEWS = "buses/news.yaml"
SEGMENT = "mail/mail-00112233445566ff-{:08}.log"


@pytest.fixture
def data(tmp_path: Path) -> Path:
    for name in ("buses", "mail"):
        (tmp_path / name).mkdir()
    return tmp_path


def keeper_of(data: Path) -> ManifestKeeper:
    keeper = ManifestKeeper(data, None, pytest.fail)
    keeper.begin(())
    return keeper


def noted(data: Path, name: str) -> FileMark:
    manifest = read_manifest(data)
    assert manifest is not None
    return manifest.files[name]


def losses(data: Path, *, whole: bool = True) -> list[str]:
    return [loss.file for loss in Comparison(data, whole=whole).losses()]


def test_every_changed_byte_of_the_manifest_is_found() -> None:
    manifest = Manifest(folder_id="a1", registries=("tokens.json",), files={NEWS: FileMark(7, 9)})
    text = encode_manifest(manifest)
    read = decode_manifest(text)
    assert read is not None
    assert (read.files, read.folder_id) == (manifest.files, "a1")
    for place in range(len(text)):
        changed = bytearray(text)
        changed[place] ^= 1
        assert decode_manifest(bytes(changed)) is None


def test_checksum_covers_the_text_before_it() -> None:
    text = with_checksum({"a": [1, 2], "b": "ü"})
    assert checksum_fits(text)
    assert not checksum_fits(text.replace(b"1", b"2", 1))
    assert not checksum_fits(b'{"a": 1}\n')


def test_content_is_noted_one_round_later_and_the_name_at_once(data: Path) -> None:
    keeper = keeper_of(data)
    (data / NEWS).write_bytes(b"one\n")
    keeper.note()
    assert noted(data, NEWS) == FileMark(0, 0)
    (data / NEWS).write_bytes(b"one\ntwo\n")
    keeper.note()
    assert noted(data, NEWS) == FileMark(4, zlib.crc32(b"one\n"))
    keeper.note()
    assert noted(data, NEWS) == FileMark(8, zlib.crc32(b"one\ntwo\n"))


def test_cut_or_removed_file_keeps_its_mark(data: Path) -> None:
    keeper = keeper_of(data)
    (data / NEWS).write_bytes(b"one\ntwo\n")
    keeper.note()
    keeper.note()
    mark = noted(data, NEWS)
    for damage in (lambda: (data / NEWS).write_bytes(b"one\n"), (data / NEWS).unlink):
        damage()
        keeper.note()
        keeper.note()
        assert noted(data, NEWS) == mark
        assert losses(data) == [NEWS]
    (data / NEWS).write_bytes(b"another file of this name, and a longer one")
    keeper.note()
    keeper.note()
    assert noted(data, NEWS) == mark
    assert losses(data) == [NEWS]
    again = ManifestKeeper(data, None, pytest.fail)
    again.begin(())  # the start does not read the content
    again.note()
    again.note()
    assert noted(data, NEWS) == mark


@pytest.mark.parametrize("name", [NEWS, SEGMENT.format(1), "audit/_open/00000001.jsonl"])
def test_every_changed_byte_of_the_noted_ones_is_found(data: Path, name: str) -> None:
    path = data / name
    path.parent.mkdir(parents=True, exist_ok=True)
    text = b'{"one": "line"}\n'
    keeper = keeper_of(data)
    path.write_bytes(text)
    keeper.note()
    keeper.note()
    assert noted(data, name) == FileMark(len(text), zlib.crc32(text))
    for place in range(len(text)):
        changed = bytearray(text)
        changed[place] ^= 1
        path.write_bytes(changed)
        assert losses(data) == [name]
    path.write_bytes(text + b"and bytes that are not noted")
    assert losses(data) == []


def test_rotated_bus_is_noted_again(data: Path) -> None:
    keeper = keeper_of(data)
    bus = Bus(data / NEWS)
    bus.append(type="FACT", project_id="p", body="one")
    keeper.note()
    keeper.note()
    bus.rotate()
    bus.append(
        type="FACT", project_id="p", body="a longer second message, so that the file outgrows its mark"
    )
    bus.close()
    assert losses(data) == []
    keeper.note()
    keeper.note()
    assert losses(data) == []
    assert noted(data, NEWS).crc32 == zlib.crc32((data / NEWS).read_bytes())


def test_bus_that_moved_to_its_organization_is_not_a_loss(data: Path) -> None:
    keeper = keeper_of(data)
    (data / NEWS).write_bytes(b"one\n")
    keeper.note()
    keeper.note()
    (data / "buses" / "@acme").mkdir()
    (data / NEWS).rename(data / "buses" / "@acme" / "news.yaml")
    assert losses(data) == []
    keeper.note()
    manifest = read_manifest(data)
    assert manifest is not None
    assert list(manifest.files) == ["buses/@acme/news.yaml"]
    (data / "buses" / "@acme" / "news.yaml").unlink()
    assert losses(data) == ["buses/@acme/news.yaml"]


def test_segment_is_lost_unless_a_compaction_replaced_it(data: Path) -> None:
    keeper = keeper_of(data)
    for number in (1, 2, 3):
        (data / SEGMENT.format(number)).write_bytes(b"x")
    keeper.note()
    keeper.note()
    (data / SEGMENT.format(1)).unlink()
    (data / SEGMENT.format(2)).unlink()
    assert losses(data) == [SEGMENT.format(1), SEGMENT.format(2)]
    (data / "mail" / "mail.compacted").write_bytes(b"00000001\n")
    assert losses(data) == [SEGMENT.format(2)]
    (data / "mail" / "mail.compacted").write_bytes(b"00000002\n")
    keeper.note()
    assert losses(data) == []
    manifest = read_manifest(data)
    assert manifest is not None
    assert list(manifest.files) == [SEGMENT.format(3)]


def test_one_process_keeps_the_manifest(data: Path) -> None:
    with keeping(data, None, pytest.fail) as keeper:
        assert keeper is not None
        with keeping(data, None, pytest.fail) as second:
            assert second is None
    assert (data / MANIFEST_FILE).exists()


def test_refusal_shows_the_first_losses(data: Path) -> None:
    text = refusal("run", [Loss("mail", f"mail/{n}", "it is missing") for n in range(SHOWN_MAX + 2)])
    assert f"mail/{SHOWN_MAX - 1}: it is missing; and 2 more" in text
    assert text.endswith("`postroom up --data run --accept-loss mail`")
    (data / NEWS).write_bytes(b"one\n")
    with keeping(data, None, lambda _: None):
        pass
    (data / NEWS).unlink()
    with pytest.raises(DataLost, match=r"buses/news\.yaml: it is missing"), keeping(data, None, pytest.fail):
        pass
