"""Conversion between envelopes and Kafka records.

The body becomes the record's value, unchanged, so that a console consumer shows it as it was sent.
The key becomes the record's key, and everything else a header. qkit's own headers begin with
``qkit-``. A record without them is a foreign message.
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
ATTEMPT: Final = "qkit-attempt"  # number of deliveries so far; absent if 0
NOT_BEFORE: Final = "qkit-not-before"
EXPIRES_AT: Final = "qkit-expires-at"
ORIGINAL_TOPIC: Final = "qkit-original-topic"
ORIGINAL_PARTITION: Final = "qkit-original-partition"
ORIGINAL_OFFSET: Final = "qkit-original-offset"
REMOVED: Final = "qkit-removed"  # only on markers: the offset of the message to hide
DEAD_REASON: Final = "qkit-dead-reason"  # only on dead letters

_OWN_HEADERS: Final = frozenset(
    {ID, ATTEMPT, NOT_BEFORE, EXPIRES_AT, ORIGINAL_TOPIC, ORIGINAL_PARTITION, ORIGINAL_OFFSET}
    | {REMOVED}
)

Headers = Sequence[tuple[str, bytes | None]]


class KafkaRecord(Protocol):
    """Attributes of the driver's record that this backend uses."""

    topic: str
    partition: int
    offset: int
    timestamp: int
    key: bytes | None
    value: bytes | None
    headers: Headers


class Origin(NamedTuple):
    """Position of a message at its first delivery."""

    topic: str
    partition: int
    offset: int


class RecordAttributes(NamedTuple):
    """Data of a record that is not part of the envelope.

    Attributes:
        not_before: Time at which the message is due, in seconds since the epoch.
        origin: Position at the first delivery; set for retried messages and dead letters.
        removed: Offset of the message that this record hides; set for markers.
    """

    not_before: float | None = None
    origin: Origin | None = None
    removed: int | None = None


NO_ATTRIBUTES: Final = RecordAttributes()


def encode(
    envelope: Envelope, *, deliveries: int = 0, attributes: RecordAttributes = NO_ATTRIBUTES
) -> tuple[bytes | None, bytes, list[tuple[str, bytes]]]:
    """Return the key, value and headers of the record for ``envelope``.

    Args:
        envelope: The message.
        deliveries: Number of deliveries so far; 0 by default.
        attributes: Data that is not part of the envelope; none by default.

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
        _restore_raw(envelope, headers)
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
    """Return the key of the record for ``envelope``, as the original bytes of a foreign message.

    A replayed message thus goes to the same partition as the original.
    """
    if envelope.key is None:
        return None
    if RAW in envelope.headers:
        raw = kept(envelope.headers).get("key")
        if raw is not None and text_of(raw) == envelope.key:
            return raw
    return _bytes(envelope.key)


def _restore_raw(envelope: Envelope, headers: list[tuple[str, bytes]]) -> None:
    """Restore the original bytes of headers whose text has not changed."""
    raw = kept(envelope.headers)
    for at, (name, value) in enumerate(headers):
        original = raw.get("id" if name == ID else f"header:{name}")
        if original is not None and text_of(original).encode() == value:
            headers[at] = name, original


def marker(offset: int) -> tuple[None, bytes, list[tuple[str, bytes]]]:
    """Return the key, value and headers of a marker that hides the message at ``offset``."""
    return None, b"", [(REMOVED, b"%d" % offset)]


def decode(record: KafkaRecord) -> tuple[Envelope, RecordAttributes]:
    """Return the envelope and the attributes of a record.

    The envelope's ``attempt`` is the number of the next attempt. The id of a foreign message is its
    position in the log, so it is the same at each delivery. A byte that is not UTF-8 is replaced
    with an escape, and the header ``qkit-raw`` keeps the original bytes.
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
        elif name in _OWN_HEADERS:
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
        record.value or b"",  # a tombstone from another program has no value
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
    """Return whether a message of a topic is for ``group``; remove its group header."""
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
    text = own.get(name, "")  # another program may have written anything
    return int(text) if text.isascii() and text.isdigit() and len(text) <= 18 else None


def _seconds(own: Mapping[str, str], name: str) -> float | None:
    milliseconds = _number(own, name)
    return None if milliseconds is None else milliseconds / 1000


def _milliseconds(seconds: float) -> bytes:
    """Return whole milliseconds, rounded up so that no message is delivered early."""
    return b"%d" % max(0, math.ceil(round(seconds * 1000, 3)))


def _bytes(text: str) -> bytes:
    return text.encode(errors="backslashreplace")
