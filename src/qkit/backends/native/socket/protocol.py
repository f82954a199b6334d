"""Binary protocol between the owner and its clients: frames and their contents, without I/O.

A client starts a connection with ``MAGIC``, whose last byte is the version; the owner replies with
a ``HELLO`` frame. After that, both sides send frames. A frame consists of a fixed-size
little-endian header (body length, kind, number) and a body. The number identifies a request or a
subscription. One frame can carry many messages, deliveries or settlements. Data that is sent
rarely, such as declarations and errors, is encoded as JSON.

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
    "decode_settlements",
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
    "encode_settlements",
    "frame",
    "split",
]

R = TypeVar("R", QueueSpec, SubscriptionSpec)

MAGIC: Final = b"\xf1qkit\x01"  # first byte: never the start of a JSON line; last byte: version
MAX_FRAME: Final = 64 << 20  # default limit in bytes; an owner may allow larger frames

# Frames from a client to the owner. Unless noted, the response is OK or ERROR with the same number.
DECLARE: Final = 1
PUBLISH: Final = 2
SUBSCRIBE: Final = 3  # the frame's number identifies the subscription in later frames
CREDIT: Final = 4  # how many deliveries the client wants now; 0 withdraws credit; no response
SETTLE: Final = 5
STOP: Final = 6
LEAVE: Final = 7
ADMINISTER: Final = 8
LISTEN: Final = 9  # which events to send; no response
PING: Final = 10
RENEW: Final = 11  # renew leases that another connection of the same client holds; no response
CLOSE: Final = 12  # the client is about to close the connection; no response

# Frames from the owner to a client.
HELLO: Final = 64
OK: Final = 65
ERROR: Final = 66
MORE: Final = 67  # part of a response that is too large for one frame; OK carries the last part
DELIVERIES: Final = 68
LOST: Final = 69  # the subscription was lost
DEAD_LETTERED: Final = 70
DROPPED: Final = 71
EVENT_FLAGS: Final = {DEAD_LETTERED: 1, DROPPED: 2}  # bits in the body of LISTEN

# Kinds of settlement.
ACK: Final = 1
RELEASE: Final = 2
EXTEND: Final = 3

HEAD: Final = struct.Struct("<IBI")  # body length in bytes, kind, number
# flags, priority, not_before, expires_at, attempt, then the lengths of id, key, headers and body
ENVELOPE: Final = struct.Struct("<BiddIIIII")
DELIVERY: Final = struct.Struct("<Qd")  # receipt, lease
SETTLEMENT: Final = struct.Struct("<BQdBI")  # what, receipt, seconds, count_attempt, header length
RENEWAL: Final = struct.Struct("<IQd")  # subscription, receipt, seconds
CREDIT_BODY: Final = struct.Struct("<II")  # serial number, number of deliveries
LENGTH: Final = struct.Struct("<I")
SESSION: Final = struct.Struct("<Q")

# Flags of an envelope: which optional fields it has.
HAS_KEY: Final = 1
HAS_PRIORITY: Final = 2
HAS_NOT_BEFORE: Final = 4
HAS_EXPIRES_AT: Final = 8
NO_LEASE: Final = -1.0
NO_POSITION: Final = -1
MAX_PRIORITY: Final = (1 << 31) - 1  # limit of the encoded field; the limit of a queue is lower

_pack_envelope: Final = ENVELOPE.pack
_unpack_envelope: Final = ENVELOPE.unpack_from


class ProtocolError(QueueError):
    """Invalid data on the connection, or a frame that exceeds the size limit."""


class SettleItem(NamedTuple):
    """Ack, release or extension of one delivery.

    Attributes:
        what: ``ACK``, ``RELEASE`` or ``EXTEND``.
        receipt: Receipt of the delivery.
        seconds: Delay of a release or new length of a lease, in seconds.
        count_attempt: Whether a release counts the attempt.
        headers: Headers that the message has after a release.
    """

    what: int
    receipt: int
    seconds: float
    count_attempt: bool
    headers: dict[str, str]


# Frames


def frame(kind: int, number: int, body: bytes = b"") -> bytes:
    """Encode a frame: header and body."""
    return HEAD.pack(len(body), kind, number) + body


def split(parts: Iterable[bytes], limit: int) -> Iterator[list[bytes]]:
    """Divide parts, in order, into groups of at most ``limit`` bytes.

    A part larger than ``limit`` forms a group by itself. If there are no parts, yield one empty
    group.

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
    """Decoder that splits received bytes into frames.

    Args:
        limit: Maximum size of a frame's body in bytes; ``MAX_FRAME`` by default.
    """

    __slots__ = ("_limit", "_needed", "_parts", "_size")

    def __init__(self, limit: int = MAX_FRAME) -> None:
        self._limit = limit
        self._parts: list[bytes] = []
        self._size = 0
        self._needed = HEAD.size  # bytes required before the next frame can be complete

    @property
    def buffered(self) -> int:
        """Number of bytes of a frame that is not complete."""
        return self._size

    def feed(self, data: bytes) -> Iterator[tuple[int, int, bytes]]:
        """Add received bytes; yield the kind, number and body of each complete frame.

        Raises:
            ProtocolError: The body of a frame is larger than the limit.
        """
        self._parts.append(data)
        self._size += len(data)
        if self._size < self._needed:
            return
        if len(self._parts) > 1:  # join once per frame: a large frame arrives in many parts
            data = b"".join(self._parts)
        at, end = 0, len(data)
        self._parts, self._needed = [], HEAD.size
        while end - at >= HEAD.size:
            length, kind, number = HEAD.unpack_from(data, at)
            if length > self._limit:
                raise ProtocolError(
                    f"the frame has {length} bytes, but the limit is {self._limit}: send fewer or "
                    "smaller messages per call"
                )
            start = at + HEAD.size
            if end - start < length:
                self._needed = HEAD.size + length
                break
            at = start + length
            yield kind, number, data[start:at]
        if at < end:
            self._parts.append(data[at:])
        self._size = end - at


