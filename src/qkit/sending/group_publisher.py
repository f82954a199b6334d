"""``GroupPublisher``: publishes the messages of one group, with one publish in flight at a time.

A send is published immediately if no publish of its group is in flight. Sends that arrive during a
publish share the next round trip. Thus a single send never waits, and a hundred concurrent sends
need two round trips.
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple

from qkit._internal.coalescer import Coalescer
from qkit._internal.deadlines import Deadline
from qkit.errors import PartialSend, QueueError
from qkit.message import Envelope, Sent
from qkit.sending.guarded_backend import GuardedBackend

__all__ = ["MAX_BATCH_MESSAGES", "GroupPublisher", "message_id_of"]

MAX_BATCH_MESSAGES = 1_000

Publish = Callable[[Sequence[Envelope]], Awaitable[list[Sent]]]


class _Waiting(NamedTuple):
    """A send that waits for the next publish."""

    envelopes: Sequence[Envelope]
    result: asyncio.Future[list[Sent]]
    end: float  # the deadline, in the loop's time


class GroupPublisher:
    """Publisher of the messages of one group.

    Args:
        guarded: The backend.
        publish: Publishes envelopes of this group on the backend.
        name: Name of the task that publishes waiting sends.

    Attributes:
        publish: The ``publish`` argument.
        coalescer: Collects waiting sends. While it is not busy, a caller may publish through its
            ``run_now``; otherwise the caller must ``join``.
    """

    def __init__(self, guarded: GuardedBackend, publish: Publish, *, name: str) -> None:
        self.publish = publish
        self.coalescer: Coalescer[_Waiting] = Coalescer(
            self._publish_waiting, max_size=MAX_BATCH_MESSAGES, size=_size, name=name
        )
        self._guarded = guarded
        self._timer = guarded.timer
        self._expiry: asyncio.TimerHandle | None = None

    def join(self, envelopes: Sequence[Envelope], end: float) -> asyncio.Future[list[Sent]]:
        """Add messages to the next publish.

        One timer serves all waiting sends, because a timer for each would cost as much as the rest
        of the send.

        Args:
            envelopes: The messages.
            end: The deadline, in the loop's time. It must not be before that of an earlier call.

        Returns:
            A future of the results, one for each message.

        Raises:
            CircuitOpen: The circuit is open.
        """
        self._guarded.breaker.check()
        loop = self._timer.loop
        waiting = _Waiting(envelopes, loop.create_future(), end)
        self.coalescer.post(waiting)
        if self._expiry is None:
            self._expiry = loop.call_at(end, self._expire)
        return waiting.result

    async def close(self) -> None:
        """Fail the sends that are still in progress with ``SendTimeout``."""
        for waiting in await self.coalescer.close():
            if not waiting.result.done():
                waiting.result.set_exception(self._guarded.timeout_error())
        if self._expiry is not None:
            self._expiry.cancel()
            self._expiry = None

    def _expire(self) -> None:
        """Fail the sends whose deadline has passed; sends wait in the order of their deadlines."""
        self._expiry = None
        now = self._timer.loop.time()
        for waiting in self.coalescer.pending():
            if waiting.result.done():
                continue
            if waiting.end > now:
                self._expiry = self._timer.loop.call_at(waiting.end, self._expire)
                return
            waiting.result.set_exception(self._guarded.timeout_error())

    async def _publish_waiting(self, batch: list[_Waiting]) -> None:
        """Publish a batch of waiting sends and set the result of each."""
        batch = [waiting for waiting in batch if not waiting.result.done()]
        envelopes = [envelope for waiting in batch for envelope in waiting.envelopes]
        if not batch:
            return
        # Each send has its own deadline. This deadline keeps a backend that never responds from
        # blocking later sends.
        deadline = Deadline(self._timer)
        results: Sequence[Sent | QueueError]
        try:
            with deadline:
                results = await self._guarded.call(deadline, self.publish, envelopes)
        except PartialSend as error:
            results = error.results
        except Exception as error:
            _fail_all(batch, self._guarded.timeout_error() if deadline.expired else error)
            return
        self._guarded.connection.record_message()
        _distribute_results(batch, results)


def message_id_of(envelopes: Sequence[Envelope]) -> str | None:
    """Return the id of a single message; ``None`` for several."""
    return envelopes[0].id if len(envelopes) == 1 else None


def _size(waiting: _Waiting) -> int:
    return len(waiting.envelopes)


def _fail_all(batch: list[_Waiting], error: Exception) -> None:
    """Fail each send with its own copy of an error.

    A shared error would collect the tracebacks of all senders and name only one message.
    """
    for waiting in batch:
        if waiting.result.done():
            continue
        if isinstance(error, QueueError):
            error = copy.copy(error)
            error.message_id = message_id_of(waiting.envelopes)
        waiting.result.set_exception(error)


def _distribute_results(batch: list[_Waiting], results: Sequence[Sent | QueueError]) -> None:
    """Set the result of each send from the results of a publish."""
    start = 0
    for envelopes, result, _ in batch:
        end = start + len(envelopes)
        own = results[start:end]
        start = end
        if result.done():
            continue
        if len(own) == 1:  # the common case
            (only,) = own
            if isinstance(only, QueueError):
                result.set_exception(only)
            else:
                result.set_result([only])
            continue
        sent = [item for item in own if isinstance(item, Sent)]
        if len(sent) == len(own):
            result.set_result(sent)
        else:
            result.set_exception(
                PartialSend(f"{len(sent)} of {len(own)} messages were confirmed", list(own))
            )
