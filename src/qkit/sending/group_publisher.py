"""``GroupPublisher``: at most one publish of a group of messages in flight.

A send goes out at once while no publish of its group is in flight; sends that arrive meanwhile
share the next round trip. So a lone send never waits, and a hundred at once cost two round trips.
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
    end: float  # of the loop's time, when its sender gives up


class GroupPublisher:
    """Publishes the messages of one group.

    Args:
        guarded: The backend.
        publish: Publishes envelopes of this group on the backend.
        name: Name of the task that publishes what waited.

    Attributes:
        publish: As given.
        coalescer: While it is not busy a caller may publish with its ``run_now``; otherwise it
            must ``join``.
    """

    def __init__(self, guarded: GuardedBackend, publish: Publish, *, name: str) -> None:
        self.publish = publish
        self.coalescer = Coalescer(
            self._publish_waiting, max_size=MAX_BATCH_MESSAGES, size=_size, name=name
        )
        self._guarded = guarded
        self._timer = guarded.timer
        self._expiry: asyncio.TimerHandle | None = None

    def join(self, envelopes: Sequence[Envelope], end: float) -> asyncio.Future[list[Sent]]:
        """Wait for the next publish. One timer serves all that wait; ``end`` is the sender's own.

        A deadline for each would cost as much as the rest of the send.

        Raises:
            CircuitOpen: While the circuit is open.
        """
        self._guarded.breaker.check()
        loop = self._timer.loop
        waiting = _Waiting(envelopes, loop.create_future(), end)
        self.coalescer.post(waiting)
        if self._expiry is None:
            self._expiry = loop.call_at(end, self._expire)
        return waiting.result

    async def close(self) -> None:
        """Give up what is still in progress: its senders get ``SendTimeout``."""
        for waiting in await self.coalescer.close():
            if not waiting.result.done():
                waiting.result.set_exception(self._guarded.timeout_error())
        if self._expiry is not None:
            self._expiry.cancel()
            self._expiry = None

    def _expire(self) -> None:
        """Fail the sends whose time is up. They wait in the order of their ends."""
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
        """Publish what waited, and give each sender its own result."""
        batch = [waiting for waiting in batch if not waiting.result.done()]
        envelopes = [envelope for waiting in batch for envelope in waiting.envelopes]
        if not batch:
            return
        # Each sender gives up in its own time. This deadline keeps a backend that never answers
        # from holding up those that come later.
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
    """Return the id of the only message; ``None`` for several."""
    return envelopes[0].id if len(envelopes) == 1 else None


def _size(waiting: _Waiting) -> int:
    return len(waiting.envelopes)


def _fail_all(batch: list[_Waiting], error: Exception) -> None:
    """Give each sender an error of its own: raising adds to it, and it names one message."""
    for waiting in batch:
        if waiting.result.done():
            continue
        if isinstance(error, QueueError):
            error = copy.copy(error)
            error.message_id = message_id_of(waiting.envelopes)
        waiting.result.set_exception(error)


def _distribute_results(batch: list[_Waiting], results: Sequence[Sent | QueueError]) -> None:
    """Give each sender its own part of a publish's results."""
    start = 0
    for envelopes, result, _ in batch:
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
