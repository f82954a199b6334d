"""Subscription to a queue of the native engine."""

from __future__ import annotations

import asyncio
from typing import TypeVar

from qkit._internal.clock import Clock
from qkit.backend import Delivery, SubscriptionSpec
from qkit.errors import AckDeadlineExceeded, StorageError, SubscriptionLost
from qkit.native.queue.consumers import Consumer
from qkit.native.queue.key_locks import new_holder
from qkit.native.queue.queue import Queue, envelope_of
from qkit.native.queue.stored_message import StoredMessage

__all__ = ["NativeSubscription"]

_T = TypeVar("_T")


class NativeSubscription:
    """Subscription to a queue of the engine, with at most ``prefetch`` unsettled deliveries.

    Args:
        queue: Queue, or group of a topic, to consume from.
        spec: Specification of the subscription.
        clock: Clock of the engine.
    """

    __slots__ = (
        "_clock",
        "_consumer",
        "_held",
        "_lease",
        "_prefetch",
        "_queue",
        "_slot_waiters",
        "_stopped",
        "holder",
    )

    def __init__(self, queue: Queue, spec: SubscriptionSpec, clock: Clock) -> None:
        self._queue = queue
        self._clock = clock
        self._consumer = spec.consumer
        self._prefetch = spec.prefetch
        self._lease = _or(spec.ack_deadline, queue.config.ack_deadline)
        self._held: set[int] = set()
        self._slot_waiters: set[asyncio.Future[None]] = set()
        self._stopped = False
        self.holder: int = new_holder() if spec.ordered else 0

    async def receive(self, limit: int) -> list[Delivery]:
        """Wait for messages; return up to ``limit`` deliveries, or an empty list once stopped.

        Raises:
            SubscriptionLost: The queue was deleted, the engine was closed, or its disk failed.
        """
        queue = self._queue
        if queue.waiters.woken and not self._stopped:
            # Other receivers were woken for the ready messages and have not run yet. Without this
            # yield, a receiver that never waits would take all the messages.
            await asyncio.sleep(0)
        while not self._stopped:
            try:
                claimed = await queue.take(
                    limit, self._lease, self._consumer, self._free_slots, holder=self.holder
                )
                if claimed and queue.journal is not None:
                    claimed = await self._prepare(claimed)
            except StorageError as error:
                raise self._storage_failed(error) from error
            if not claimed:
                if self._free_slots() <= 0 and not self._stopped:
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

    def _free_slots(self) -> int:
        return 0 if self._stopped else self._prefetch - len(self._held)

    async def _wait_for_slot(self) -> None:
        waiter = asyncio.get_running_loop().create_future()
        self._slot_waiters.add(waiter)
        try:
            await waiter
        finally:
            self._slot_waiters.discard(waiter)

    async def _prepare(self, claimed: list[StoredMessage]) -> list[StoredMessage]:
        """Wait until the claims are in the log; return the messages that can be delivered.

        All claimed messages occupy slots while this method waits.
        """
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

    def _storage_failed(self, error: StorageError) -> SubscriptionLost:
        return SubscriptionLost(
            f"could not write deliveries to the log: {error.message}",
            backend="native",
            operation="receive",
            queue=self._queue.name,
        )

    def listed(self) -> Consumer:
        """Return this consumer's entry in the engine's list of consumers."""
        return Consumer(
            consumer=self._consumer,
            prefetch=self._prefetch,
            in_flight=len(self._held),
            group=self._queue.group,
        )

    async def ack(self, delivery: Delivery) -> None:
        """Remove the message from the queue."""
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
        """Return the message to the queue after ``delay`` seconds, with the envelope's headers."""
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
        """Extend the lease so that it ends ``seconds`` from now."""
        token = delivery.receipt_of(int, "native", "extend")
        try:
            self._queue.extend(token, seconds)
        except AckDeadlineExceeded as error:
            raise self._lost(token, delivery, error) from None

    async def stop(self) -> None:
        """Stop fetching and wake a waiting ``receive``; held deliveries can still be settled."""
        self._stopped = True
        self._wake_slot_waiters()
        self._queue.wake_consumer(self._consumer)

    def wake(self) -> None:
        """Wake a waiting ``receive``, because a message of one of its keys is ready."""
        self._queue.wake_consumer(self._consumer)

    def refresh(self) -> None:
        """Free the slots of deliveries whose leases have ended."""
        self._held = {token for token in self._held if self._queue.state.holds(token)}
        self._wake_slot_waiters()

    def abandon(self) -> None:
        """End all leases immediately after a consumer crash; the attempts still count."""
        held, self._held = self._held, set()
        self._queue.abandon(held)

    def release_uncharged(self) -> None:
        """Release all held deliveries without counting an attempt."""
        held, self._held = self._held, set()
        for token in held:
            if self._queue.state.holds(token):
                self._queue.release(token, count_attempt=False)
        if self.holder:
            self._queue.forget_holder(self.holder)

    def _settled(self, delivery: Delivery, token: int) -> None:
        delivery.receipt = None
        self._held.discard(token)
        if self._slot_waiters:
            self._wake_slot_waiters()

    def _lost(
        self, token: int, delivery: Delivery, error: AckDeadlineExceeded
    ) -> AckDeadlineExceeded:
        self._held.discard(token)
        self._wake_slot_waiters()
        error.located(backend="native", message_id=delivery.envelope.id)
        return error

    def _wake_slot_waiters(self) -> None:
        for waiter in self._slot_waiters:
            if not waiter.done():
                waiter.set_result(None)


def _or(value: _T | None, default: _T) -> _T:
    return default if value is None else value
