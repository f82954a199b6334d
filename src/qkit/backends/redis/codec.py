"""A message as it lies in a Redis list: a line of facts, a line of headers, then the body as it is.

``qk1 <id> <priority> <not before> <expires> <deliveries> <key>``: times in milliseconds since the
epoch, 0 for none; ``-`` where there is no priority or key. ``redis-cli LRANGE orders 0 0`` shows it
to a person, and scripts on the server read the first line alone. Whatever does not begin so was
written by another program: all of it is the body.
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

FOREIGN: Final = "foreign"  # the id of what another program wrote, until somebody gives it one

_HEAD: Final = re.compile(
    rb"qk1 (\S+) (-|\d{1,9}) (\d{1,15}) (\d{1,15}) (\d{1,9})!? ([-=]\S*)\n([^\n]*)\n"
)
# Most messages have nothing but an id and a body, and reading one costs as much as handling it.
_BARE: Final = re.compile(rb"qk1 ([0-9A-Za-z]+) - 0 0 (\d{1,9}) -\n\n")
_PLAIN: Final = re.compile(r"[A-Za-z0-9._~-]+")


BATCH: Final = 500  # messages in one call of a script, or one write
BATCH_BYTES: Final = 8 * 2**20  # and about so many bytes, which the server reads before it works


def batches(envelopes: Sequence[Envelope]) -> Iterator[Sequence[Envelope]]:
    """The messages in order, as many at a time as may go together."""
    start = size = 0
    for at, envelope in enumerate(envelopes):
        if at > start and (at - start >= BATCH or size + len(envelope.body) > BATCH_BYTES):
            yield envelopes[start:at]
            start, size = at, 0
        size += len(envelope.body)
    if start < len(envelopes):
        yield envelopes[start:]


def wire_id(id: str) -> str:
    """An id as the first line carries it: without spaces, and never empty."""
    return id if _PLAIN.fullmatch(id) else quote(id, safe="", errors="backslashreplace") or "%"


def encode(envelope: Envelope, deliveries: int = 0, *, scheduled: bool = True) -> bytes:
    """The frame of ``envelope`` after so many deliveries.

    >>> encode(Envelope("0190", b"{}", {"tenant": "acme"}, key="k 1"))
    b'qk1 0190 - 0 0 0 =k%201\\n{"tenant":"acme"}\\n{}'
    """
    id = envelope.id
    if (  # nearly all
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
    """Return the message in a frame, with the deliveries so far as ``attempt``.

    Earlier versions put a ``!`` behind the number of the last delivery that was allowed; it has no
    meaning any more.

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
    text = _unquoted(id, "id", raw) if id != b"%" else ""
    owner = None if key[:1] == b"-" else _unquoted(key[1:], "key", raw)
    if raw:
        keep(headers, raw)
    return Envelope(
        text,
        frame[found.end() :],
        headers,
        owner,
        None if priority == b"-" else int(priority),
        int(due) / 1000 if due != b"0" else None,
        int(expires) / 1000 if expires != b"0" else None,
        int(deliveries),
    )


def _unquoted(text: bytes, entry: str, raw: dict[str, bytes]) -> str:
    """The text; bytes that are not UTF-8 are replaced, and kept in ``raw``."""
    value = unquote_to_bytes(text)
    try:
        return value.decode()
    except UnicodeDecodeError:
        raw[entry] = value
        return text_of(value)


def _headers(line: bytes, raw: dict[str, bytes]) -> dict[str, str]:
    """The headers; a line that another program made up and that has none is kept in ``raw``."""
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
    """Rounded up, because a message must not come early; 0 is none."""
    return 0 if seconds is None else min(max(1, math.ceil(round(seconds * 1000, 3))), 10**15 - 1)
