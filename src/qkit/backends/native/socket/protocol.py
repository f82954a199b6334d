"""The binary form of the boundary: frames, and the records inside them. No I/O in here.

A connection begins with ``MAGIC``, whose last byte is the version; the owner answers with a
``HELLO``. After that both sides write frames: a fixed little-endian head (length of the body, kind,
number) and the body. The number is the request's, or the subscription's. Many messages, deliveries
or settlements travel in one frame; what is rare travels as JSON.

>>> list(FrameDecoder().feed(frame(PING, 7)))
[(10, 7, b'')]
"""

from __future__ import annotations

import json
import struct
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import asdict, fields
from typing import Any, Final, NamedTuple, TypeVar, cast

from qkit.backend import Delivery, QueueSpec, SubscriptionSpec
from qkit.errors import QueueError
from qkit.message import Envelope, Sent

__all__ = [
    "MAGIC",
    "MAX_FRAME",
    "FrameDecoder",
    "ProtocolError",
    "SettleItem",
    "decode_credit",
    "decode_deliveries",
    "decode_envelopes",
    "decode_json",
    "decode_number",
    "decode_positions",
    "decode_publish",
    "decode_record",
    "decode_renewals",
    "decode_settlings",
    "encode_credit",
    "encode_deliveries",
    "encode_delivery",
    "encode_envelope",
    "encode_json",
    "encode_number",
    "encode_positions",
    "encode_publish",
    "encode_record",
    "encode_renewals",
    "encode_settlings",
    "frame",
    "split",
]

R = TypeVar("R", QueueSpec, SubscriptionSpec)

MAGIC: Final = b"\xf1qkit\x01"  # its first byte begins no text, its last is the version
MAX_FRAME: Final = 64 << 20  # bytes; an owner may allow more

# What a client asks. The answer is OK or ERROR with the same number, unless there is none.
DECLARE: Final = 1
PUBLISH: Final = 2
SUBSCRIBE: Final = 3  # its number names the subscription from then on
CREDIT: Final = 4  # no answer but deliveries: how many are wanted now, 0 to take it back
SETTLE: Final = 5
STOP: Final = 6
LEAVE: Final = 7
ADMINISTER: Final = 8
LISTEN: Final = 9  # no answer but events
PING: Final = 10
RENEW: Final = 11  # no answer: leases of another connection of the same client
CLOSE: Final = 12  # no answer: the client leaves in peace

# What an owner says.
HELLO: Final = 64
OK: Final = 65
ERROR: Final = 66
MORE: Final = 67  # a part of an answer too large for one frame; OK follows
DELIVERIES: Final = 68
LOST: Final = 69  # the subscription broke
DEAD_LETTERED: Final = 70
DROPPED: Final = 71
EVENT_FLAGS: Final = {DEAD_LETTERED: 1, DROPPED: 2}  # what LISTEN asks for, added up

ACK: Final = 1
RELEASE: Final = 2
EXTEND: Final = 3

HEAD: Final = struct.Struct("<IBI")  # bytes of the body, kind, number
# flags, priority, not_before, expires_at, attempt, then the bytes of id, key, headers and body
ENVELOPE: Final = struct.Struct("<BiddIIIII")
DELIVERY: Final = struct.Struct("<Qd")  # receipt, lease
SETTLING: Final = struct.Struct("<BQdBI")  # what, receipt, seconds, count_attempt, header bytes
RENEWAL: Final = struct.Struct("<IQd")  # subscription, receipt, seconds
CREDITED: Final = struct.Struct("<II")  # serial number, how many
LENGTH: Final = struct.Struct("<I")
SESSION: Final = struct.Struct("<Q")

KEYED: Final = 1
RANKED: Final = 2
DELAYED: Final = 4
EXPIRING: Final = 8
NO_LEASE: Final = -1.0
NO_POSITION: Final = -1
MAX_PRIORITY: Final = (1 << 31) - 1  # of the frame; no queue takes one so high

