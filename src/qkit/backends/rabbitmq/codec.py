"""Conversion between envelopes and AMQP messages.

The body is sent unchanged. The id, the content type, the priority, the timestamp and a few
well-known headers become AMQP properties; everything else goes into the header table. Foreign
messages are read in the same way, and their copies keep the original header values.
"""

from __future__ import annotations

import hashlib
import json
import math
import struct
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, Final, cast

from pamqp import encode as pamqp_encode
from pamqp.commands import Basic

from qkit._internal.ids import new_id
from qkit.backends.common.raw_text import RAW, keep, kept, text_of
from qkit.backends.rabbitmq.header_packing import MAX_NAME_BYTES, PACKED, fit, unpack
from qkit.backends.rabbitmq.lenient_decoding import UNREADABLE, Unreadable, read_value
from qkit.errors import InvalidHeader
from qkit.message import (
    CONTENT_ENCODING,
    CONTENT_TYPE,
    FIRST_FAILED_AT,
    GROUP,
    DeadLetter,
    Envelope,
    Reason,
    TimeToLiveExpired,
)

__all__ = [
    "as_dead_letter",
    "decode",
    "deliveries",
    "encode",
    "encode_copy",
    "listed_id",
    "not_before",
]

Table = Mapping[str, Any]  # header table with values of any AMQP type

ATTEMPTS: Final = "qkit-attempts"  # number of deliveries so far
KEY: Final = "qkit-key"
EXPIRES: Final = "qkit-expires-at"  # milliseconds since the epoch
DUE: Final = "qkit-not-before"  # milliseconds since the epoch; only beyond MAX_DELAY_SECONDS
_OWN_HEADERS: Final = frozenset({ATTEMPTS, KEY, EXPIRES, DUE})

DELIVERY_COUNT: Final = "x-delivery-count"
_BROKER_HEADERS: Final = frozenset({"x-death", DELIVERY_COUNT, "x-acquired-count"})
_BROKER_PREFIXES: Final = ("x-first-death-", "x-last-death-")

FOREIGN_PREFIX: Final = "foreign-"  # ids of messages that another program sent without an id
JSON: Final = "application/json"
DEFAULT_PRIORITY: Final = 5
PERSISTENT: Final = 2
SHORT_STRING_BYTES: Final = 255  # limit of AMQP's short strings
MAX_EXPIRATION_MS: Final = 2**32 - 1  # RabbitMQ closes the connection if it is higher
SHORT_NAME_LENGTH: Final = MAX_NAME_BYTES // 4  # characters; a name up to this length always fits
DEFAULT_FRAME_BYTES: Final = 131_072  # RabbitMQ's default for frame_max

# Headers that become AMQP properties, with the driver's names for the properties.
_PROPERTIES: Final = {
    CONTENT_ENCODING: "content_encoding",
    "correlation-id": "correlation_id",
    "reply-to": "reply_to",
    "type": "message_type",
    "app-id": "app_id",
}
# The broker interprets some headers itself, so they are sent with a prefix.
_ESCAPE_PREFIX: Final = "qkit-header-"
_INTERPRETED_HEADERS: Final = frozenset({"CC", "BCC"})
_DIRECT_REPLY: Final = "amq.rabbitmq.reply-to"


def encode(
    envelope: Envelope,
    *,
    now: float,
    priority: int | None,
    expire: bool,
    due: float | None = None,
    frame: int = DEFAULT_FRAME_BYTES,
) -> Basic.Properties:
    """Return the AMQP properties of a message that is sent or replayed.

    Args:
        envelope: The message.
        now: Current time in seconds since the epoch.
        priority: Priority if the message has none.
        expire: Whether the broker dead-letters the message when its TTL expires.
        due: Time before which the message must not be handled, in seconds since the epoch; set if
            the delay exceeds the maximum of the delay cascade.
        frame: Largest frame in bytes, 128 KiB by default; headers that do not fit are packed.

    Raises:
        InvalidHeader: The id or the content type is too long for AMQP.
    """
    table: dict[str, Any] = {}
    properties = Basic.Properties(
        message_id=_short(envelope.id),
        content_type=JSON,
        delivery_mode=PERSISTENT,
        priority=priority if envelope.priority is None else envelope.priority,
        timestamp=datetime.fromtimestamp(now, UTC),
    )
    size = 0
    if envelope.headers:
        size = _write_headers(envelope.headers, {}, properties, table)
    if envelope.key is not None:
        table[KEY] = envelope.key
    if envelope.expires_at is not None:
        table[EXPIRES] = _milliseconds(envelope.expires_at)
        lifetime = max(0, _milliseconds(envelope.expires_at - now))
        if expire and lifetime <= MAX_EXPIRATION_MS:
            properties.expiration = str(lifetime)
    if due is not None:
        table[DUE] = _milliseconds(due)
    if table:
        properties.headers = table
        if size * 5 > frame:  # upper limit in bytes: a character has at most four
            fit(properties, frame, envelope.headers, _is_kept_readable)
    return properties


