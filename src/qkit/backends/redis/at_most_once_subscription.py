"""A consumer of a Redis list without leases: what it takes is gone from the server at once."""

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
    """At most once: a consumer that dies takes along what it held.

    What no handler saw goes back when ``receive`` is cancelled, as far as the connection allows.
    """

    async def ack(self, delivery: Delivery) -> None:
        """The work is done; the server knows nothing of it."""
        self._forget(delivery, "ack")

    async def ack_many(self, deliveries: Sequence[Delivery]) -> list[QueueError | None]:
        """The work is done; the server knows nothing of it."""
        for delivery in deliveries:
            self._forget(delivery, "ack")
        return [None] * len(deliveries)

    async def release(
        self, delivery: Delivery, delay: float, *, count_attempt: bool = True
    ) -> None:
        """Put the message back at once: there are no delays without leases."""
        envelope = delivery.envelope
        self._forget(delivery, "release")
        content = codec.encode(envelope, envelope.attempt - (not count_attempt))
        await self._release("", 0.0, content)

    async def extend_many(
        self, deliveries: Sequence[Delivery], seconds: float
    ) -> list[QueueError | None]:
        """Raise ``Unsupported``: there are no leases."""
        raise Unsupported(
            "there are no leases with reliable=false",
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

    def _keep(self) -> None:
        pass  # nothing runs out

    def _returned(self, claimed: list[Delivery]) -> list[CommandArgument]:
        arguments: list[CommandArgument] = []
        for delivery in reversed(claimed):
            content = codec.encode(delivery.envelope, delivery.envelope.attempt - 1)
            arguments += ["", 0, content]
        return arguments

    async def _give_back(self) -> None:
        self._settled(list(self.held))
