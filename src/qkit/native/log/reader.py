"""Reading the log from another process: a range of positions always yields the same messages.

A position is a segment and an offset in it. A record of a bulk file is valid only if the
BULK_IMPORT of the file follows in the log. So a plan ends before the first record of a bulk file
whose import may still complete. Segments that a reader has retained are never rewritten
(``retention.py``), so its positions stay valid.
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

READ_WINDOW_BYTES: Final = 4 << 20  # minimum size of one read
MAX_RANGE_BYTES: Final = 4 << 20  # size at which a range ends; each task reads one range

SeqRange = tuple[int, int]  # first and last seq of a bulk file's messages


class LogPosition(NamedTuple):
    """Position up to which the log was read. The default is the beginning of the log."""

    segment: int = 0
    offset: int = 0


class LogRange(NamedTuple):
    """Part of one segment, with everything that a task needs to read it."""

    log: bytes  # id of the log
    segment: int
    generation: int
    start: int
    end: int
    queues: tuple[int, ...]
    bulks: tuple[SeqRange, ...]  # seq ranges of valid messages of bulk files


class ReadPlan(NamedTuple):
    """Result of ``LogReader.plan``.

    Attributes:
        end: Position at which the plan ends.
        messages: Number of messages to read.
        queues: Log numbers of the channel's queues, up to ``end``.
        ranges: Ranges to read.
    """

    end: LogPosition
    messages: int
    queues: frozenset[int]
    ranges: list[LogRange]


class LogReader:
    """Reader of one channel's messages in a log.

    It works whether or not a process owns the directory.

    >>> LogReader("nowhere", "orders").plan(LogPosition(), frozenset(), 100).messages
    0
    """

    def __init__(self, path: str | os.PathLike[str], channel: str) -> None:
        self._log = Path(path) / "log"
        self._channel = channel
        self._bulks: list[SeqRange] = []  # of imported bulk files, sorted
        self._scanned_to = LogPosition()  # end of the scan for imported bulk files

    def plan(
        self,
        start: LogPosition,
        queues: frozenset[int],
        limit: int | None = None,
        *,
        stop: LogPosition | None = None,
    ) -> ReadPlan:
        """Plan the ranges to read for the messages after a position.

        The planned messages are on disk when this returns.

        Args:
            start: Position to start from.
            queues: Log numbers of the channel's queues that were declared before ``start``.
            limit: Maximum number of messages to read. Default: no limit.
            stop: Position to stop at. Default: the end of the log.

        Raises:
            StorageError: The log no longer contains ``start``.
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
                elif going and found.end.offset != size:  # a segment with a successor is complete
                    raise damaged(f"segment {number} cannot be read at offset {found.end.offset}")
            if not going:
                break
        return ReadPlan(found.end, found.count, frozenset(found.queues), found.ranges)

    def _walk(
        self, segment: _Segment, begin: int, stop: int | None, found: _Found, limit: int | None
    ) -> bool:
        """Walk through one segment; return whether to continue with the next."""
        bulks: set[SeqRange] = set()
        cut = position = begin
        going = True
        for _, after, content in segment.records(begin, stop):
            kind = content[0]
            if kind == DECLARE:
                record = decode(content)
                if isinstance(record, Declare) and record.name == self._channel:
                    found.queues.add(record.queue)
            elif (message := _queue_and_seq(content, kind)) is not None:
                queue, seq, bulk = message
                if bulk:
                    range_ = self._range_of(seq)
                    if range_ is None and self._is_open(seq):
                        going = False
                        break
                    if range_ is not None:
                        bulks.add(range_)
                    else:
                        queue = -1  # from an import that a crash interrupted: not valid
                if queue in found.queues:
                    if found.count == limit:
                        going = False
                        break
                    found.count += 1
            position = after
            if after - cut >= MAX_RANGE_BYTES:
                found.add(segment, cut, after, bulks)
                cut = after
        if position > cut:
            found.add(segment, cut, position, bulks)
        found.end = LogPosition(segment.header.number, position)
        return going

    def _range_of(self, seq: int) -> SeqRange | None:
        """Return the seq range of the imported bulk file that contains a message, or ``None``.

        Scans more of the log if needed.
        """
        if not self._bulks or seq > self._bulks[-1][1]:
            self._scan_imports()
        at = bisect_right(self._bulks, (seq, 1 << 64)) - 1
        if at >= 0 and self._bulks[at][0] <= seq <= self._bulks[at][1]:
            return self._bulks[at]
        return None

    def _is_open(self, seq: int) -> bool:
        """Return whether the import of a message's bulk file may still complete.

        Files are imported one by one, so it cannot once a later file has been imported.
        """
        return not self._bulks or seq > self._bulks[-1][1]

    def _scan_imports(self) -> None:
        """Continue the scan for imported bulk files up to the end of the log."""
        scanned_to = self._scanned_to
        for number in _segments(self._log):
            if number < scanned_to.segment:
                continue
            begin = scanned_to.offset if number == scanned_to.segment else HEADER_SIZE
            with _opened(self._log, number) as segment:
                for _, after, content in segment.records(begin):
                    if content[0] == BULK_IMPORT:
                        record = decode(content)
                        if isinstance(record, BulkImport):
                            insort(self._bulks, (record.first, record.last))
                    begin = after
            self._scanned_to = LogPosition(number, begin)


