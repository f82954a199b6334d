"""Client end of a subscription to a queue of the owner."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

from qkit._internal.logging import logger
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

UNRECEIVED_RETURN_SECONDS: Final = 0.25  # delay before unreceived deliveries are released
SETTLE_TIMEOUT: Final = 10.0  # seconds to wait for the response to a settlement


class SocketSubscription:
    """Subscription to a queue of the owner's engine.

    The owner sends deliveries only against credit. ``receive`` grants credit and withdraws it when
    cancelled. Deliveries that arrive after that are kept for the next ``receive``. If it is not
    called within ``UNRECEIVED_RETURN_SECONDS``, they are released without counting an attempt, so
    that a paused consumer does not keep messages from other consumers.

    Args:
        connection: Connection to the owner.
        queue: Name of the queue.
        lease_renewal: Thread that renews leases while the event loop is blocked; ``None`` for no
            renewal.
    """

    def __init__(
        self, connection: ClientConnection, queue: str, lease_renewal: ClientLeaseRenewal | None
    ) -> None:
        self._connection = connection
        self._queue = queue
        self._lease_renewal = lease_renewal
        self._loop = asyncio.get_running_loop()
        self._arrivals: Arrivals[Delivery] = Arrivals(
            unclaimed=self._release_unclaimed,
            after=UNRECEIVED_RETURN_SECONDS,
            left=self._withdraw_credit,
        )
        self._leases: dict[int, float] = {}  # seconds by receipt; the renewal thread reads it
        self._serial = 0
        self._credit = 0  # credit that the owner has not used yet
        self._stopped = False
        self._lost = False
        self.number: int = 0

    # Open and close

    async def open(self, spec: SubscriptionSpec) -> None:
        """Open the subscription at the owner; raise the owner's error if it fails."""
        leave_out = ["needs_delay"]
        if spec.ordered and "key_lock" not in self._connection.hello.get("capabilities", ()):
            leave_out.append("ordered")  # unknown to the owner, which might reject it
            logger.warning(
                "the owner of the native directory runs an older version of qkit and does not "
                "keep the order per key across processes; queue %r: update the owner",
                spec.queue,
            )
        self.number, opened = self._connection.begin(
            protocol.SUBSCRIBE, protocol.encode_record(spec, leave_out=leave_out)
        )
        try:
            await opened
        except asyncio.CancelledError:  # the owner may already have opened it
            with contextlib.suppress(QueueError):
                self._connection.send_request(
                    protocol.LEAVE, protocol.encode_number(self.number), _ignore
                )
            raise
        if self._lease_renewal is not None:
            self._lease_renewal.add(self.number, self._leases)

    async def leave(self) -> None:
        """Close the subscription; return once the owner has released its deliveries.

        No attempt is counted for the released deliveries.
        """
        self._stopped = True
        self._arrivals.stop()
        self._discard_deliveries()
        with contextlib.suppress(BackendUnavailable):  # a lost connection closes it too
            await self._connection.request(protocol.LEAVE, protocol.encode_number(self.number))

    def lost(self, error: QueueError) -> None:
        """Make ``receive`` raise ``SubscriptionLost``.

        Called after the connection was lost, the queue was deleted or the engine was closed.
        """
        self._lost = True
        self._discard_deliveries()
        loss = SubscriptionLost(
            error.message,
            backend="native",
            operation="receive",
            queue=self._queue,
            cause=error.cause,
        )
        self._arrivals.fail(loss, drop=True)

    def _discard_deliveries(self) -> None:
        """Discard all deliveries and leases, which can no longer be settled."""
        self._arrivals.drain()
        self._leases.clear()
        if self._lease_renewal is not None:
            self._lease_renewal.remove(self.number)

    # Receive

    async def receive(self, limit: int) -> list[Delivery]:
        """Wait for messages; return up to ``limit`` deliveries, or an empty list once stopped.

        Raises:
            SubscriptionLost: The connection was lost, the queue was deleted, the engine was closed,
                or its disk failed.
        """
        return await self._arrivals.take(limit, self._grant_credit)

    def _grant_credit(self, limit: int) -> None:
        if limit > self._credit:
            self._set_credit(limit)

    def _withdraw_credit(self) -> None:
        if self._credit and not self._stopped and not self._lost:
            self._set_credit(0)

    def _set_credit(self, wanted: int) -> None:
        self._serial += 1
        self._credit = wanted
        credit = protocol.encode_credit(self._serial, wanted)
        self._connection.send(protocol.CREDIT, self.number, credit)

    def deliver(self, body: bytes) -> None:
        """Handle the body of a DELIVERIES frame, which may contain no deliveries."""
        serial, deliveries = protocol.decode_deliveries(self._queue, body)
        if serial == self._serial:
            self._credit = 0
        for delivery in deliveries:
            if delivery.lease is not None:
                self._leases[delivery.receipt_of(int, "native", "receive")] = delivery.lease
        if deliveries and self._lease_renewal is not None:
            self._lease_renewal.wake()
        if self._stopped:
            self._release_unclaimed(deliveries)
        elif deliveries:
            self._arrivals.put(deliveries)
        else:
            self._arrivals.wake()

    def _release_unclaimed(self, deliveries: Sequence[Delivery]) -> None:
        """Release deliveries that no ``receive`` took, without counting an attempt."""
        if deliveries:
            self._request([_release(delivery, 0.0, count_attempt=False) for delivery in deliveries])

    async def stop(self) -> None:
        """Stop fetching and wake a waiting ``receive``; held deliveries can still be settled."""
        if self._stopped:
            return
        self._stopped = True
        self._arrivals.stop()
        self._release_unclaimed(self._arrivals.drain())
        if not self._lost:
            with contextlib.suppress(BackendUnavailable):
                await self._connection.request(protocol.STOP, protocol.encode_number(self.number))

    # Settle

    async def ack(self, delivery: Delivery) -> None:
        """Remove the message from the queue."""
        await self._settle(_ack(delivery), delivery)
        delivery.receipt = None

    async def ack_many(self, deliveries: Sequence[Delivery]) -> list[QueueError | None]:
        """Remove several messages in one round trip; return each message's error or ``None``."""
        results = await self._settle_many(_ack, deliveries)
        for delivery, error in zip(deliveries, results, strict=True):
            if error is None:
                delivery.receipt = None
        return results

    async def release(
        self, delivery: Delivery, delay: float, *, count_attempt: bool = True
    ) -> None:
        """Return the message to the queue after ``delay`` seconds, with the envelope's headers."""
        await self._settle(_release(delivery, delay, count_attempt=count_attempt), delivery)
        delivery.receipt = None

    async def extend(self, delivery: Delivery, seconds: float) -> None:
        """Extend the lease so that it ends ``seconds`` from now."""
        await self._settle(_extend(delivery, seconds), delivery)

    async def extend_many(
        self, deliveries: Sequence[Delivery], seconds: float
    ) -> list[QueueError | None]:
        """Extend several leases in one round trip, so that they end ``seconds`` from now.

        Returns:
            For each delivery, in order, its error or ``None``.

        Raises:
            SubscriptionLost: The connection was lost, or the owner did not respond in time.
        """
        results = await self._settle_many(partial(_extend, seconds=seconds), deliveries)
        for error in results:
            if isinstance(error, SubscriptionLost):
                raise error
        return results

    async def _settle(self, item: protocol.SettleItem, delivery: Delivery) -> None:
        (error,) = await self._request([item])
        if error is not None:
            raise _with_context(error, delivery) from error.cause

    async def _settle_many(
        self, item_of: Callable[[Delivery], protocol.SettleItem], deliveries: Sequence[Delivery]
    ) -> list[QueueError | None]:
        """Settle deliveries with one frame; return each delivery's error or ``None``."""
        results: list[QueueError | None] = [None] * len(deliveries)
        items: dict[int, protocol.SettleItem] = {}
        for index, delivery in enumerate(deliveries):
            try:
                items[index] = item_of(delivery)
            except MessageNotFound as error:  # already settled
                results[index] = error
        if items:
            errors = await self._request(list(items.values()))
            for index, problem in zip(items, errors, strict=True):
                if problem is not None:
                    results[index] = _with_context(problem, deliveries[index])
        return results

    def _request(
        self, items: Sequence[protocol.SettleItem]
    ) -> asyncio.Future[list[QueueError | None]]:
        """Send one SETTLE frame; return a future with each item's error or ``None``."""
        future: asyncio.Future[list[QueueError | None]] = self._loop.create_future()

        def answered(answer: bytes | QueueError) -> None:
            timer.cancel()
            errors: list[QueueError | None] = [None] * len(items)
            if isinstance(answer, QueueError):
                errors = [answer] * len(items)
            else:
                for index, error in decode_failures(answer).items():
                    errors[index] = error
            for item, problem in zip(items, errors, strict=True):
                if _ends_lease(item, problem):
                    # Stop renewing only now: the lease must last until the owner has responded.
                    self._leases.pop(item.receipt, None)
            if not future.done():
                future.set_result(errors)

        timeout_error = BackendUnavailable(
            f"the owner did not respond within {SETTLE_TIMEOUT:g} s", backend="native"
        )
        timer = self._loop.call_later(SETTLE_TIMEOUT, answered, timeout_error)
        try:
            body = protocol.encode_settlements(self.number, items)
            self._connection.send_request(protocol.SETTLE, body, answered)
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


def _with_context(error: QueueError, delivery: Delivery) -> QueueError:
    """Add the delivery's queue and message id to the error of a settlement.

    Convert ``BackendUnavailable`` to ``SubscriptionLost``, because leases end with the connection.
    """
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


def _ends_lease(item: protocol.SettleItem, error: QueueError | None) -> bool:
    """Return whether this response means that the delivery's lease has ended."""
    if error is None:
        return item.what != protocol.EXTEND
    return isinstance(error, AckDeadlineExceeded | MessageNotFound)


def _ignore(answer: bytes | QueueError) -> None:
    pass
