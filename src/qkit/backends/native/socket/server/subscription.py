"""Owner's end of a subscription: sends deliveries against credit and settles them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Final, Protocol

from qkit.backend import (
    Admin,
    Backend,
    DeadLetterSource,
    Delivery,
    DroppedLetterSource,
    Subscription,
    SubscriptionSpec,
)
from qkit.backends.native.socket import protocol
from qkit.backends.native.socket.error_codec import encode_error
from qkit.backends.native.socket.write_buffer import WriteBuffer
from qkit.errors import AckDeadlineExceeded, MessageNotFound, QueueError

__all__ = ["ServedBackend", "ServedSubscription", "ServerSubscription"]

FRAME_BYTES: Final = 1 << 20  # larger batches are split into several frames


class ServedSubscription(Subscription, Protocol):
    """Subscription whose leases can be ended after its consumer crashed."""

    def abandon(self) -> None:
        """End all leases immediately after a consumer crash; the attempts still count."""
        ...


class ServedBackend(Backend, Admin, DeadLetterSource, DroppedLetterSource, Protocol):
    """Backend that a ``SocketServer`` can serve, such as the native backend."""

    def subscribe(self, spec: SubscriptionSpec) -> AbstractAsyncContextManager[ServedSubscription]:
        """Return a context manager that opens a subscription."""
        ...


class ServerSubscription:
    """Subscription that the owner holds on behalf of a client.

    Each CREDIT frame replaces the number of deliveries that the client wants. Messages are claimed
    only against credit and are sent immediately.

    Args:
        number: Number that identifies the subscription in frames.
        write_buffer: Write buffer of the client's connection.

    Attributes:
        ended: Set when the subscription is closed and its unsettled deliveries are released.
    """

    def __init__(self, number: int, write_buffer: WriteBuffer) -> None:
        self._number = number
        self._write_buffer = write_buffer
        self._subscription: Subscription | None = None
        self._held: dict[int, Delivery] = {}
        self._receipts = 0
        self._serial = 0  # serial number of the latest credit
        self._wanted = 0
        self._changed = asyncio.Event()
        self._receiving: asyncio.Timeout | None = None
        self._left = False
        self._crashed = False
        self.ended: asyncio.Event = asyncio.Event()

    # Requests from the client

    def credit(self, serial: int, wanted: int) -> None:
        """Replace the client's credit.

        Args:
            serial: Serial number of the credit.
            wanted: Number of deliveries that the client wants now.
        """
        self._serial, self._wanted = serial, wanted
        self._notify()

    def leave(self, *, crashed: bool = False) -> None:
        """Close the subscription.

        Args:
            crashed: Whether the connection was lost without CLOSE or LEAVE. If so, unsettled
                deliveries count as attempts. Default: false.
        """
        if not self._left:
            self._left, self._crashed = True, crashed
            self._notify()

    async def stop(self) -> None:
        """Stop fetching; held deliveries can still be settled."""
        if self._subscription is not None:
            await self._subscription.stop()

    async def settle(self, item: protocol.SettleItem) -> None:
        """Ack, release or extend one delivery; raise the backend's error if that fails."""
        delivery, subscription = self._held.get(item.receipt), self._subscription
        if delivery is None or subscription is None:
            raise AckDeadlineExceeded(
                "the lease of this delivery has expired and another consumer may have the message: "
                "extend the lease while the handler runs, or raise ack_deadline",
                backend="native",
            )
        try:
            if item.what == protocol.EXTEND:
                await subscription.extend(delivery, item.seconds)
                return
            if item.what == protocol.ACK:
                await subscription.ack(delivery)
            elif item.what == protocol.RELEASE:
                delivery.envelope.headers = item.headers
                await subscription.release(delivery, item.seconds, count_attempt=item.count_attempt)
            else:
                raise protocol.ProtocolError(f"unknown kind of settlement: {item.what}")
        except (AckDeadlineExceeded, MessageNotFound):
            self._held.pop(item.receipt, None)
            raise
        self._held.pop(item.receipt, None)

    # Delivery

    async def run(
        self, backend: ServedBackend, spec: SubscriptionSpec, opened: Callable[[], None]
    ) -> None:
        """Subscribe and send deliveries until the client leaves.

        Args:
            backend: Backend to subscribe to.
            spec: Specification of the subscription, from the client.
            opened: Called once the subscription is open.
        """
        try:
            async with backend.subscribe(spec) as subscription:
                self._subscription = subscription
                opened()
                await self._serve(subscription)
        finally:
            self._subscription = None
            self.ended.set()

    async def _serve(self, subscription: ServedSubscription) -> None:
        try:
            await self._deliver(subscription)
        except QueueError as error:
            self._write_buffer.frame(protocol.LOST, self._number, encode_error(error))
            while not self._left:  # the client may still try to settle its deliveries
                await self._wait_for_change()
        if self._crashed:
            subscription.abandon()

    async def _deliver(self, subscription: Subscription) -> None:
        while not self._left:
            if not self._wanted:
                await self._wait_for_change()
                continue
            serial = self._serial
            try:
                async with asyncio.timeout(None) as self._receiving:
                    deliveries = await subscription.receive(self._wanted)
            except TimeoutError:
                if self._receiving is None or not self._receiving.expired():
                    raise
                continue  # the credit changed or the client left; cancelling receive is safe
            finally:
                self._receiving = None
            if serial == self._serial:
                self._wanted = 0
            self._write(serial, deliveries)
            # Claim no further messages for a client that does not read.
            await self._write_buffer.drained()

    def _write(self, serial: int, deliveries: list[Delivery]) -> None:
        parts: list[bytes] = []
        for receipt, delivery in enumerate(deliveries, self._receipts + 1):
            self._held[receipt] = delivery
            parts.append(protocol.encode_delivery(receipt, delivery))
        self._receipts += len(deliveries)
        for frame in protocol.split(parts, FRAME_BYTES):
            body = protocol.encode_deliveries(serial, frame)
            self._write_buffer.frame(protocol.DELIVERIES, self._number, body)

    def _notify(self) -> None:
        """Wake the delivery loop and interrupt a running ``receive``."""
        self._changed.set()
        if self._receiving is not None and not self._receiving.expired():
            self._receiving.reschedule(asyncio.get_running_loop().time())

    async def _wait_for_change(self) -> None:
        await self._changed.wait()
        self._changed.clear()
