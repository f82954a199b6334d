"""``Tail``: the active segment, at the end of the log. Blocking; not thread-safe."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Final

from qkit.native.log.disk import Disk
from qkit.native.log.segment import (
    FRAME_SIZE,
    HEADER_SIZE,
    WRITE_CHUNK_BYTES,
    Header,
    frame,
    mark,
    name_of,
    seal,
    write_all,
    write_segment,
)

__all__ = ["Position", "Tail"]

Position = tuple[int, int]  # segment and offset of a frame

MAX_WRITE_BYTES: Final = 8 * WRITE_CHUNK_BYTES  # a larger group takes several writes


class Tail:
    """Appender to the active segment, which also creates and seals segments.

    A segment is created by the first write that needs it. ``broken`` is the error of a failed sync
    or of a failed write that could not be undone. Once it is set, nothing is written. A failed
    fsync is never retried, because the success of a later call says nothing about the earlier
    bytes.
    """

    def __init__(
        self,
        disk: Disk,
        log_id: bytes,
        number: int,
        *,
        segment_bytes: int,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._disk = disk
        self._log_id = log_id
        self._segment_bytes = segment_bytes
        self._wall = wall
        self._fd: int | None = None
        self._sealed = True
        self._salt = 0
        self._offset = 0
        self._synced = 0
        self._marked = 0
        self.number: int = number  # of the active segment; if there is none, of the last one
        self.full_now: bool = False  # set by ``Log.rotate``
        self.broken: OSError | None = None

    @property
    def size(self) -> int:
        """Size of the active segment in bytes; 0 if there is none."""
        return 0 if self._sealed else self._offset

    @property
    def empty(self) -> bool:
        """Whether the active segment contains no record."""
        return self._sealed or self._offset <= HEADER_SIZE

    def resume(self, header: Header, fd: int, offset: int) -> None:
        """Continue to append to a segment whose first ``offset`` bytes are on disk."""
        self._fd, self._salt, self._sealed = fd, header.salt, False
        self._offset = self._synced = offset
        self._marked = 0
        self.number = header.number

    @property
    def full(self) -> bool:
        """Whether the next write starts a new segment."""
        return self._sealed or self.full_now or self._offset >= self._segment_bytes

    def write(self, batches: Iterable[Sequence[bytes]]) -> list[Position]:
        """Write batches until the segment is full or ``MAX_WRITE_BYTES`` are reached.

        After an ``OSError`` the file contains none of them.

        Returns:
            The position of the first record of each batch that was written.
        """
        if self._offset >= self._segment_bytes or self._sealed or self.full_now:
            self._rotate()
        synced, offset = self._synced, self._offset
        stop = min(offset + MAX_WRITE_BYTES, self._segment_bytes)
        contents: list[bytes] = []
        if synced > self._marked:
            contents.append(mark(synced, self._wall()))
            offset += FRAME_SIZE + len(contents[0])
        positions: list[Position] = []
        for batch in batches:
            positions.append((self.number, offset))
            contents += batch
            offset += FRAME_SIZE * len(batch) + sum(map(len, batch))
            if offset >= stop:
                break
        self._put(contents)
        self._marked = synced
        return positions

    def _put(self, contents: Iterable[bytes]) -> None:
        """Append records; after an ``OSError`` the file contains none of them."""
        start, fd = self._offset, self._fd
        assert fd is not None
        parts: list[bytes] = []
        end = frame(contents, self._salt, start, parts)
        try:
            write_all(self._disk, fd, parts, start)
        except OSError as error:
            try:
                self._disk.truncate(fd, start)
            except OSError:
                # After a shorter write, the rest of the failed write would still be read as frames.
                self.broken = error
            raise
        self._offset = end

    def sync(self, cut_on_error: int | None = None) -> None:
        """Sync the segment to disk.

        Args:
            cut_on_error: Offset at which to truncate the segment if the sync fails, so that a
                reopened log does not contain unconfirmed records.
        """
        offset, fd = self._offset, self._fd
        if offset == self._synced:
            return
        assert fd is not None
        try:
            self._disk.sync(fd)
        except OSError as error:
            self.broken = error
            if cut_on_error is not None:
                with suppress(OSError):
                    self._disk.truncate(fd, cut_on_error)
            raise
        self._synced = offset

    def _rotate(self) -> None:
        """Seal the active segment and start the next.

        The old segment is synced before the new one exists, regardless of the fsync policy. So a
        segment with a successor is complete, and a gap in it is damage.
        """
        if not self._sealed:
            self._put((seal(),))
            self._sealed = True
            self.sync()
        header = Header(self.number + 1, 0, self._log_id)
        name, fd, _ = write_segment(self._disk, header, (), sealed=False)
        try:
            self._broken_on_error(self._disk.sync, fd)
            self._disk.rename(name, name_of(header.number))
        except OSError:
            self._disk.close_file(fd)
            raise
        if self._fd is not None:
            self._disk.close_file(self._fd)
        self.resume(header, fd, HEADER_SIZE)
        self.full_now = False
        self._broken_on_error(self._disk.sync_directory)

    def _broken_on_error(self, sync: Callable[..., None], *args: int) -> None:
        try:
            sync(*args)
        except OSError as error:
            self.broken = error
            raise

    def close(self, *, sync: bool) -> None:
        """Close the segment. If ``sync`` is true and it is not broken, sync and mark it first."""
        if self._fd is None:
            return
        try:
            if sync and self.broken is None:
                self.sync()
                self._mark_end()
        finally:
            self._disk.close_file(self._fd)
            self._fd = None

    def _mark_end(self) -> None:
        """Append a mark that all records are on disk; skip it if the disk is full or fails."""
        if self._sealed or self._synced <= self._marked:
            return
        with suppress(OSError):
            self._put((mark(self._synced, self._wall()),))
            self.sync()
