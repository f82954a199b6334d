"""Message format in Redis: a line of fields, a line of JSON headers, then the unchanged body.

The first line is ``qk1 <id> <priority> <not before> <expires> <deliveries> <key>``. Times are in
milliseconds since the epoch; 0 means none. ``-`` means no priority or no key; a key is preceded by
``=``. The Lua scripts use only the fields of this line. ``redis-cli LRANGE orders 0 0`` prints a
message in readable form. A value that does not start with these two lines is a foreign message,
and all of it is the body.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Sequence
from typing import Final, cast
from urllib.parse import quote, unquote_to_bytes

from qkit._internal.text import encodable
from qkit.backends.common.raw_text import keep, text_of
from qkit.message import Envelope

__all__ = ["FOREIGN", "batches", "decode", "encode", "wire_id"]

FOREIGN: Final = "foreign"  # id of a foreign message until a script or a subscription assigns one

_HEAD: Final = re.compile(
    rb"qk1 (\S+) (-|\d{1,9}) (\d{1,15}) (\d{1,15}) (\d{1,9})!? ([-=]\S*)\n([^\n]*)\n"
)
# Fast path: most messages have only an id and a body, and parsing is a large part of the cost.
_BARE: Final = re.compile(rb"qk1 ([0-9A-Za-z]+) - 0 0 (\d{1,9}) -\n\n")
_PLAIN: Final = re.compile(r"[A-Za-z0-9._~-]+")


BATCH: Final = 500  # messages per script call or write
# Approximate limit per script call, because the server buffers the whole call before running it.
BATCH_BYTES: Final = 8 * 2**20


def batches(envelopes: Sequence[Envelope]) -> Iterator[Sequence[Envelope]]:
    """Split messages, in order, into batches of at most ``BATCH`` messages.

    The bodies of a batch have at most ``BATCH_BYTES`` bytes, unless it is a single message.
    """
    start = size = 0
    for index, envelope in enumerate(envelopes):
        if index > start and (index - start >= BATCH or size + len(envelope.body) > BATCH_BYTES):
            yield envelopes[start:index]
            start, size = index, 0
        size += len(envelope.body)
    if start < len(envelopes):
        yield envelopes[start:]


def wire_id(id: str) -> str:
    """Return an id in the form used in the first line: percent-encoded if needed, never empty."""
    return id if _PLAIN.fullmatch(id) else quote(id, safe="", errors="backslashreplace") or "%"


def encode(envelope: Envelope, deliveries: int = 0, *, scheduled: bool = True) -> bytes:
    """Return the frame of a message.

    Args:
        envelope: The message.
        deliveries: Number of deliveries so far.
        scheduled: Write ``not_before``; if false, the message is due immediately.

    >>> encode(Envelope("0190", b"{}", {"tenant": "acme"}, key="k 1"))
    b'qk1 0190 - 0 0 0 =k%201\\n{"tenant":"acme"}\\n{}'
    """
    id = envelope.id
    if (  # fast path, taken by most messages
        envelope.priority is None
        and envelope.not_before is None
        and envelope.expires_at is None
        and envelope.key is None
        and not envelope.headers
        and id.isalnum()
        and id.isascii()
    ):
        return f"qk1 {id} - 0 0 {deliveries} -\n\n".encode() + envelope.body
    key = "-" if envelope.key is None else "=" + quote(envelope.key, errors="backslashreplace")
    priority = "-" if envelope.priority is None else envelope.priority
    due = milliseconds(envelope.not_before) if scheduled else 0
    expires = milliseconds(envelope.expires_at)
    headers = json.dumps(envelope.headers, separators=(",", ":")) if envelope.headers else ""
    head = f"qk1 {wire_id(id)} {priority} {due} {expires} {deliveries} {key}\n{headers}\n"
    return head.encode() + envelope.body


def decode(frame: bytes) -> Envelope:
    """Decode a frame; the message's ``attempt`` is the number of deliveries so far.

    Earlier versions wrote ``!`` after the delivery count of the last allowed delivery. It is
    ignored.

    >>> decode(b'qk1 0190 7 0 0 2! -\\n\\n{}')
    Envelope(id='0190', body=b'{}', headers={}, key=None, priority=7, ..., attempt=2)
    """
    if (bare := _BARE.match(frame)) is not None:
        id, deliveries = bare.groups()
        return Envelope(id.decode(), frame[bare.end() :], attempt=int(deliveries))
    found = _HEAD.match(frame)
    if found is None:
        return Envelope(FOREIGN, frame, attempt=0)
    id, priority, due, expires, deliveries, key, line = found.groups()
    raw: dict[str, bytes] = {}
    headers = _headers(line, raw) if line else {}
    decoded_id = _unquoted(id, "id", raw) if id != b"%" else ""
    decoded_key = None if key[:1] == b"-" else _unquoted(key[1:], "key", raw)
    if raw:
        keep(headers, raw)
    return Envelope(
        decoded_id,
        frame[found.end() :],
        headers,
        decoded_key,
        None if priority == b"-" else int(priority),
        int(due) / 1000 if due != b"0" else None,
        int(expires) / 1000 if expires != b"0" else None,
        int(deliveries),
    )


def _unquoted(text: bytes, entry: str, raw: dict[str, bytes]) -> str:
    """Decode percent-encoded text; if it is not UTF-8, add its bytes to ``raw``."""
    value = unquote_to_bytes(text)
    try:
        return value.decode()
    except UnicodeDecodeError:
        raw[entry] = value
        return text_of(value)


def _headers(line: bytes, raw: dict[str, bytes]) -> dict[str, str]:
    """Parse the header line; if it is not a JSON object, add the line to ``raw``."""
    try:
        found: object = json.loads(line)
        if isinstance(found, dict):
            pairs = cast("dict[str, object]", found).items()
            return {encodable(name): encodable(str(value)) for name, value in pairs}
    except (ValueError, RecursionError):
        pass
    raw["headers"] = line
    return {}


def milliseconds(seconds: float | None) -> int:
    """Convert seconds to milliseconds, rounded up so that no message is early.

    ``None`` becomes 0; any other value is at least 1.
    """
    return 0 if seconds is None else min(max(1, math.ceil(round(seconds * 1000, 3))), 10**15 - 1)