_pack_envelope: Final = ENVELOPE.pack
_unpack_envelope: Final = ENVELOPE.unpack_from


class ProtocolError(QueueError):
    """Bytes that are no frame of this protocol, or one beyond the limit."""


class SettleItem(NamedTuple):
    """One delivery's end, or the renewal of its lease.

    ``headers`` is what a release writes back.
    """

    what: int
    receipt: int
    seconds: float
    count_attempt: bool
    headers: dict[str, str]


# Frames


def frame(kind: int, number: int, body: bytes = b"") -> bytes:
    """One frame."""
    return HEAD.pack(len(body), kind, number) + body


def split(parts: Iterable[bytes], limit: int) -> Iterator[list[bytes]]:
    """Group parts of frames, in order, so that a group of several has at most ``limit`` bytes.

    Yields at least one group, also for no parts.

    >>> list(split([b"ab", b"c", b"def"], 3))
    [[b'ab', b'c'], [b'def']]
    """
    group: list[bytes] = []
    size = 0
    for part in parts:
        size += len(part)
        if group and size > limit:
            yield group
            group, size = [], len(part)
        group.append(part)
    yield group


class FrameDecoder:
    """Cuts what arrives into frames; raises ``ProtocolError`` for one beyond ``limit`` bytes."""

    __slots__ = ("_limit", "_missing", "_parts", "_size")

    def __init__(self, limit: int = MAX_FRAME) -> None:
        self._limit = limit
        self._parts: list[bytes] = []
        self._size = 0
        self._missing = HEAD.size  # nothing can be cut before there is so much

    def feed(self, data: bytes) -> Iterator[tuple[int, int, bytes]]:
        """The frames that are whole now: kind, number, body."""
        self._parts.append(data)
        self._size += len(data)
        if self._size < self._missing:
            return
        if len(self._parts) > 1:  # joined once: a large frame arrives in many pieces
            data = b"".join(self._parts)
        at, end = 0, len(data)
        self._parts, self._missing = [], HEAD.size
        while end - at >= HEAD.size:
            length, kind, number = HEAD.unpack_from(data, at)
            if length > self._limit:
                raise ProtocolError(
                    f"a frame of {length} bytes, and {self._limit} is the limit: send less at once"
                )
            start = at + HEAD.size
            if end - start < length:
                self._missing = HEAD.size + length
                break
            at = start + length
            yield kind, number, data[start:at]
        if at < end:
            self._parts.append(data[at:])
        self._size = end - at


# Envelopes


def encode_envelope(item: Envelope) -> bytes:
    """One message as it stands in a frame, one after the other."""
    id, key, headers, body = _bytes(item.id), b"", b"", item.body
    flags, priority, due, expires = 0, 0, 0.0, 0.0
    if item.priority is not None:
        flags, priority = RANKED, item.priority
        if not -MAX_PRIORITY <= priority <= MAX_PRIORITY:
            priority = MAX_PRIORITY
    if item.key is not None:
        flags |= KEYED
        key = _bytes(item.key)
    if item.not_before is not None:
        flags |= DELAYED
        due = item.not_before
    if item.expires_at is not None:
        flags |= EXPIRING
        expires = item.expires_at
    if item.headers:
        headers = _encode_headers(item.headers)
    try:
        head = _pack_envelope(
            flags, priority, due, expires, item.attempt, len(id), len(key), len(headers), len(body)
        )
    except struct.error as error:
        raise ProtocolError(
            f"a message that cannot travel ({error}): a priority is a whole number, times are "
            "numbers, and nothing is larger than 4 GiB",
            message_id=item.id,
        ) from error
    return head + id + key + headers + body if key or headers else head + id + body


def decode_envelopes(data: bytes, start: int = 0) -> list[Envelope]:
    """Every message from ``start`` to the end."""
    found: list[Envelope] = []
    while start < len(data):
        item, start = _decode_envelope(data, start)
        found.append(item)
    return found