def encode_copy(
    envelope: Envelope,
    original: Basic.Properties,
    *,
    attempts: int,
    due: float | None = None,
    frame: int = DEFAULT_FRAME_BYTES,
) -> Basic.Properties:
    """Return the AMQP properties of a copy that replaces a message.

    Headers that did not change keep their original type. The ``x-death`` header is left out,
    because RabbitMQ silently drops a message with it that is dead-lettered by the same queue again.

    Args:
        envelope: The message with its current headers.
        original: Properties of the message that is replaced.
        attempts: Number of deliveries so far.
        due: Time before which the message must not be handled, in seconds since the epoch; none by
            default.
        frame: Largest frame in bytes, 128 KiB by default; headers that do not fit are packed.
    """
    before = cast("Table", original.headers or {})
    table: dict[str, Any] = {}
    copy = Basic.Properties(
        message_id=_short(envelope.id),
        content_type=JSON,
        delivery_mode=PERSISTENT,
        priority=original.priority,
        timestamp=original.timestamp,
    )
    size = _write_headers(envelope.headers, before, copy, table)
    if RAW in table:
        _omit_derived(table)
    if envelope.key is not None:
        table[KEY] = envelope.key
    if envelope.expires_at is not None:
        table[EXPIRES] = _milliseconds(envelope.expires_at)
    if attempts:
        table[ATTEMPTS] = attempts
    if due is not None:
        table[DUE] = _milliseconds(due)
    copy.headers = table or None
    if size * 5 > frame:  # as in ``encode``
        fit(copy, frame, envelope.headers, _is_kept_readable)
    return copy


def decode(properties: Basic.Properties, body: bytes, *, now: float | None = None) -> Envelope:
    """Return the envelope of a message; its ``attempt`` is the number of recorded deliveries.

    A byte that is not UTF-8 is replaced with an escape, and the header ``qkit-raw`` keeps the
    original bytes. A foreign message without an id gets a new one, which a copy of it keeps.

    Args:
        properties: AMQP properties of the message.
        body: Its body.
        now: Time of the delivery in seconds since the epoch. AMQP counts the expiration of a
            foreign message from its arrival, which is unknown; it is counted from the delivery
            instead. By default the expiration is ignored.
    """
    raw: dict[str, bytes] = {}
    id = properties.message_id
    envelope = Envelope(
        _clean(id, "id", raw) if id else FOREIGN_PREFIX + new_id(),
        body,
        priority=properties.priority,
        attempt=0,
    )
    headers = envelope.headers
    if properties.content_type and properties.content_type != JSON:
        headers[CONTENT_TYPE] = _clean(properties.content_type, f"header:{CONTENT_TYPE}", raw)
    for name, attribute in _PROPERTIES.items():
        value = getattr(properties, attribute)
        if value:
            headers[name] = _clean(value, f"header:{name}", raw)
    table = cast("Table | None", properties.headers)
    if table:
        _read_headers(table, envelope, raw)
    if raw:
        keep(headers, raw)
    if properties.expiration and now is not None and envelope.expires_at is None:
        # Set by another program. Copies of the message carry ``qkit-expires-at`` instead.
        lifetime = _integer(properties.expiration)
        if lifetime:  # 0 means that the message expires unless it is delivered at once
            envelope.expires_at = now + lifetime / 1000
    return envelope


def listed_id(properties: Basic.Properties, body: bytes) -> str:
    """Return the id under which a message is listed and removed.

    The id of a foreign message without one is a hash of what is known about it, so that it is the
    same at each read. Identical messages have the same hash.
    """
    if properties.message_id:
        return _clean(properties.message_id, "id", {})
    deaths = cast("Table", properties.headers or {}).get("x-death", "")
    known = f"{properties.timestamp or ''}{deaths}"
    return (
        f"{FOREIGN_PREFIX}{hashlib.sha256(known.encode(errors='replace') + body).hexdigest()[:32]}"
    )


def _clean(text: str, entry: str, raw: dict[str, bytes]) -> str:
    """Return a short string from the driver as valid UTF-8.

    If bytes were replaced, the original is added to ``raw`` as ``entry``. The result still fits
    into a short string.
    """
    if text.isascii():
        return text
    value = text.encode(errors="surrogateescape")
    clean = text_of(value)
    if clean != text:
        raw[entry] = value
        if len(clean.encode()) > SHORT_STRING_BYTES:
            digest = hashlib.sha256(value).hexdigest()[:16]
            clean = f"{clean.encode()[:200].decode(errors='ignore')}…{digest}"
    return clean


