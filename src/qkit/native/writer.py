"""Group commit: a thread writes and syncs, so that the event loop never waits for a disk.

While a group is on its way to the disk the loop collects the next one; it leaves when the last has
been answered. So a hundred senders share one sync, and one alone waits for no timer. Letting the
thread take what is pending by itself gave smaller groups and more switches between threads.
"""

from __future__ import annotations

import asyncio
import errno
import queue
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Literal, NamedTuple

from qkit.errors import LifecycleError
from qkit.native.disk import StorageError
from qkit.native.tail import Position, Tail

__all__ = ["Fsync", "ReadOnly", "Writer"]

Fsync = Literal["always", "interval", "never"]
# Contents, who waits for them, and whether for the sync or only for the write. A plain tuple:
# there is one for each message.
_Batch = tuple[Sequence[bytes], "asyncio.Future[Position] | None", bool]


class ReadOnly(StorageError):
    """A sync failed, so it is not known what is on the disk: the log takes nothing more.

    What was confirmed before is safe. Look after the disk, then close the log and open it again.
    """

    @classmethod
    def since(cls, error: OSError, operation: str) -> ReadOnly:
        """The refusal after ``error``."""
        return cls(
            f"the log is read-only since the disk failed ({error}): look after the disk, then "
            "close and reopen it",
            backend="native",
            operation=operation,
            cause=error,
        )


class _Group(NamedTuple):
    batches: list[_Batch]
    sync: bool  # somebody waits for the sync
    early: bool  # somebody waits for the write alone


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
        on_lost: Callable[[StorageError, Sequence[bytes]], None] | None = None,
    ) -> None:
        self._tail = tail
        self._loop = loop
        self._fsync = fsync
        self._interval = interval
        self._on_lost = on_lost
        # Without syncs the loop writes by itself, which spares two switches of threads for each
        # group; only a rotation, which does sync, is left to the thread.
        self._inline = fsync == "never"
        self._pending: list[_Batch] = []
        self._pending_sync = self._pending_early = False
        self._busy = False  # a group is on its way, or about to leave
        self._closed = False
        self._sync_at = float("inf")
        self._queue: queue.SimpleQueue[_Group | None] = queue.SimpleQueue()
        self._finished: asyncio.Future[OSError | None] = loop.create_future()
        self._thread = threading.Thread(target=self._run, name="qkit-log-writer", daemon=True)
        self.groups = 0  # written so far
        self.lost = 0  # records that nobody waited for and that could not be written
        self._thread.start()

    # In the loop's thread

    def append(self, contents: Sequence[bytes], sync: bool) -> asyncio.Future[Position]:
        """Add a batch; see ``Log.append``."""
        if self._tail.broken is not None or self._closed:
            raise self._refusal()
        future: asyncio.Future[Position] = self._loop.create_future()
        self._pending.append((contents, future, sync))
        if sync:
            self._pending_sync = True
        else:
            self._pending_early = True
        if not self._busy:
            self._busy = True
            self._loop.call_soon(self._send)
        return future

    def append_nowait(self, contents: Sequence[bytes]) -> None:
        """Add a batch that nobody waits for; see ``Log.append_nowait``."""
        if self._tail.broken is not None or self._closed:
            raise self._refusal()
        self._pending.append((contents, None, False))
        if not self._busy:
            self._busy = True
            self._loop.call_soon(self._send)

    def _refusal(self) -> Exception:
        if self._closed:
            return LifecycleError("the log is closed", backend="native", operation="append")
        return self._error(self._tail.broken)

    def _send(self) -> None:
        if not self._pending or self._closed:
            self._busy = False
            return
        group = self._take()
        if self._inline and not self._tail.full:
            outcome = self._write_run(group)
            rest = group.batches[len(outcome.batches) :]
            if not rest:
                self.groups += 1
                self._answer([outcome])
                return
            self._resolve([outcome])
            group = group._replace(batches=rest)
        self._queue.put(group)

    def _take(self) -> _Group:
        group = _Group(self._pending, self._pending_sync, self._pending_early)
        self._pending, self._pending_sync, self._pending_early = [], False, False
        return group

    def _answer(self, outcomes: list[_Outcome]) -> None:
        self._resolve(outcomes)
        # Behind those whom it wakes, so that their next batches go along.
        self._loop.call_soon(self._send)

    def _resolve(self, outcomes: list[_Outcome]) -> None:
        for batches, positions, error in outcomes:
            if error is None:
                for (_, future, _), position in zip(batches, positions, strict=True):
                    if future is not None and not future.done():
                        future.set_result(position)
            else:
                self._answer_failed(batches, error)

    def _answer_failed(self, batches: list[_Batch], error: OSError) -> None:
        for contents, future, _ in batches:
            if future is None:
                self.lost += len(contents)
                if self._on_lost is not None:
                    self._on_lost(self._error(error), contents)
            elif not future.done():
                future.set_exception(self._error(error))

    def _answer_written(self, batches: list[_Batch], positions: list[Position]) -> None:
        for (_, future, sync), position in zip(batches, positions, strict=True):
            if future is not None and not sync and not future.done():
                future.set_result(position)

    def _error(self, error: OSError | None) -> StorageError:
        if self._tail.broken is not None:
            return ReadOnly.since(self._tail.broken, "append")
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
                self._call(self._answer, self._write_group(group))
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

    def _write_group(self, group: _Group) -> list[_Outcome]:
        outcomes: list[_Outcome] = []
        while group.batches:
            outcome = self._write_run(group)
            outcomes.append(outcome)
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
        if self._fsync != "always" or not group.sync:
            if self._fsync != "never" and self._sync_at == float("inf"):
                self._sync_at = time.monotonic() + self._interval
            return None
        if group.early:
            self._call(self._answer_written, run, positions)
        try:
            self._tail.sync()
        except OSError as error:
            self._tail.take_back(positions[0][1])
            return error
        self._sync_at = float("inf")
        return None
