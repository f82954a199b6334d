"""Group commit: a thread writes and syncs, so that the event loop never waits for a disk.

While a group is on its way to the disk the loop collects the next one; it leaves when the last has
been answered. So a hundred senders share one sync, and one alone waits for no timer. Letting the
thread take what is pending by itself gave smaller groups and more switches between threads.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from itertools import islice, zip_longest
from operator import itemgetter
from typing import Final, Literal, NamedTuple

from qkit.errors import LifecycleError, PayloadTooLarge, ReadOnly, StorageError
from qkit.native.log.record import MAX_CONTENT
from qkit.native.log.tail import Position, Tail

__all__ = ["AppendCallback", "Fsync", "Writer", "read_only"]

logger = logging.getLogger("qkit.native")

FULL_DISK_RETRY_SECONDS: Final = 0.2  # between attempts to write deferred records

Fsync = Literal["always", "interval", "never"]
# Called in the loop with the place of a batch's first record, or with the error.
AppendCallback = Callable[["Position | None", "StorageError | None"], None]
# Contents, whom to tell, and whether they must be written in the end: what they tell has happened
# in memory already, so a full disk only puts them off. A plain tuple: one for each message.
_Batch = tuple[Sequence[bytes], "AppendCallback | None", bool]
CONTENTS: Final = itemgetter(0)  # of a batch


def read_only(error: OSError, operation: str) -> ReadOnly:
    """The refusal after a sync failed with ``error``."""
    return ReadOnly(
        f"the log is read-only since the disk failed ({error}): look after the disk, then "
        "close and reopen it",
        backend="native",
        operation=operation,
        cause=error,
    )


class _Group(NamedTuple):
    batches: list[_Batch]
    sync: bool  # a caller waits for the sync
    force: bool  # whatever the policy
    written: list[asyncio.Future[None]]  # of callers that wait for the write alone
    positions: list[Position]  # of the batches that were written, in order


class Writer:
    """Takes batches in the loop's thread and answers there when they are written or synced."""

    def __init__(
        self,
        tail: Tail,
        loop: asyncio.AbstractEventLoop,
        *,
        fsync: Fsync = "always",
        interval: float = 1.0,
        inline: bool = False,
    ) -> None:
        self._tail = tail
        self._loop = loop
        self._fsync = fsync
        self._interval = interval
        # Without syncs the loop writes by itself, which spares two switches of threads for each
        # group; only a rotation, which does sync, is left to the thread. ``inline`` wants it so
        # whatever it costs: virtual time knows nothing of threads.
        self._always_inline = inline
        self._inline = inline or fsync == "never"
        self._pending: list[_Batch] = []
        self._pending_sync = self._pending_force = False
        self._current: _Group | None = None  # on its way
        self._pending_written: list[asyncio.Future[None]] = []
        self._busy = False  # a group is on its way, or about to leave
        self._closed = False
        self._sync_at = float("inf")
        self._queue: queue.SimpleQueue[_Group | None] = queue.SimpleQueue()
        self._finished: asyncio.Future[OSError | None] = loop.create_future()
        self._thread = threading.Thread(target=self._run, name="qkit-log-writer", daemon=True)
        self.group_number = 0  # of the group that is being collected
        self.groups = 0  # written so far
        self.deferred_records = 0  # records that a full disk put off
        self._thread.start()

    # In the loop's thread

    def append(self, contents: Sequence[bytes]) -> asyncio.Future[Position]:
        """Add records, next to each other; the result is the position of the first.

        It is set when they are on the disk, or by the policies ``interval`` and ``never`` when the
        operating system has them: they survive this process, not the machine. Each record is
        atomic, a batch is not: a crash may keep its first records only.

        Call it in the loop's thread. Raises ``ReadOnly`` after a failed sync; the future raises
        ``StorageError`` if the disk refused, and then nothing of the batch is in the log.
        """
        future: asyncio.Future[Position] = self._loop.create_future()
        self.append_with_callback(contents, partial(_answer_append, future))
        return future

    def append_with_callback(
        self, contents: Sequence[bytes], done: AppendCallback, *, force: bool = False
    ) -> None:
        """Add records as ``append`` does; ``done`` is called in the loop, in order of the appends.

        Records may be added to ``contents`` as long as ``group_number`` is what it was.

        Args:
            contents: The records; none, with ``force`` only.
            done: Called with the position of the first record, or the error.
            force: Call it when they are on the disk, whatever the policy.
        """
        if self._tail.broken is not None or self._closed:
            raise self._refusal()
        if force:
            self._pending_force = True
        elif len(contents) != 1 or len(contents[0]) > MAX_CONTENT or not contents[0]:
            _check(contents)
        self._pending.append((contents, done, False))
        self._pending_sync = True
        if not self._busy:
            self._busy = True
            self._loop.call_soon(self._send)

    def append_nowait(self, contents: Sequence[bytes], done: AppendCallback | None = None) -> None:
        """Add records of what has happened: they keep their place in the order.

        They are written with the next group, and synced with the next that is, after
        ``fsync_interval`` at the latest (unless the policy is ``never``). A full disk defers them,
        in front of all that comes later; ``done`` is called once they are written, or when the log
        has become read-only.
        """
        if self._tail.broken is not None or self._closed:
            raise self._refusal()
        if len(contents) != 1 or len(contents[0]) > MAX_CONTENT or not contents[0]:
            _check(contents)
        self._pending.append((contents, done, True))
        if not self._busy:
            self._busy = True
            self._loop.call_soon(self._send)

    async def sync(self) -> None:
        """Wait until all that was appended is on the disk, whatever the policy."""
        future: asyncio.Future[Position] = self._loop.create_future()
        self.append_with_callback((), partial(_answer_append, future), force=True)
        await future

    def written(self) -> asyncio.Future[None] | None:
        """Return a future of when the operating system has all that was appended; ``None``: it has.

        It raises ``StorageError`` if the disk refused a part; what was appended with
        ``append_nowait`` will be written nevertheless, as soon as there is space.
        """
        if self._tail.broken is not None or self._closed:
            raise self._refusal()
        group = self._current
        if not self._pending and group is None:
            return None
        future: asyncio.Future[None] = self._loop.create_future()
        (self._pending_written if self._pending or group is None else group.written).append(future)
        return future

    def _refusal(self) -> Exception:
        if self._closed:
            return LifecycleError("the log is closed", backend="native", operation="append")
        return self._error(self._tail.broken)

    def _send(self) -> None:
        if not self._pending or self._closed:
            self._busy = False
            return
        group = self._current = self._take()
        if self._inline and (self._always_inline or not (group.force or self._tail.full)):
            error = self._write_group(group, one_run=not self._always_inline)
            if error is not None or len(group.positions) == len(group.batches):
                self.groups += 1
                self._answer(group, error)
                return
        self._queue.put(group)

    def _take(self) -> _Group:
        group = _Group(
            self._pending, self._pending_sync, self._pending_force, self._pending_written, []
        )
        self.group_number += 1
        self._pending, self._pending_written = [], []
        self._pending_sync = self._pending_force = False
        self.deferred_records = 0
        return group

    def _answer(self, group: _Group, error: OSError | None) -> None:
        """Call the callbacks of a group; ``error`` is why not all of its batches were written."""
        self._current = None
        failure = None if error is None else self._defer(group, error)
        for (_, done, must), position in zip_longest(group.batches, group.positions):
            if done is None or (position is None and must and self.deferred_records):
                continue
            try:
                done(position, None if position is not None else failure)
            except Exception:  # a mistake in one must not leave the others without an answer
                logger.exception("a callback of the log failed")
        if group.written:
            _settle(group.written, failure)
        if self.deferred_records and not self._pending_sync:
            # Only what the disk refused a moment ago: give it time to find some space.
            self._busy = False
            self._loop.call_later(FULL_DISK_RETRY_SECONDS, self._retry)
        else:
            # Behind those whom this wakes, so that their next batches go along.
            self._loop.call_soon(self._send)

    def _defer(self, group: _Group, error: OSError) -> StorageError:
        """Keep what must be written although the disk refused it; return the error of the rest."""
        if self._tail.broken is None:
            deferred = [batch for batch in group.batches[len(group.positions) :] if batch[2]]
            # In front of what came later, so that the log tells things in the order they happened.
            self._pending[:0] = deferred
            self.deferred_records += sum(len(batch[0]) for batch in deferred)
        return self._error(error)

    def _retry(self) -> None:
        if not self._busy:
            self._busy = True
            self._send()

    def _error(self, error: OSError | None) -> StorageError:
        if self._tail.broken is not None:
            return read_only(self._tail.broken, "append")
        return StorageError(
            f"nothing was stored, the disk refused it ({error}): free some space and try again",
            backend="native",
            operation="append",
            cause=error,
        )

    async def close(self) -> None:
        """Write what is pending, sync by the policy, end the thread; again: wait for it too.

        Raises ``ReadOnly`` if the last sync fails.
        """
        if not self._closed:
            self._closed = True
            if self._pending:
                self._queue.put(self._take())
            self._queue.put(None)
        try:
            error = await asyncio.shield(self._finished)
        finally:
            self._thread.join()
        if error is not None:
            raise self._error(error)

    # In the writer's thread

    def _run(self) -> None:
        error: OSError | None = None
        try:
            while (group := self._next()) is not None:
                self.groups += 1
                self._call(self._answer, group, self._write_group(group))
            self._tail.close(sync=self._fsync != "never")
        except OSError as failure:
            error = failure
        finally:
            self._call(self._finish, error)

    def _finish(self, error: OSError | None) -> None:
        if not self._finished.done():
            self._finished.set_result(error)

    def _call(self, function: Callable[..., None], *values: object) -> None:
        with suppress(RuntimeError):  # the loop was closed without ``close``: nobody listens
            self._loop.call_soon_threadsafe(function, *values)

    def _next(self) -> _Group | None:
        while True:
            if self._sync_at == float("inf"):
                return self._queue.get()
            wait = self._sync_at - time.monotonic()
            if wait > 0:
                with suppress(queue.Empty):
                    return self._queue.get(timeout=wait)
            self._sync_at = float("inf")
            with suppress(OSError):  # the tail is broken then, and the next to come are told so
                self._sync()

    def _sync(self) -> None:
        if self._tail.broken is None:
            self._tail.sync()

    def _write_group(self, group: _Group, *, one_run: bool = False) -> OSError | None:
        """Write the batches that are not written yet, as many at a time as a segment has room for.

        Returns:
            Why some could not be written. With ``one_run``, some may be left without an error.
        """
        tail, batches, positions = self._tail, group.batches, group.positions
        sync = group.force or (self._fsync == "always" and group.sync)
        try:
            while len(positions) < len(batches):
                if tail.broken is not None:
                    return tail.broken
                run = tail.write(map(CONTENTS, islice(batches, len(positions), None)))
                if sync:
                    if group.written and len(positions) + len(run) == len(batches):
                        self._call(_settle, group.written, None)
                    # Once a part was confirmed as written, a failed sync must not cut it.
                    tail.sync(cut_on_error=None if group.written else run[0][1])
                    self._sync_at = float("inf")
                elif self._sync_at == float("inf") and self._fsync != "never":
                    self._sync_at = time.monotonic() + self._interval
                positions += run
                if one_run:
                    break
        except OSError as error:
            return error
        except Exception as error:
            # A mistake of qkit's own, or no memory: what is in the file is not known any more,
            # and callers must hear of it rather than wait for a thread that has ended.
            tail.broken = OSError(errno.EIO, f"the writer failed: {error!r}")
            return tail.broken
        return None


def _answer_append(
    future: asyncio.Future[Position], position: Position | None, error: StorageError | None
) -> None:
    if future.done():
        return
    if position is not None:
        future.set_result(position)
    elif error is not None:
        future.set_exception(error)


def _check(contents: Sequence[bytes]) -> None:
    if not contents or not all(contents):
        raise ValueError("a batch has at least one record, and a record at least its type")
    if sum(map(len, contents)) > MAX_CONTENT:
        raise PayloadTooLarge(
            f"a batch of more than {MAX_CONTENT} bytes: append it in parts",
            backend="native",
            operation="append",
        )


def _settle(futures: list[asyncio.Future[None]], error: StorageError | None) -> None:
    for future in futures:
        if future.done():
            continue
        if error is None:
            future.set_result(None)
        else:
            future.set_exception(error)
            future.exception()  # perhaps nobody waits any more, and then it need not be shown
