"""One file of the log: its header, how records are framed in it, and how they are found again.

    header   twice the same 40 bytes: magic, version, segment, generation, log id, checksum
    frame    u32 length · u16 check · u32 crc32 · content

Both checks are seeded with the header's checksum (so with the log, the segment and its generation)
and with the frame's own offset. Bytes of another log, of a deleted segment that a file system
brings back, or of this segment quoted inside a message never pass for a record. ``check`` covers
the length alone: it tells a damaged content, which can be stepped over exactly, from a damaged
length, after which the next frame must be searched.

Two kinds of content belong to the segment and are never handed out. ``MARK`` says how far the file
was synced when it was written: a hole before that point is damage, one after it is what a power
loss leaves of writes that nobody was promised. ``SEAL`` ends a segment that has a successor, so a
segment cut short at the edge of a record is noticed.
"""

from __future__ import annotations

import re
import struct
from array import array
from collections.abc import Iterable, Iterator
from typing import Final, NamedTuple
from zlib import crc32

from qkit.errors import Damage, LogDamaged, LogVersion
from qkit.native.log.disk import Disk

__all__ = [
    "FRAME_SIZE",
    "HEADER_SIZE",
    "VERSION",
    "Header",
    "Scan",
    "check_frame",
    "damaged",
    "frame",
    "frame_length",
    "mark",
    "name_of",
    "number_of",
    "read_header",
    "scan",
    "seal",
    "write_segment",
    "write_whole",
]

VERSION: Final = 1
MAGIC: Final = b"qkit-log"
MARK: Final = 0xF0
SEAL: Final = 0xF1
WRITE_CHUNK_BYTES: Final = 1 << 20

# In every version the first 40 bytes mean the same, so any version can be told from damage.
_HEADER: Final = struct.Struct("<8sHHII16s")  # magic, version, 0, segment, generation, log id
_CRC: Final = struct.Struct("<I")
_COPY: Final = _HEADER.size + _CRC.size
HEADER_SIZE: Final = 2 * _COPY
_FRAME: Final = struct.Struct("<IHI")
FRAME_SIZE: Final = _FRAME.size
_MARK: Final = struct.Struct("<BId")  # type, synced up to, wall time
_SPREAD: Final = 0x9E3779B1  # an odd number near 2^32 / φ: neighbouring lengths differ in all bits
_TYPE: Final = re.compile(rb"[\x01-\x1f\xf0\xf1]")
_NAME: Final = re.compile(r"(\d{8,10})\.seg(\.damaged-\d+)?")


def damaged(message: str, damage: Iterable[Damage] = ()) -> LogDamaged:
    """The error that says so, and where."""
    error = LogDamaged(message, backend="native", operation="open")
    error.damage = list(damage)
    return error


class Header(NamedTuple):
    """What a segment says of itself."""

    number: int
    generation: int
    log_id: bytes

    def pack(self) -> bytes:
        """Both copies."""
        copy = _HEADER.pack(MAGIC, VERSION, 0, self.number, self.generation, self.log_id)
        return (copy + _CRC.pack(crc32(copy))) * 2

    @property
    def salt(self) -> int:
        """What the checks of this segment's frames are seeded with."""
        return crc32(self.pack()[: _HEADER.size])


class Scan(NamedTuple):
    """What a segment holds: where its frames begin, and what is between them."""

    offsets: array[int]
    holes: list[tuple[int, int]]  # offset and length; one that reaches the end is ``torn``
    torn: int  # bytes at the end that are no frame
    end: int  # where the last frame ends
    synced: int  # how far the file was on disk, by its marks
    sealed: bool


def name_of(number: int) -> str:
    """The file name of a segment.

    >>> name_of(1)
    '00000001.seg'
    """
    return f"{number:08}.seg"


def number_of(name: str) -> tuple[int, bool] | None:
    """The number in a file name, and whether it is a live segment; ``None`` for other files."""
    match = _NAME.fullmatch(name)
    return None if match is None else (int(match[1]), match[2] is None)


