"""Constructors for errors that several backends raise."""

from __future__ import annotations

from qkit.backend import Delivery
from qkit.errors import AckDeadlineExceeded, LifecycleError, QueueFull, SubscriptionLost

__all__ = ["lease_lost", "other_loop", "queue_full", "subscription_broke"]


def lease_lost(backend: str, operation: str, delivery: Delivery) -> AckDeadlineExceeded:
    """Return the error for settling or extending a delivery whose lease has expired."""
    return AckDeadlineExceeded(
        "the lease of this delivery has expired, and another consumer may have the message: "
        "extend the lease while the handler runs, or raise ack_deadline",
        backend=backend,
        operation=operation,
        queue=delivery.queue,
        message_id=delivery.envelope.id,
    )


def other_loop(backend: str, operation: str | None = None) -> LifecycleError:
    """Return the error for using a backend in another event loop or in a forked child process."""
    return LifecycleError(
        "the backend was started in another event loop or in the parent process; nothing was sent: "
        "start a backend or service in each event loop and in each process",
        backend=backend,
        operation=operation,
    )


def queue_full(backend: str, queue: str, message_id: str) -> QueueFull:
    """Return the error for a message that exceeds the ``max_depth`` of its queue."""
    return QueueFull(
        "the queue is full: consume or purge messages, or raise max_depth",
        backend=backend,
        operation="publish",
        queue=queue,
        message_id=message_id,
    )


def subscription_broke(
    backend: str, queue: str, reason: str, cause: BaseException | None = None
) -> SubscriptionLost:
    """Return the error that ``receive`` raises after the subscription was lost."""
    return SubscriptionLost(
        f"the subscription was lost: {reason}",
        backend=backend,
        operation="receive",
        queue=queue,
        cause=cause,
    )
