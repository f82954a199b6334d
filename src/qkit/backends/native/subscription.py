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
        self._blocked: set[asyncio.Future[None]] = set()  # waiting for a free slot
        self._stopped = False

    async def receive(self, limit: int) -> list[Delivery]:
        """Up to ``limit`` deliveries as soon as there are any; none once stopped.

        Raises ``SubscriptionLost`` when the queue is deleted or the engine closed.
        """
        queue = self._queue
        if queue.waiters.woken and not self._stopped:
            # Others were woken for what is there. A receiver that asks again and again without a
            # pause would take it all before they run.
            await asyncio.sleep(0)
        while not self._stopped:
            try:
                claimed = await queue.take(limit, self._lease, self._consumer, self._free)
                if claimed and queue.journal is not None:
                    claimed = await self._prepare(claimed)
            except StorageError as error:
                raise self._refused(error) from error
            if not claimed:
                if self._free() <= 0 and not self._stopped:
                    await self._wait_for_slot()
                continue
            offset = self._clock.time() - self._clock.monotonic()
            deliveries: list[Delivery] = []
            for message in claimed:
                self._held.add(message.state)
                envelope = envelope_of(message, offset)
                deliveries.append(Delivery(envelope, queue.name, message.state, self._lease))
            return deliveries
        return []

    def _free(self) -> int:
        return 0 if self._stopped else self._prefetch - len(self._held)

    async def _wait_for_slot(self) -> None:
        waiter = asyncio.get_running_loop().create_future()
        self._blocked.add(waiter)
        try:
            await waiter
        finally:
            self._blocked.discard(waiter)

    async def _prepare(self, claimed: list[StoredMessage]) -> list[StoredMessage]:
        """Wait until what was claimed may be handed out; meanwhile it takes its slots."""
        tokens = [message.state for message in claimed]
        self._held.update(tokens)
        try:
            ready = await self._queue.prepare(claimed)
        except BaseException:
            self._held.difference_update(tokens)
            raise
        if len(ready) < len(claimed):
            self.refresh()
        return ready

    def _refused(self, error: StorageError) -> SubscriptionLost:
        return SubscriptionLost(
            f"nothing can be delivered, the disk refuses to record it: {error.message}",
            backend="native",
            operation="receive",
            queue=self._queue.name,
        )

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
        self._queue.wake_consumer(self._consumer)

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
