"""Format of a segment, which is one file of the log: header, frames, and the scan for frames.

    header   the same 40 bytes twice: magic, version, segment, generation, log id, checksum
    frame    u32 length · u16 check · u32 crc32 · content

``check`` and ``crc32`` are seeded with the frame's offset and with the header's checksum, which
covers the log id, the segment number and the generation. So bytes from another log, from a deleted
segment that the file system restored, or from a copy of this segment inside a message are not
mistaken for records. ``check`` covers only the length. If only the content is damaged, exactly this
frame is skipped. If the length is damaged, the next frame must be searched for.

Two types of content belong to the segment and are not returned as records. ``MARK`` contains the
offset up to which the file was synced. A hole before that offset is damage; a hole after it is the
result of a power loss, in data that was not synced yet. ``SEAL`` ends a segment that has a
successor, so that a segment cut short between two records is detected.
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
    "write_all",
    "write_segment",
]

VERSION: Final = 1
MAGIC: Final = b"qkit-log"
MARK: Final = 0xF0
SEAL: Final = 0xF1
WRITE_CHUNK_BYTES: Final = 1 << 20

# Every version has the same layout of the first 40 bytes, so another version is not mistaken for
# damage.
_HEADER: Final = struct.Struct("<8sHHII16s")  # magic, version, 0, segment, generation, log id
_CRC: Final = struct.Struct("<I")
_COPY: Final = _HEADER.size + _CRC.size
HEADER_SIZE: Final = 2 * _COPY
_FRAME: Final = struct.Struct("<IHI")
FRAME_SIZE: Final = _FRAME.size
_MARK: Final = struct.Struct("<BId")  # type, offset up to which the file is synced, wall time
_SPREAD: Final = 0x9E3779B1  # odd number near 2^32 / φ: similar lengths get different checks
_TYPE: Final = re.compile(rb"[\x01-\x1f\xf0\xf1]")
_NAME: Final = re.compile(r"(\d{8,10})\.seg(\.damaged-\d+)?")


def damaged(message: str, damage: Iterable[Damage] = ()) -> LogDamaged:
    """Return a ``LogDamaged`` error that lists the damage found."""
    error = LogDamaged(message, backend="native", operation="open")
    error.damage = list(damage)
    return error


class Header(NamedTuple):
    """Header of a segment."""

    number: int
    generation: int
    log_id: bytes

    def pack(self) -> bytes:
        """Return the bytes of the header: two identical copies."""
        copy = _HEADER.pack(MAGIC, VERSION, 0, self.number, self.generation, self.log_id)
        return (copy + _CRC.pack(crc32(copy))) * 2

    @property
    def salt(self) -> int:
        """Seed for the checks of this segment's frames."""
        return crc32(self.pack()[: _HEADER.size])


class Scan(NamedTuple):
    """Result of ``scan``: the frames of a segment and the holes between them."""

    offsets: array[int]
    holes: list[tuple[int, int]]  # offset and length; a hole at the end is ``torn`` instead
    torn: int  # bytes after the last frame
    end: int  # end of the last frame
    synced: int  # offset up to which the file was synced, according to its marks
    sealed: bool


def name_of(number: int) -> str:
    """Return the file name of a segment.

    >>> name_of(1)
    '00000001.seg'
    """
    return f"{number:08}.seg"


def number_of(name: str) -> tuple[int, bool] | None:
    """Return the segment number in a file name, and whether the segment is in use.

    A damaged segment that was kept for inspection is not in use. Returns ``None`` for other files.
    """
    match = _NAME.fullmatch(name)
    return None if match is None else (int(match[1]), match[2] is None)


