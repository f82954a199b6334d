"""Codec: envelopes survive a round trip, and foreign records are decoded."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

from qkit.backends.kafka import codec
from qkit.backends.kafka.codec import NO_ATTRIBUTES, Headers, Origin, RecordAttributes
from qkit.backends.kafka.driver import partition_of
from qkit.message import Envelope


@dataclass
class Stored:
    """Record with the same attributes as a record of the driver."""

    key: bytes | None
    value: bytes | None
    headers: Headers = field(default_factory=list)
    topic: str = "orders"
    partition: int = 2
    offset: int = 41
    timestamp: int = 0


def test_a_message_survives_a_round_trip() -> None:
    envelope = Envelope(
        "0190", b"\x00{}", {"tenant": "Grüße", "empty": ""}, key="k ü", expires_at=1234.5678
    )
    attributes = RecordAttributes(99.0001, Origin("orders", 3, 7))
    record = Stored(*codec.encode(envelope, deliveries=2, attributes=attributes))
    decoded, decoded_attributes = codec.decode(record)
    assert (decoded.id, decoded.body, decoded.headers, decoded.key) == (
        envelope.id, envelope.body, envelope.headers, envelope.key,
    )  # fmt: skip
    assert decoded.attempt == 3
    assert decoded.expires_at == 1234.568, "rounded up to the millisecond"
    assert decoded_attributes == RecordAttributes(99.001, Origin("orders", 3, 7))


def test_a_record_of_a_new_message_has_only_its_body_id_and_headers() -> None:
    key, value, headers = codec.encode(Envelope("0190", b'{"id":1}', {"tenant": "acme"}))
    assert (key, value) == (None, b'{"id":1}')
    assert headers == [("qkit-id", b"0190"), ("tenant", b"acme")]


def test_the_id_of_a_foreign_record_is_its_position() -> None:
    headers: Any = [("from", b"x"), ("n", None)]  # Kafka allows headers without a value
    envelope, attributes = codec.decode(Stored(b"\xff\x00", b'{"a": 1}', headers))
    assert (envelope.id, envelope.body, envelope.attempt) == ("orders-2-41", b'{"a": 1}', 1)
    assert envelope.key == "\\xff\0"
    assert envelope.headers == {"from": "x", "n": "", "qkit-raw": '{"key": "/wA="}'}
    assert attributes is NO_ATTRIBUTES
    key, _, _ = codec.encode(envelope)
    assert key == b"\xff\x00", "a binary key is kept"


def test_a_tombstone_is_an_empty_message() -> None:
    envelope, _ = codec.decode(Stored(b"k", None))
    assert (envelope.body, envelope.key) == (b"", "k")


@pytest.mark.parametrize("value", [b"", b"x", b"-1", b"1.5", b"9" * 40, "٣".encode()])
def test_invalid_values_of_qkit_headers_are_ignored(value: bytes) -> None:
    names = ("attempt", "expires-at", "not-before", "original-offset", "removed")
    headers = [(f"qkit-{name}", value) for name in names]
    envelope, attributes = codec.decode(Stored(None, b"", headers))
    assert (envelope.attempt, envelope.expires_at, envelope.headers) == (1, None, {})
    assert attributes == RecordAttributes()


def test_a_marker_contains_the_offset_that_it_hides() -> None:
    _, attributes = codec.decode(Stored(*codec.marker(17)))
    assert attributes.removed == 17


@pytest.mark.parametrize(
    ("key", "hash"),
    [(b"21", -973932308), (b"foobar", -790332482), (b"a-little-bit-long-string", -985981536)],
)
def test_keys_have_the_same_partition_as_in_the_java_client(key: bytes, hash: int) -> None:
    """The hashes are from Kafka's murmur2 tests."""
    assert partition_of(key, 1000) == (hash & 0x7FFF_FFFF) % 1000