# Envelopes


def encode_envelope(item: Envelope) -> bytes:
    """Encode a message.

    Raises:
        ProtocolError: A field does not fit the format.
    """
    id, key, headers, body = _bytes(item.id), b"", b"", item.body
    flags, priority, due, expires = 0, 0, 0.0, 0.0
    if item.priority is not None:
        flags, priority = HAS_PRIORITY, item.priority
        if not -MAX_PRIORITY <= priority <= MAX_PRIORITY:
            priority = MAX_PRIORITY
    if item.key is not None:
        flags |= HAS_KEY
        key = _bytes(item.key)
    if item.not_before is not None:
        flags |= HAS_NOT_BEFORE
        due = item.not_before
    if item.expires_at is not None:
        flags |= HAS_EXPIRES_AT
        expires = item.expires_at
    if item.headers:
        headers = _encode_headers(item.headers)
    try:
        head = _pack_envelope(
            flags, priority, due, expires, item.attempt, len(id), len(key), len(headers), len(body)
        )
    except struct.error as error:
        raise ProtocolError(
            f"could not encode the message ({error}): the priority must be an integer, times must "
            "be numbers, and no part may exceed 4 GiB",
            message_id=item.id,
        ) from error
    return head + id + key + headers + body if key or headers else head + id + body


def decode_envelopes(data: bytes, start: int = 0) -> list[Envelope]:
    """Decode all messages from ``start`` to the end of ``data``."""
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
            raise ProtocolError("invalid message: the data is shorter than its header states")
        return Envelope(
            _text(data[at_key - id_bytes : at_key]),
            data[at_body:end],
            _decode_headers(data[at_headers:at_body]) if header_bytes else {},
            _text(data[at_key:at_headers]) if flags & HAS_KEY else None,
            priority if flags & HAS_PRIORITY else None,
            due if flags & HAS_NOT_BEFORE else None,
            expires if flags & HAS_EXPIRES_AT else None,
            attempt,
        ), end
    except (struct.error, ValueError) as error:
        raise ProtocolError(f"invalid message: {error!r}") from error


