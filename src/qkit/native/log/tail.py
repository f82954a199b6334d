"""The end of the log, where records are added: one open segment. Blocking, and without threads."""

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
    write_segment,
    write_whole,
)

__all__ = ["Position", "Tail"]

Position = tuple[int, int]  # segment and offset of a frame

MAX_WRITE_BYTES: Final = 8 * WRITE_CHUNK_BYTES  # the rest of a group takes a further write


class Tail:
    """Adds batches to the active segment, which it makes, seals and replaces.

    A segment is created by the first write that needs it. ``broken`` is the error of a failed
    sync (or of a failed write that could not be taken back): from then on nothing is written. What
    a later fsync would report is no longer about those bytes, so it is never called again.
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
        self.number = number  # of the active segment, or of the last one
        self.full_now = False  # asked for by ``Log.rotate``
        self.broken: OSError | None = None

    @property
    def size(self) -> int:
        """How long the active segment is."""
        return 0 if self._sealed else self._offset

    @property
    def empty(self) -> bool:
        """Whether nothing was written to the active segment."""
        return self._sealed or self._offset <= HEADER_SIZE

    def resume(self, header: Header, fd: int, offset: int) -> None:
        """Go on in a segment whose ``offset`` bytes are on disk."""
        self._fd, self._salt, self._sealed = fd, header.salt, False
        self._offset = self._synced = offset
        self._marked = 0
        self.number = header.number

    @property
    def full(self) -> bool:
        """Whether the next write begins another segment."""
        return self._sealed or self.full_now or self._offset >= self._segment_bytes

    def write(self, batches: Iterable[Sequence[bytes]]) -> list[Position]:
        """Hand batches to the operating system; return the place of each one's first record.

        Stops when the segment is full and after some megabytes: the answer is as long as what was
        written. On an ``OSError`` nothing of it is left in the file.
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
        """Write records behind the others; after an ``OSError`` none of them is in the file."""
        start, fd = self._offset, self._fd
        assert fd is not None
        parts: list[bytes] = []
        end = frame(contents, self._salt, start, parts)
        try:
            write_whole(self._disk, fd, parts, start)
        except OSError as error:
            try:
                self._disk.truncate(fd, start)
            except OSError:
                # Frames of the failed write would come back after the next, shorter one.
                self.broken = error
            raise
        self._offset = end

    def sync(self, cut_on_error: int | None = None) -> None:
        """Return when everything written is on the disk.

        Args:
            cut_on_error: Where to cut the segment if that fails, so that a reopened log does not
                show what is in doubt.
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
        """Seal the active segment and begin the next.

        The old one is on disk before the new one exists, whatever the policy: a segment with a
        successor is complete, and anything else found in it is damage.
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
        """Sync and mark the segment as whole, if nothing speaks against it, and close it."""
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
        """Prove to the next start that all before was on disk; without space it does without."""
        if self._sealed or self._synced <= self._marked:
            return
        with suppress(OSError):
            self._put((mark(self._synced, self._wall()),))
            self.sync()
