"""A message as it lies in a Kafka topic: the body is the value, everything else is a header.

A console consumer shows it to a person as it was sent. qkit's own facts are headers that begin
with ``qkit-``; a record without them was written by another program, and is a message as well.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple, Protocol

from qkit.backends.common.raw_text import RAW, keep, kept, text_of
from qkit.message import GROUP, Envelope

__all__ = [
    "DEAD_REASON",
    "NO_ATTRIBUTES",
    "KafkaRecord",
    "Origin",
    "RecordAttributes",
    "decode",
    "encode",
    "key_of",
]

ID: Final = "qkit-id"
ATTEMPT: Final = "qkit-attempt"  # deliveries so far; absent on what was never delivered
NOT_BEFORE: Final = "qkit-not-before"
EXPIRES_AT: Final = "qkit-expires-at"
ORIGINAL_TOPIC: Final = "qkit-original-topic"
ORIGINAL_PARTITION: Final = "qkit-original-partition"
ORIGINAL_OFFSET: Final = "qkit-original-offset"
REMOVED: Final = "qkit-removed"  # a marker: the message at this offset of the partition is gone
DEAD_REASON: Final = "qkit-dead-reason"  # only dead letters have it

_OWN: Final = frozenset(
    {ID, ATTEMPT, NOT_BEFORE, EXPIRES_AT, ORIGINAL_TOPIC, ORIGINAL_PARTITION, ORIGINAL_OFFSET}
    | {REMOVED}
)

Headers = Sequence[tuple[str, bytes | None]]


class KafkaRecord(Protocol):
    """What is read of the driver's record."""

    topic: str
    partition: int
    offset: int
    timestamp: int
    key: bytes | None
    value: bytes | None
    headers: Headers


class Origin(NamedTuple):
    """Where a message lay when it was first delivered."""

    topic: str
    partition: int
    offset: int


class RecordAttributes(NamedTuple):
    """What a record says about its message beyond the envelope."""

    not_before: float | None = None
    origin: Origin | None = None
    removed: int | None = None


NO_ATTRIBUTES: Final = RecordAttributes()  # most messages: never delivered, never delayed


def encode(
    envelope: Envelope, *, deliveries: int = 0, attributes: RecordAttributes = NO_ATTRIBUTES
) -> tuple[bytes | None, bytes, list[tuple[str, bytes]]]:
    """Key, value and headers of ``envelope`` after so many deliveries.

    >>> encode(Envelope("0190", b"{}", {"tenant": "acme"}, key="k"))
    (b'k', b'{}', [('qkit-id', b'0190'), ('tenant', b'acme')])
    """
    headers = [(ID, _bytes(envelope.id))]
    for name, value in envelope.headers.items():
        headers.append((name, _bytes(value)))
    if deliveries:
        headers.append((ATTEMPT, b"%d" % deliveries))
    if envelope.expires_at is not None:
        headers.append((EXPIRES_AT, _milliseconds(envelope.expires_at)))
    key = key_of(envelope)
    if RAW in envelope.headers:
        _restore(envelope, headers)
    if attributes is NO_ATTRIBUTES:
        return key, envelope.body, headers
    if attributes.not_before is not None:
        headers.append((NOT_BEFORE, _milliseconds(attributes.not_before)))
    if attributes.origin is not None:
        topic, partition, offset = attributes.origin
        headers.append((ORIGINAL_TOPIC, topic.encode()))
        headers.append((ORIGINAL_PARTITION, b"%d" % partition))
        headers.append((ORIGINAL_OFFSET, b"%d" % offset))
    return key, envelope.body, headers


def key_of(envelope: Envelope) -> bytes | None:
    """Return the key of a message's record, as it came if another program wrote it.

    A message is retried with the same key, so that it keeps its partition.
    """
    if envelope.key is None:
        return None
    if RAW in envelope.headers:
        raw = kept(envelope.headers).get("key")
        if raw is not None and text_of(raw) == envelope.key:
            return raw
    return _bytes(envelope.key)


def _restore(envelope: Envelope, headers: list[tuple[str, bytes]]) -> None:
    """Give the headers that are unchanged the bytes that they came with."""
    raw = kept(envelope.headers)
    for at, (name, value) in enumerate(headers):
        original = raw.get("id" if name == ID else f"header:{name}")
        if original is not None and text_of(original).encode() == value:
            headers[at] = name, original


def marker(offset: int) -> tuple[None, bytes, list[tuple[str, bytes]]]:
    """A record that hides the one at ``offset`` of its partition."""
    return None, b"", [(REMOVED, b"%d" % offset)]


def decode(record: KafkaRecord) -> tuple[Envelope, RecordAttributes]:
    """The message of a record; its ``attempt`` is that of the delivery to come.

    A foreign record has no id: its place in the log is one, and stays the same however often it
    is delivered. Text that is not UTF-8 is replaced, and the header ``qkit-raw`` keeps its bytes.
    """
    id: str | None = None
    headers: dict[str, str] = {}
    own: dict[str, str] = {}
    raw: dict[str, bytes] = {}
    for name, value in record.headers:
        text = ""
        if value is not None:
            try:
                text = value.decode()
            except UnicodeDecodeError:
                text = text_of(value)
                raw["id" if name == ID else f"header:{name}"] = value
        if name == ID:
            id = text
        elif name in _OWN:
            own[name] = text
        else:
            headers[name] = text
    if id is None:
        id = f"{record.topic}-{record.partition}-{record.offset}"
    key: str | None = None
    if record.key is not None:
        try:
            key = record.key.decode()
        except UnicodeDecodeError:
            key = text_of(record.key)
            raw["key"] = record.key
    if raw:
        keep(headers, raw)
    envelope = Envelope(
        id,
        record.value or b"",  # a foreign tombstone has no value at all
        headers,
        key,
    )
    if not own:
        return envelope, NO_ATTRIBUTES
    envelope.attempt = (_number(own, ATTEMPT) or 0) + 1
    envelope.expires_at = _seconds(own, EXPIRES_AT)
    return envelope, RecordAttributes(
        _seconds(own, NOT_BEFORE), _origin(own), _number(own, REMOVED)
    )


def for_group(envelope: Envelope, group: str) -> bool:
    """Whether a topic's message is for this group; the header has then done its duty."""
    addressed = envelope.headers.get(GROUP)
    if addressed is None:
        return True
    del envelope.headers[GROUP]
    return addressed == group


def _origin(own: Mapping[str, str]) -> Origin | None:
    partition, offset = _number(own, ORIGINAL_PARTITION), _number(own, ORIGINAL_OFFSET)
    if partition is None or offset is None:
        return None
    return Origin(own.get(ORIGINAL_TOPIC, ""), partition, offset)


def _number(own: Mapping[str, str], name: str) -> int | None:
    text = own.get(name, "")  # another program may have written anything here
    return int(text) if text.isascii() and text.isdigit() and len(text) <= 18 else None


def _seconds(own: Mapping[str, str], name: str) -> float | None:
    milliseconds = _number(own, name)
    return None if milliseconds is None else milliseconds / 1000


def _milliseconds(seconds: float) -> bytes:
    """Rounded up, because a message must not come early."""
    return b"%d" % max(0, math.ceil(round(seconds * 1000, 3)))


def _bytes(text: str) -> bytes:
    return text.encode(errors="backslashreplace")
