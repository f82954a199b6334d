"""A message as AMQP carries it: facts where a user of RabbitMQ looks for them, the body as it is.

The id, the content type, the priority, a time and a few well-known headers are AMQP's own
properties; everything else is in its table of headers. Whatever another program wrote is read in
the same way, and goes back as it came.
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

from qkit.backends.common.raw_text import RAW, keep, kept, text_of
from qkit.backends.rabbitmq.header_packing import LONGEST_NAME, PACKED, fit, unpack
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
    "encode_again",
    "message_id",
    "not_before",
]

Table = Mapping[str, Any]  # AMQP's headers have types of their own

ATTEMPTS: Final = "qkit-attempts"  # deliveries so far
KEY: Final = "qkit-key"
EXPIRES: Final = "qkit-expires-at"  # milliseconds since the epoch
DUE: Final = "qkit-not-before"  # only where the delay is longer than the broker can measure
_OWN: Final = frozenset({ATTEMPTS, KEY, EXPIRES, DUE})

DELIVERY_COUNT: Final = "x-delivery-count"
_BROKERS_OWN: Final = frozenset({"x-death", DELIVERY_COUNT, "x-acquired-count"})
_BROKERS_NOTES: Final = ("x-first-death-", "x-last-death-")

JSON: Final = "application/json"
USUAL_PRIORITY: Final = 5
PERSISTENT: Final = 2
SHORT: Final = 255  # bytes in AMQP's short strings
LONGEST_EXPIRATION: Final = 2**32 - 1  # milliseconds; RabbitMQ closes the connection above it
ORDINARY_NAME: Final = LONGEST_NAME // 4  # characters of a header's name that surely fit
FRAME: Final = 131_072  # bytes in a frame, as RabbitMQ is set up by default

# Headers that have a property of their own in AMQP, and the driver's name for it.
_PROPERTIES: Final = {
    CONTENT_ENCODING: "content_encoding",
    "correlation-id": "correlation_id",
    "reply-to": "reply_to",
    "type": "message_type",
    "app-id": "app_id",
}
# The broker acts upon these instead of carrying them, so they travel under another name.
_HIDDEN: Final = "qkit-header-"
_ACTED_UPON: Final = frozenset({"CC", "BCC"})
_DIRECT_REPLY: Final = "amq.rabbitmq.reply-to"


def encode(
    envelope: Envelope,
    *,
    now: float,
    priority: int | None,
    expire: bool,
    due: float | None = None,
    frame: int = FRAME,
) -> Basic.Properties:
    """The properties of a message that is sent for the first time, or again after its death.

    ``priority`` is for one that has none. With ``expire`` the broker takes it out by itself when
    its time is over. ``due`` is written down for whoever receives it too early. Headers that are
    too large for a frame of ``frame`` bytes are packed.
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
        if expire and lifetime <= LONGEST_EXPIRATION:
            properties.expiration = str(lifetime)
    if due is not None:
        table[DUE] = _milliseconds(due)
    if table:
        properties.headers = table
        if size * 5 > frame:  # a character has at most four bytes
            fit(properties, frame, envelope.headers, _is_fact)
    return properties


def encode_again(
    envelope: Envelope,
    original: Basic.Properties,
    *,
    attempts: int,
    due: float | None = None,
    frame: int = FRAME,
) -> Basic.Properties:
    """The properties of a copy that replaces a message: as it came, with the envelope's headers.

    Without the broker's notes about earlier deaths: a copy that has them is dropped without a word
    when it dies in the same place again.
    """
    before = cast("Table", original.headers or {})
    table: dict[str, Any] = {}
    again = Basic.Properties(
        message_id=_short(envelope.id),
        content_type=JSON,
        delivery_mode=PERSISTENT,
        priority=original.priority,
        timestamp=original.timestamp,
    )
    size = _write_headers(envelope.headers, before, again, table)
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
    again.headers = table or None
    if size * 5 > frame:  # as in encode
        fit(again, frame, envelope.headers, _is_fact)
    return again


