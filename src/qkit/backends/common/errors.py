"""Errors that several backends raise with the same text."""

from __future__ import annotations

from qkit.backend import Delivery
from qkit.errors import AckDeadlineExceeded, QueueFull, SubscriptionLost

__all__ = ["lease_lost", "queue_full", "subscription_broke"]


def lease_lost(backend: str, operation: str, delivery: Delivery) -> AckDeadlineExceeded:
    """Return the error for settling or extending a delivery whose lease has ended."""
    return AckDeadlineExceeded(
        "the lease of this delivery is lost, the message may be with another consumer: "
        "extend the lease while working, or raise ack_deadline",
        backend=backend,
        operation=operation,
        queue=delivery.queue,
        message_id=delivery.envelope.id,
    )


def queue_full(backend: str, queue: str, message_id: str) -> QueueFull:
    """Return the error for a message that a queue at its ``max_depth`` does not take."""
    return QueueFull(
        "the queue holds as many messages as it may: consume or purge some, or raise max_depth",
        backend=backend,
        operation="publish",
        queue=queue,
        message_id=message_id,
    )


def subscription_broke(
    backend: str, queue: str, reason: str, cause: BaseException | None = None
) -> SubscriptionLost:
    """Return the error of ``receive`` on a subscription that has ended."""
    return SubscriptionLost(
        f"the subscription broke: {reason}",
        backend=backend,
        operation="receive",
        queue=queue,
        cause=cause,
    )
