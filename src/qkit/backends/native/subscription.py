"""Subscription on a queue of the native engine."""

from __future__ import annotations

import asyncio
from typing import TypeVar

from qkit._internal.clock import Clock
from qkit.backend import Delivery, SubscriptionSpec
from qkit.errors import AckDeadlineExceeded, StorageError, SubscriptionLost
from qkit.native.queue.consumers import Consumer
from qkit.native.queue.queue import Queue, envelope_of
from qkit.native.queue.stored_message import StoredMessage

__all__ = ["NativeSubscription"]

_T = TypeVar("_T")


class NativeSubscription:
    """A live claim on a queue of the engine: at most ``prefetch`` unsettled deliveries."""

    __slots__ = (
        "_blocked",
        "_clock",
        "_consumer",
        "_held",
        "_lease",
        "_parked",
        "_prefetch",
        "_queue",
        "_stopped",
    )

    def __init__(self, queue: Queue, spec: SubscriptionSpec, clock: Clock) -> None:
        self._queue = queue
        self._clock = clock
        self._consumer = spec.consumer
        self._prefetch = spec.prefetch
        self._lease = _or(spec.ack_deadline, queue.config.ack_deadline)
        self._held: set[int] = set()
        self._parked: set[asyncio.Future[None]] = set()  # waiting for a message
        self._blocked: set[asyncio.Future[None]] = set()  # waiting for a free slot
        self._stopped = False

    async def receive(self, limit: int) -> list[Delivery]:
        """Up to ``limit`` deliveries as soon as there are any; none once stopped.

        Raises ``SubscriptionLost`` when the queue is deleted or the engine closed.
        """
        if self._queue.waiters.woken and not self._stopped:
            # Others were woken for what is there. Who asks again and again without a pause would
            # take it all before they come to it.
            await asyncio.sleep(0)
        place = 0
        while not self._stopped:
            if self._queue.lost is not None:
                raise self._queue.lost_error("receive")
            free = min(limit, self._prefetch - len(self._held))
            if free > 0:
                try:
                    claimed = self._queue.claim(
                        self._clock.monotonic(), free, self._lease, self._consumer
                    )
                except StorageError as error:
                    raise self._refused(error) from error
                if claimed:
                    for message in claimed:
                        self._held.add(message.state)
                    if self._queue.journal is not None:
                        claimed = await self._prepare(claimed)
                    return self._deliveries(claimed)
                place = await self._wait(self._parked, place)
            else:
                # Whoever took its last slot has passed on any wake-up: see Queue.claim.
                await self._wait(self._blocked)
        self._queue.pass_wakeup_on()  # it may have been woken for a message and then stopped
        return []

    async def _wait(self, among: set[asyncio.Future[None]], place: int = 0) -> int:
        waiter = asyncio.get_running_loop().create_future()
        among.add(waiter)
        try:
            if among is self._parked:
                return await self._queue.park(waiter, self._consumer, place=place)
            await waiter
            return place
        finally:
            among.discard(waiter)

    async def _prepare(self, claimed: list[StoredMessage]) -> list[StoredMessage]:
        """Wait until what was claimed may be handed out; return it without what was lost."""
        tokens = [message.state for message in claimed]
        try:
            await self._queue.prepare(claimed)
        except BaseException as error:
            self._held.difference_update(tokens)
            if isinstance(error, StorageError):
                raise self._refused(error) from error
            raise
        held = zip(tokens, claimed, strict=True)
        return [message for token, message in held if message.state == token]

    def _refused(self, error: StorageError) -> SubscriptionLost:
        return SubscriptionLost(
            f"nothing can be delivered, the disk refuses to record it: {error.message}",
            backend="native",
            operation="receive",
            queue=self._queue.name,
        )

    def _deliveries(self, claimed: list[StoredMessage]) -> list[Delivery]:
        clock, name, lease = self._clock, self._queue.name, self._lease
        offset = clock.time() - clock.monotonic()
        deliveries: list[Delivery] = []
        for message in claimed:
            envelope = envelope_of(message, offset)
            deliveries.append(Delivery(envelope, name, message.state, lease))
        return deliveries

    def listed(self) -> Consumer:
        """How the engine lists this consumer."""
        return Consumer(
            consumer=self._consumer,
            prefetch=self._prefetch,
            in_flight=len(self._held),
            group=self._queue.group,
        )

    async def ack(self, delivery: Delivery) -> None:
        """The work is done: remove the message."""
        token = delivery.receipt_of(int, "native", "ack")
        try:
            self._queue.ack(token)
        except AckDeadlineExceeded as error:
            raise self._lost(token, delivery, error) from None
        self._settled(delivery, token)
        if self._queue.journal is not None:
            await self._queue.written()

    async def release(
        self, delivery: Delivery, delay: float, *, count_attempt: bool = True
    ) -> None:
        """Give the message back with the envelope's headers, after ``delay`` seconds."""
        token = delivery.receipt_of(int, "native", "release")
        headers = dict(delivery.envelope.headers)
        try:
            self._queue.release(token, delay, count_attempt=count_attempt, headers=headers)
        except AckDeadlineExceeded as error:
            raise self._lost(token, delivery, error) from None
        self._settled(delivery, token)
        if self._queue.journal is not None:
            await self._queue.written()

    async def extend(self, delivery: Delivery, seconds: float) -> None:
        """Move the end of the lease to ``seconds`` from now."""
        token = delivery.receipt_of(int, "native", "extend")
        try:
            self._queue.extend(token, seconds)
        except AckDeadlineExceeded as error:
            raise self._lost(token, delivery, error) from None

    async def stop(self) -> None:
        """Fetch no more and wake a parked ``receive``; what was delivered can be settled."""
        self._stopped = True
        self._wake_blocked()
        for waiter in self._parked:
            self._queue.unpark(waiter)

    def refresh(self) -> None:
        """Leases were lost, or the whole queue: a lost delivery takes no slot any longer."""
        self._held = {token for token in self._held if self._queue.state.holds(token)}
        self._wake_blocked()

    def abandon(self) -> None:
        """The consumer is gone without a word: its leases end now, its attempts stay counted."""
        held, self._held = self._held, set()
        self._queue.abandon(held)

    def release_uncharged(self) -> None:
        """Release what is still held, without charging an attempt."""
        held, self._held = self._held, set()
        for token in held:
            if self._queue.state.holds(token):
                self._queue.release(token, count_attempt=False)

    def _settled(self, delivery: Delivery, token: int) -> None:
        delivery.receipt = None
        self._held.discard(token)
        if self._blocked:
            self._wake_blocked()

    def _lost(
        self, token: int, delivery: Delivery, error: AckDeadlineExceeded
    ) -> AckDeadlineExceeded:
        self._held.discard(token)
        self._wake_blocked()
        error.located(backend="native", message_id=delivery.envelope.id)
        return error

    def _wake_blocked(self) -> None:
        for waiter in self._blocked:
            if not waiter.done():
                waiter.set_result(None)


def _or(value: _T | None, default: _T) -> _T:
    return default if value is None else value
