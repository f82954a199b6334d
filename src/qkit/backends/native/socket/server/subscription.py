"""The owner's side of one client's subscription: deliveries against credit, and how it ends."""

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

FRAME_BYTES: Final = 1 << 20  # deliveries of more than this are spread over several frames


class ServedSubscription(Subscription, Protocol):
    """A subscription that can be told that its consumer is gone."""

    def abandon(self) -> None:
        """What is held ends as if its leases ended now: the attempts stay counted."""
        ...


class ServedBackend(Backend, Admin, DeadLetterSource, DroppedLetterSource, Protocol):
    """What can be served: everything that the native backend is."""

    def subscribe(self, spec: SubscriptionSpec) -> AbstractAsyncContextManager[ServedSubscription]:
        """As every backend does."""
        ...


class ServerSubscription:
    """One subscription held for a client, from its opening until it is left.

    The client says with each credit how many deliveries it wants now, so nothing is claimed for
    one that does not ask; whatever there is goes out at once.
    """

    def __init__(self, number: int, write_buffer: WriteBuffer) -> None:
        self._number = number
        self._write_buffer = write_buffer
        self._subscription: Subscription | None = None
        self._held: dict[int, Delivery] = {}
        self._receipts = 0
        self._serial = 0  # of the latest credit
        self._wanted = 0
        self._changed = asyncio.Event()
        self._receiving: asyncio.Timeout | None = None
        self._left = False
        self._crashed = False
        self.ended = asyncio.Event()  # everything is settled or given back

    # What the client says

    def credit(self, serial: int, wanted: int) -> None:
        """So many are wanted now, whatever was said before."""
        self._serial, self._wanted = serial, wanted
        self._look()

    def leave(self, *, crashed: bool = False) -> None:
        """The client leaves the subscription, or is gone without a word."""
        if not self._left:
            self._left, self._crashed = True, crashed
            self._look()

    async def stop(self) -> None:
        """Fetch no more."""
        if self._subscription is not None:
            await self._subscription.stop()

    async def settle(self, item: protocol.SettleItem) -> None:
        """Ack, release or extend one delivery; raises what the backend raises."""
        delivery, subscription = self._held.get(item.receipt), self._subscription
        if delivery is None or subscription is None:
            raise AckDeadlineExceeded(
                "the lease of this delivery is lost, the message may be with another consumer: "
                "extend the lease while working, or raise ack_deadline",
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
                raise protocol.ProtocolError(f"{item.what} is no settlement that this owner knows")
        except (AckDeadlineExceeded, MessageNotFound):
            self._held.pop(item.receipt, None)
            raise
        self._held.pop(item.receipt, None)

    # Its life

    async def run(
        self, backend: ServedBackend, spec: SubscriptionSpec, opened: Callable[[], None]
    ) -> None:
        """Subscribe, deliver, and leave as the client left; raises what subscribing raises."""
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
            while not self._left:  # what was delivered may still be settled, or refused
                await self._change()
        if self._crashed:
            subscription.abandon()

    async def _deliver(self, subscription: Subscription) -> None:
        while not self._left:
            if not self._wanted:
                await self._change()
                continue
            serial = self._serial
            try:
                async with asyncio.timeout(None) as self._receiving:
                    deliveries = await subscription.receive(self._wanted)
            except TimeoutError:
                if self._receiving is None or not self._receiving.expired():
                    raise
                continue  # the credit changed; receive is safe to cancel
            finally:
                self._receiving = None
            if serial == self._serial:
                self._wanted = 0
            self._write(serial, deliveries)
            # A client that does not read gets no more, and holds no more than its prefetch.
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

    def _look(self) -> None:
        self._changed.set()
        if self._receiving is not None and not self._receiving.expired():
            self._receiving.reschedule(asyncio.get_running_loop().time())

    async def _change(self) -> None:
        await self._changed.wait()
        self._changed.clear()
