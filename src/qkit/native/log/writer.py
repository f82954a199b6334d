"""``Writer``: group commit in a thread, so that the event loop does not wait for syncs.

While the thread writes one group, the loop collects the next group, and passes it to the thread
when the first is finished. So a hundred senders share one sync, and a single sender does not wait
for a timer. If the thread itself took pending batches, groups would be smaller and thread switches
more frequent.
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

logger: logging.Logger = logging.getLogger("qkit.native")

FULL_DISK_RETRY_SECONDS: Final = 0.2  # time between attempts to write deferred records

Fsync = Literal["always", "interval", "never"]
# Called in the loop with the position of a batch's first record, or with the error.
AppendCallback = Callable[["Position | None", "StorageError | None"], None]
# Contents, callback, and whether the batch must be written eventually. Such a batch records changes
# that are already made in memory, so a full disk only defers it. A plain tuple, because there may
# be one for each message.
_Batch = tuple[Sequence[bytes], "AppendCallback | None", bool]
CONTENTS: Final = itemgetter(0)  # of a batch


def read_only(error: OSError, operation: str) -> ReadOnly:
    """Return the error for a log that became read-only because of ``error``."""
    return ReadOnly(
        f"the log is read-only because the disk failed ({error}): repair the disk, then "
        "close and reopen the log",
        backend="native",
        operation=operation,
        cause=error,
    )


class _Group(NamedTuple):
    batches: list[_Batch]
    sync: bool  # callers wait for the records to be confirmed
    force: bool  # sync regardless of the policy
    written: list[asyncio.Future[None]]  # of callers that wait only for the write
    positions: list[Position]  # of the batches that were written, in order


class Writer:
    """Writer that appends batches of records to the log.

    Batches are added in the loop's thread; their callbacks run there once they are written or
    synced.

    Args:
        tail: Active segment.
        loop: Running event loop.
        fsync: When to sync; see ``Log.open``. Default: ``"always"``.
        interval: Maximum time until written records are synced, in seconds. Default: 1.
        inline: Write in the event loop, for tests with virtual time. Default: false.
    """

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
        # Without syncs, the loop itself writes, which saves two thread switches for each group.
        # Only syncs, such as that of a rotation, are left to the thread. With ``inline``, even
        # these run in the loop, because virtual time would advance while the thread works.
        self._always_inline = inline
        self._inline = inline or fsync == "never"
        self._pending: list[_Batch] = []
        self._pending_sync = self._pending_force = False
        self._current: _Group | None = None  # being written
        self._pending_written: list[asyncio.Future[None]] = []
        self._busy = False  # a group is being written, or is scheduled to be
        self._closed = False
        self._sync_at = float("inf")
        self._queue: queue.SimpleQueue[_Group | None] = queue.SimpleQueue()
        self._finished: asyncio.Future[OSError | None] = loop.create_future()
        self._thread = threading.Thread(target=self._run, name="qkit-log-writer", daemon=True)
        self.group_number: int = 0  # of the group that is being collected
        self.groups: int = 0  # number of groups written so far
        self.deferred_records: int = 0  # records that wait for space on the disk
        self._thread.start()

    # In the loop's thread

    def append(self, contents: Sequence[bytes]) -> asyncio.Future[Position]:
        """Append records one after another. Call this in the loop's thread.

        Each record is atomic. A batch is not: a crash may keep only its first records.

        Returns:
            A future for the position of the first record. It is done when the records are on disk
            or, with the policies ``interval`` and ``never``, when the operating system has them:
            then they survive a crash of this process, but not of the machine. It raises
            ``StorageError`` if the write failed; then the log contains no record of the batch.

        Raises:
            ReadOnly: The log is read-only because of an earlier disk error.
        """
        future: asyncio.Future[Position] = self._loop.create_future()
        self.append_with_callback(contents, partial(_answer_append, future))
        return future

    def append_with_callback(
        self, contents: Sequence[bytes], done: AppendCallback, *, force: bool = False
    ) -> None:
        """Append records as ``append`` does, and call a function when they are confirmed.

        Callbacks run in the loop, in the order of the appends. Until ``group_number`` changes, the
        caller may add records to ``contents``.

        Args:
            contents: Records to append. May be empty if ``force`` is true.
            done: Called with the position of the first record, or with the error.
            force: Sync before the callback, regardless of the policy. Default: false.
        """
        if self._tail.broken is not None or self._closed:
            raise self._append_error()
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
        """Append records of changes that are already made in memory, in order.

        The records are written with the next group. They are synced with the next group that is
        synced, after ``fsync_interval`` at the latest, unless the policy is ``never``. While the
        disk is full they are deferred, and later records wait for them. ``done`` is called once
        they are written, or when the log has become read-only.
        """
        if self._tail.broken is not None or self._closed:
            raise self._append_error()
        if len(contents) != 1 or len(contents[0]) > MAX_CONTENT or not contents[0]:
            _check(contents)
        self._pending.append((contents, done, True))
        if not self._busy:
            self._busy = True
            self._loop.call_soon(self._send)

    async def sync(self) -> None:
        """Wait until all appended records are on disk, regardless of the policy."""
        future: asyncio.Future[Position] = self._loop.create_future()
        self.append_with_callback((), partial(_answer_append, future), force=True)
        await future

    def written(self) -> asyncio.Future[None] | None:
        """Return a future that is done once the operating system has all appended records.

        The future raises ``StorageError`` if a write failed. Records of ``append_nowait`` are still
        written as soon as there is space. Returns ``None`` if all records are already written.
        """
        if self._tail.broken is not None or self._closed:
            raise self._append_error()
        group = self._current
        if not self._pending and group is None:
            return None
        future: asyncio.Future[None] = self._loop.create_future()
        (self._pending_written if self._pending or group is None else group.written).append(future)
        return future

    def _append_error(self) -> Exception:
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
        """Call the callbacks of a group. ``error`` is why some batches were not written."""
        self._current = None
        failure = None if error is None else self._defer(group, error)
        for (_, done, must), position in zip_longest(group.batches, group.positions):
            if done is None or (position is None and must and self.deferred_records):
                continue
            try:
                done(position, None if position is not None else failure)
            except Exception:  # the other callbacks must run despite a bug in this one
                logger.exception("a log callback failed")
        if group.written:
            _settle(group.written, failure)
        if self.deferred_records and not self._pending_sync:
            # Only deferred records are pending: wait before trying again.
            self._busy = False
            self._loop.call_later(FULL_DISK_RETRY_SECONDS, self._retry)
        else:
            # Run after the tasks that the callbacks woke, so that the next group includes their
            # next batches.
            self._loop.call_soon(self._send)

    def _defer(self, group: _Group, error: OSError) -> StorageError:
        """Keep the batches that must be written eventually; return the error for the others."""
        if self._tail.broken is None:
            deferred = [batch for batch in group.batches[len(group.positions) :] if batch[2]]
            # Put them before later batches, so that the log keeps the order of the changes.
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
            f"the write to disk failed and nothing was stored ({error}): free some space and "
            "try again",
            backend="native",
            operation="append",
            cause=error,
        )

    async def close(self) -> None:
        """Write pending records, sync them unless the policy is ``never``, and stop the thread.

        Idempotent.

        Raises:
            ReadOnly: The last sync failed.
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
        with suppress(RuntimeError):  # the loop was closed before the writer
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
            with suppress(OSError):  # the tail is now broken, so the next append raises the error
                self._sync()

    def _sync(self) -> None:
        if self._tail.broken is None:
            self._tail.sync()

    def _write_group(self, group: _Group, *, one_run: bool = False) -> OSError | None:
        """Write the remaining batches of a group, as many at a time as fit into the segment.

        Returns:
            The error if some batches could not be written, otherwise ``None``. With ``one_run``,
            only one write is made, so batches may remain without an error.
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
                    # Once callers know that records are written, a failed sync must not truncate
                    # them.
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
            # A bug in qkit, or a lack of memory: the content of the file is unknown. Callers must
            # get an error instead of waiting for a thread that has ended.
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
        raise ValueError(
            "a batch must have at least one record, and a record at least its type byte"
        )
    if sum(map(len, contents)) > MAX_CONTENT:
        raise PayloadTooLarge(
            f"a batch may have at most {MAX_CONTENT} bytes, "
            f"got {sum(map(len, contents))}: split it",
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
            future.exception()  # avoid a "never retrieved" warning if the caller was cancelled
