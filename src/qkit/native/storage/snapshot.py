"""A short cut for recovery: what the log says up to the end of a segment, without the bodies.

It is made from the log and never from memory, so making one stops nobody, and a log without it,
or with a damaged one, says the same: it is only read more slowly.

    header    magic, version, covered segment, log id, last queue, last message, size, checksums
    places    for each segment: number, generation, and its messages' numbers and offsets
    records   u32 length · content, as in the log; messages without their bodies
"""

from __future__ import annotations

import re
import struct
import sys
from array import array
from collections.abc import Iterator
from typing import Final
from zlib import crc32

from qkit.errors import Damage, LogVersion
from qkit.native.log.disk import Disk
from qkit.native.log.log import Log
from qkit.native.log.segment import write_whole
from qkit.native.storage.index import SegmentIndex
from qkit.native.storage.replay import Replay, messages_in

__all__ = ["VERSION", "read_snapshot", "write_snapshot"]

VERSION: Final = 1
MAGIC: Final = b"qkit-snp"

# magic, version, 0, segment, log id, last queue, last message, size and checksum of the rest
_HEADER: Final = struct.Struct("<8sHHI16sIQQI")
_CRC: Final = struct.Struct("<I")
_SEGMENT: Final = struct.Struct("<III")  # number, generation, messages
_LENGTH: Final = struct.Struct("<I")
WRITE_BYTES: Final = 1 << 18
_NAME: Final = re.compile(r"(\d{8,10})\.snap")


def write_snapshot(log: Log, upto: int, replay: Replay) -> int:
    """Write what ``replay`` read of the segments up to ``upto``; return the size. Blocking.

    Older ones are removed once it is on the disk.
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
    """Write the body in pieces, since joining it whole would stop every thread, then the header."""
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
    write_whole(disk, fd, [head + _CRC.pack(crc32(head))], 0)
    return size


def _put(disk: Disk, fd: int, parts: list[bytes], size: int, crc: int) -> tuple[int, int]:
    data = b"".join(parts)
    if data:
        write_whole(disk, fd, [data], _HEADER.size + _CRC.size + size)
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


def read_snapshot(log: Log, replay: Replay, damage: list[Damage]) -> int:
    """Read the newest snapshot that is whole; return the segment it covers, 0 for none.

    One that cannot be used is noted in ``damage``. Raises ``LogVersion`` for another format.
    """
    disk, generations = log.disk, log.generations()
    if any(generation < 0 for generation in generations.values()):
        return 0  # a replay of the whole log says what is damaged
    numbers = [int(match[1]) for match in map(_NAME.fullmatch, disk.names()) if match]
    for number in sorted(numbers, reverse=True):
        data = _whole(disk, number, log.id)
        if data is None:
            damage.append(Damage("snapshot", number, 0, 0, "not whole; the log tells it all"))
            continue
        _load(log, replay, data, generations)
        return number
    return 0


def _whole(disk: Disk, number: int, log_id: bytes) -> bytes | None:
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
            f"the snapshot {number} is of format {version}; this qkit reads format {VERSION}: use "
            "the qkit that wrote it, or delete the file: the log tells it all",
            backend="native",
            operation="open",
        )
    same = (magic, covered, found) == (MAGIC, number, log_id)
    if not same or len(data) - start != size or crc32(memoryview(data)[start:]) != crc:
        return None
    return data


def _load(log: Log, replay: Replay, data: bytes, generations: dict[int, int]) -> None:
    _, _, _, upto, _, replay.last_queue, replay.last_seq, _, _ = _HEADER.unpack_from(data)
    position = _HEADER.size + _CRC.size
    (count,) = _LENGTH.unpack_from(data, position)
    position += _LENGTH.size
    known: set[int] = set()
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
    for number in sorted(generations):  # those that were rewritten since
        if number <= upto and number not in known:
            found = [
                (seq, entry.position[1])
                for entry in log.entries(number)
                for seq in messages_in(entry.content)
            ]
            if found:
                replay.index.replace([], SegmentIndex(number, *zip(*found, strict=True)))
    replay.load(_framed(data, position))


def _framed(data: bytes, position: int) -> Iterator[bytes]:
    while position < len(data):
        (length,) = _LENGTH.unpack_from(data, position)
        position += _LENGTH.size
        yield data[position : position + length]
        position += length


def _little(numbers: array[int]) -> array[int]:
    if sys.byteorder == "big":  # the file is the same on every machine
        numbers = array(numbers.typecode, numbers)
        numbers.byteswap()
    return numbers
