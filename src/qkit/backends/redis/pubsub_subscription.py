"""A subscriber of a Redis channel: what it hears waits here for a handler, a bounded while.

Nothing is kept for whoever does not listen, and nothing is redelivered. When handlers are slow this
stops reading; then the server keeps what comes, up to ``client-output-buffer-limit pubsub``, and
hangs up beyond that.
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

MESSAGES: Final = 1_000  # that wait here at most, but for what came with the last of them
BYTES: Final = 16 * 2**20
# After one to two intervals without data the server gets a PING. With the time that it has to
# answer, a dead connection is found within ten seconds.
PING_INTERVAL_SECONDS: Final = 2.0
ANSWER_TIMEOUT_SECONDS: Final = 4.0


# The number in the order of delivery, and a payload or a message that was put back.
_Arrival = tuple[int, bytes | Envelope]


class _Receipt(NamedTuple):
    subscription: PubSubSubscription
    number: int


class SubscriberConnection(PipelinedConnection):
    """A connection in subscriber mode: it is told messages beside the answers to its commands."""

    def __init__(
        self,
        connection: AbstractConnection,
        hear: Callable[[bytes], None],
        ended: Callable[[Exception], None],
    ) -> None:
        self._hear = hear
        self._ended = ended
        self._reading = True
        self._silent = True
        self._ping_timer: asyncio.TimerHandle | None = None
        super().__init__(connection, ANSWER_TIMEOUT_SECONDS)
        if self.lost is None:
            self._ping_timer = self._loop.call_later(PING_INTERVAL_SECONDS, self._ask)

    def _answer(self, reply: Reply) -> None:
        self._silent = False
        if type(reply) is list and reply[0] == b"message":
            self._hear(cast("bytes", reply[2]))
        else:
            super()._answer(reply)

    def _ask(self) -> None:
        if self._reading and self._silent and not self._waiting:
            self.call("PING").add_done_callback(retrieve_exception)
        self._silent = True
        self._ping_timer = self._loop.call_later(PING_INTERVAL_SECONDS, self._ask)

    def read(self, on: bool) -> None:
        """Read on, or leave what comes with the server."""
        if on is self._reading or self.lost is not None:
            return
        self._reading = on
        transport: Any = self._transport  # one that writes and reads
        if on:
            if self._waiting:  # an answer that nobody has read is not late
                self._waiting[0].deadline = self._loop.time() + ANSWER_TIMEOUT_SECONDS
            transport.resume_reading()
        else:
            transport.pause_reading()

    def _check(self) -> None:
        if self._reading:
            super()._check()
        else:
            self._watch = self._loop.call_later(ANSWER_TIMEOUT_SECONDS, self._check)

    def _lose(self, error: Exception) -> None:
        if self.lost is None:
            super()._lose(error)
            if self._ping_timer is not None:
                self._ping_timer.cancel()
            self._ended(error)


class PubSubSubscription:
    """A subscription to a channel: every one gets a copy of every message.

    Its deliveries exist only here. ``release`` puts one back in the order of delivery. What was
    not handled is lost when the subscription ends.
    """

    def __init__(self, parameters: ConnectionParameters, spec: SubscriptionSpec) -> None:
        self._parameters = parameters
        self._channel = spec.queue
        self._group = spec.group
        self._arrivals: Arrivals[_Arrival] = Arrivals(order=itemgetter(0))
        self._heard = 0
        self._size = 0  # of the payloads that wait
        self._connection: SubscriberConnection | None = None
        self._full = False
        self._stopped = False
        self._dropped = 0

    async def open(self) -> None:
        """Subscribe; from here on everything is heard."""
        self._connection = SubscriberConnection(
            await self._parameters.open_driver_connection(), self._hear, self._lost
        )
        await self._connection.call("SUBSCRIBE", self._channel)

    def _hear(self, payload: bytes) -> None:
        if self._stopped:
            self._dropped += 1
            return
        self._heard += 1
        self._size += len(payload)
        self._arrivals.put(((self._heard, payload),))
        if not self._full and (len(self._arrivals) >= MESSAGES or self._size >= BYTES):
            self._full = True
            assert self._connection is not None
            self._connection.read(False)
            logger.warning(
                "%s: %d messages wait for a handler of %s and no more are read: the server keeps "
                "the rest, and hangs up when its client-output-buffer-limit for pubsub is reached",
                self._channel,
                len(self._arrivals),
                self._group,
                extra={"queue": self._channel, "consumer": self._group},
            )

    async def receive(self, limit: int) -> list[Delivery]:
        """Up to ``limit`` deliveries as soon as there are any; none once stopped.

        Raises ``SubscriptionLost`` when the connection breaks, once all that came by it is handled.
        """
        while items := await self._arrivals.take(limit):
            if found := self._deliveries(items):
                return found
        return []

    def _lost(self, error: Exception) -> None:
        lost = SubscriptionLost(
            "the subscription broke, and what is published meanwhile is not heard: "
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
                envelope = self._decoded(item)
            else:
                envelope = item
            if envelope is not None:
                found.append(Delivery(envelope, self._channel, _Receipt(self, number)))
        if self._full and len(self._arrivals) <= MESSAGES // 2 and self._size <= BYTES // 2:
            self._full = False
            assert self._connection is not None
            self._connection.read(True)
        return found

    def _decoded(self, payload: bytes) -> Envelope | None:
        """The message, or none if it is a replay for another group."""
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
        """The work is done; the server knows nothing of it."""
        self._settle(delivery, "ack")

    async def release(
        self, delivery: Delivery, delay: float, *, count_attempt: bool = True
    ) -> None:
        """Put the message back in the order of delivery; there are no delays."""
        number = self._settle(delivery, "release")
        if self._stopped:
            self._dropped += 1
            return
        delivery.envelope.attempt += count_attempt
        self._arrivals.put_back((number, delivery.envelope))

    async def extend(self, delivery: Delivery, seconds: float) -> None:
        """There is nothing to extend."""
        raise Unsupported(
            "pub/sub has no leases", backend=BACKEND, operation="extend", queue=delivery.queue
        )

    def _settle(self, delivery: Delivery, operation: str) -> int:
        receipt = delivery.receipt_of(_Receipt, BACKEND, operation)
        if receipt.subscription is not self:
            raise delivery.settled_before(BACKEND, operation)
        delivery.receipt = None
        return receipt.number

    # The end

    async def stop(self) -> None:
        """Hear no more, and wake a ``receive`` that waits."""
        if self._stopped:
            return
        self._stopped = True
        self._arrivals.stop()
        self._dropped += len(self._arrivals.drain())
        if self._connection is not None:
            await self._connection.aclose()

    async def leave(self) -> None:
        """Stop, and say what was lost by that."""
        await self.stop()
        if self._dropped:
            logger.warning(
                "%s: %d messages that no handler had done with are gone: pub/sub keeps nothing",
                self._channel,
                self._dropped,
                extra={"queue": self._channel, "consumer": self._group},
            )