class _Found:
    """Result of ``LogReader.plan`` so far."""

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
    """Open segment, read in windows so that memory use does not grow with its size."""

    def __init__(self, fd: int, header: Header) -> None:
        self.fd = fd
        self.header = header

    def records(self, begin: int, stop: int | None = None) -> Iterator[tuple[int, int, bytes]]:
        """Yield offset, next offset and content of each record, up to ``stop`` or to damage."""
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
    """Yield the messages of a range, in order.

    Raises:
        StorageError: The segment was rewritten after the range was planned, or ``path`` is not the
            directory for which it was planned.
        LogDamaged: The segment is damaged.
    """
    queues, position = set(log_range.queues), log_range.start
    if log_id(path) != log_range.log:
        raise not_shared(path)
    with _opened(Path(path) / "log", log_range.segment) as segment:
        if segment.header.generation != log_range.generation:
            raise _gone(log_range.segment)
        for _, after, content in segment.records(log_range.start, log_range.end):
            position = after
            message = _queue_and_seq(content, content[0])
            if message is None or message[0] not in queues:
                continue
            _, seq, bulk = message
            if bulk and not any(first <= seq <= last for first, last in log_range.bulks):
                continue
            record = decode(content)
            if isinstance(record, Publish):
                yield record
            elif isinstance(record, Fanout):
                yield record.message
            elif isinstance(record, DeadLetterMove):
                yield record.letter
    if position != log_range.end:
        raise damaged(f"segment {log_range.segment} cannot be read at offset {position}")


class Imported(NamedTuple):
    """Imported bulk file: number of messages, and queues of the messages still in the log."""

    messages: int
    queues: set[str]


def imported(path: str | os.PathLike[str], jobs: Collection[str]) -> dict[str, Imported]:
    """Return the bulk files in ``jobs`` that were imported, by name. Reads the whole log."""
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
    """Return the names of all queues and topics in the log. Reads the whole log."""
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
    """Return the error for a process that sees another directory than the Spark driver."""
    return StorageError(
        f"{path} on {gethostname()} is not the directory of the driver: the directory must be on a "
        "file system that all executors share, under the same path",
        backend="native",
        operation="open",
    )


def _queue_and_seq(content: bytes, kind: int) -> tuple[int, int, bool] | None:
    """Return queue and seq of the message in a record, and whether it is from a bulk file.

    Returns ``None`` for a record without a message.
    """
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
        f"segment {number} of the log was rewritten or removed after the reader saved its "
        "position, because the reader was stopped for too long: start with a new checkpoint",
        backend="native",
        operation="read",
    )