def _decode_envelope(data: bytes, start: int) -> tuple[Envelope, int]:
    try:
        flags, priority, due, expires, attempt, *lengths = _unpack_envelope(data, start)
        id_bytes, key_bytes, header_bytes, body_bytes = lengths
        at_key = start + ENVELOPE.size + id_bytes
        at_headers = at_key + key_bytes
        at_body = at_headers + header_bytes
        end = at_body + body_bytes
        if end > len(data):
            raise ProtocolError("a message shorter than its own parts")
        return Envelope(
            _text(data[at_key - id_bytes : at_key]),
            data[at_body:end],
            _decode_headers(data[at_headers:at_body]) if header_bytes else {},
            _text(data[at_key:at_headers]) if flags & KEYED else None,
            priority if flags & RANKED else None,
            due if flags & DELAYED else None,
            expires if flags & EXPIRING else None,
            attempt,
        ), end
    except (struct.error, ValueError) as error:
        raise ProtocolError(f"no message of this protocol: {error!r}") from error


def _encode_headers(headers: dict[str, str]) -> bytes:
    """Names and values with a NUL between; as JSON where that would not be exact."""
    flat = "\0".join([part for pair in headers.items() for part in pair])
    if flat.count("\0") == 2 * len(headers) - 1 and not flat.startswith("{"):
        try:
            return flat.encode()
        except UnicodeEncodeError:
            pass  # a lone surrogate, which JSON can escape
    return json.dumps(headers).encode()


def _decode_headers(data: bytes) -> dict[str, str]:
    if data.startswith(b"{"):
        return cast("dict[str, str]", json.loads(data))
    parts = data.decode().split("\0")
    return dict(zip(parts[::2], parts[1::2], strict=True))


# Requests and answers


def encode_publish(queue: str, envelopes: Iterable[bytes]) -> bytes:
    """Encoded messages for one queue."""
    name = _bytes(queue)
    return b"".join((LENGTH.pack(len(name)), name, *envelopes))


def decode_publish(body: bytes) -> tuple[str, list[Envelope]]:
    """The queue, and its messages."""
    (length,) = _unpack(LENGTH, body, 0)
    end = LENGTH.size + length
    return _text(body[LENGTH.size : end]), decode_envelopes(body, end)


def encode_positions(sent: Sequence[Sent]) -> bytes:
    """The positions alone: whoever sent the messages knows their ids."""
    places = [NO_POSITION if item.position is None else item.position for item in sent]
    return struct.pack(f"<{len(places)}q", *places)


def decode_positions(body: bytes) -> list[int | None]:
    """The position of each message, in the order in which they were sent."""
    try:
        places = struct.unpack(f"<{len(body) // 8}q", body)
    except struct.error as error:
        raise ProtocolError(f"no positions: {error}") from error
    return [None if place == NO_POSITION else place for place in places]


def encode_delivery(receipt: int, delivery: Delivery) -> bytes:
    """One delivery with its receipt."""
    lease = NO_LEASE if delivery.lease is None else delivery.lease
    return DELIVERY.pack(receipt, lease) + encode_envelope(delivery.envelope)


def encode_deliveries(serial: int, deliveries: Iterable[bytes]) -> bytes:
    """Encoded deliveries in answer to the credit of that serial number."""
    return b"".join((LENGTH.pack(serial), *deliveries))


def decode_deliveries(queue: str, body: bytes) -> tuple[int, list[Delivery]]:
    """The credit's serial number and the deliveries."""
    (serial,) = _unpack(LENGTH, body, 0)
    at, found = LENGTH.size, list[Delivery]()
    while at < len(body):
        receipt, lease = _unpack(DELIVERY, body, at)
        envelope, at = _decode_envelope(body, at + DELIVERY.size)
        found.append(Delivery(envelope, queue, receipt, None if lease == NO_LEASE else lease))
    return serial, found