def _encode_headers(headers: dict[str, str]) -> bytes:
    """Join names and values with NUL bytes; use JSON if the result would be ambiguous."""
    flat = "\0".join([part for pair in headers.items() for part in pair])
    if flat.count("\0") == 2 * len(headers) - 1 and not flat.startswith("{"):
        try:
            return flat.encode()
        except UnicodeEncodeError:
            pass  # a header has a lone surrogate, which JSON can escape
    return json.dumps(headers).encode()


def _decode_headers(data: bytes) -> dict[str, str]:
    if data.startswith(b"{"):
        return cast("dict[str, str]", json.loads(data))
    parts = data.decode().split("\0")
    return dict(zip(parts[::2], parts[1::2], strict=True))


# Requests and responses


def encode_publish(queue: str, envelopes: Iterable[bytes]) -> bytes:
    """Encode the body of PUBLISH from the queue's name and encoded messages."""
    name = _bytes(queue)
    return b"".join((LENGTH.pack(len(name)), name, *envelopes))


def decode_publish(body: bytes) -> tuple[str, list[Envelope]]:
    """Decode the body of PUBLISH; return the queue's name and the messages."""
    (length,) = _unpack(LENGTH, body, 0)
    end = LENGTH.size + length
    return _text(body[LENGTH.size : end]), decode_envelopes(body, end)


def encode_positions(sent: Sequence[Sent]) -> bytes:
    """Encode the positions of sent messages; the client already has their ids."""
    positions = [NO_POSITION if item.position is None else item.position for item in sent]
    return struct.pack(f"<{len(positions)}q", *positions)


def decode_positions(body: bytes) -> list[int | None]:
    """Decode the positions of sent messages, in sending order."""
    try:
        positions = struct.unpack(f"<{len(body) // 8}q", body)
    except struct.error as error:
        raise ProtocolError(f"invalid positions: {error}") from error
    return [None if position == NO_POSITION else position for position in positions]


def encode_delivery(receipt: int, delivery: Delivery) -> bytes:
    """Encode a delivery with its receipt."""
    lease = NO_LEASE if delivery.lease is None else delivery.lease
    return DELIVERY.pack(receipt, lease) + encode_envelope(delivery.envelope)


def encode_deliveries(serial: int, deliveries: Iterable[bytes]) -> bytes:
    """Encode the body of DELIVERIES.

    Args:
        serial: Serial number of the credit that the deliveries use up.
        deliveries: Encoded deliveries.
    """
    return b"".join((LENGTH.pack(serial), *deliveries))


def decode_deliveries(queue: str, body: bytes) -> tuple[int, list[Delivery]]:
    """Decode the body of DELIVERIES; return the credit's serial number and the deliveries."""
    (serial,) = _unpack(LENGTH, body, 0)
    at, found = LENGTH.size, list[Delivery]()
    while at < len(body):
        receipt, lease = _unpack(DELIVERY, body, at)
        envelope, at = _decode_envelope(body, at + DELIVERY.size)
        found.append(Delivery(envelope, queue, receipt, None if lease == NO_LEASE else lease))
    return serial, found


def encode_settlements(number: int, items: Iterable[SettleItem]) -> bytes:
    """Encode the body of SETTLE for deliveries of subscription ``number``."""
    parts = [LENGTH.pack(number)]
    for what, receipt, seconds, count, headers in items:
        packed = _encode_headers(headers) if headers else b""
        parts.append(SETTLEMENT.pack(what, receipt, seconds, count, len(packed)) + packed)
    return b"".join(parts)


