"""``Log``: the log of a durable engine, a locked directory of append-only segments.

Call ``open``, iterate over ``recover`` to the end, then call ``start`` in the event loop.
``start`` returns the ``Writer`` that appends records until ``close``.
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
READ_AHEAD: Final = 4096  # bytes of the first read; most records are shorter


@dataclass(frozen=True, slots=True)
class Rewrite:
    """Rewritten segment under a temporary name, with the offsets of its records."""

    number: int
    name: str
    offsets: list[int]


class Log:
    """Log of records on disk, in the order in which they were appended.

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
            raise ConfigError(f"fsync must be always, interval or never, got {fsync!r}")
        if not fsync_interval > 0:
            raise ConfigError(f"fsync_interval must be greater than 0, got {fsync_interval}")
        if not HEADER_SIZE < segment_bytes <= MAX_CONTENT:
            raise ConfigError(
                f"segment_bytes must be {HEADER_SIZE + 1}–{MAX_CONTENT}, got {segment_bytes}"
            )
        self._disk = disk
        self._fsync: Fsync = fsync
        self._fsync_interval = fsync_interval
        self._segment_bytes = segment_bytes
        self.inline = inline
        self._recovery = Recovery(disk, repair=repair)
        self._tail: Tail | None = None
        self._writer: Writer | None = None
        self._readers: dict[int, tuple[int, Header, int]] = {}  # file, header and salt
        self._pinned: set[int] = set()  # rewritten segments whose old file is still read
        self._lock = threading.Lock()  # guards ``_readers``; compaction runs in another thread
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
        """Open the log in a directory, which is locked for this process and created if missing.

        Args:
            path: Directory of the log.
            fsync: When to sync. ``"always"`` (the default): before an append is confirmed.
                ``"interval"``: at most ``fsync_interval`` seconds later. ``"never"``: only when a
                segment is sealed.
            fsync_interval: Maximum time until written records are synced, in seconds. Default: 1.
            segment_bytes: Size in bytes at which a segment is sealed. Default: 64 MiB.
            repair: Keep the intact records of a damaged log instead of raising ``LogDamaged``.
                Default: false.
            inline: Write in the event loop, for tests with virtual time. Default: false.

        Raises:
            LogLocked: Another process has the directory open.
            StorageError: The directory cannot be used, for example because it is a symbolic link.
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

    # Opening and recovery

    def generations(self) -> dict[int, int]:
        """Return how often each segment was rewritten; -1 if its header cannot be read.

        A position is valid in only one generation of a segment. After ``recover``, the active
        segment is not included. Blocking. May be called before ``recover``.

        Raises:
            LogVersion: A segment has another format.
        """
        if self._tail is not None:
            return {number: self.generation(number) for number, _ in self.segments()}
        return {
            number: -1 if header is None else header.generation
            for number, header in self._recovery.inspect().items()
        }

    def generation(self, segment: int) -> int:
        """Return the current generation of a segment."""
        with self._lock:
            return self._reader(segment)[1].generation

    @property
    def disk(self) -> Disk:
        """Directory of the log, for files beside the segments."""
        return self._disk

    @property
    def id(self) -> bytes:
        """Random id of this log."""
        return self._recovery.log_id

    @property
    def active(self) -> int:
        """Number of the active segment."""
        return self._active()

    @property
    def active_bytes(self) -> int:
        """Size of the active segment in bytes."""
        return 0 if self._tail is None else self._tail.size

    def recover(self, start: Position | None = None) -> Iterator[Entry]:
        """Yield every record from ``start`` on. Blocking. Can be called only once.

        When the iteration ends, the log can be started, all yielded records are on disk, and
        ``damage`` lists what was torn or damaged.

        Args:
            start: End of the snapshot. Default: the beginning of the log.

        Raises:
            LogDamaged: Stored records cannot be read, and ``repair`` is false.
            LogVersion: A segment has another format.
        """
        if self._tail is not None or self._closed:
            raise LifecycleError("a log can be recovered only once, before it is started")
        yield from self._recovery.records(start)
        self._tail = self._recovery.tail(self._segment_bytes)

    def repair_sealed(self) -> set[int]:
        """Rewrite sealed segments that are damaged, also those that a snapshot covers. Blocking.

        Call it before a snapshot is read. Returns the segments that lost records.
        """
        return self._recovery.repair_sealed()

    @property
    def damage(self) -> list[Damage]:
        """Damage that ``recover`` found."""
        return self._recovery.damage

    def start(self) -> Writer:
        """Start the writer in the running event loop and return it."""
        if self._tail is None or self._writer is not None or self._closed:
            raise LifecycleError("a log can be started only once, after recover has finished")
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
        """Writer of the log; raises ``LifecycleError`` before ``start``."""
        if self._writer is None:
            raise LifecycleError(
                "the log is not started: call start first", backend="native", operation="append"
            )
        return self._writer

    async def rotate(self) -> None:
        """Seal the active segment, so that all appended records are in sealed segments."""
        writer = self.writer
        assert self._tail is not None
        if self._tail.empty:
            return
        self._tail.full_now = True
        await writer.sync()

    @property
    def read_only(self) -> bool:
        """Whether the disk failed so that nothing can be appended until the log is reopened."""
        return self._tail is not None and self._tail.broken is not None

    # Reading and maintenance

    def read(self, segment: int, offset: int) -> bytes:
        """Return the content of the record at a position. Blocking; thread-safe.

        Raises:
            LogDamaged: The record does not match its checksum.
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
        """Return the number and the size in bytes of every sealed segment, oldest first.

        Blocking; thread-safe.
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
            raise LifecycleError("the log is not recovered: iterate over recover first")
        return self._tail.number

    def entries(self, segment: int) -> Iterator[Entry]:
        """Yield the records of a segment; for the active segment, those written so far.

        Blocking; thread-safe.

        Raises:
            LogDamaged: A sealed segment is damaged.
        """
        growing = self._tail is not None and segment >= self._tail.number
        return self._recovery.entries(segment, growing=growing)

    def remove(self, segments: Collection[int]) -> None:
        """Delete segments. Blocking; thread-safe.

        The deletion is durable when this returns.

        Raises:
            StorageError: The disk failed.
        """
        self._check_sealed(segments)
        for number in sorted(segments):
            with self._lock:
                self._forget(number)
            with storage_errors("remove"):
                self._disk.unlink(name_of(number))
            # Sync after each removal: a power loss may undo any removal that is not synced, and
            # the record that settles a message must not disappear before the message does.
            self._sync_directory("remove")

    def rewrite(self, segment: int, contents: Iterable[bytes]) -> Rewrite:
        """Write a new version of a segment that contains ``contents``. Blocking; thread-safe.

        ``install`` replaces the old version with it. Until then, a crash leaves the old version.

        Raises:
            StorageError: The disk failed. The log is unchanged.
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
        """Replace a segment with its new version. Blocking; thread-safe.

        The replacement is durable when this returns. ``read`` uses the old version until
        ``activate_rewrite`` is called.

        Raises:
            StorageError: The disk failed.
        """
        with self._lock, storage_errors("install"):
            self._pinned.add(rewrite.number)
            self._reader(rewrite.number)
            self._disk.rename(rewrite.name, name_of(rewrite.number))
        self._sync_directory("install")

    def discard_rewrite(self, rewrite: Rewrite) -> None:
        """Delete a rewritten segment that was not installed. Blocking; thread-safe."""
        with storage_errors("drop"):
            self._disk.unlink(rewrite.name)

    def activate_rewrite(self, segment: int) -> None:
        """Use the installed version of a segment for all further reads."""
        with self._lock:
            self._pinned.discard(segment)
            self._forget(segment)

    def _sync_directory(self, operation: str) -> None:
        try:
            self._disk.sync_directory()
        except OSError as error:
            # After a power loss, a removed segment may reappear without the records that settle
            # its messages.
            if self._tail is not None:
                self._tail.broken = error
            raise read_only(error, operation) from error

    def _check_sealed(self, segments: Collection[int]) -> None:
        active = self._active()
        if any(number >= active for number in segments):
            raise LifecycleError(
                f"segment {active} is being written: only sealed segments can be rewritten or "
                "removed"
            )

    # Closing

    async def close(self) -> None:
        """Write all appended records, and unlock the directory. Idempotent.

        The records are synced unless ``fsync`` is ``"never"``.

        Raises:
            ReadOnly: The last sync failed. The directory is unlocked anyway.
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
    """Convert an ``OSError`` to a ``StorageError`` which states that the log is unchanged."""
    try:
        yield
    except OSError as error:
        raise StorageError(
            f"the disk failed ({error}); the log is unchanged",
            backend="native",
            operation=operation,
            cause=error,
        ) from error


def positions(first: Position, contents: Iterable[bytes]) -> list[Position]:
    """Return the position of each record of a batch, given the position of the first record.

    >>> positions((1, 80), [b"one", b"three"])
    [(1, 80), (1, 93)]
    """
    segment, offset = first
    found: list[Position] = []
    for content in contents:
        found.append((segment, offset))
        offset += FRAME_SIZE + len(content)
    return found