def read_header(data: bytes, number: int) -> tuple[Header | None, list[int]]:
    """The header of segment ``number``, if a copy is whole, and the offsets of those that are not.

    Raises ``LogVersion`` for a whole header of another format.
    """
    header: Header | None = None
    broken: list[int] = []
    for start in (0, _COPY):
        copy = data[start : start + _COPY]
        if len(copy) < _COPY or _CRC.unpack_from(copy, _HEADER.size)[0] != crc32(copy[:-4]):
            broken.append(start)
            continue
        magic, version, _, found, generation, log_id = _HEADER.unpack_from(copy)
        if magic == MAGIC and version != VERSION:
            age = "a newer" if version > VERSION else "an older"
            raise LogVersion(
                f"segment {number} is of format {version}, {age} one; this qkit reads format "
                f"{VERSION}: use the qkit that wrote it",
                backend="native",
                operation="open",
            )
        if magic == MAGIC and found == number:
            header = Header(found, generation, log_id)
        else:
            broken.append(start)
    return header, broken


# Writing


def frame(contents: Iterable[bytes], salt: int, offset: int, parts: list[bytes]) -> int:
    """Add the frames of ``contents`` from ``offset`` on to ``parts``; return where they end."""
    pack, add = _FRAME.pack, parts.append
    for content in contents:
        length = len(content)
        seed = salt ^ offset
        add(pack(length, (seed + length) * _SPREAD >> 16 & 0xFFFF, crc32(content, seed)))
        add(content)
        offset += FRAME_SIZE + length
    return offset


def mark(synced: int, at: float) -> bytes:
    """The content that says how far the segment is on disk."""
    return _MARK.pack(MARK, synced, at)


def seal() -> bytes:
    """The content that ends a segment."""
    return bytes((SEAL,))


def write_whole(disk: Disk, fd: int, parts: list[bytes], offset: int) -> None:
    """Write all of ``parts``, by one call unless they are large or the disk takes less."""
    small = sum(map(len, parts)) < WRITE_CHUNK_BYTES
    for data in (b"".join(parts),) if small else _chunks(parts):
        done = disk.write(fd, data, offset) if data else 0
        while done < len(data):
            more = disk.write(fd, memoryview(data)[done:], offset + done)
            if not more:
                raise OSError("the disk took nothing and gave no reason")
            done += more
        offset += len(data)


def _chunks(parts: list[bytes]) -> Iterator[bytes]:
    """Join small parts to chunks; a large part is a chunk by itself.

    Joining costs less than a vector of hundreds of small pieces, but large bodies are not copied.
    """
    waiting: list[bytes] = []
    size = 0
    for part in parts:
        if len(part) >= WRITE_CHUNK_BYTES:
            yield b"".join(waiting)
            yield part
            waiting, size = [], 0
            continue
        waiting.append(part)
        size += len(part)
        if size >= WRITE_CHUNK_BYTES:
            yield b"".join(waiting)
            waiting, size = [], 0
    yield b"".join(waiting)


def write_segment(
    disk: Disk, header: Header, contents: Iterable[bytes], *, sealed: bool
) -> tuple[str, int, list[int]]:
    """Write a whole segment under a temporary name, for the caller to sync and to rename.

    Return that name, the open file and the contents' offsets. A segment has its real name only
    when it is complete, so a file with a broken header is damage and never a crash's leftover.
    """
    name = f"{name_of(header.number)}.{header.generation}.tmp"
    if name in disk.names():
        disk.unlink(name)  # of an attempt that failed
    fd = disk.create(name)
    try:
        start, parts, offsets = 0, [header.pack()], list[int]()
        offset = HEADER_SIZE
        for content in contents:
            offsets.append(offset)
            offset = frame((content,), header.salt, offset, parts)
            if offset - start >= WRITE_CHUNK_BYTES:
                write_whole(disk, fd, parts, start)
                start, parts = offset, []
        if sealed:
            frame((seal(),), header.salt, offset, parts)
        write_whole(disk, fd, parts, start)
    except BaseException:
        disk.close_file(fd)
        disk.unlink(name)
        raise
    return name, fd, offsets


