"""The small things at the boundary: what a capability says, how a delivery shows."""

from __future__ import annotations

import time

import pytest

from qkit import MessageNotFound
from qkit._internal.clock import SystemClock
from qkit.backend import Admin, Capabilities, DeadLetterSource, Delivery, Support
from qkit.backends.native.backend import NativeBackend
from qkit.message import Envelope


def test_a_feature_counts_as_there_when_it_is_native_or_emulated() -> None:
    can = Capabilities(priority=Support.NATIVE, delay=Support.EMULATED)
    assert can.supports("priority")
    assert can.supports("delay")
    assert not can.supports("topics")
    assert bool(can.delay) is True
    assert bool(can.topics) is False


def test_capabilities_are_shown_as_words() -> None:
    shown = Capabilities(priority=Support.NATIVE).as_dict()
    assert shown["priority"] == "native"
    assert set(shown.values()) == {"native", "unsupported"}
    assert len(shown) == 19


def test_a_delivery_shows_what_it_is_and_not_its_body() -> None:
    delivery = Delivery(Envelope("0190", b"secret", attempt=2), "orders", receipt=1)
    assert repr(delivery) == "<Delivery 0190 of orders, attempt 2>"


def test_a_receipt_is_returned_by_its_type_until_it_was_settled() -> None:
    delivery = Delivery(Envelope("0190", b""), "orders", receipt="token")
    assert delivery.receipt_of(str, "some", "ack") == "token"
    for receipt in (None, 7):  # settled, or another backend's
        delivery.receipt = receipt
        with pytest.raises(MessageNotFound, match="settled before") as caught:
            delivery.receipt_of(str, "some", "ack")
        assert caught.value.context == {
            "backend": "some",
            "operation": "ack",
            "queue": "orders",
            "message_id": "0190",
        }


def test_optional_abilities_are_found_by_their_methods() -> None:
    backend = NativeBackend()
    assert isinstance(backend, Admin)
    assert isinstance(backend, DeadLetterSource)
    assert not isinstance(object(), Admin | DeadLetterSource)


def test_the_system_clock_is_the_machines() -> None:
    clock = SystemClock()
    assert abs(clock.time() - time.time()) < 5
    assert abs(clock.monotonic() - time.monotonic()) < 5