def decode_settlements(body: bytes) -> tuple[int, list[SettleItem]]:
    """Decode the body of SETTLE; return the number of the subscription and the settlements."""
    (number,) = _unpack(LENGTH, body, 0)
    at, found = LENGTH.size, list[SettleItem]()
    while at < len(body):
        what, receipt, seconds, count, length = _unpack(SETTLEMENT, body, at)
        start = at + SETTLEMENT.size
        at = start + length
        if at > len(body):
            raise ProtocolError("invalid settlement: the body ends before its headers end")
        try:
            headers = _decode_headers(body[start:at]) if length else {}
        except ValueError as error:
            raise ProtocolError(f"invalid headers: {error!r}") from error
        found.append(SettleItem(what, receipt, seconds, bool(count), headers))
    return number, found


def encode_renewals(session: int, leases: Iterable[tuple[int, int, float]]) -> bytes:
    """Encode the body of RENEW.

    Args:
        session: Session number of the connection that holds the leases.
        leases: Subscription number, receipt and new length in seconds of each lease.
    """
    return SESSION.pack(session) + b"".join([RENEWAL.pack(*lease) for lease in leases])


def decode_renewals(body: bytes) -> tuple[int, list[tuple[int, int, float]]]:
    """Decode the body of RENEW; return the session number and the leases."""
    (session,) = _unpack(SESSION, body, 0)
    try:
        return session, list(RENEWAL.iter_unpack(body[SESSION.size :]))
    except struct.error as error:
        raise ProtocolError(f"invalid renewals: {error}") from error


def encode_credit(serial: int, wanted: int) -> bytes:
    """Encode the body of CREDIT.

    Args:
        serial: Serial number of the credit; the owner returns it with the deliveries.
        wanted: Number of deliveries that the client wants now.
    """
    return CREDIT_BODY.pack(serial, min(wanted, MAX_PRIORITY))


def decode_credit(body: bytes) -> tuple[int, int]:
    """Decode the body of CREDIT; return the serial number and the number of deliveries."""
    serial, wanted = _unpack(CREDIT_BODY, body, 0)
    return serial, wanted


def encode_number(number: int) -> bytes:
    """Encode a subscription number or the flags of LISTEN."""
    return LENGTH.pack(number)


def decode_number(body: bytes) -> int:
    """Decode the output of ``encode_number``."""
    (number,) = _unpack(LENGTH, body, 0)
    return int(number)


def encode_record(
    record: QueueSpec | SubscriptionSpec, *, leave_out: Collection[str] = ()
) -> bytes:
    """Encode a specification as JSON; omit default values and the fields in ``leave_out``."""
    values = asdict(record)
    for field in fields(record):
        if values[field.name] == field.default or field.name in leave_out:
            del values[field.name]
    return encode_json(values)


def decode_record(cls: type[R], body: bytes) -> R:
    """Decode the output of ``encode_record``; ignore fields that this version does not know."""
    known = {field.name for field in fields(cls)}
    try:
        values = cast("dict[str, Any]", decode_json(body))
        return cls(**{name: value for name, value in values.items() if name in known})
    except (AttributeError, TypeError) as error:
        raise ProtocolError(f"invalid {cls.__name__}: {error}") from error


def encode_json(value: object) -> bytes:
    """Encode ``value`` as JSON."""
    return json.dumps(value).encode()


def decode_json(body: bytes) -> Any:
    """Decode the output of ``encode_json``."""
    try:
        return json.loads(body)
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"invalid JSON in a frame: {error!r}") from error


def _unpack(layout: struct.Struct, body: bytes, at: int) -> tuple[Any, ...]:
    try:
        return layout.unpack_from(body, at)
    except struct.error as error:
        raise ProtocolError(f"invalid frame: the body is too short: {error}") from error


def _bytes(text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError:  # a lone surrogate; the owner decides whether it is valid
        return text.encode("utf-8", "surrogatepass")


def _text(data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError:
        pass
    try:
        return data.decode("utf-8", "surrogatepass")
    except UnicodeDecodeError as error:
        raise ProtocolError(f"invalid text: {error!r}") from error
