"""Segments: a scan finds exactly the intact frames of a truncated or damaged file."""

from __future__ import annotations

from random import Random
from zlib import crc32

import pytest

from qkit.errors import LogVersion
from qkit.native.log.segment import (
    FRAME_SIZE,
    HEADER_SIZE,
    VERSION,
    Header,
    check_frame,
    frame,
    mark,
    name_of,
    number_of,
    read_header,
    scan,
    seal,
    write_all,
    write_segment,
)
from tests.support.crasher import content
from tests.support.disk import SimulatedDisk

HEADER = Header(3, 0, b"0123456789abcdef")


def segment(*contents: bytes, header: Header = HEADER) -> bytes:
    parts = [header.pack()]
    frame(contents, header.salt, HEADER_SIZE, parts)
    return b"".join(parts)


def contents_of(data: bytes, header: Header = HEADER) -> list[bytes]:
    found: list[bytes] = []
    for offset in scan(data, header.salt).offsets:
        length = int.from_bytes(data[offset : offset + 4], "little")
        found.append(data[offset + FRAME_SIZE : offset + FRAME_SIZE + length])
    return found


@pytest.mark.proves("002-log-5")
def test_a_segment_is_read_as_it_was_written():
    records = [content(at, at * 10) for at in range(20)]
    data = segment(*records, mark(500, 1.0), seal())
    found = scan(data, HEADER.salt)

    assert contents_of(data) == records
    assert (found.holes, found.torn, found.end) == ([], 0, len(data))
    assert (found.synced, found.sealed) == (500, True)


@pytest.mark.parametrize(
    "other",
    [
        HEADER._replace(number=4),
        HEADER._replace(generation=1),
        HEADER._replace(log_id=b"another log's id"),
    ],
)
def test_frames_of_another_segment_are_ignored(other):
    stale = segment(*(content(at, 50) for at in range(20)), header=other)

    assert contents_of(HEADER.pack() + stale[HEADER_SIZE:]) == []


def test_frames_quoted_in_a_damaged_message_are_ignored():
    quoted = segment(*(content(at, 50) for at in range(5)))
    data = bytearray(segment(b"\x01" + quoted, content(99)))
    data[HEADER_SIZE] ^= 1  # the length of the outer message

    assert contents_of(bytes(data)) == [content(99)]


@pytest.mark.proves("002-log-5")
def test_damaged_content_or_a_damaged_length_loses_only_one_record():
    records = [content(at, 40) for at in range(5)]
    second = HEADER_SIZE + FRAME_SIZE + len(records[0])
    for at in (second, second + 5, second + FRAME_SIZE + 3):
        data = bytearray(segment(*records))
        data[at] ^= 0x10
        found = scan(bytes(data), HEADER.salt)
        assert contents_of(bytes(data)) == records[:1] + records[2:]
        assert found.holes == [(second, FRAME_SIZE + len(records[1]))]


@pytest.mark.parametrize("fill", [b"\0" * 5000, b"\xff" * 5000, Random(1).randbytes(5000)])
def test_bytes_after_the_last_frame_are_reported_as_torn(fill):
    data = segment(content(1)) + fill
    found = scan(data, HEADER.salt)

    assert contents_of(data) == [content(1)]
    assert found.torn == len(fill)


def test_a_large_hole_of_random_bytes_is_searched_quickly():
    data = segment(content(1)) + Random(2).randbytes(1 << 20)
    assert scan(data, HEADER.salt).torn == 1 << 20


def test_segment_numbers_are_parsed_from_file_names():
    assert [number_of(name) for name in (name_of(12), name_of(2**32 - 1))] == [
        (12, True),
        (2**32 - 1, True),
    ]
    assert number_of("00000012.seg.damaged-1") == (12, False)
    for name in ("00000012.seg.0.tmp", "12.seg", "x00000012.seg", "LOCK"):
        assert number_of(name) is None


def test_a_header_with_one_broken_copy_is_readable():
    for at in range(HEADER_SIZE):
        data = bytearray(HEADER.pack())
        data[at] ^= 1
        assert read_header(bytes(data), 3) == (HEADER, [0 if at < 40 else 40])
    assert read_header(HEADER.pack(), 4) == (None, [0, 40])  # the header of another segment
    assert read_header(b"", 3) == (None, [0, 40])


@pytest.mark.parametrize(("version", "word"), [(0, "older"), (VERSION + 1, "newer")])
def test_another_format_is_rejected_as_older_or_newer(version, word):
    with pytest.raises(LogVersion, match=rf"format {version}, an? {word} one.* reads format 1"):
        read_header(of_version(version), 3)


def of_version(version: int) -> bytes:
    copy = bytearray(HEADER.pack()[:36])
    copy[8:10] = version.to_bytes(2, "little")
    return (bytes(copy) + crc32(copy).to_bytes(4, "little")) * 2


def test_check_frame_detects_a_wrong_offset_or_length():
    data = segment(content(1, 9))[HEADER_SIZE:]

    assert check_frame(data, HEADER.salt, HEADER_SIZE) == content(1, 9)
    assert check_frame(data, HEADER.salt, HEADER_SIZE + 1) is None
    assert check_frame(data[:-1], HEADER.salt, HEADER_SIZE) is None
    assert check_frame(b"", HEADER.salt, HEADER_SIZE) is None


@pytest.mark.parametrize(
    ("short", "large"), [(1, 9), (7, 1 << 14), (100_000, 1 << 20), (None, 1 << 20)]
)
def test_short_writes_are_continued(short, large):
    disk = SimulatedDisk()
    disk.short = short
    parts = [bytes([at]) * size for at, size in enumerate((10, 3, large, 5))]
    fd = disk.create("x")
    write_all(disk, fd, parts, 4)

    assert disk.files()["x"] == bytes(4) + b"".join(parts)


@pytest.mark.proves("002-improvements-2")
def test_small_parts_are_joined_into_one_write():
    disk = SimulatedDisk()
    fd = disk.create("x")
    write_all(disk, fd, [b"x" * 100] * 500, 0)
    assert sum(call.kind == "write" for call in disk.journal) == 1


def test_a_disk_that_writes_nothing_raises_instead_of_looping():
    class Stuck(SimulatedDisk):
        def write(self, fd: int, data: bytes | memoryview, offset: int) -> int:
            return 0

    disk = Stuck()
    with pytest.raises(OSError, match="wrote nothing"):
        write_all(disk, disk.create("x"), [b"abc"], 0)


def test_a_new_segment_has_a_temporary_name_and_is_removed_on_failure():
    disk = SimulatedDisk()
    records = [content(at, 900) for at in range(3000)]
    name, _, offsets = write_segment(disk, HEADER, records, sealed=True)
    data = disk.files()[name]
    assert number_of(name) is None
    assert contents_of(data) == records
    assert list(scan(data, HEADER.salt).offsets) == offsets
    assert scan(data, HEADER.salt).sealed

    disk.capacity = 1000
    with pytest.raises(OSError, match="No space"):
        write_segment(disk, HEADER, records, sealed=True)
    assert disk.names() == []