def deliveries(properties: Basic.Properties) -> int:
    """Return how many times a quorum queue has delivered the message before."""
    table = cast("Table", properties.headers or {})
    return max(0, _integer(table.get(DELIVERY_COUNT)) or 0)


def not_before(properties: Basic.Properties) -> float | None:
    """Return the time before which a message must not be handled, or ``None`` if it has none."""
    due = _integer(cast("Table", properties.headers or {}).get(DUE))
    return None if due is None else due / 1000


def as_dead_letter(envelope: Envelope, properties: Basic.Properties, *, ignored: str) -> Envelope:
    """Convert a message that the broker dead-lettered to a dead letter of qkit.

    A dead letter that qkit wrote, and a message that was not dead-lettered, are returned unchanged.
    Expiry in a queue whose name starts with ``ignored`` does not count, because such queues belong
    to the delay cascade.
    """
    if any(name.startswith("qkit-dead-") for name in envelope.headers):
        return envelope
    death = _last_death(cast("Table", properties.headers or {}), ignored)
    if death is None:
        return envelope
    channel, _, group = str(death.get("queue", "")).partition(":")
    when = death.get("time")
    at = when.timestamp() if isinstance(when, datetime) else 0.0
    reason, error = _DEATHS.get(str(death.get("reason")), (None, None))
    rejected = reason is Reason.EXPLICIT_NACK
    letter = DeadLetter.of(
        Envelope(
            envelope.id,
            envelope.body,
            dict(envelope.headers),
            envelope.key,
            envelope.priority,
            attempt=envelope.attempt + rejected,
        ),
        channel=channel,
        group=group or None,
        reason=reason or Reason.EXPLICIT_NACK,
        error=error or BrokerRefused(f"RabbitMQ dead-lettered the message: {death.get('reason')}"),
        at=at,
    )
    return letter.to_envelope()


class Rejected(Exception):
    """Error in a dead letter: a consumer of another program rejected the message."""


class DeliveryLimit(Exception):
    """Error in a dead letter: the message reached the delivery limit of the queue."""


class BrokerRefused(Exception):
    """Error in a dead letter: the broker dead-lettered the message for another reason."""


_DEATHS: Final[Mapping[str, tuple[Reason, Exception]]] = {
    "expired": (
        Reason.TTL_EXPIRED,
        TimeToLiveExpired("the message was not handled within its time to live"),
    ),
    "rejected": (
        Reason.EXPLICIT_NACK,
        Rejected("a consumer of another program rejected the message"),
    ),
    "delivery_limit": (
        Reason.MAX_RETRIES_EXCEEDED,
        DeliveryLimit("the message was delivered as often as the queue allows"),
    ),
}


def _last_death(table: Table, ignored: str) -> Table | None:
    deaths = table.get("x-death")
    if not isinstance(deaths, list):
        return None
    for death in cast("list[object]", deaths):  # newest first
        if isinstance(death, dict):
            found = cast("dict[str, Any]", death)
            if not str(found.get("queue", "")).startswith(ignored):
                return found
    return None


def _write_headers(
    headers: Mapping[str, str],
    before: Table,
    properties: Basic.Properties,
    table: dict[str, Any],
) -> int:
    """Write headers to the properties and the table; an unchanged value keeps its original type.

    Return their approximate size in characters. A name that may be too long for AMQP counts as a
    whole frame, so that the caller calls ``fit``.
    """
    size = 2 * len(headers)  # allows for the six bytes that AMQP adds to each header
    for name, value in headers.items():
        size += len(name) + len(value) if len(name) <= SHORT_NAME_LENGTH else DEFAULT_FRAME_BYTES
        if name == CONTENT_TYPE:
            properties.content_type = _short(value)
            if value != JSON:
                continue  # an explicit JSON type is also in the table, unlike the default
        attribute = _PROPERTIES.get(name)
        if attribute and value and name not in before and _fits(value):
            setattr(properties, attribute, value)
        elif name in before and _text(before[name]) == value:
            table[name] = _original_value(before[name])
        else:
            table[_escaped_name(name)] = value
    return size


