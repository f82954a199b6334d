"""Functions that create the errors common to several backends."""

from __future__ import annotations

from qkit import AckDeadlineExceeded, QueueFull
from qkit.backend import Delivery
from qkit.backends.common.errors import lease_lost, queue_full, subscription_broke
from qkit.errors import SubscriptionLost
from qkit.message import Envelope


def test_lease_lost_names_the_delivery_and_the_remedy() -> None:
    error = lease_lost("some", "ack", Delivery(Envelope("7", b""), "orders", receipt=1))
    assert type(error) is AckDeadlineExceeded
    assert "raise ack_deadline" in error.message
    assert error.context == {
        "backend": "some",
        "operation": "ack",
        "queue": "orders",
        "message_id": "7",
    }


def test_queue_full_names_the_message_and_the_remedy() -> None:
    error = queue_full("some", "orders", "7")
    assert type(error) is QueueFull
    assert "raise max_depth" in error.message
    assert error.context == {
        "backend": "some",
        "operation": "publish",
        "queue": "orders",
        "message_id": "7",
    }


def test_subscription_broke_has_the_reason_and_the_cause() -> None:
    cause = OSError("reset")
    error = subscription_broke("some", "orders", "the channel was closed", cause)
    assert type(error) is SubscriptionLost
    assert error.message == "the subscription was lost: the channel was closed"
    assert error.cause is cause
    assert error.context == {"backend": "some", "operation": "receive", "queue": "orders"}
    assert subscription_broke("some", "orders", "it was closed").cause is None
