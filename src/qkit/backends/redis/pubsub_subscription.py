"""Subscription to a Redis channel, with a bounded buffer of received messages.

The server does not store messages for absent subscribers and never redelivers a message. While the
buffer is full, the subscription stops reading. The server then buffers messages up to its
``client-output-buffer-limit pubsub``, and closes the connection when that limit is exceeded.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from operator import itemgetter
from typing import Any, Final, NamedTuple, cast

from redis.asyncio.connection import AbstractConnection

from qkit._internal.ids import new_id
from qkit._internal.logging import logger
from qkit._internal.tasks import retrieve_exception
from qkit.backend import Delivery, SubscriptionSpec
from qkit.backends.common.arrivals import Arrivals
from qkit.backends.redis import codec
from qkit.backends.redis.connection import ConnectionParameters
from qkit.backends.redis.driver import PipelinedConnection, Reply
from qkit.backends.redis.errors import BACKEND, to_queue_error
from qkit.errors import SubscriptionLost, Unsupported
from qkit.message import GROUP, Envelope

__all__ = ["PubSubSubscription"]

# Limits of the buffer. The rest of the read that reaches a limit is still buffered.
MAX_BUFFERED_MESSAGES: Final = 1_000
MAX_BUFFERED_BYTES: Final = 16 * 2**20
# After one to two intervals without data, the subscription sends a PING. Including the timeout for
# the reply, a dead connection is detected within ten seconds.
PING_INTERVAL_SECONDS: Final = 2.0
ANSWER_TIMEOUT_SECONDS: Final = 4.0


# Sequence number in delivery order, and a payload or a released message.
_Arrival = tuple[int, bytes | Envelope]


class _Receipt(NamedTuple):
    subscription: PubSubSubscription
    number: int


class SubscriberConnection(PipelinedConnection):
    """Connection in subscriber mode, which receives messages as well as replies.

    Args:
        connection: Open redis-py connection; the caller must not use it afterwards.
        on_message: Called with the payload of each message.
        on_lost: Called with the error when the connection is lost or closed.
    """

    def __init__(
        self,
        connection: AbstractConnection,
        on_message: Callable[[bytes], None],
        on_lost: Callable[[Exception], None],
    ) -> None:
        self._on_message = on_message
        self._on_lost = on_lost
        self._reading = True
        self._silent = True  # whether no data arrived since the last check
        self._ping_timer: asyncio.TimerHandle | None = None
        super().__init__(connection, ANSWER_TIMEOUT_SECONDS)
        if self.lost is None:
            self._ping_timer = self._loop.call_later(PING_INTERVAL_SECONDS, self._ping_if_silent)

    def _handle_reply(self, reply: Reply) -> None:
        self._silent = False
        if type(reply) is list and reply[0] == b"message":
            self._on_message(cast("bytes", reply[2]))
        else:
            super()._handle_reply(reply)

    def _ping_if_silent(self) -> None:
        if self._reading and self._silent and not self._pending:
            self.call("PING").add_done_callback(retrieve_exception)
        self._silent = True
        self._ping_timer = self._loop.call_later(PING_INTERVAL_SECONDS, self._ping_if_silent)

    def set_reading(self, on: bool) -> None:
        """Resume reading if ``on``; otherwise pause it, so that the server buffers messages."""
        if on is self._reading or self.lost is not None:
            return
        self._reading = on
        transport: Any = self._transport  # declared as write-only, but it can also read
        if on:
            if self._pending:  # the reply is not late: it could not be read while paused
                self._pending[0].deadline = self._loop.time() + ANSWER_TIMEOUT_SECONDS
            transport.resume_reading()
        else:
            transport.pause_reading()

    def _check_timeout(self) -> None:
        if self._reading:
            super()._check_timeout()
        else:
            self._timeout_timer = self._loop.call_later(ANSWER_TIMEOUT_SECONDS, self._check_timeout)

    def _lose(self, error: Exception) -> None:
        if self.lost is None:
            super()._lose(error)
            if self._ping_timer is not None:
                self._ping_timer.cancel()
            self._on_lost(error)


class PubSubSubscription:
    """Subscription to a channel; each subscription receives a copy of every message.

    Deliveries exist only in this process. ``release`` returns a delivery to its place in delivery
    order. Messages that are not settled when the subscription is closed are lost.

    Args:
        parameters: Parameters of the connection.
        spec: Specification of the subscription; its ``prefetch`` is ignored.
    """

    def __init__(self, parameters: ConnectionParameters, spec: SubscriptionSpec) -> None:
        self._parameters = parameters
        self._channel = spec.queue
        self._group = spec.group
        self._arrivals: Arrivals[_Arrival] = Arrivals(order=itemgetter(0))
        self._received = 0
        self._size = 0  # bytes of the buffered payloads
        self._connection: SubscriberConnection | None = None
        self._full = False
        self._stopped = False
        self._dropped = 0

    async def open(self) -> None:
        """Connect and subscribe; only messages published afterwards are received."""
        self._connection = SubscriberConnection(
            await self._parameters.open_driver_connection(), self._buffer, self._lost
        )
        await self._connection.call("SUBSCRIBE", self._channel)

    def _buffer(self, payload: bytes) -> None:
        if self._stopped:
            self._dropped += 1
            return
        self._received += 1
        self._size += len(payload)
        self._arrivals.put(((self._received, payload),))
        if not self._full and (
            len(self._arrivals) >= MAX_BUFFERED_MESSAGES or self._size >= MAX_BUFFERED_BYTES
        ):
            self._full = True
            assert self._connection is not None
            self._connection.set_reading(False)
            logger.warning(
                "%s: paused reading because %d messages are waiting for the handlers of group %s; "
                "the server closes the connection if its client-output-buffer-limit for pubsub is "
                "exceeded",
                self._channel,
                len(self._arrivals),
                self._group,
                extra={"queue": self._channel, "consumer": self._group},
            )

    async def receive(self, limit: int) -> list[Delivery]:
        """Wait for messages and return up to ``limit`` deliveries; an empty list once stopped.

        Raises:
            SubscriptionLost: The connection was lost and all buffered messages were received.
        """
        while items := await self._arrivals.take(limit):
            if found := self._deliveries(items):
                return found
        return []

    def _lost(self, error: Exception) -> None:
        lost = SubscriptionLost(
            "the subscription was lost and will miss messages until it is reopened: "
            + to_queue_error(error, "receive").message,
            backend=BACKEND,
            operation="receive",
            queue=self._channel,
            cause=error,
        )
        self._arrivals.fail(lost, drop=False)

    def _deliveries(self, items: list[_Arrival]) -> list[Delivery]:
        found: list[Delivery] = []
        for number, item in items:
            envelope: Envelope | None
            if isinstance(item, bytes):
                self._size -= len(item)
                envelope = self._decode(item)
            else:
                envelope = item
            if envelope is not None:
                found.append(Delivery(envelope, self._channel, _Receipt(self, number)))
        if (
            self._full
            and len(self._arrivals) <= MAX_BUFFERED_MESSAGES // 2
            and self._size <= MAX_BUFFERED_BYTES // 2
        ):
            self._full = False
            assert self._connection is not None
            self._connection.set_reading(True)
        return found

    def _decode(self, payload: bytes) -> Envelope | None:
        """Decode a message; return ``None`` if it is addressed to another group."""
        envelope = codec.decode(payload)
        if envelope.id == codec.FOREIGN:
            envelope.id = new_id()
        headers = envelope.headers
        if headers and headers.pop(GROUP, self._group) != self._group:
            return None
        envelope.attempt += 1
        return envelope

    # Settle

    async def ack(self, delivery: Delivery) -> None:
        """Mark the delivery as settled, in this process only."""
        self._settle(delivery, "ack")

    async def release(
        self, delivery: Delivery, delay: float, *, count_attempt: bool = True
    ) -> None:
        """Return the message to its place in delivery order; ``delay`` is ignored."""
        number = self._settle(delivery, "release")
        if self._stopped:
            self._dropped += 1
            return
        delivery.envelope.attempt += count_attempt
        self._arrivals.put_back((number, delivery.envelope))

    async def extend(self, delivery: Delivery, seconds: float) -> None:
        """Raise ``Unsupported``, because there are no leases."""
        raise Unsupported(
            "pub/sub has no leases", backend=BACKEND, operation="extend", queue=delivery.queue
        )

    def _settle(self, delivery: Delivery, operation: str) -> int:
        receipt = delivery.receipt_of(_Receipt, BACKEND, operation)
        if receipt.subscription is not self:
            raise delivery.settled_before(BACKEND, operation)
        delivery.receipt = None
        return receipt.number

    # Stop and close

    async def stop(self) -> None:
        """Disconnect, drop buffered messages and wake a waiting ``receive``."""
        if self._stopped:
            return
        self._stopped = True
        self._arrivals.stop()
        self._dropped += len(self._arrivals.drain())
        if self._connection is not None:
            await self._connection.aclose()

    async def leave(self) -> None:
        """Stop and log the number of dropped messages."""
        await self.stop()
        if self._dropped:
            logger.warning(
                "%s: %d unhandled messages were lost because pub/sub does not store messages",
                self._channel,
                self._dropped,
                extra={"queue": self._channel, "consumer": self._group},
            )
