"""The client's side of a subscription: asks for deliveries, hands them out, settles them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

from qkit.backend import Delivery, SubscriptionSpec
from qkit.backends.common.arrivals import Arrivals
from qkit.backends.native.socket import protocol
from qkit.backends.native.socket.client.connection import ClientConnection
from qkit.backends.native.socket.client.lease_renewal import ClientLeaseRenewal
from qkit.backends.native.socket.error_codec import decode_failures
from qkit.errors import (
    AckDeadlineExceeded,
    BackendUnavailable,
    MessageNotFound,
    QueueError,
    SubscriptionLost,
)

__all__ = ["SocketSubscription"]

UNRECEIVED_RETURN_SECONDS: Final = 0.25  # then deliveries that no receive() takes go back
SETTLE_TIMEOUT: Final = 10.0  # a settlement is not waited for longer than this


class SocketSubscription:
    """A live claim on a queue of the owner's engine.

    Deliveries come only against credit, which ``receive`` gives and takes back when it is
    cancelled. Those that were on their way by then are for the next ``receive``; if none comes
    soon they go back uncharged, so that a paused consumer keeps nothing from the others.
    """

    def __init__(
        self, connection: ClientConnection, queue: str, lease_renewal: ClientLeaseRenewal | None
    ) -> None:
        self._connection = connection
        self._queue = queue
        self._lease_renewal = lease_renewal
        self._loop = asyncio.get_running_loop()
        self._arrivals: Arrivals[Delivery] = Arrivals(
            unclaimed=self._give_back, after=UNRECEIVED_RETURN_SECONDS, left=self._withdraw_credit
        )
        self._leases: dict[int, float] = {}  # of all that is held; the renewing thread reads it
        self._serial = 0
        self._asked = 0  # the credit that the owner has
        self._stopped = False
        self._broken = False
        self.number = 0

    # Its life

    async def open(self, spec: SubscriptionSpec) -> None:
        """Subscribe; raises what the owner raises."""
        self.number, opened = self._connection.begin(
            protocol.SUBSCRIBE, protocol.encode_record(spec, leave_out=("needs_delay",))
        )
        try:
            await opened
        except asyncio.CancelledError:  # the owner may have opened it already
            with contextlib.suppress(QueueError):
                self._connection.ask(protocol.LEAVE, protocol.encode_number(self.number), _ignore)
            raise
        if self._lease_renewal is not None:
            self._lease_renewal.add(self.number, self._leases)

    async def leave(self) -> None:
        """Give back what is held, uncharged; returns once others can have it."""
        self._stopped = True
        self._arrivals.stop()
        self._forget()
        with contextlib.suppress(BackendUnavailable):  # then the claim ended with the connection
            await self._connection.request(protocol.LEAVE, protocol.encode_number(self.number))

    def lost(self, error: QueueError) -> None:
        """It broke: the connection did, the queue is gone, or the engine was closed."""
        self._broken = True
        self._forget()
        loss = SubscriptionLost(
            error.message,
            backend="native",
            operation="receive",
            queue=self._queue,
            cause=error.cause,
        )
        self._arrivals.fail(loss, drop=True)

    def _forget(self) -> None:
        """Nothing that it holds can be settled any more, or need be."""
        self._arrivals.drain()
        self._leases.clear()
        if self._lease_renewal is not None:
            self._lease_renewal.remove(self.number)

    # Receiving

    async def receive(self, limit: int) -> list[Delivery]:
        """Up to ``limit`` deliveries as soon as there are any; none once stopped.

        Raises ``SubscriptionLost`` when the connection breaks, the queue is deleted or the engine
        closed.
        """
        return await self._arrivals.take(limit, self._ask)

    def _ask(self, limit: int) -> None:
        if limit > self._asked:
            self._credit(limit)

    def _withdraw_credit(self) -> None:
        if self._asked and not self._stopped and not self._broken:
            self._credit(0)

    def _credit(self, wanted: int) -> None:
        """Tell the owner how many deliveries are wanted now."""
        self._serial += 1
        self._asked = wanted
        credit = protocol.encode_credit(self._serial, wanted)
        self._connection.tell(protocol.CREDIT, self.number, credit)

    def deliver(self, body: bytes) -> None:
        """Deliveries arrived; or none, and the owner woke us all the same."""
        serial, deliveries = protocol.decode_deliveries(self._queue, body)
        if serial == self._serial:
            self._asked = 0
        for delivery in deliveries:
            if delivery.lease is not None:
                self._leases[delivery.receipt_of(int, "native", "receive")] = delivery.lease
        if deliveries and self._lease_renewal is not None:
            self._lease_renewal.wake()
        if self._stopped:
            self._give_back(deliveries)
        elif deliveries:
            self._arrivals.put(deliveries)
        else:
            self._arrivals.wake()

    def _give_back(self, deliveries: Sequence[Delivery]) -> None:
        """Release deliveries that no ``receive`` takes, uncharged: others may have them."""
        if deliveries:
            self._request([_release(delivery, 0.0, count_attempt=False) for delivery in deliveries])

    async def stop(self) -> None:
        """Fetch no more and let a parked ``receive`` go; what was delivered can be settled."""
        if self._stopped:
            return
        self._stopped = True
        self._arrivals.stop()
        self._give_back(self._arrivals.drain())
        if not self._broken:
            with contextlib.suppress(BackendUnavailable):
                await self._connection.request(protocol.STOP, protocol.encode_number(self.number))

    # Settling

    async def ack(self, delivery: Delivery) -> None:
        """The work is done: remove the message."""
        await self._settle(_ack(delivery), delivery)
        delivery.receipt = None

    async def ack_many(self, deliveries: Sequence[Delivery]) -> list[QueueError | None]:
        """Remove several messages in one round trip."""
        results = await self._settle_many(_ack, deliveries)
        for delivery, error in zip(deliveries, results, strict=True):
            if error is None:
                delivery.receipt = None
        return results

    async def release(
        self, delivery: Delivery, delay: float, *, count_attempt: bool = True
    ) -> None:
        """Give the message back with the envelope's headers, after ``delay`` seconds."""
        await self._settle(_release(delivery, delay, count_attempt=count_attempt), delivery)
        delivery.receipt = None

    async def extend(self, delivery: Delivery, seconds: float) -> None:
        """Move the end of the lease to ``seconds`` from now."""
        await self._settle(_extend(delivery, seconds), delivery)

    async def extend_many(
        self, deliveries: Sequence[Delivery], seconds: float
    ) -> list[QueueError | None]:
        """Move the ends of several leases in one round trip.

        Raises:
            SubscriptionLost: The owner did not answer; no lease was extended.
        """
        results = await self._settle_many(partial(_extend, seconds=seconds), deliveries)
        for error in results:
            if isinstance(error, SubscriptionLost):
                raise error
        return results

    async def _settle(self, item: protocol.SettleItem, delivery: Delivery) -> None:
        (error,) = await self._request([item])
        if error is not None:
            raise _about(error, delivery) from error.cause

    async def _settle_many(
        self, item_of: Callable[[Delivery], protocol.SettleItem], deliveries: Sequence[Delivery]
    ) -> list[QueueError | None]:
        """Settle in one frame. One that was settled before fails alone, not the others."""
        results: list[QueueError | None] = [None] * len(deliveries)
        items: dict[int, protocol.SettleItem] = {}
        for place, delivery in enumerate(deliveries):
            try:
                items[place] = item_of(delivery)
            except MessageNotFound as error:
                results[place] = error
        if items:
            errors = await self._request(list(items.values()))
            for place, problem in zip(items, errors, strict=True):
                if problem is not None:
                    results[place] = _about(problem, deliveries[place])
        return results

    def _request(
        self, items: Sequence[protocol.SettleItem]
    ) -> asyncio.Future[list[QueueError | None]]:
        """Send one SETTLE frame; the future gets an error for each item that failed."""
        future: asyncio.Future[list[QueueError | None]] = self._loop.create_future()

        def answered(answer: bytes | QueueError) -> None:
            timer.cancel()
            errors: list[QueueError | None] = [None] * len(items)
            if isinstance(answer, QueueError):
                errors = [answer] * len(items)
            else:
                for place, error in decode_failures(answer).items():
                    errors[place] = error
            for item, problem in zip(items, errors, strict=True):
                if _is_over(item, problem):
                    # Not before: while the owner has not heard of it, the lease must not end.
                    self._leases.pop(item.receipt, None)
            if not future.done():
                future.set_result(errors)

        silence = BackendUnavailable(f"no answer within {SETTLE_TIMEOUT:g} s", backend="native")
        timer = self._loop.call_later(SETTLE_TIMEOUT, answered, silence)
        try:
            body = protocol.encode_settlings(self.number, items)
            self._connection.ask(protocol.SETTLE, body, answered)
        except QueueError as error:
            answered(error)
        return future


