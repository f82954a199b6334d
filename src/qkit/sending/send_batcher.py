"""``SendBatcher``: sends to one queue, with deadline, retries and batching.

A send goes out at once while no publish to its queue is in flight; sends that arrive meanwhile
share the next round trip. So a lone send never waits, and a hundred at once cost two round trips.
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple

from qkit._internal.coalescer import Coalescer
from qkit._internal.deadlines import Deadline, DeadlineTimer
from qkit._internal.logging import logger
from qkit._internal.retry import Backoff, retry_while_unavailable
from qkit.errors import BackendUnavailable, CircuitOpen, PartialSend, QueueError
from qkit.message import Envelope, Sent
from qkit.sending.guarded_backend import GuardedBackend

__all__ = ["SendBatcher"]

MAX_BATCH_MESSAGES = 1_000

Prepare = Callable[[], Awaitable[None]]


class _Waiting(NamedTuple):
    """A send that waits for the next publish."""

    envelopes: Sequence[Envelope]
    result: asyncio.Future[list[Sent]]
    end: float  # of the loop's time, when its sender gives up


class SendBatcher:
    """Sends envelopes to one queue; never hangs, never reports what was not confirmed."""

    def __init__(self, guarded: GuardedBackend, queue: str, backoff: Backoff) -> None:
        self._guarded = guarded
        self._publish = guarded.backend.publish
        self._timer = guarded.timer
        self._queue = queue
        self._backoff = backoff
        self._coalescer = Coalescer(
            self._send_group,
            max_size=MAX_BATCH_MESSAGES,
            size=_size,
            name=f"qkit send {queue}",
        )
        self._expiry: asyncio.TimerHandle | None = None
        self._in_progress = 0
        self._idle: asyncio.Event | None = None  # set when nothing is in progress any more

    async def send(
        self, envelopes: Sequence[Envelope], *, prepare: Prepare | None = None
    ) -> list[Sent]:
        """Return once the broker has confirmed the envelopes.

        Args:
            envelopes: The messages.
            prepare: Called first, under the same deadline: it declares the queue.

        Raises:
            SendTimeout: After the deadline.
            CircuitOpen: At once, while the circuit is open.
            PartialSend: When only some were accepted.
            QueueError: What the backend raised.
        """
        deadline = Deadline(self._timer)
        self._in_progress += 1
        try:
            failure: BackendUnavailable | None = None
            if prepare is None:
                try:
                    if self._coalescer.busy:
                        return await self._join(envelopes, deadline.end)
                    with deadline:
                        call = self._guarded.call(deadline, self._publish, self._queue, envelopes)
                        sent = await self._coalescer.run_now(call)
                    self._guarded.connection.record_message()
                    return sent
                except CircuitOpen:
                    raise
                except BackendUnavailable as error:
                    failure = error
                except TimeoutError:
                    if not deadline.expired:
                        raise
                    raise self._guarded.timeout_error() from None
            return await self._retry_until(deadline.end, envelopes, prepare, failure)
        except QueueError as error:
            self._locate(error, envelopes)
            raise
        finally:
            self._in_progress -= 1
            if self._idle is not None and not self._in_progress:
                self._idle.set()

    async def drain(self) -> None:
        """Wait until no send is in progress any more; the caller sets the deadline."""
        while self._in_progress:
            self._idle = asyncio.Event()
            await self._idle.wait()

    async def close(self) -> None:
        """Give up what is still in progress: its senders get ``SendTimeout``."""
        for waiting in await self._coalescer.close():
            if not waiting.result.done():
                waiting.result.set_exception(self._guarded.timeout_error())
        if self._expiry is not None:
            self._expiry.cancel()
            self._expiry = None

    @property
    def in_progress(self) -> bool:
        """Whether a send has not returned yet."""
        return self._in_progress > 0

    def _join(self, envelopes: Sequence[Envelope], end: float) -> Awaitable[list[Sent]]:
        """Wait for the next publish. One timer serves all that wait; ``end`` is the sender's own.

        A deadline for each would cost as much as the rest of the send.
        """
        self._guarded.breaker.check()
        loop = self._timer.loop
        waiting = _Waiting(envelopes, loop.create_future(), end)
        self._coalescer.post(waiting)
        if self._expiry is None:
            self._expiry = loop.call_at(end, self._expire)
        return waiting.result

    def _expire(self) -> None:
        """Fail the sends whose time is up. They wait in the order of their ends."""
        self._expiry = None
        now = self._timer.loop.time()
        for waiting in self._coalescer.pending():
            if waiting.result.done():
                continue
            if waiting.end > now:
                self._expiry = self._timer.loop.call_at(waiting.end, self._expire)
                return
            waiting.result.set_exception(self._guarded.timeout_error())

    async def _send_group(self, group: list[_Waiting]) -> None:
        """Publish what waited, and give each sender its own result."""
        group = [waiting for waiting in group if not waiting.result.done()]
        envelopes = [envelope for waiting in group for envelope in waiting.envelopes]
        if not group:
            return
        # Each sender gives up in its own time. This deadline keeps a backend that never answers
        # from holding up those that come later.
        deadline = Deadline(self._timer)
        results: Sequence[Sent | QueueError]
        try:
            with deadline:
                results = await self._guarded.call(deadline, self._publish, self._queue, envelopes)
        except PartialSend as error:
            results = error.results
        except Exception as error:
            _fail_group(group, self._guarded.timeout_error() if deadline.expired else error)
            return
        self._guarded.connection.record_message()
        _distribute_results(group, results)

    async def _retry_until(
        self,
        end: float,
        envelopes: Sequence[Envelope],
        prepare: Prepare | None,
        failure: BackendUnavailable | None,
    ) -> list[Sent]:
        """Try again while the connection fails, until ``end``.

        ``failure`` is that of a first try.
        """
        # A timer of its own: the deadlines of the usual one end in the order in which they began.
        deadline = Deadline(DeadlineTimer(end - self._timer.loop.time()))
        pending = [] if prepare is None else [prepare]
        failures: list[QueueError] = []

        async def attempt() -> list[Sent]:
            while pending:
                await self._guarded.call(deadline, pending[0])
                pending.pop()  # once: done again it would touch no broker, yet count as an answer
            if self._coalescer.busy:
                return await self._join(envelopes, self._timer.deadline_from_now())
            call = self._guarded.call(deadline, self._publish, self._queue, envelopes)
            sent = await self._coalescer.run_now(call)
            self._guarded.connection.record_message()
            return sent

        def record(error: QueueError) -> None:
            self._record_failure(error, envelopes, failures)

        try:
            with deadline:
                if failure is not None:
                    record(failure)
                    await asyncio.sleep(self._backoff.after(1))
                return await retry_while_unavailable(
                    attempt, backoff=self._backoff, on_failure=record
                )
        except CircuitOpen as error:
            if failures:  # its own tries were among those that opened the circuit
                raise error from failures[-1]
            raise
        except TimeoutError:
            if not deadline.expired:
                raise
            raise self._guarded.timeout_error(failures) from (failures[-1] if failures else None)

    def _record_failure(
        self, error: QueueError, envelopes: Sequence[Envelope], failures: list[QueueError]
    ) -> None:
        self._locate(error, envelopes)
        failures.append(error)
        logger.warning(
            "%s: sending failed, trying again: %s",
            self._queue,
            error.message,
            extra={"queue": self._queue, "attempt": len(failures), "error": str(error)},
        )

    def _locate(self, error: QueueError, envelopes: Sequence[Envelope]) -> None:
        """Complete an error with the place where it happened."""
        error.located(
            backend=self._guarded.backend.name,
            operation="send",
            queue=self._queue,
            message_id=_only_id(envelopes),
        )


def _size(waiting: _Waiting) -> int:
    return len(waiting.envelopes)


def _only_id(envelopes: Sequence[Envelope]) -> str | None:
    return envelopes[0].id if len(envelopes) == 1 else None


def _fail_group(group: list[_Waiting], error: Exception) -> None:
    """Give each sender an error of its own: raising adds to it, and it names one message."""
    for waiting in group:
        if waiting.result.done():
            continue
        if isinstance(error, QueueError):
            error = copy.copy(error)
            error.message_id = _only_id(waiting.envelopes)
        waiting.result.set_exception(error)


def _distribute_results(group: list[_Waiting], results: Sequence[Sent | QueueError]) -> None:
    """Give each sender its own part of a group's results."""
    start = 0
    for envelopes, result, _ in group:
        end = start + len(envelopes)
        mine = results[start:end]
        start = end
        if result.done():
            continue
        if len(mine) == 1:  # as nearly all
            (only,) = mine
            if isinstance(only, QueueError):
                result.set_exception(only)
            else:
                result.set_result([only])
            continue
        sent = [item for item in mine if isinstance(item, Sent)]
        if len(sent) == len(mine):
            result.set_result(sent)
        else:
            result.set_exception(
                PartialSend(f"{len(sent)} of {len(mine)} messages were accepted", list(mine))
            )
