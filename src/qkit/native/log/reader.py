"""Reading the log from outside, by places: a range of it says the same whenever it is read.

A place is a segment and an offset in it. Records count where they stand, but for those of a bulk
file: they count once its BULK_IMPORT is further on, and not at all if it never comes. So no end is
chosen behind one that is not decided yet. Segments that a reader has asked for are never rewritten
(``retention.py``), which is what keeps its places valid.
"""

from __future__ import annotations

import os
from bisect import bisect_right, insort
from collections.abc import Collection, Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from socket import gethostname
from typing import Final, NamedTuple

from qkit.errors import StorageError
from qkit.native.log.record import (
    BULK,
    BULK_IMPORT,
    DEAD_LETTER_MOVE,
    DECLARE,
    DELETE,
    FANOUT,
    ONE_SEQ,
    PUBLISH,
    QUEUE_SEQ,
    QUEUE_SEQ_OFFSET,
    TARGETS,
    BulkImport,
    DeadLetterMove,
    Declare,
    Delete,
    Fanout,
    Publish,
    decode,
)
from qkit.native.log.retention import retention_lock
from qkit.native.log.segment import (
    FRAME_SIZE,
    HEADER_SIZE,
    Header,
    check_frame,
    damaged,
    frame_length,
    name_of,
    number_of,
    read_header,
)

__all__ = [
    "Imported",
    "LogPosition",
    "LogRange",
    "LogReader",
    "ReadPlan",
    "channels",
    "imported",
    "log_id",
    "not_shared",
    "read_range",
]

READ_WINDOW_BYTES: Final = 4 << 20  # bytes read at once
MAX_RANGE_BYTES: Final = 4 << 20  # bytes of the log after which a batch is cut for another task

SeqRange = tuple[int, int]  # the first and last number of a bulk file's messages


class LogPosition(NamedTuple):
    """Where a record begins; all before it was read. ``LogPosition()`` is before everything."""

    segment: int = 0
    offset: int = 0


class LogRange(NamedTuple):
    """A part of one segment, for one task to read: what it needs to know goes with it."""

    log: bytes  # the log's id
    segment: int
    generation: int
    start: int
    end: int
    queues: tuple[int, ...]
    bulks: tuple[SeqRange, ...]  # the bulk messages that count


class ReadPlan(NamedTuple):
    """What was found from a place on: its end, how many messages, the channel's queues by then."""

    end: LogPosition
    messages: int
    queues: frozenset[int]
    ranges: list[LogRange]