def _ack(delivery: Delivery) -> protocol.SettleItem:
    receipt = delivery.receipt_of(int, "native", "ack")
    return protocol.SettleItem(protocol.ACK, receipt, 0.0, False, {})


def _extend(delivery: Delivery, seconds: float) -> protocol.SettleItem:
    receipt = delivery.receipt_of(int, "native", "extend")
    return protocol.SettleItem(protocol.EXTEND, receipt, seconds, False, {})


def _release(delivery: Delivery, delay: float, *, count_attempt: bool) -> protocol.SettleItem:
    headers = dict(delivery.envelope.headers)
    receipt = delivery.receipt_of(int, "native", "release")
    return protocol.SettleItem(protocol.RELEASE, receipt, delay, count_attempt, headers)


def _about(error: QueueError, delivery: Delivery) -> QueueError:
    """The error of a settlement, told of its delivery; without the owner there is no claim."""
    if not isinstance(error, BackendUnavailable):
        error.located(queue=delivery.queue, message_id=delivery.envelope.id)
        return error
    return SubscriptionLost(
        error.message,
        backend="native",
        operation="settle",
        queue=delivery.queue,
        message_id=delivery.envelope.id,
        cause=error.cause,
    )


def _is_over(item: protocol.SettleItem, error: QueueError | None) -> bool:
    """Whether there is no lease any more after this answer."""
    if error is None:
        return item.what != protocol.EXTEND
    return isinstance(error, AckDeadlineExceeded | MessageNotFound)


def _ignore(answer: bytes | QueueError) -> None:
    pass
