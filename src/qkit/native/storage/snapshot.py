"""Snapshots of the state at the end of a segment, without message bodies, for faster recovery.

A snapshot is made from the log, not from memory, so it does not block callers. A log with a missing
or damaged snapshot recovers to the same state, only more slowly.

    header     magic, version, covered segment, log id, last queue, last message, size, checksums
    positions  for each segment: number, generation, and its messages' numbers and offsets
    records    u32 length · content, as in the log; messages without their bodies
"""

from __future__ import annotations

import re
import struct
import sys
from array import array
from collections.abc import Collection, Iterator
from typing import Final
from zlib import crc32

from qkit.errors import Damage, LogVersion
from qkit.native.log.disk import Disk
from qkit.native.log.log import Log
from qkit.native.log.segment import write_all
from qkit.native.storage.index import SegmentIndex
from qkit.native.storage.replay import Replay, messages_in

__all__ = ["VERSION", "read_snapshot", "write_snapshot"]

VERSION: Final = 1
MAGIC: Final = b"qkit-snp"

# magic, version, 0, segment, log id, last queue, last message, size and checksum of the body
_HEADER: Final = struct.Struct("<8sHHI16sIQQI")
_CRC: Final = struct.Struct("<I")
_SEGMENT: Final = struct.Struct("<III")  # number, generation, number of messages
_LENGTH: Final = struct.Struct("<I")
WRITE_BYTES: Final = 1 << 18
_NAME: Final = re.compile(r"(\d{8,10})\.snap")


def write_snapshot(log: Log, upto: int, replay: Replay) -> int:
    """Write a snapshot of the segments up to ``upto``, as read by ``replay``. Blocking.

    Older snapshots are removed once the new one is on disk.

    Returns:
        The size of the snapshot in bytes, without its header.
    """
    numbers = [number for number, _ in log.segments() if number <= upto]
    disk, name = log.disk, f"{upto:08}.snap"
    temporary = f"{name}.tmp"
    if temporary in disk.names():
        disk.unlink(temporary)
    fd = disk.create(temporary)
    try:
        size = _write(disk, fd, _body(log, replay, numbers), log.id, upto, replay)
        disk.sync(fd)
    except BaseException:
        disk.unlink(temporary)
        raise
    finally:
        disk.close_file(fd)
    disk.rename(temporary, name)
    disk.sync_directory()
    for other in disk.names():
        if _NAME.fullmatch(other) and other != name:
            disk.unlink(other)
    return size


def _write(
    disk: Disk, fd: int, body: Iterator[bytes], log_id: bytes, upto: int, replay: Replay
) -> int:
    """Write the body in pieces, then the header; return the size of the body in bytes.

    Joining the whole body in one call would block all threads.
    """
    size, crc, waiting = 0, 0, 0
    piece: list[bytes] = []
    for part in body:
        piece.append(part)
        waiting += len(part)
        if waiting >= WRITE_BYTES:
            size, crc = _put(disk, fd, piece, size, crc)
            piece, waiting = [], 0
    size, crc = _put(disk, fd, piece, size, crc)
    head = _HEADER.pack(
        MAGIC, VERSION, 0, upto, log_id, replay.last_queue, replay.last_seq, size, crc
    )
    write_all(disk, fd, [head + _CRC.pack(crc32(head))], 0)
    return size


def _put(disk: Disk, fd: int, parts: list[bytes], size: int, crc: int) -> tuple[int, int]:
    data = b"".join(parts)
    if data:
        write_all(disk, fd, [data], _HEADER.size + _CRC.size + size)
    return size + len(data), crc32(data, crc)


def _body(log: Log, replay: Replay, numbers: list[int]) -> Iterator[bytes]:
    segments = [replay.index[number] for number in numbers]
    yield _LENGTH.pack(len(segments))
    for segment in segments:
        yield _SEGMENT.pack(segment.number, log.generation(segment.number), len(segment))
        yield _little(segment.seqs).tobytes()
        yield _little(segment.offsets).tobytes()
    for content in replay.contents():
        yield _LENGTH.pack(len(content))
        yield content