class LogReader:
    """The log of a directory as far as one channel is concerned; no process need own it.

    >>> LogReader("nowhere", "orders").plan(LogPosition(), frozenset(), 100).messages
    0
    """

    def __init__(self, path: str | os.PathLike[str], channel: str) -> None:
        self._log = Path(path) / "log"
        self._channel = channel
        self._bulks: list[SeqRange] = []  # those that were taken in whole
        self._looked = LogPosition()  # up to where they are known

    def plan(
        self,
        start: LogPosition,
        queues: frozenset[int],
        limit: int | None = None,
        *,
        stop: LogPosition | None = None,
    ) -> ReadPlan:
        """Go from ``start`` over at most ``limit`` messages, or up to ``stop``.

        ``queues`` are the numbers that the channel is known to have had before ``start``. All that
        was found is on the disk when this returns: whatever happens, it will be there again.
        Raises ``StorageError`` if ``start`` is no place of this log any more.
        """
        found = _Found(start, set(queues))
        numbers = [number for number in _segments(self._log) if number >= start.segment]
        if stop is not None:
            numbers = [number for number in numbers if number <= stop.segment]
        if start.segment and numbers[:1] != [start.segment]:
            raise _gone(start.segment)
        for number in numbers:
            begin = max(HEADER_SIZE, start.offset) if number == start.segment else HEADER_SIZE
            last = stop.offset if stop is not None and number == stop.segment else None
            with _opened(self._log, number) as segment:
                size = os.fstat(segment.fd).st_size
                if begin > size:
                    raise _gone(number)
                going = self._walk(segment, begin, last, found, limit)
                if number == numbers[-1]:
                    os.fdatasync(segment.fd)
                elif going and found.end.offset != size:  # it has a successor, so it is complete
                    raise damaged(f"segment {number} cannot be read at {found.end.offset}")
            if not going:
                break
        return ReadPlan(found.end, found.count, frozenset(found.queues), found.ranges)

    def _walk(
        self, segment: _Segment, begin: int, stop: int | None, found: _Found, limit: int | None
    ) -> bool:
        """Through one segment; whether to go on with the next."""
        bulks: set[SeqRange] = set()
        cut = place = begin
        going = True
        for _, after, content in segment.records(begin, stop):
            kind = content[0]
            if kind == DECLARE:
                record = decode(content)
                if isinstance(record, Declare) and record.name == self._channel:
                    found.queues.add(record.queue)
            elif (whose := _queue_and_seq(content, kind)) is not None:
                queue, seq, bulk = whose
                if bulk:
                    range_ = self._range_of(seq)
                    if range_ is None and self._is_open(seq):
                        going = False
                        break
                    if range_ is not None:
                        bulks.add(range_)
                    else:
                        queue = -1  # of an attempt that a crash ended: it does not count
                if queue in found.queues:
                    if found.count == limit:
                        going = False
                        break
                    found.count += 1
            place = after
            if after - cut >= MAX_RANGE_BYTES:
                found.add(segment, cut, after, bulks)
                cut = after
        if place > cut:
            found.add(segment, cut, place, bulks)
        found.end = LogPosition(segment.header.number, place)
        return going

    def _range_of(self, seq: int) -> SeqRange | None:
        """The bulk file, taken in whole, that brought a message; looks further if need be."""
        if not self._bulks or seq > self._bulks[-1][1]:
            self._look_ahead()
        at = bisect_right(self._bulks, (seq, 1 << 64)) - 1
        if at >= 0 and self._bulks[at][0] <= seq <= self._bulks[at][1]:
            return self._bulks[at]
        return None

    def _is_open(self, seq: int) -> bool:
        """Whether its BULK_IMPORT may still come: files are taken in one after the other."""
        return not self._bulks or seq > self._bulks[-1][1]

    def _look_ahead(self) -> None:
        """Find out which bulk files are complete, from where this was found out before."""
        for number in _segments(self._log):
            if number < self._looked.segment:
                continue
            begin = self._looked.offset if number == self._looked.segment else HEADER_SIZE
            with _opened(self._log, number) as segment:
                for _, after, content in segment.records(begin):
                    if content[0] == BULK_IMPORT:
                        record = decode(content)
                        if isinstance(record, BulkImport):
                            insort(self._bulks, (record.first, record.last))
                    begin = after
            self._looked = LogPosition(number, begin)


class _Found:
    """What a walk has come to so far."""

    def __init__(self, end: LogPosition, queues: set[int]) -> None:
        self.end = end
        self.queues = queues
        self.count = 0
        self.ranges: list[LogRange] = []

    def add(self, segment: _Segment, start: int, end: int, bulks: set[SeqRange]) -> None:
        number, generation, log = segment.header
        queues = tuple(sorted(self.queues))
        self.ranges.append(
            LogRange(log, number, generation, start, end, queues, tuple(sorted(bulks)))
        )


class _Segment:
    """An open segment; records are read in windows, so memory is flat in its size."""

    def __init__(self, fd: int, header: Header) -> None:
        self.fd = fd
        self.header = header

    def records(self, begin: int, stop: int | None = None) -> Iterator[tuple[int, int, bytes]]:
        """Offset, offset of the next, and content, up to ``stop`` or to what is no whole record."""
        salt, offset = self.header.salt, begin
        data, base = b"", begin
        while stop is None or offset < stop:
            at = offset - base
            length = frame_length(data[at : at + FRAME_SIZE], salt, offset)
            if length is None or at + length > len(data):
                more = os.pread(self.fd, max(READ_WINDOW_BYTES, length or 0), offset)
                if len(more) <= len(data) - at:
                    return
                data, base = more, offset
                continue
            content = check_frame(data[at : at + length], salt, offset)
            if content is None:
                return
            yield offset, offset + length, content
            offset += length


