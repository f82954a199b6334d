"""The binary form of the boundary: frames, and the records inside them. No I/O in here.

A connection begins with ``MAGIC``, whose last byte is the version; the owner answers with a
``HELLO``. After that both sides write frames: a fixed little-endian head (length of the body, kind,
number) and the body. The number is the request's, or the subscription's. Many messages, deliveries
or settlements travel in one frame; what is rare travels as JSON. A message is the log's record of a
publish, with queue and seq 0, behind its length.

>>> list(FrameDecoder().feed(frame(PING, 7)))
[(10, 7, b'')]
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, fields
from typing import Any, Final, NamedTuple, TypeVar, cast

from qkit.backend import Delivery, QueueSpec, SubscriptionSpec
from qkit.errors import InvalidPriority, QueueError
from qkit.message import Envelope, Sent
from qkit.native.log.encode import encode_publish as record_of
from qkit.native.log.encode import pack_headers
from qkit.native.log.record import FLAGS_OFFSET, NO_PRIORITY, unpack_headers
from qkit.native.log.record import decode_publish as read_record

__all__ = [
    "MAGIC",
    "MAX_FRAME",
    "VERSION",
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
    "owner_version",
    "split",
    "version_error",
]

R = TypeVar("R", QueueSpec, SubscriptionSpec)

MAGIC: Final = b"\xf1qkit\x02"  # its first byte begins no text, its last is the version
VERSION: Final = MAGIC[-1]
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
DELIVERY: Final = struct.Struct("<Qd")  # receipt, lease
SETTLING: Final = struct.Struct("<BQdBI")  # what, receipt, seconds, count_attempt, header bytes
RENEWAL: Final = struct.Struct("<IQd")  # subscription, receipt, seconds
CREDITED: Final = struct.Struct("<II")  # serial number, how many
LENGTH: Final = struct.Struct("<I")
SESSION: Final = struct.Struct("<Q")

NO_LEASE: Final = -1.0
NO_POSITION: Final = -1
MAX_CREDIT: Final = (1 << 31) - 1
MAX_PRIORITY: Final = 255  # of a record
EXPIRED_LONG_AGO: Final = 1.0  # in place of 0, which means "never" in a record


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


def encode_envelope(item: Envelope, attempt: int | None = None) -> bytes:
    """One message as it stands in a frame, one after the other.

    Args:
        item: The message.
        attempt: In place of the envelope's. The record of a new message, with 0, is shorter.

    Raises:
        InvalidPriority: A priority that no record holds.
        RecordError: An id or key that is too long or not Unicode, or times that are not numbers.
        PayloadTooLarge: Above 1 GiB.
    """
    priority, expires = item.priority, item.expires_at
    if priority is not None and not 0 <= priority <= MAX_PRIORITY:
        raise InvalidPriority(
            f"priority {priority!r} is outside 0–{MAX_PRIORITY}, the range of native queues",
            message_id=item.id,
        )
    record = record_of(
        0,
        0,
        item.id,
        item.body,
        priority=priority,
        due=item.not_before or 0.0,
        expires=0.0 if expires is None else expires or EXPIRED_LONG_AGO,
        key=item.key,
        headers=item.headers,
        attempt=item.attempt if attempt is None else attempt,
    )
    return LENGTH.pack(len(record)) + record


def decode_envelopes(data: bytes, start: int = 0) -> list[Envelope]:
    """Every message from ``start`` to the end."""
    found: list[Envelope] = []
    while start < len(data):
        item, start = _decode_envelope(data, start)
        found.append(item)
    return found


def _decode_envelope(data: bytes, start: int) -> tuple[Envelope, int]:
    try:
        end = start + LENGTH.size + LENGTH.unpack_from(data, start)[0]
        start += LENGTH.size
        if end > len(data):
            raise ProtocolError("a message shorter than its own parts")
        _, _, id, body, priority, _, due, expires, key, headers, attempt, _ = read_record(
            data, start, end
        )
    except (struct.error, ValueError) as error:  # RecordError is one too
        raise ProtocolError(f"no message of this protocol: {error!r}") from error
    rank = None if data[start + FLAGS_OFFSET] & NO_PRIORITY else priority
    item = Envelope(id, body, headers or {}, key, rank, due or None, expires or None, attempt)
    return item, end


# Requests and answers


def version_error(owner: int, client: int) -> str:
    """Why an owner and a client cannot talk; which of them to replace.

    The beginning is the same in every version: ``owner_version`` reads it.
    """
    older = "client" if client < owner else "owner"
    return (
        f"this owner speaks version {owner} of the protocol, the client version {client}: "
        f"restart the process of the {older} with the newer version of qkit"
    )


def owner_version(refusal: str) -> int | None:
    """The version of an owner that refused this client's; ``None`` if that was not the reason."""
    found = re.match(r"this owner speaks version (\d+) of the protocol", refusal)
    return int(found[1]) if found else None


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
        packed = pack_headers(headers) if headers else b""
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
            headers = unpack_headers(body[start:at]) if length else {}
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
    return CREDITED.pack(serial, min(wanted, MAX_CREDIT))


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


def encode_record(record: QueueSpec | SubscriptionSpec) -> bytes:
    """A specification by its fields, without those that have their default."""
    values = asdict(record)
    for field in fields(record):
        if values[field.name] == field.default:
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
    return text.encode("utf-8", "surrogatepass")  # a name that the owner refuses, with its reason


def _text(data: bytes) -> str:
    try:
        return data.decode("utf-8", "surrogatepass")
    except UnicodeDecodeError as error:
        raise ProtocolError(f"no text: {error!r}") from error
