"""The one owner of a queue's state: its waiting consumers and its one timer.

Everything runs in the engine's event loop and nothing in here awaits between looking at the state
and changing it, so a queue needs no lock and never waits for another queue.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable

from qkit.backend import QueueStats
from qkit.clock import Clock
from qkit.message import Envelope, Reason
from qkit.native.config import QueueConfig
from qkit.native.dead import Dead
from qkit.native.queue import QueueState
from qkit.native.stored import Stored

__all__ = ["QueueActor", "envelope_of"]


class QueueActor:
    """A queue, or one group's share of a topic, inside a running engine."""

    __slots__ = (
        "_armed_at",
        "_clock",
        "_loop",
        "_on_dead",
        "_on_evicted",
        "_timer",
        "_waiters",
        "config",
        "consumers",
        "group",
        "lost",
        "name",
        "on_change",
        "state",
    )

    def __init__(
        self,
        name: str,
        config: QueueConfig,
        *,
        clock: Clock,
        loop: asyncio.AbstractEventLoop,
        on_dead: Callable[[QueueActor, list[Dead]], None],
        on_evicted: Callable[[list[Envelope]], None],
        group: str | None = None,
    ) -> None:
        self.name = name
        self.group = group
        self.config = config
        self.state = QueueState(
            name,
            max_depth=config.max_depth,
            max_priority=config.max_priority,
            max_deliveries=config.max_deliveries,
            drop_oldest=config.drop_oldest,
        )
        self.consumers = 0  # open subscriptions and waiting ``consume`` calls
        self.lost: str | None = None  # why nothing can be received from it any more
        self.on_change: list[Callable[[], None]] = []  # called when leases or the queue are lost
        self._clock = clock
        self._loop = loop
        self._on_dead = on_dead
        self._on_evicted = on_evicted
        self._waiters: deque[asyncio.Future[None]] = deque()
        self._timer: asyncio.TimerHandle | None = None
        self._armed_at = float("inf")

    def reconfigure(self, config: QueueConfig) -> None:
        """Take over other limits; what is in the queue stays."""
        self.config = config
        self.state.limit(
            max_depth=config.max_depth,
            max_priority=config.max_priority,
            max_deliveries=config.max_deliveries,
            drop_oldest=config.drop_oldest,
        )

    # Messages

    def put(
        self,
        now: float,
        id: str,
        body: bytes,
        headers: dict[str, str] | None = None,
        key: str | None = None,
        priority: int | None = None,
        due: float | None = None,
        expires: float | None = None,
    ) -> int | None:
        """Add a message and wake a consumer for it; see ``QueueState.put``."""
        position = self.state.put(now, id, body, headers, key, priority, due, expires)
        if self.state.evicted:
            offset = self._clock.time() - now
            self._on_evicted([envelope_of(message, offset) for message in self.state.evicted])
            self.state.evicted.clear()
        if self._waiters and position is not None:
            self.wake()
        if due is not None or expires is not None:
            self._rearm()
        return position

    def claim(
        self, now: float, limit: int, lease: float, consumer: str | None = None
    ) -> list[Stored]:
        """Lease what is ready; see ``QueueState.claim``."""
        state = self.state
        claimed = state.claim(now, limit, lease, consumer)
        if claimed and now + lease < self._armed_at:
            self._arm(now + lease)
        if state.dead:  # their time to live ran out
            self._on_dead(self, state.take_dead())
        if self._waiters:
            # Whoever is woken takes what it can and wakes the next one for the rest, so that as
            # long as messages are ready and consumers parked, a wake-up is under way.
            self.nudge()
        return claimed

    def release(
        self,
        token: int,
        delay: float = 0.0,
        *,
        count_attempt: bool = True,
        headers: dict[str, str] | None = None,
    ) -> bool:
        """Give a held message back; see ``QueueState.release``."""
        alive = self.state.release(
            self._clock.monotonic(), token, delay, count_attempt=count_attempt, headers=headers
        )
        self._distribute(self.state.take_dead())
        self._rearm()
        return alive

    def reject(self, token: int, reason: Reason, error: Exception | None = None) -> None:
        """Send a held message to the dead letters."""
        self.state.reject(token, reason, error)
        self._distribute(self.state.take_dead())

    def extend(self, token: int, seconds: float) -> None:
        """Move the end of a lease; see ``QueueState.extend``."""
        now = self._clock.monotonic()
        self.state.extend(now, token, seconds)
        if now + seconds < self._armed_at:
            self._arm(now + seconds)

    def peek(self, limit: int) -> list[Envelope]:
        """The next messages in order of delivery; see ``QueueState.peek``."""
        self._distribute(self.state.advance(self._clock.monotonic()))
        offset = self._clock.time() - self._clock.monotonic()
        return [
            envelope_of(message, offset, None if due is None else due + offset)
            for message, due in self.state.peek(limit)
        ]

    def stats(self) -> QueueStats:
        """The queue's figures now."""
        state, now = self.state, self._clock.monotonic()
        self._distribute(state.advance(now))
        since = state.oldest_since()
        return QueueStats(
            queue=self.name,
            depth=state.ready,
            in_flight=state.in_flight,
            scheduled=state.scheduled,
            consumers=self.consumers,
            published_total=state.published,
            consumed_total=state.claimed,
            acked_total=state.acked,
            nacked_total=state.released,
            dead_lettered_total=state.dead_lettered,
            dropped_total=state.dropped,
            avg_wait_time_ms=(
                1000 * state.waited / state.first_claimed if state.first_claimed else None
            ),
            oldest_message_age_secs=None if since is None else max(0.0, now - since),
        )

    def _distribute(self, dead: list[Dead]) -> None:
        """Route the dead, and wake consumers for what became ready."""
        if dead:
            self._on_dead(self, dead)
        for _ in range(min(self.state.ready, len(self._waiters))):
            self.wake()

    @property
    def backlog(self) -> int:
        """How many messages wait for consumers that are there."""
        return self.state.ready if self.consumers else 0

    # Parked consumers

    async def park(self, waiter: asyncio.Future[None], *, again: bool = False) -> None:
        """Wait until a message may be ready, first come, first served; safe to cancel.

        ``again``: another consumer was quicker, so the place at the front is kept.
        """
        if again:
            self._waiters.appendleft(waiter)
        else:
            self._waiters.append(waiter)
        try:
            await waiter
        except asyncio.CancelledError:
            if waiter.cancelled():
                with contextlib.suppress(ValueError):  # a wake-up in this very pass passed it by
                    self._waiters.remove(waiter)
            else:
                self.nudge()  # its wake-up was already given: the next one takes it
            raise

    def unpark(self, waiter: asyncio.Future[None]) -> None:
        """Wake this waiter although there may be nothing for it."""
        if not waiter.done():
            self._waiters.remove(waiter)
            waiter.set_result(None)

    def wake(self) -> None:
        """Let the first parked consumer look."""
        while self._waiters:
            waiter = self._waiters.popleft()
            if not waiter.done():
                waiter.set_result(None)
                return

    def nudge(self) -> None:
        """Pass a wake-up on: let the first parked consumer look if there is anything for it."""
        if self.state.ready:
            self.wake()

    def close(self, reason: str) -> None:
        """Stop the timer and let every parked consumer go; ``reason`` says why."""
        self.lost = reason
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._armed_at = float("-inf")  # so that nothing arms it again
        for notify in tuple(self.on_change):
            notify()
        while self._waiters:
            self.wake()

    # Time

    def _arm(self, due: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._armed_at = due
        self._timer = self._loop.call_at(due, self._fire)

    def _rearm(self) -> None:
        due = self.state.next_due()
        if due is not None and due < self._armed_at:
            self._arm(due)

    def _fire(self) -> None:
        self._timer = None
        self._armed_at = float("-inf")  # nothing arms it until it has been dealt with
        now = self._clock.monotonic()
        try:
            self._distribute(self.state.advance(now))
        except BaseException:
            self._armed_at = float("inf")
            self._rearm()
            raise
        lease = self.state.next_lease()
        if lease is not None and lease <= now:
            # The loop may have been blocked past the end of the lease. Two passes let the
            # renewals and acks that waited run first: timers, then the tasks they woke. A lease
            # is lost only here; comparing clocks in ``ack`` would refuse work that is done.
            self._loop.call_soon(self._loop.call_soon, self._expire)
        else:
            self._armed_at = float("inf")
            self._rearm()

    def _expire(self) -> None:
        if self.lost is not None:
            return
        in_flight = self.state.in_flight
        try:
            self._distribute(self.state.expire(self._clock.monotonic()))
        finally:
            self._armed_at = float("inf")
            self._rearm()
        if self.state.in_flight < in_flight:
            for notify in tuple(self.on_change):
                notify()


def envelope_of(message: Stored, offset: float, not_before: float | None = None) -> Envelope:
    """A stored message as it leaves the engine; ``offset`` is wall time less monotonic time."""
    return Envelope(
        message.id,
        message.body,
        dict(message.headers) if message.headers else {},
        message.key,
        message.priority,
        not_before,
        None if message.expires is None else message.expires + offset,
        message.attempt,
    )