def decode(properties: Basic.Properties, body: bytes) -> Envelope:
    """The message, ``attempt`` as the deliveries that were written down.

    Text that is not UTF-8 is replaced, and the header ``qkit-raw`` keeps its bytes.
    """
    raw: dict[str, bytes] = {}
    envelope = Envelope(
        _message_id(properties, body, raw),
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
    if envelope.expires_at is None and properties.expiration and properties.timestamp:
        # Another program's: the broker forgets it when the message is delayed or retried.
        lifetime = _whole(properties.expiration)
        if lifetime is not None:
            envelope.expires_at = properties.timestamp.timestamp() + lifetime / 1000
    return envelope


def message_id(properties: Basic.Properties, body: bytes) -> str:
    """The message's id; of one that another program sent without, what it is made of.

    So it stays the same however often the message is looked at. Messages that are alike share it.
    """
    return _message_id(properties, body, {})


def _message_id(properties: Basic.Properties, body: bytes, raw: dict[str, bytes]) -> str:
    if properties.message_id:
        return _clean(properties.message_id, "id", raw)
    sent = str(properties.timestamp or "").encode()
    return f"foreign-{hashlib.sha256(sent + body).hexdigest()[:32]}"


def _clean(text: str, entry: str, raw: dict[str, bytes]) -> str:
    """Replace what is not UTF-8 in a short string of the driver's, and keep the bytes in ``raw``.

    The result is a short string again, so that a copy can carry it.
    """
    if text.isascii():
        return text
    value = text.encode(errors="surrogateescape")
    clean = text_of(value)
    if clean != text:
        raw[entry] = value
        if len(clean.encode()) > SHORT:
            digest = hashlib.sha256(value).hexdigest()[:16]
            clean = f"{clean.encode()[:200].decode(errors='ignore')}…{digest}"
    return clean


def deliveries(properties: Basic.Properties) -> int:
    """How often a quorum queue has handed this copy out before."""
    table = cast("Table", properties.headers or {})
    return max(0, _whole(table.get(DELIVERY_COUNT)) or 0)


def not_before(properties: Basic.Properties) -> float | None:
    """When the message may be delivered, if the broker could not wait so long."""
    due = _whole(cast("Table", properties.headers or {}).get(DUE))
    return None if due is None else due / 1000


def as_dead_letter(envelope: Envelope, properties: Basic.Properties, *, ignored: str) -> Envelope:
    """The record of a message that the broker itself took out of its queue, as everywhere else.

    One that qkit wrote is returned as it is. Queues whose names begin with ``ignored`` are stations
    of a delay: leaving them is no death.
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
        error=error or BrokerRefused(f"RabbitMQ took it out of its queue: {death.get('reason')}"),
        at=at,
    )
    return letter.to_envelope()


class Rejected(Exception):
    """A consumer of another program refused the message."""


class DeliveryLimit(Exception):
    """The message was handed out more often than the queue allows."""


class BrokerRefused(Exception):
    """The broker took the message out of its queue for a reason of its own."""


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
    for death in cast("list[object]", deaths):  # the last one comes first
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
    """Headers to properties and table; a value that is as it came keeps its type.

    Returns about how many characters they have; a name that is long for AMQP counts as a frame.
    """
    size = 2 * len(headers)  # AMQP adds six bytes to a header
    for name, value in headers.items():
        size += len(name) + len(value) if len(name) <= ORDINARY_NAME else FRAME
        if name == CONTENT_TYPE:
            properties.content_type = _short(value)
            if value != JSON:
                continue  # else it must be told from the one that is always written
        attribute = _PROPERTIES.get(name)
        if attribute and value and name not in before and _fits(value):
            setattr(properties, attribute, value)
        elif name in before and _text(before[name]) == value:
            table[name] = _as_it_came(before[name])
        else:
            table[_carried(name)] = value
    return size


def _omit_derived(table: dict[str, Any]) -> None:
    """Omit the bytes in ``qkit-raw`` that a binary header of ``table`` has too.

    ``decode`` adds them again. A header whose name is too long is packed as text, without them.
    """
    derived: dict[str, bytes] = {}
    for name, value in table.items():
        if len(name.encode()) <= LONGEST_NAME:
            _keep_value(value, f"header:{name}", derived)
    if not derived or not isinstance(table[RAW], str):
        return
    found = kept(table)
    rest = {entry: value for entry, value in found.items() if derived.get(entry) != value}
    if len(rest) < len(found):
        del table[RAW]
        if rest:
            keep(table, rest)


def _read_headers(table: Table, envelope: Envelope, raw: dict[str, bytes]) -> None:
    headers = envelope.headers
    for name, value in table.items():
        if name in _OWN:
            if name == KEY:
                envelope.key = value if type(value) is str else _text(value)
                if type(value) is not str:
                    _keep_value(value, "key", raw)
            elif name == ATTEMPTS:
                envelope.attempt = max(0, _whole(value) or 0)
            elif name == EXPIRES:
                expires = _whole(value)
                envelope.expires_at = None if expires is None else expires / 1000
        elif name == PACKED and (packed := unpack(value)) is not None:
            headers.update(packed)
        elif name in _BROKERS_OWN or name.startswith(_BROKERS_NOTES):
            continue
        elif type(value) is str and name.isascii():
            headers[name.removeprefix(_HIDDEN)] = value
        else:
            name_raw = name.encode(errors="surrogateescape")
            text = text_of(name_raw)
            if text != name:
                raw[f"name:{text}"] = name_raw
            headers[text.removeprefix(_HIDDEN)] = _text(value)
            entry = "headers" if name == UNREADABLE else f"header:{text.removeprefix(_HIDDEN)}"
            _keep_value(value, entry, raw)


def _keep_value(value: object, entry: str, raw: dict[str, bytes]) -> None:
    """Keep a binary value of which the text does not tell the bytes."""
    if isinstance(value, bytes | bytearray) and (
        isinstance(value, Unreadable) or text_of(value) != value.decode(errors="replace")
    ):
        raw[entry] = bytes(value)


def _is_fact(name: str) -> bool:
    """Whether a header is qkit's own and small, so that it stays readable where others are packed.

    The error of a dead letter is bounded; of ``qkit-raw`` that is not so.
    """
    return name in _OWN or name.startswith(("qkit-dead-", GROUP, FIRST_FAILED_AT))


def _carried(name: str) -> str:
    brokers = name in _BROKERS_OWN or name in _ACTED_UPON or name.startswith(_BROKERS_NOTES)
    return _HIDDEN + name if brokers else name


def _text(value: object) -> str:
    """A header of any of AMQP's types, as handlers see it."""
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


def _as_it_came(value: object) -> object:
    """A value that the driver read, if it can write the same again; otherwise its text.

    It writes every float with four bytes, and refuses some decimals and times.
    """
    if isinstance(value, str | int) or value is None:
        return value
    again = _encodable(value)
    try:
        same = read_value(pamqp_encode.encode_table_value(cast("Any", again))) == value
    except (TypeError, ValueError, ArithmeticError, struct.error):
        same = False
    return again if same and not isinstance(value, Unreadable) else _text(value)


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


def _whole(value: object) -> int | None:
    if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) < 16:
        return int(value)
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _fits(value: str) -> bool:
    return len(value.encode(errors="surrogatepass")) <= SHORT and value != _DIRECT_REPLY


def _short(value: str) -> str:
    if len(value.encode(errors="surrogatepass")) > SHORT:
        raise InvalidHeader(
            f"{value[:40]!r}… is longer than the {SHORT} bytes that AMQP has for an id or a type"
        )
    return value


def _milliseconds(seconds: float) -> int:
    """Rounded up, because a message must not come early."""
    return math.ceil(round(seconds * 1000, 3))
