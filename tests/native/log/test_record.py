"""Encoding and decoding of log records, including truncated and invalid ones."""

from __future__ import annotations

import struct
from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qkit.errors import PayloadTooLarge
from qkit.native.log import encode
from qkit.native.log.encode import (
    encode_ack,
    encode_bulk_import,
    encode_claim,
    encode_dead_letter_move,
    encode_declare,
    encode_delete,
    encode_fanout,
    encode_publish,
    encode_release,
    encode_remove,
)
from qkit.native.log.record import (
    Ack,
    BulkImport,
    Claim,
    DeadLetterMove,
    Declare,
    Delete,
    Fanout,
    Publish,
    RecordError,
    Release,
    Remove,
    decode,
)

U32 = st.integers(0, 2**32 - 1)
U64 = st.integers(0, 2**64 - 1)
WALL = st.floats(0, 1e12)
TEXT = st.text(st.characters(exclude_categories=["Cs"]))
HEADERS = st.none() | st.dictionaries(st.text(), st.text(), min_size=1)


@pytest.mark.proves("002-log-6", "002-log-8")
@given(U32, U64, TEXT, st.binary(), st.integers(0, 255), WALL, WALL, WALL, st.none() | TEXT,
       HEADERS, U32)  # fmt: skip
def test_a_message_is_decoded_as_it_was_encoded(
    queue, seq, id, body, priority, at, due, expires, key, headers, attempt
):
    content = encode_publish(
        queue, seq, id, body, priority=priority, at=at, due=due, expires=expires, key=key,
        headers=headers, attempt=attempt,
    )  # fmt: skip

    assert decode(content) == Publish(
        queue, seq, id, body, priority, at, due, expires, key, headers, attempt
    )


MESSAGE = encode_publish(9, 4, "0190", b"body", headers={"a": "b"}, key="k")
DECODED = Publish(9, 4, "0190", b"body", 5, 0.0, 0.0, 0.0, "k", {"a": "b"}, 0)


@pytest.mark.proves("002-log-7")
@pytest.mark.parametrize(
    ("content", "record"),
    [
        (
            encode_declare(1, "orders", None, {"max_depth": 5}),
            Declare(1, "orders", None, {"max_depth": 5}),
        ),
        (encode_declare(1, "prices", "", {}), Declare(1, "prices", "", {})),
        (encode_declare(1, "prices", "audit"), Declare(1, "prices", "audit", {})),
        (encode_delete(7), Delete(7)),
        (encode_claim(1, [5], [1]), Claim(1, (5,), (1,))),
        (encode_claim(1, [5, 2**60], [1, 4]), Claim(1, (5, 2**60), (1, 4))),
        (encode_ack(1, [5]), Ack(1, (5,))),
        (encode_ack(1, range(1000)), Ack(1, tuple(range(1000)))),
        (encode_remove(1, [5, 6]), Remove(1, (5, 6))),
        (encode_release(1, 5, 2, 99.5), Release(1, 5, 2, 99.5, None)),
        (encode_release(1, 5, 2, 0.0, {}), Release(1, 5, 2, 0.0, {})),
        (encode_release(1, 5, 2, 0.0, {"a": ""}), Release(1, 5, 2, 0.0, {"a": ""})),
        (encode_dead_letter_move(1, 5, MESSAGE), DeadLetterMove(1, 5, DECODED)),
        (encode_fanout([(9, 4), (8, 3)], MESSAGE), Fanout(((9, 4), (8, 3)), DECODED)),
        (encode_bulk_import("job-1", 8, 2**40), BulkImport("job-1", 8, 2**40)),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, tuple) else "",
)
def test_each_record_type_is_decoded_as_it_was_encoded(content, record):
    assert decode(content) == record


@pytest.mark.parametrize(
    "headers",
    [{"nul": "a\0b"}, {"{": "looks like JSON"}, {"lone": "\ud800"}, {"": ""}, {"é": "ü\n"}],
)
def test_unusual_headers_are_preserved(headers):
    record = decode(encode_publish(1, 1, "x", b"", headers=headers))

    assert isinstance(record, Publish)
    assert record.headers == headers


@pytest.mark.parametrize(
    "call",
    [
        lambda: encode_publish(2**32, 1, "x", b""),
        lambda: encode_publish(1, -1, "x", b""),
        lambda: encode_publish(1, 1, "x", b"", priority=256),
        lambda: encode_publish(1, 1, "x" * 70_000, b""),
        lambda: encode_publish(1, 1, "x", b"", key="k" * 70_000),
        lambda: encode_declare(1, "n" * 70_000),
        lambda: encode_claim(1, [1, 2], [1]),
        lambda: encode_claim(1, [], []),
        lambda: encode_ack(1, []),
        lambda: encode_ack(1, [2**64]),
        lambda: encode_fanout([(1, 1)] * 70_000, MESSAGE),
    ],
)
def test_values_that_do_not_fit_into_a_record_are_rejected(call):
    with pytest.raises(RecordError):
        call()


@pytest.mark.parametrize(
    "complete", [MESSAGE, encode_dead_letter_move(1, 5, MESSAGE), encode_claim(1, [1], [1])]
)
def test_a_truncated_record_is_rejected_or_decoded_as_a_shorter_one(complete):
    for end in range(len(complete)):
        try:
            record = decode(complete[:end])
        except RecordError:
            continue
        assert len(repr(record)) < len(repr(decode(complete)))


@settings(max_examples=300)
@given(st.binary(max_size=100))
def test_arbitrary_bytes_raise_only_record_error(data):
    with suppress(RecordError):
        decode(data)


def test_a_dead_letter_that_is_not_a_message_is_rejected():
    with pytest.raises(RecordError, match="expected a PUBLISH record"):
        decode(encode_dead_letter_move(1, 5, encode_ack(1, list(range(9)))))


def test_the_layout_of_a_publish_record_matches_the_documented_format():
    content = encode_publish(1, 2, "id", b"body", priority=3, at=4.0)

    assert content == struct.pack("<BBIQBdH", 3, 0, 1, 2, 3, 4.0, 2) + b"id" + b"body"


def test_a_body_above_the_limit_is_rejected(monkeypatch):
    monkeypatch.setattr(encode, "MAX_CONTENT", 100_050)
    encode_publish(1, 1, "x", bytes(100_000))
    for key in (None, "k"):
        with pytest.raises(PayloadTooLarge):
            encode_publish(1, 1, "x", bytes(100_050), key=key)
