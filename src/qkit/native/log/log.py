"""The log of a durable engine: an owned directory of append-only segments.

Its life: ``open``, then ``recover`` to the end, then ``start`` in the loop, which returns the
``Writer`` that appends records until ``close``.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Collection, Generator, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

from qkit.errors import ConfigError, Damage, LifecycleError, StorageError
from qkit.native.log.disk import Disk
from qkit.native.log.record import MAX_CONTENT
from qkit.native.log.recovery import Entry, Recovery
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
    write_segment,
)
from qkit.native.log.tail import Position, Tail
from qkit.native.log.writer import Fsync, Writer, read_only

__all__ = [
    "Entry",
    "Fsync",
    "Log",
    "Position",
    "Rewrite",
    "positions",
    "storage_errors",
]

SEGMENT_BYTES: Final = 64 << 20
MAX_OPEN_FILES: Final = 32  # segments kept open for reading
READ_AHEAD: Final = 4096  # most records are not longer


@dataclass(frozen=True, slots=True)
class Rewrite:
    """A segment written anew under a temporary name; ``offsets`` are its records' new places."""

    number: int
    name: str
    offsets: list[int]


class Log:
    """Records on disk, in the order in which they were appended.

    >>> async def example(path):
    ...     log = Log.open(path)
    ...     print([entry.content for entry in log.recover()])
    ...     writer = log.start()
    ...     await writer.append([b"\\x01a record"])
    ...     await log.close()
    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as path:
    ...     asyncio.run(example(path))
    ...     asyncio.run(example(path))
    []
    [b'\\x01a record']
    """

    def __init__(
        self,
        disk: Disk,
        *,
        fsync: Fsync = "always",
        fsync_interval: float = 1.0,
        segment_bytes: int = SEGMENT_BYTES,
        repair: bool = False,
        inline: bool = False,
    ) -> None:
        if fsync not in ("always", "interval", "never"):
            raise ConfigError(f"fsync is always, interval or never, not {fsync!r}")
        if not fsync_interval > 0:
            raise ConfigError("fsync_interval is more than 0 seconds")
        if not HEADER_SIZE < segment_bytes <= MAX_CONTENT:
            raise ConfigError(f"segment_bytes is {HEADER_SIZE + 1}–{MAX_CONTENT}")
        self._disk = disk
        self._fsync: Fsync = fsync
        self._fsync_interval = fsync_interval
        self._segment_bytes = segment_bytes
        self.inline = inline
        self._recovery = Recovery(disk, repair=repair)
        self._tail: Tail | None = None
        self._writer: Writer | None = None
        self._readers: dict[int, tuple[int, Header, int]] = {}  # file, header and salt
        self._pinned: set[int] = set()  # rewritten, but still read in their old form
        self._lock = threading.Lock()  # of ``_readers``: compaction works in another thread
        self._closed = False

    @classmethod
    def open(
        cls,
        path: str | os.PathLike[str],
        *,
        fsync: Fsync = "always",
        fsync_interval: float = 1.0,
        segment_bytes: int = SEGMENT_BYTES,
        repair: bool = False,
        inline: bool = False,
    ) -> Log:
        """Take the directory for this process, making it if need be.

        ``fsync``: ``always``, before an append is confirmed; ``interval``, at most
        ``fsync_interval`` seconds later; ``never``, when the system sees fit (a rotation excepted).
        ``inline`` writes in the loop itself, for virtual time.

        Raises ``LogLocked`` if another process has it, and ``StorageError`` for symbolic links
        and the like.
        """
        disk = Disk(path)
        try:
            return cls(
                disk,
                fsync=fsync,
                fsync_interval=fsync_interval,
                segment_bytes=segment_bytes,
                repair=repair,
                inline=inline,
            )
        except BaseException:
            disk.close()
            raise

    # Starting

    def generations(self) -> dict[int, int]:
        """How often each segment was rewritten: places are valid for one generation only.

        Of one whose header cannot be read it is -1. Blocking, before ``recover`` as well. Raises
        ``LogVersion``.
        """
        if self._tail is not None:
            return {number: self.generation(number) for number, _ in self.segments()}
        return {
            number: -1 if header is None else header.generation
            for number, header in self._recovery.inspect().items()
        }

    def generation(self, segment: int) -> int:
        """The generation of one segment now."""
        with self._lock:
            return self._reader(segment)[1].generation

    @property
    def disk(self) -> Disk:
        """The directory, for what is kept beside the segments."""
        return self._disk

    @property
    def id(self) -> bytes:
        """What tells this log from every other."""
        return self._recovery.log_id

    @property
    def active(self) -> int:
        """The segment that is being written."""
        return self._active()

    @property
    def active_bytes(self) -> int:
        """How much is in the segment that is being written."""
        return 0 if self._tail is None else self._tail.size

    def recover(self, start: Position | None = None) -> Iterator[Entry]:
        """Every record from ``start`` on (a snapshot knows the rest); blocking, and only once.

        When it has come to its end the log is whole and all that it gave is on disk. What was torn
        or damaged is in ``damage``. Raises ``LogDamaged`` and ``LogVersion``.
        """
        if self._tail is not None or self._closed:
            raise LifecycleError("a log is recovered once, before it is started")
        yield from self._recovery.records(start)
        self._tail = self._recovery.tail(self._segment_bytes)

    @property
    def damage(self) -> list[Damage]:
        """What ``recover`` found that was no record."""
        return self._recovery.damage

    def start(self) -> Writer:
        """Return what appends records, in the running event loop."""
        if self._tail is None or self._writer is not None or self._closed:
            raise LifecycleError("a log is started once, after recover has come to its end")
        self._writer = Writer(
            self._tail,
            asyncio.get_running_loop(),
            fsync=self._fsync,
            interval=self._fsync_interval,
            inline=self.inline,
        )
        return self._writer

    # Writing

    @property
    def writer(self) -> Writer:
        """What appends records; ``LifecycleError`` before ``start``."""
        if self._writer is None:
            raise LifecycleError("the log is not started", backend="native", operation="append")
        return self._writer

    async def rotate(self) -> None:
        """Begin another segment, so that all that was appended is in complete ones."""
        writer = self.writer
        assert self._tail is not None
        if self._tail.empty:
            return
        self._tail.full_now = True
        await writer.sync()

    @property
    def read_only(self) -> bool:
        """Whether a sync failed: nothing is taken until the log is opened again."""
        return self._tail is not None and self._tail.broken is not None

    # Reading back and maintenance

    def read(self, segment: int, offset: int) -> bytes:
        """The content at a place, checked. Blocking, for any thread.

        Raises ``LogDamaged`` if the bytes are not those that were written.
        """
        with self._lock:
            fd, _, salt = self._reader(segment)
            data = self._disk.read(fd, READ_AHEAD, offset)
            length = frame_length(data, salt, offset)
            if length is not None and length > len(data) == READ_AHEAD:
                data = self._disk.read(fd, length, offset)
        content = check_frame(data[:length], salt, offset)
        if content is None:
            damage = Damage("damaged", segment, offset, len(data))
            raise damaged(f"a stored record cannot be read: {damage}", [damage])
        return content

    def _reader(self, segment: int) -> tuple[int, Header, int]:
        found = self._readers.get(segment)
        if found is None:
            fd = self._disk.open(name_of(segment))
            header, _ = read_header(self._disk.read(fd, HEADER_SIZE, 0), segment)
            if header is None:
                self._disk.close_file(fd)
                raise damaged(f"the header of segment {segment} cannot be read")
            if len(self._readers) >= MAX_OPEN_FILES:
                for other in self._readers:
                    if other not in self._pinned:
                        self._forget(other)
                        break
            found = self._readers[segment] = fd, header, header.salt
        return found

    def _forget(self, segment: int) -> None:
        reader = self._readers.pop(segment, None)
        if reader is not None:
            self._disk.close_file(reader[0])

    def segments(self) -> list[tuple[int, int]]:
        """Number and size of every segment that may be rewritten or removed, the oldest first.

        The one that is being written is not among them. Blocking, for any thread.
        """
        active = self._active()
        numbers = sorted(
            number for number, live in filter(None, map(number_of, self._disk.names())) if live
        )
        found: list[tuple[int, int]] = []
        for number in numbers:
            if number < active:
                fd = self._disk.open(name_of(number))
                found.append((number, self._disk.size(fd)))
                self._disk.close_file(fd)
        return found

    def _active(self) -> int:
        if self._tail is None:
            raise LifecycleError("the log is not recovered")
        return self._tail.number

    def entries(self, segment: int) -> Iterator[Entry]:
        """The records of a segment; of the one being written, those written so far.

        Blocking, for any thread. Raises ``LogDamaged`` if one of them is not as it was written.
        """
        growing = self._tail is not None and segment >= self._tail.number
        return self._recovery.entries(segment, growing=growing)

    def remove(self, segments: Collection[int]) -> None:
        """Delete segments that hold nothing of use any more. Blocking, for any thread.

        They are gone for good when this returns. Raises ``StorageError``.
        """
        self._check_sealed(segments)
        for number in sorted(segments):
            with self._lock:
                self._forget(number)
            with storage_errors("remove"):
                self._disk.unlink(name_of(number))
            # One by one: of removals that are not on the disk yet, a power loss keeps any. The
            # end of a message must not go before the message.
            self._sync_directory("remove")

    def rewrite(self, segment: int, contents: Iterable[bytes]) -> Rewrite:
        """Write a segment anew with ``contents``, beside the old one. Blocking, for any thread.

        ``install`` puts it in the old one's place. A crash before that leaves the old one. Raises
        ``StorageError``; the log is as before then.
        """
        self._check_sealed([segment])
        with self._lock:
            header = self._reader(segment)[1]
        header = header._replace(generation=header.generation + 1)
        with storage_errors("rewrite"):
            name, fd, offsets = write_segment(self._disk, header, contents, sealed=True)
            try:
                self._disk.sync(fd)
            except OSError:
                self._disk.unlink(name)
                raise
            finally:
                self._disk.close_file(fd)
        return Rewrite(segment, name, offsets)

    def install(self, rewrite: Rewrite) -> None:
        """Put a rewritten segment in place, for good when this returns. Blocking, for any thread.

        ``read`` goes on in the old one until ``activate_rewrite``. Raises ``StorageError``.
        """
        with self._lock, storage_errors("install"):
            self._pinned.add(rewrite.number)
            self._reader(rewrite.number)
            self._disk.rename(rewrite.name, name_of(rewrite.number))
        self._sync_directory("install")

    def discard_rewrite(self, rewrite: Rewrite) -> None:
        """Remove a rewritten segment that is not wanted after all. Blocking, for any thread."""
        with storage_errors("drop"):
            self._disk.unlink(rewrite.name)

    def activate_rewrite(self, segment: int) -> None:
        """From now on places are those of the installed segment."""
        with self._lock:
            self._pinned.discard(segment)
            self._forget(segment)

    def _sync_directory(self, operation: str) -> None:
        try:
            self._disk.sync_directory()
        except OSError as error:
            # A removed segment may come back, without those that say what became of its messages.
            if self._tail is not None:
                self._tail.broken = error
            raise read_only(error, operation) from error

    def _check_sealed(self, segments: Collection[int]) -> None:
        active = self._active()
        if any(number >= active for number in segments):
            raise LifecycleError(f"segment {active} is being written")

    # Ending

    async def close(self) -> None:
        """Write what was appended, sync it, and let the directory go. Again: nothing happens.

        Raises ``ReadOnly`` if that last sync fails; the directory is let go all the same.
        """
        if self._closed:
            return
        self._closed = True
        try:
            if self._writer is not None:
                await self._writer.close()
            elif self._tail is not None:
                self._tail.close(sync=False)
        finally:
            with self._lock:
                for segment in list(self._readers):
                    self._forget(segment)
            self._disk.close()


@contextmanager
def storage_errors(operation: str) -> Generator[None]:
    """Raise ``StorageError`` for an ``OSError``; nothing has changed then."""
    try:
        yield
    except OSError as error:
        raise StorageError(
            f"the disk refused ({error}); the log is as before",
            backend="native",
            operation=operation,
            cause=error,
        ) from error


def positions(first: Position, contents: Iterable[bytes]) -> list[Position]:
    """The place of each record of a batch, from the place of its first.

    >>> positions((1, 80), [b"one", b"three"])
    [(1, 80), (1, 93)]
    """
    segment, offset = first
    found: list[Position] = []
    for content in contents:
        found.append((segment, offset))
        offset += FRAME_SIZE + len(content)
    return found
