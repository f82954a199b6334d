"""Messages and records: what qkit writes comes back, and what others write is a message too."""

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
    """A record as the driver gives it."""

    key: bytes | None
    value: bytes | None
    headers: Headers = field(default_factory=list)
    topic: str = "orders"
    partition: int = 2
    offset: int = 41
    timestamp: int = 0


def test_a_message_comes_back_as_it_was() -> None:
    envelope = Envelope(
        "0190", b"\x00{}", {"tenant": "Grüße", "empty": ""}, key="k ü", expires_at=1234.5678
    )
    attributes = RecordAttributes(99.0001, Origin("orders", 3, 7))
    again, told = codec.decode(Stored(*codec.encode(envelope, deliveries=2, attributes=attributes)))
    assert (again.id, again.body, again.headers, again.key) == (
        envelope.id, envelope.body, envelope.headers, envelope.key,
    )  # fmt: skip
    assert again.attempt == 3
    assert again.expires_at == 1234.568, "rounded up to the millisecond"
    assert told == RecordAttributes(99.001, Origin("orders", 3, 7))


def test_a_plain_message_is_its_body_an_id_and_its_headers() -> None:
    key, value, headers = codec.encode(Envelope("0190", b'{"id":1}', {"tenant": "acme"}))
    assert (key, value) == (None, b'{"id":1}')
    assert headers == [("qkit-id", b"0190"), ("tenant", b"acme")]


def test_a_foreign_record_is_a_message_with_its_place_as_its_id() -> None:
    headers: Any = [("from", b"x"), ("n", None)]  # Kafka allows it
    envelope, attributes = codec.decode(Stored(b"\xff\x00", b'{"a": 1}', headers))
    assert (envelope.id, envelope.body, envelope.attempt) == ("orders-2-41", b'{"a": 1}', 1)
    assert envelope.key == "\\xff\0"
    assert envelope.headers == {"from": "x", "n": "", "qkit-raw": '{"key": "/wA="}'}
    assert attributes is NO_ATTRIBUTES
    key, _, _ = codec.encode(envelope)
    assert key == b"\xff\x00", "a key that is no text survives"


def test_a_tombstone_is_an_empty_message() -> None:
    envelope, _ = codec.decode(Stored(b"k", None))
    assert (envelope.body, envelope.key) == (b"", "k")


@pytest.mark.parametrize("value", [b"", b"x", b"-1", b"1.5", b"9" * 40, "٣".encode()])
def test_nonsense_in_our_headers_is_as_if_it_were_not_there(value: bytes) -> None:
    names = ("attempt", "expires-at", "not-before", "original-offset", "removed")
    headers = [(f"qkit-{name}", value) for name in names]
    envelope, attributes = codec.decode(Stored(None, b"", headers))
    assert (envelope.attempt, envelope.expires_at, envelope.headers) == (1, None, {})
    assert attributes == RecordAttributes()


def test_a_marker_names_what_it_hides() -> None:
    _, attributes = codec.decode(Stored(*codec.marker(17)))
    assert attributes.removed == 17


@pytest.mark.parametrize(
    ("key", "hash"),
    [(b"21", -973932308), (b"foobar", -790332482), (b"a-little-bit-long-string", -985981536)],
)
def test_keys_go_where_java_s_client_sends_them(key: bytes, hash: int) -> None:
    """The vectors of Kafka's own tests of murmur2."""
    assert partition_of(key, 1000) == (hash & 0x7FFF_FFFF) % 1000
