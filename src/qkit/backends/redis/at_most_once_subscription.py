"""Subscription to a Redis list without leases; a claim removes the message from the server."""

from __future__ import annotations

from collections.abc import Sequence

from qkit.backend import Delivery
from qkit.backends.redis import codec
from qkit.backends.redis.driver import CommandArgument
from qkit.backends.redis.errors import BACKEND
from qkit.backends.redis.list_subscription import ListSubscription
from qkit.errors import QueueError, Unsupported
from qkit.message import Envelope

__all__ = ["AtMostOnceSubscription"]


class AtMostOnceSubscription(ListSubscription):
    """Subscription with at-most-once delivery.

    If the consumer dies, the messages that it holds are lost. Messages claimed for a ``receive``
    that was cancelled are returned to the queue if the connection still works.
    """

    async def ack(self, delivery: Delivery) -> None:
        """Free the delivery's slot; the message is already gone from the server."""
        self._forget(delivery, "ack")

    async def ack_many(self, deliveries: Sequence[Delivery]) -> list[QueueError | None]:
        """Free the slots of several deliveries."""
        for delivery in deliveries:
            self._forget(delivery, "ack")
        return [None] * len(deliveries)

    async def release(
        self, delivery: Delivery, delay: float, *, count_attempt: bool = True
    ) -> None:
        """Return the message to the queue immediately; ``delay`` is ignored."""
        envelope = delivery.envelope
        self._forget(delivery, "release")
        content = codec.encode(envelope, envelope.attempt - (not count_attempt))
        await self._release("", 0.0, content)

    async def extend_many(
        self, deliveries: Sequence[Delivery], seconds: float
    ) -> list[QueueError | None]:
        """Raise ``Unsupported``, because there are no leases."""
        raise Unsupported(
            "leases require reliable=true",
            backend=BACKEND,
            operation="extend",
            queue=self._keys.queue,
        )

    def _forget(self, delivery: Delivery, operation: str) -> None:
        token = delivery.receipt_of(str, BACKEND, operation)
        delivery.receipt = None
        self._settled([token])

    def _delivery(self, envelope: Envelope, token: str) -> Delivery:
        return Delivery(envelope, self._keys.queue, token)

    def _wake_lease_renewal(self) -> None:
        pass  # no lease can expire

    def _returned(self, claimed: list[Delivery]) -> list[CommandArgument]:
        arguments: list[CommandArgument] = []
        for delivery in reversed(claimed):
            content = codec.encode(delivery.envelope, delivery.envelope.attempt - 1)
            arguments += ["", 0, content]
        return arguments

    async def _release_held(self) -> None:
        self._settled(list(self.held))