# Reading


def frame_length(data: bytes, salt: int, offset: int) -> int | None:
    """How long the frame that ``data``, read at ``offset``, begins with is; ``None`` if damaged."""
    if len(data) < FRAME_SIZE:
        return None
    length, check, _ = _FRAME.unpack_from(data)
    sound = ((salt ^ offset) + length) * _SPREAD >> 16 & 0xFFFF == check
    return FRAME_SIZE + length if sound else None


def check_frame(data: bytes, salt: int, offset: int) -> bytes | None:
    """The content of the one frame that ``data``, read at ``offset``, is; ``None`` if damaged."""
    if len(data) < FRAME_SIZE:
        return None
    length, _, crc = _FRAME.unpack_from(data)
    content = data[FRAME_SIZE:]
    return content if length == len(content) and crc32(content, salt ^ offset) == crc else None


def scan(data: bytes, salt: int, start: int = HEADER_SIZE) -> Scan:
    """Find every frame from ``start`` on. Allocates a few bytes for each, whatever a length says.

    >>> parts = [bytes(HEADER_SIZE)]
    >>> end = frame([b"\\x01one", b"\\x01two"], 7, HEADER_SIZE, parts)
    >>> found = scan(b"".join(parts)[:-1], 7)
    >>> found.offsets.tolist(), found.torn
    ([80], 13)
    """
    unpack, size = _FRAME.unpack_from, len(data)
    offsets = array("I")
    holes: list[tuple[int, int]] = []
    offset = end = min(start, size)
    synced, sealed = 0, False
    while offset + FRAME_SIZE < size:
        length, check, crc = unpack(data, offset)
        seed = salt ^ offset
        after = offset + FRAME_SIZE + length
        if (
            after <= size
            and length
            and check == (seed + length) * _SPREAD >> 16 & 0xFFFF
            and crc == crc32(data[offset + FRAME_SIZE : after], seed)
        ):
            kind = data[offset + FRAME_SIZE]
            if kind == MARK:
                synced = max(synced, _MARK.unpack_from(data, offset + FRAME_SIZE)[1])
            elif kind == SEAL:
                sealed = True
            else:
                offsets.append(offset)
            offset = end = after
            continue
        found = _next_frame(data, salt, offset)
        if found is None:
            break
        holes.append((offset, found - offset))
        offset = found
    return Scan(offsets, holes, size - end, end, synced, sealed)


def _next_frame(data: bytes, salt: int, offset: int) -> int | None:
    """Where the next whole frame after the damaged one at ``offset`` begins."""
    after = _after(data, salt, offset)
    if after is not None and _whole(data, salt, after):
        return after
    # Searched to the end even if the length is sound and reaches past it: sixteen bits of check
    # are too few to give up what may follow. A type byte is in each frame: finding those is C's.
    for match in _TYPE.finditer(data, offset + FRAME_SIZE + 1):
        candidate = match.start() - FRAME_SIZE
        if _whole(data, salt, candidate):
            return candidate
    return None


def _after(data: bytes, salt: int, offset: int) -> int | None:
    """Where the frame at ``offset`` ends, if its length is sound; perhaps past the file's end."""
    if offset + FRAME_SIZE > len(data):
        return None
    length, check, _ = _FRAME.unpack_from(data, offset)
    if not length or check != ((salt ^ offset) + length) * _SPREAD >> 16 & 0xFFFF:
        return None
    return offset + FRAME_SIZE + int(length)


def _whole(data: bytes, salt: int, offset: int) -> bool:
    after = _after(data, salt, offset)
    if after is None or after > len(data):
        return False
    crc = _FRAME.unpack_from(data, offset)[2]
    return bool(crc == crc32(memoryview(data)[offset + FRAME_SIZE : after], salt ^ offset))
