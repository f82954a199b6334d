"""Capabilities, deliveries and optional protocols of the backend boundary."""

from __future__ import annotations

import time

import pytest

from qkit import MessageNotFound
from qkit._internal.clock import SystemClock
from qkit.backend import Admin, Capabilities, DeadLetterSource, Delivery, Support
from qkit.backends.native.backend import NativeBackend
from qkit.message import Envelope


def test_a_feature_is_supported_if_it_is_native_or_emulated() -> None:
    capabilities = Capabilities(priority=Support.NATIVE, delay=Support.EMULATED)
    assert capabilities.supports("priority")
    assert capabilities.supports("delay")
    assert not capabilities.supports("topics")
    assert bool(capabilities.delay) is True
    assert bool(capabilities.topics) is False


def test_capabilities_convert_to_a_dictionary_of_strings() -> None:
    shown = Capabilities(priority=Support.NATIVE).as_dict()
    assert shown["priority"] == "native"
    assert set(shown.values()) == {"native", "unsupported"}
    assert len(shown) == 20


def test_the_repr_of_a_delivery_omits_the_body() -> None:
    delivery = Delivery(Envelope("0190", b"secret", attempt=2), "orders", receipt=1)
    assert repr(delivery) == "<Delivery 0190 of orders, attempt 2>"


def test_a_receipt_of_another_type_means_that_the_delivery_is_settled() -> None:
    delivery = Delivery(Envelope("0190", b""), "orders", receipt="token")
    assert delivery.receipt_of(str, "some", "ack") == "token"
    for receipt in (None, 7):  # a settled delivery; a receipt of another backend
        delivery.receipt = receipt
        with pytest.raises(MessageNotFound, match="already settled") as caught:
            delivery.receipt_of(str, "some", "ack")
        assert caught.value.context == {
            "backend": "some",
            "operation": "ack",
            "queue": "orders",
            "message_id": "0190",
        }


def test_optional_protocols_are_recognised_by_their_methods() -> None:
    backend = NativeBackend()
    assert isinstance(backend, Admin)
    assert isinstance(backend, DeadLetterSource)
    assert not isinstance(object(), Admin | DeadLetterSource)


def test_the_system_clock_returns_the_time_of_the_machine() -> None:
    clock = SystemClock()
    assert abs(clock.time() - time.time()) < 5
    assert abs(clock.monotonic() - time.monotonic()) < 5