def read_snapshot(
    log: Log, replay: Replay, damage: list[Damage], repaired: Collection[int] = ()
) -> int:
    """Read the newest intact snapshot into ``replay``; add damaged ones to ``damage``.

    Args:
        log: Log of the snapshot.
        replay: Replay that has read no record yet.
        damage: List to which damaged snapshots are added.
        repaired: Segments that have just lost records; their messages are added to
            ``replay.lost``. Default: none.

    Returns:
        The last segment that the snapshot covers; 0 if there is no snapshot.

    Raises:
        LogVersion: A snapshot has another format.
    """
    disk, generations = log.disk, log.generations()
    if any(generation < 0 for generation in generations.values()):
        return 0  # a replay of the whole log reports the damage
    numbers = [int(match[1]) for match in map(_NAME.fullmatch, disk.names()) if match]
    for number in sorted(numbers, reverse=True):
        data = _intact(disk, number, log.id)
        if data is None:
            damage.append(
                Damage("snapshot", number, 0, 0, "damaged and ignored; the log is complete")
            )
            continue
        _load(log, replay, data, generations, repaired)
        return number
    return 0


def _intact(disk: Disk, number: int, log_id: bytes) -> bytes | None:
    fd = disk.open(f"{number:08}.snap")
    try:
        data = disk.read(fd, disk.size(fd), 0)
    finally:
        disk.close_file(fd)
    start = _HEADER.size + _CRC.size
    if len(data) < start or _CRC.unpack_from(data, _HEADER.size)[0] != crc32(data[: _HEADER.size]):
        return None
    magic, version, _, covered, found, _, _, size, crc = _HEADER.unpack_from(data)
    if magic == MAGIC and version != VERSION:
        raise LogVersion(
            f"snapshot {number} has format {version}, but this version of qkit reads format "
            f"{VERSION}: use the version that wrote it, or delete the file (the log is complete)",
            backend="native",
            operation="open",
        )
    same = (magic, covered, found) == (MAGIC, number, log_id)
    if not same or len(data) - start != size or crc32(memoryview(data)[start:]) != crc:
        return None
    return data


def _load(
    log: Log,
    replay: Replay,
    data: bytes,
    generations: dict[int, int],
    repaired: Collection[int],
) -> None:
    _, _, _, upto, _, replay.last_queue, replay.last_seq, _, _ = _HEADER.unpack_from(data)
    position = _HEADER.size + _CRC.size
    (count,) = _LENGTH.unpack_from(data, position)
    position += _LENGTH.size
    known: set[int] = set()
    expected: dict[int, int] = {}  # segments of messages that a repair may have lost
    for _ in range(count):
        number, generation, messages = _SEGMENT.unpack_from(data, position)
        position += _SEGMENT.size
        seqs, offsets = array("Q"), array("I")
        seqs.frombytes(data[position : position + 8 * messages])
        position += 8 * messages
        offsets.frombytes(data[position : position + 4 * messages])
        position += 4 * messages
        if generations.get(number) == generation:
            known.add(number)
            replay.index.replace([], SegmentIndex(number, _little(seqs), _little(offsets)))
        elif number in repaired:
            for seq in _little(seqs):
                expected[seq] = int(number)
    for number in sorted(generations):  # read the segments that were rewritten after the snapshot
        if number <= upto and number not in known:
            found = [
                (seq, entry.position[1])
                for entry in log.entries(number)
                for seq in messages_in(entry.content)
            ]
            if found:
                replay.index.replace([], SegmentIndex(number, *zip(*found, strict=True)))
    replay.load(_framed(data, position), expected)


def _framed(data: bytes, position: int) -> Iterator[bytes]:
    while position < len(data):
        (length,) = _LENGTH.unpack_from(data, position)
        position += _LENGTH.size
        yield data[position : position + length]
        position += length


def _little(numbers: array[int]) -> array[int]:
    if sys.byteorder == "big":  # the file is little-endian on every machine
        numbers = array(numbers.typecode, numbers)
        numbers.byteswap()
    return numbers