def _omit_derived(table: dict[str, Any]) -> None:
    """Remove entries of ``qkit-raw`` whose bytes are also in a binary header of ``table``.

    ``decode`` restores them. Entries of a header with a long name stay, because such a header is
    packed as text.
    """
    derived: dict[str, bytes] = {}
    for name, value in table.items():
        if len(name.encode()) <= MAX_NAME_BYTES:
            _keep_value(value, f"header:{name}", derived)
    if not derived or not isinstance(table[RAW], str):
        return
    found = kept(table)
    remaining = {entry: value for entry, value in found.items() if derived.get(entry) != value}
    if len(remaining) < len(found):
        del table[RAW]
        if remaining:
            keep(table, remaining)


def _read_headers(table: Table, envelope: Envelope, raw: dict[str, bytes]) -> None:
    headers = envelope.headers
    for name, value in table.items():
        if name in _OWN_HEADERS:
            if name == KEY:
                envelope.key = value if type(value) is str else _text(value)
                if type(value) is not str:
                    _keep_value(value, "key", raw)
            elif name == ATTEMPTS:
                envelope.attempt = max(0, _integer(value) or 0)
            elif name == EXPIRES:
                expires = _integer(value)
                envelope.expires_at = None if expires is None else expires / 1000
        elif name == PACKED and (packed := unpack(value)) is not None:
            headers.update(packed)
        elif name in _BROKER_HEADERS or name.startswith(_BROKER_PREFIXES):
            continue
        elif type(value) is str and name.isascii():
            headers[name.removeprefix(_ESCAPE_PREFIX)] = value
        else:
            name_raw = name.encode(errors="surrogateescape")
            text = text_of(name_raw)
            if text != name:
                raw[f"name:{text}"] = name_raw
            headers[text.removeprefix(_ESCAPE_PREFIX)] = _text(value)
            entry = (
                "headers" if name == UNREADABLE else f"header:{text.removeprefix(_ESCAPE_PREFIX)}"
            )
            _keep_value(value, entry, raw)


def _keep_value(value: object, entry: str, raw: dict[str, bytes]) -> None:
    """Add a binary value to ``raw`` if its bytes are not recoverable from its text."""
    if isinstance(value, bytes | bytearray) and (
        isinstance(value, Unreadable) or text_of(value) != value.decode(errors="replace")
    ):
        raw[entry] = bytes(value)


def _is_kept_readable(name: str) -> bool:
    """Return whether a header is never packed: it is qkit's own and has a limited size.

    ``qkit-raw`` may be packed, because its size is not limited.
    """
    return name in _OWN_HEADERS or name.startswith(("qkit-dead-", GROUP, FIRST_FAILED_AT))


def _escaped_name(name: str) -> str:
    escaped = (
        name in _BROKER_HEADERS or name in _INTERPRETED_HEADERS or name.startswith(_BROKER_PREFIXES)
    )
    return _ESCAPE_PREFIX + name if escaped else name


def _text(value: object) -> str:
    """Return a header value of any AMQP type as the text that the handler sees."""
    match value:
        case str():
            return value
        case None:
            return ""
        case bool():
            return "true" if value else "false"
        case Unreadable():
            return f"(unreadable: {len(value)} bytes, kept in qkit-raw)"
        case bytes() | bytearray():
            return text_of(value)
        case datetime():
            return value.isoformat()
        case list() | dict():
            return json.dumps(value, default=_text)
        case _:
            return str(value)


def _original_value(value: object) -> object:
    """Return a header value in a form that the driver encodes without loss, otherwise its text.

    The driver encodes every float in four bytes, and rejects some decimals and times.
    """
    if isinstance(value, str | int) or value is None:
        return value
    encodable = _encodable(value)
    try:
        same = read_value(pamqp_encode.encode_table_value(cast("Any", encodable))) == value
    except (TypeError, ValueError, ArithmeticError, struct.error):
        same = False
    return encodable if same and not isinstance(value, Unreadable) else _text(value)


def _encodable(value: object) -> object:
    match value:
        case bytes():
            return bytearray(value)
        case list():
            return [_encodable(item) for item in cast("list[object]", value)]
        case dict():
            table = cast("dict[str, object]", value)
            return {name: _encodable(item) for name, item in table.items()}
        case _:
            return value


def _integer(value: object) -> int | None:
    if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) < 16:
        return int(value)
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _fits(value: str) -> bool:
    return (
        len(value.encode(errors="surrogatepass")) <= SHORT_STRING_BYTES and value != _DIRECT_REPLY
    )


def _short(value: str) -> str:
    if len(value.encode(errors="surrogatepass")) > SHORT_STRING_BYTES:
        raise InvalidHeader(
            f"{value[:40]!r}… is too long: an AMQP id or content type has at most "
            f"{SHORT_STRING_BYTES} bytes"
        )
    return value


def _milliseconds(seconds: float) -> int:
    """Return whole milliseconds, rounded up so that no message is delivered early."""
    return math.ceil(round(seconds * 1000, 3))
