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
from typing import Final, Literal, NamedTuple

from qkit.errors import LifecycleError, ReadOnly, StorageError
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
    sync: bool  # somebody waits for the sync
    force: bool  # whatever the policy
    written: list[asyncio.Future[None]]  # of those who wait for the write alone


class _Outcome(NamedTuple):
    batches: list[_Batch]
    positions: list[Position]
    error: OSError | None


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

    def append(
        self, contents: Sequence[bytes], done: AppendCallback, *, force: bool = False
    ) -> None:
        """Add a batch, confirmed when it is as safe as the policy says; see ``Log.append``.

        ``force``: when it is on the disk, whatever the policy says.
        """
        if self._tail.broken is not None or self._closed:
            raise self._refusal()
        self._pending.append((contents, done, False))
        self._pending_sync = True
        if force:
            self._pending_force = True
        if not self._busy:
            self._busy = True
            self._loop.call_soon(self._send)

    def append_nowait(self, contents: Sequence[bytes], done: AppendCallback | None = None) -> None:
        """Add a batch that will be written in the end; see ``Log.append_nowait``."""
        if self._tail.broken is not None or self._closed:
            raise self._refusal()
        self._pending.append((contents, done, True))
        if not self._busy:
            self._busy = True
            self._loop.call_soon(self._send)

    def written(self) -> asyncio.Future[None] | None:
        """What comes true when everything added so far is written; ``None`` if it is."""
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
        group = self._take()
        self._current = group
        if self._inline and (self._always_inline or not (group.force or self._tail.full)):
            outcomes = self._write_group(group, one_run=not self._always_inline)
            rest = group.batches[sum(len(outcome.batches) for outcome in outcomes) :]
            if not rest:
                self.groups += 1
                self._answer(group, outcomes)
                return
            self._resolve(outcomes)
            group = group._replace(batches=rest)
        self._queue.put(group)

    def _take(self) -> _Group:
        group = _Group(
            self._pending, self._pending_sync, self._pending_force, self._pending_written
        )
        self.group_number += 1
        self._pending, self._pending_written = [], []
        self._pending_sync = self._pending_force = False
        self.deferred_records = 0
        return group

    def _answer(self, group: _Group, outcomes: list[_Outcome]) -> None:
        self._current = None
        error = self._resolve(outcomes)
        _settle(group.written, error)
        if self.deferred_records and not self._pending_sync:
            # Only what the disk refused a moment ago: give it time to find some space.
            self._busy = False
            self._loop.call_later(FULL_DISK_RETRY_SECONDS, self._retry)
        else:
            # Behind those whom this wakes, so that their next batches go along.
            self._loop.call_soon(self._send)

    def _retry(self) -> None:
        if not self._busy:
            self._busy = True
            self._send()

    def _resolve(self, outcomes: list[_Outcome]) -> StorageError | None:
        failure: StorageError | None = None
        for batches, positions, error in outcomes:
            if error is None:
                for (_, done, _), position in zip(batches, positions, strict=True):
                    if done is not None:
                        _tell(done, position, None)
            else:
                failure = self._answer_failed(batches, error)
        return failure

    def _answer_failed(self, batches: list[_Batch], error: OSError) -> StorageError:
        failure = self._error(error)
        deferred = [batch for batch in batches if batch[2]] if self._tail.broken is None else []
        # In front of what came later, so that the log tells things in the order they happened.
        self._pending[:0] = deferred
        self.deferred_records += sum(len(batch[0]) for batch in deferred)
        for _, done, must in batches:
            if done is not None and not (must and deferred):
                _tell(done, None, failure)
        return failure

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

    def _write_group(self, group: _Group, *, one_run: bool = False) -> list[_Outcome]:
        outcomes: list[_Outcome] = []
        while group.batches:
            outcome = self._write_run(group)
            outcomes.append(outcome)
            if one_run:
                break
            group = group._replace(batches=group.batches[len(outcome.batches) :])
        return outcomes

    def _write_run(self, group: _Group) -> _Outcome:
        """Write the first batches of a group: as many as the segment has room for."""
        batches = group.batches
        if self._tail.broken is not None:
            return _Outcome(batches, [], self._tail.broken)
        try:
            positions = self._tail.write([batch[0] for batch in batches])
        except OSError as error:
            return _Outcome(batches, [], error)
        except Exception as error:
            # A mistake of qkit's own, or no memory: what is in the file is not known any more,
            # and those who wait must hear of it rather than wait for a thread that is gone.
            self._tail.broken = OSError(errno.EIO, f"the writer failed: {error!r}")
            return _Outcome(batches, [], self._tail.broken)
        run = batches[: len(positions)]
        return _Outcome(run, positions, self._settle(group, run, positions))

    def _settle(
        self, group: _Group, run: list[_Batch], positions: list[Position]
    ) -> OSError | None:
        """Sync what was written if somebody waits for it, else see to it that it will be."""
        if not (group.force or (self._fsync == "always" and group.sync)):
            if self._fsync != "never" and self._sync_at == float("inf"):
                self._sync_at = time.monotonic() + self._interval
            return None
        if group.written and len(run) == len(group.batches):
            self._call(_settle, group.written, None)
        try:
            self._tail.sync()
        except OSError as error:
            if not group.written:  # else some of it was confirmed as written
                self._tail.truncate_to(positions[0][1])
            return error
        self._sync_at = float("inf")
        return None


def _tell(done: AppendCallback, position: Position | None, error: StorageError | None) -> None:
    try:
        done(position, error)
    except Exception:  # a mistake in one must not leave the others without an answer
        logger.exception("a callback of the log failed")


def _settle(futures: list[asyncio.Future[None]], error: StorageError | None) -> None:
    for future in futures:
        if future.done():
            continue
        if error is None:
            future.set_result(None)
        else:
            future.set_exception(error)
            future.exception()  # perhaps nobody waits any more, and then it need not be shown
