"""Binary protocol: encoding, decoding, and rejection of invalid data."""

from __future__ import annotations

import contextlib
import math
import os
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qkit import errors
from qkit.backend import Delivery, QueueSpec, SubscriptionSpec
from qkit.backends.native.socket import protocol
from qkit.backends.native.socket.error_codec import (
    decode_error,
    decode_failures,
    encode_error,
    encode_failures,
)
from qkit.errors import PartialSend, QueueError, QueueFull, QueueNotFound
from qkit.message import Envelope, Sent

SEED = int(os.environ.get("QKIT_TEST_SEED", "20240501"))

anything = st.text(st.characters(exclude_categories=()))  # includes lone surrogates and NULs
seconds = st.floats(allow_nan=False)
envelopes = st.builds(
    Envelope,
    id=anything,
    body=st.binary(max_size=300),
    headers=st.dictionaries(anything, anything, max_size=4),
    key=st.none() | anything,
    priority=st.none() | st.integers(-(1 << 31) + 1, (1 << 31) - 1),
    not_before=st.none() | seconds,
    expires_at=st.none() | seconds,
    attempt=st.integers(0, 1 << 31),
)
settlements = st.builds(
    protocol.SettleItem,
    what=st.integers(1, 3),
    receipt=st.integers(0, 1 << 63),
    seconds=seconds,
    count_attempt=st.booleans(),
    headers=st.dictionaries(anything, anything, max_size=4),
)


@given(st.lists(envelopes, max_size=5), anything)
def test_messages_survive_encoding(items: list[Envelope], queue: str) -> None:
    body = protocol.encode_publish(queue, map(protocol.encode_envelope, items))
    assert protocol.decode_publish(body) == (queue, items)


@given(st.lists(st.tuples(st.integers(0, 1 << 63), envelopes, st.none() | st.just(30.0))))
def test_deliveries_survive_encoding(items: list[tuple[int, Envelope, float | None]]) -> None:
    sent = [
        protocol.encode_delivery(receipt, Delivery(item, "q", object(), lease))
        for receipt, item, lease in items
    ]
    serial, found = protocol.decode_deliveries("q", protocol.encode_deliveries(7, sent))
    assert serial == 7
    assert [(item.receipt, item.envelope, item.lease) for item in found] == items


@given(st.integers(0, 1 << 31), st.lists(settlements))
def test_settlements_survive_encoding(number: int, items: list[protocol.SettleItem]) -> None:
    assert protocol.decode_settlements(protocol.encode_settlements(number, items)) == (
        number,
        items,
    )


@given(st.lists(st.none() | st.integers(0, 1 << 40)))
def test_positions_survive_encoding(positions: list[int | None]) -> None:
    sent = [Sent("", position) for position in positions]
    assert protocol.decode_positions(protocol.encode_positions(sent)) == positions


def test_specifications_and_renewals_survive_encoding() -> None:
    spec = SubscriptionSpec(
        queue="q", group="g", consumer="c", prefetch=3, ack_deadline=math.inf, broadcast=True
    )
    assert protocol.decode_record(SubscriptionSpec, protocol.encode_record(spec)) == spec
    queue = QueueSpec(name="q", dead_letter="d", max_deliveries=3, ack_deadline=0.5)
    assert protocol.decode_record(QueueSpec, protocol.encode_record(queue)) == queue
    leases = [(1, 2, 0.5), (3, 1 << 40, 30.0)]
    assert protocol.decode_renewals(protocol.encode_renewals(1 << 60, leases)) == (1 << 60, leases)


@given(
    st.lists(st.tuples(st.integers(0, 255), st.integers(0, 99), st.binary(max_size=50))), st.data()
)
def test_frames_are_decoded_from_arbitrary_chunks(
    sent: list[tuple[int, int, bytes]], data: st.DataObject
) -> None:
    stream = b"".join(protocol.frame(*item) for item in sent)
    frames = protocol.FrameDecoder()
    found: list[tuple[int, int, bytes]] = []
    while stream:
        cut = data.draw(st.integers(1, len(stream)))
        found += frames.feed(stream[:cut])
        stream = stream[cut:]
    assert found == sent


def test_a_frame_above_the_limit_is_rejected_when_its_head_arrives() -> None:
    frames = protocol.FrameDecoder(100)
    assert list(frames.feed(protocol.frame(1, 1, bytes(100)))) == [(1, 1, bytes(100))]
    with pytest.raises(protocol.ProtocolError, match=r"101 bytes, but the limit is 100"):
        list(frames.feed(protocol.HEAD.pack(101, 1, 1)))


def test_invalid_data_raises_only_protocol_errors() -> None:
    print("seed", SEED)
    chance = random.Random(SEED)
    good = protocol.encode_publish(
        "q", [protocol.encode_envelope(Envelope("a", b"b", {"c": "d"}, "e", 5))]
    )
    for _ in range(2_000):
        data = bytearray(good if chance.random() < 0.7 else chance.randbytes(60))
        for _ in range(chance.randrange(1, 6)):
            data[chance.randrange(len(data))] = chance.randrange(256)
        for decode in (
            protocol.decode_publish,
            protocol.decode_settlements,
            protocol.decode_renewals,
            protocol.decode_positions,
            protocol.decode_credit,
            protocol.decode_number,
            decode_error,
            lambda body: protocol.decode_deliveries("q", body),
            lambda body: protocol.decode_record(QueueSpec, body),
        ):
            with contextlib.suppress(protocol.ProtocolError):
                decode(bytes(data))


@pytest.mark.parametrize(
    "cls",
    [cls for cls in map(vars(errors).get, errors.__all__) if issubclass(cls, QueueError)],  # type: ignore[arg-type]
    ids=lambda cls: cls.__name__,
)
def test_each_error_survives_encoding(cls: type[QueueError]) -> None:
    error = cls("it failed", backend="native", operation="send", queue="q")
    same = decode_error(encode_error(error))
    assert type(same) is cls
    assert str(same) == str(error) == "it failed [backend=native operation=send queue=q]"


def test_a_partial_send_keeps_its_results() -> None:
    full = QueueFull("the queue is full", queue="q", message_id="b")
    same = decode_error(encode_error(PartialSend("half", [Sent("a", 3), full, Sent("c")])))
    assert isinstance(same, PartialSend)
    assert same.results[::2] == [Sent("a", 3), Sent("c", None)]
    assert isinstance(same.results[1], QueueFull)
    assert str(same.results[1]) == str(full)


def test_an_error_of_an_unknown_class_is_decoded_as_its_nearest_known_base_class() -> None:
    class OddlyFull(QueueFull):
        pass

    assert type(decode_error(encode_error(OddlyFull("x")))) is QueueFull
    plain = decode_error(encode_error(ZeroDivisionError("by zero")))
    assert type(plain) is QueueError
    assert plain.message == "ZeroDivisionError: by zero"


def test_failures_keep_their_indexes() -> None:
    found = decode_failures(encode_failures([None, QueueNotFound("unknown"), None]))
    assert list(found) == [1]
    assert isinstance(found[1], QueueNotFound)
    assert encode_failures([None, None]) == b""
    assert decode_failures(b"") == {}