def encode_settlings(number: int, items: Iterable[SettleItem]) -> bytes:
    """What to do with deliveries of the subscription of that number."""
    parts = [LENGTH.pack(number)]
    for what, receipt, seconds, count, headers in items:
        packed = _encode_headers(headers) if headers else b""
        parts.append(SETTLING.pack(what, receipt, seconds, count, len(packed)) + packed)
    return b"".join(parts)


def decode_settlings(body: bytes) -> tuple[int, list[SettleItem]]:
    """The subscription and what to do with its deliveries."""
    (number,) = _unpack(LENGTH, body, 0)
    at, found = LENGTH.size, list[SettleItem]()
    while at < len(body):
        what, receipt, seconds, count, length = _unpack(SETTLING, body, at)
        start = at + SETTLING.size
        at = start + length
        if at > len(body):
            raise ProtocolError("a settlement shorter than its own parts")
        try:
            headers = _decode_headers(body[start:at]) if length else {}
        except ValueError as error:
            raise ProtocolError(f"no headers: {error!r}") from error
        found.append(SettleItem(what, receipt, seconds, bool(count), headers))
    return number, found


def encode_renewals(session: int, leases: Iterable[tuple[int, int, float]]) -> bytes:
    """Leases of another connection: subscription, receipt and seconds of each."""
    return SESSION.pack(session) + b"".join([RENEWAL.pack(*lease) for lease in leases])


def decode_renewals(body: bytes) -> tuple[int, list[tuple[int, int, float]]]:
    """The connection that holds the leases, and the leases."""
    (session,) = _unpack(SESSION, body, 0)
    try:
        return session, list(RENEWAL.iter_unpack(body[SESSION.size :]))
    except struct.error as error:
        raise ProtocolError(f"no renewals: {error}") from error


def encode_credit(serial: int, wanted: int) -> bytes:
    """How many deliveries are wanted now; the serial number comes back with them."""
    return CREDITED.pack(serial, min(wanted, MAX_PRIORITY))


def decode_credit(body: bytes) -> tuple[int, int]:
    """The serial number, and how many are wanted."""
    serial, wanted = _unpack(CREDITED, body, 0)
    return serial, wanted


def encode_number(number: int) -> bytes:
    """A subscription's number, or a few flags."""
    return LENGTH.pack(number)


def decode_number(body: bytes) -> int:
    """What ``encode_number`` wrote."""
    (number,) = _unpack(LENGTH, body, 0)
    return int(number)


def encode_record(
    record: QueueSpec | SubscriptionSpec, *, leave_out: Collection[str] = ()
) -> bytes:
    """A specification by its fields, without those that have their default or are left out."""
    values = asdict(record)
    for field in fields(record):
        if values[field.name] == field.default or field.name in leave_out:
            del values[field.name]
    return encode_json(values)


def decode_record(cls: type[R], body: bytes) -> R:
    """What ``encode_record`` wrote; a field that this version does not know is passed over."""
    known = {field.name for field in fields(cls)}
    try:
        values = cast("dict[str, Any]", decode_json(body))
        return cls(**{name: value for name, value in values.items() if name in known})
    except (AttributeError, TypeError) as error:
        raise ProtocolError(f"no {cls.__name__}: {error}") from error


def encode_json(value: object) -> bytes:
    """What is rare."""
    return json.dumps(value).encode()


def decode_json(body: bytes) -> Any:
    """What ``encode_json`` wrote."""
    try:
        return json.loads(body)
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"no JSON in this frame: {error!r}") from error


def _unpack(layout: struct.Struct, body: bytes, at: int) -> tuple[Any, ...]:
    try:
        return layout.unpack_from(body, at)
    except struct.error as error:
        raise ProtocolError(f"a frame shorter than its own parts: {error}") from error


def _bytes(text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError:  # half a character: a name that the owner will refuse, or not
        return text.encode("utf-8", "surrogatepass")


def _text(data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError:
        pass
    try:
        return data.decode("utf-8", "surrogatepass")
    except UnicodeDecodeError as error:
        raise ProtocolError(f"no text: {error!r}") from error