def read_header(data: bytes, number: int) -> tuple[Header | None, list[int]]:
    """Return the header of segment ``number``, and the offsets of its broken copies.

    The header is ``None`` if both copies are broken. Raises ``LogVersion`` for an intact header
    with another format version.
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
                f"segment {number} has format {version}, {age} one, but this version of qkit reads "
                f"format {VERSION}: use the version that wrote it",
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
    """Append the frames of ``contents`` to ``parts``; return the offset at which they end.

    ``offset`` is the offset of the first frame in the file.
    """
    pack, add = _FRAME.pack, parts.append
    for content in contents:
        length = len(content)
        seed = salt ^ offset
        add(pack(length, (seed + length) * _SPREAD >> 16 & 0xFFFF, crc32(content, seed)))
        add(content)
        offset += FRAME_SIZE + length
    return offset


def mark(synced: int, at: float) -> bytes:
    """Return a ``MARK``: at wall time ``at`` the segment was on disk up to ``synced``."""
    return _MARK.pack(MARK, synced, at)


def seal() -> bytes:
    """Return a ``SEAL``, which ends a segment."""
    return bytes((SEAL,))


def write_all(disk: Disk, fd: int, parts: list[bytes], offset: int) -> None:
    """Write ``parts`` at ``offset``, in one call unless they are large or a write is partial."""
    small = sum(map(len, parts)) < WRITE_CHUNK_BYTES
    for data in (b"".join(parts),) if small else _chunks(parts):
        done = disk.write(fd, data, offset) if data else 0
        while done < len(data):
            more = disk.write(fd, memoryview(data)[done:], offset + done)
            if not more:
                raise OSError("the disk wrote nothing and reported no error")
            done += more
        offset += len(data)


def _chunks(parts: list[bytes]) -> Iterator[bytes]:
    """Join small parts into chunks; a large part becomes its own chunk, so it is not copied.

    Joining small parts is faster than a vectored write of hundreds of them.
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
    """Write a segment under a temporary name. The caller syncs and renames it.

    A segment gets its real name only when it is complete, so a file with a broken header is always
    damage, never the result of a crash.

    Returns:
        The temporary name, the descriptor of the open file, and the offsets of the records.
    """
    name = f"{name_of(header.number)}.{header.generation}.tmp"
    if name in disk.names():
        disk.unlink(name)  # left by a failed attempt
    fd = disk.create(name)
    try:
        start, parts, offsets = 0, [header.pack()], list[int]()
        offset = HEADER_SIZE
        for content in contents:
            offsets.append(offset)
            offset = frame((content,), header.salt, offset, parts)
            if offset - start >= WRITE_CHUNK_BYTES:
                write_all(disk, fd, parts, start)
                start, parts = offset, []
        if sealed:
            frame((seal(),), header.salt, offset, parts)
        write_all(disk, fd, parts, start)
    except BaseException:
        disk.close_file(fd)
        disk.unlink(name)
        raise
    return name, fd, offsets


# Reading


def frame_length(data: bytes, salt: int, offset: int) -> int | None:
    """Return the size of the frame at the start of ``data``; ``None`` if its length is damaged.

    ``offset`` is the offset of the frame in the file.
    """
    if len(data) < FRAME_SIZE:
        return None
    length, check, _ = _FRAME.unpack_from(data)
    valid = ((salt ^ offset) + length) * _SPREAD >> 16 & 0xFFFF == check
    return FRAME_SIZE + length if valid else None


def check_frame(data: bytes, salt: int, offset: int) -> bytes | None:
    """Return the content of the frame ``data``; ``None`` if the frame is damaged.

    ``offset`` is the offset of the frame in the file.
    """
    if len(data) < FRAME_SIZE:
        return None
    length, _, crc = _FRAME.unpack_from(data)
    content = data[FRAME_SIZE:]
    return content if length == len(content) and crc32(content, salt ^ offset) == crc else None


def scan(data: bytes, salt: int, start: int = HEADER_SIZE) -> Scan:
    """Find every frame from ``start`` on.

    Memory use depends on the number of frames, not on their lengths.

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
    """Return the offset of the next intact frame after the damaged one at ``offset``."""
    end = _frame_end(data, salt, offset)
    if end is not None and _is_intact(data, salt, end):
        return end
    # Search to the end of the file even if the length passes its check and extends past the end: a
    # 16-bit check is too weak to discard all that may follow. Every content begins with a type
    # byte, and the regular expression finds candidates at C speed.
    for match in _TYPE.finditer(data, offset + FRAME_SIZE + 1):
        candidate = match.start() - FRAME_SIZE
        if _is_intact(data, salt, candidate):
            return candidate
    return None


def _frame_end(data: bytes, salt: int, offset: int) -> int | None:
    """Return the end of the frame at ``offset``, which may be past the end of the file.

    Returns ``None`` if the length does not pass its check.
    """
    if offset + FRAME_SIZE > len(data):
        return None
    length, check, _ = _FRAME.unpack_from(data, offset)
    if not length or check != ((salt ^ offset) + length) * _SPREAD >> 16 & 0xFFFF:
        return None
    return offset + FRAME_SIZE + int(length)


def _is_intact(data: bytes, salt: int, offset: int) -> bool:
    end = _frame_end(data, salt, offset)
    if end is None or end > len(data):
        return False
    crc = _FRAME.unpack_from(data, offset)[2]
    return bool(crc == crc32(memoryview(data)[offset + FRAME_SIZE : end], salt ^ offset))