@contextmanager
def _opened(log: Path, number: int) -> Generator[_Segment]:
    try:
        fd = os.open(log / name_of(number), os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError as error:
        raise _gone(number) from error
    try:
        header, _ = read_header(os.pread(fd, HEADER_SIZE, 0), number)
        if header is None:
            raise damaged(f"the header of segment {number} cannot be read")
        yield _Segment(fd, header)
    finally:
        os.close(fd)


def read_range(path: str | os.PathLike[str], log_range: LogRange) -> Iterator[Publish]:
    """The messages of a piece, in their order.

    Raises ``StorageError`` if the segment was rewritten since, or this is another directory than
    the one in which the piece was chosen, and ``LogDamaged``.
    """
    queues, place = set(log_range.queues), log_range.start
    if log_id(path) != log_range.log:
        raise not_shared(path)
    with _opened(Path(path) / "log", log_range.segment) as segment:
        if segment.header.generation != log_range.generation:
            raise _gone(log_range.segment)
        for _, after, content in segment.records(log_range.start, log_range.end):
            place = after
            whose = _queue_and_seq(content, content[0])
            if whose is None or whose[0] not in queues:
                continue
            if whose[2] and not any(first <= whose[1] <= last for first, last in log_range.bulks):
                continue
            record = decode(content)
            if isinstance(record, Publish):
                yield record
            elif isinstance(record, Fanout):
                yield record.message
            elif isinstance(record, DeadLetterMove):
                yield record.letter
    if place != log_range.end:
        raise damaged(f"segment {log_range.segment} cannot be read at {place}")


class Imported(NamedTuple):
    """What the log tells of a bulk file that was imported."""

    messages: int
    queues: set[str]  # of those of its messages that are still in the log


def imported(path: str | os.PathLike[str], jobs: Collection[str]) -> dict[str, Imported]:
    """Return those of the bulk files that the log says were imported. Reads the whole log."""
    log = Path(path) / "log"
    ranges: dict[str, SeqRange] = {}
    names: dict[int, str] = {}
    with retention_lock(Path(path)):
        for content in _contents(log, (DECLARE, BULK_IMPORT)):
            record = decode(content)
            if isinstance(record, Declare):
                names[record.queue] = record.name
            elif isinstance(record, BulkImport) and record.name in jobs:
                ranges[record.name] = record.first, record.last
        found = {
            job: Imported(max(0, last - first + 1), set()) for job, (first, last) in ranges.items()
        }
        if not any(job.messages for job in found.values()):
            return found
        for content in _contents(log, (PUBLISH, FANOUT)):
            found_in = _queue_and_seq(content, content[0])
            assert found_in is not None
            for job, (first, last) in ranges.items():
                if first <= found_in[1] <= last and found_in[0] in names:
                    found[job].queues.add(names[found_in[0]])
    return found


def channels(path: str | os.PathLike[str]) -> set[str]:
    """Return the names of the queues and topics that the log tells of. Reads the whole log."""
    names: dict[int, str] = {}
    with retention_lock(Path(path)):
        for content in _contents(Path(path) / "log", (DECLARE, DELETE)):
            record = decode(content)
            if isinstance(record, Declare):
                names[record.queue] = record.name
            elif isinstance(record, Delete):
                names.pop(record.queue, None)
    return set(names.values())


def log_id(path: str | os.PathLike[str]) -> bytes | None:
    """Return the random id of a directory's log; ``None`` if there is no log."""
    log = Path(path) / "log"
    with retention_lock(Path(path)):
        for number in _segments(log):
            with _opened(log, number) as segment:
                return segment.header.log_id
    return None


def _contents(log: Path, kinds: Collection[int]) -> Iterator[bytes]:
    for number in _segments(log):
        with _opened(log, number) as segment:
            for _, _, content in segment.records(HEADER_SIZE):
                if content[0] in kinds:
                    yield content


def _segments(log: Path) -> list[int]:
    try:
        names = [file.name for file in log.iterdir()]
    except FileNotFoundError:
        return []
    return sorted(number for number, live in filter(None, map(number_of, names)) if live)


def not_shared(path: str | os.PathLike[str]) -> StorageError:
    """Return the error of a process that sees another directory than the Spark driver."""
    return StorageError(
        f"{path} on {gethostname()} is not the directory that the driver sees: the directory must "
        "be on a file system that all executors share, under the same path",
        backend="native",
        operation="open",
    )


def _queue_and_seq(content: bytes, kind: int) -> tuple[int, int, bool] | None:
    """Queue and number of the message that a record brings, and whether it is a bulk file's."""
    if kind == PUBLISH:
        at = 0
    elif kind == FANOUT:
        at = TARGETS.size + QUEUE_SEQ.size * int.from_bytes(content[1:3], "little")
    elif kind == DEAD_LETTER_MOVE:
        at = ONE_SEQ.size
    else:
        return None
    queue, seq = QUEUE_SEQ.unpack_from(content, at + QUEUE_SEQ_OFFSET)
    return queue, seq, bool(content[at + 1] & BULK)


def _gone(number: int) -> StorageError:
    return StorageError(
        f"the log has no longer what segment {number} held when this place in it was noted: the "
        "reader stayed away for too long. Begin anew, with another checkpoint",
        backend="native",
        operation="read",
    )
