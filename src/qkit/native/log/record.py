"""What the log remembers: one kind of record for each change of the engine's state, and its layout.

A record's content is a type byte, a fixed little-endian header and variable parts. ``encode.py``
writes contents, ``decode`` here reads them, ``segment.py`` frames them with a length and checksums.
Times are wall times in seconds, 0 for none: monotonic time means nothing after a restart.

>>> decode(b"\\x02\\x07\\0\\0\\0")
Delete(queue=7)
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from typing import Final, NamedTuple, TypeAlias, cast

from qkit.errors import QueueError

__all__ = [
    "MAX_CONTENT",
    "Ack",
    "BulkImport",
    "Claim",
    "DeadLetterMove",
    "Declare",
    "Delete",
    "Fanout",
    "Publish",
    "Record",
    "RecordError",
    "Release",
    "Remove",
    "decode",
    "decode_publish",
]

MAX_CONTENT: Final = 1 << 30  # so that two of them fit any segment's 32-bit offsets

# Type bytes of records are 1–31; the segment keeps those from 0xF0 on for itself.
DECLARE: Final = 1
DELETE: Final = 2
PUBLISH: Final = 3
FANOUT: Final = 4
CLAIM: Final = 5
ACK: Final = 6
RELEASE: Final = 7
DEAD_LETTER_MOVE: Final = 8
REMOVE: Final = 9
BULK_IMPORT: Final = 10

EXTENDED: Final = 1  # PUBLISH: the rare fields follow
KEYED: Final = 2  # PUBLISH: there is a key, perhaps an empty one
BULK: Final = 4  # PUBLISH: of a bulk file, and counts only if its BULK_IMPORT follows
REPLACED: Final = 1  # RELEASE: headers follow, else they stay as they were
GROUPED: Final = 1  # DECLARE: one group's share of a topic

MESSAGE: Final = struct.Struct("<BBIQBdH")  # type, flags, queue, seq, priority, at, id bytes
QUEUE_SEQ: Final = struct.Struct("<IQ")  # its queue and seq
QUEUE_SEQ_OFFSET: Final = 2
MESSAGE_EXTRA: Final = struct.Struct("<ddIHI")  # due, expires, attempt, key bytes, header bytes
DECLARATION: Final = struct.Struct("<BBIHH")  # type, flags, queue, name bytes, group bytes
QUEUE: Final = struct.Struct("<BI")  # type, queue
ONE_SEQ: Final = struct.Struct("<BIQ")  # type, queue, seq
ONE_CLAIM: Final = struct.Struct("<BIQI")  # type, queue, seq, attempt
RELEASE_LAYOUT: Final = struct.Struct("<BBIQId")  # type, flags, queue, seq, attempt, due
TARGETS: Final = struct.Struct("<BH")  # type, targets
BULK_IMPORT_LAYOUT: Final = struct.Struct("<BQQ")  # type, first seq, last seq


class RecordError(QueueError, ValueError):
    """A content that is no record of this format, or values that no record can hold."""


class Declare(NamedTuple):
    """A queue, or one group's share of a topic, exists from here on, or has other limits.

    ``queue`` is its number in the log: given once, never again, so that a queue deleted and made
    anew under its old name shares nothing with the first.
    """

    queue: int
    name: str
    group: str | None
    config: dict[str, object]


class Delete(NamedTuple):
    """The queue and all it held are gone."""

    queue: int


class Publish(NamedTuple):
    """A message was accepted. ``attempt`` counts deliveries so far, for logs written anew.

    ``bulk``: by a bulk file, so that it counts only if the ``Inbox`` of that follows.
    """

    queue: int
    seq: int
    id: str
    body: bytes
    priority: int
    at: float
    due: float
    expires: float
    key: str | None
    headers: dict[str, str] | None
    attempt: int
    bulk: bool = False


class Fanout(NamedTuple):
    """A message was accepted by several groups of a topic at once: all of them or none.

    ``targets`` are (queue, seq) pairs; the first is also ``message``'s own.
    """

    targets: tuple[tuple[int, int], ...]
    message: Publish


class Claim(NamedTuple):
    """Messages were handed out, each for the time that ``attempts`` says."""

    queue: int
    seqs: tuple[int, ...]
    attempts: tuple[int, ...]


class Ack(NamedTuple):
    """The work on these messages is done."""

    queue: int
    seqs: tuple[int, ...]


class Release(NamedTuple):
    """A message was given back; ``headers`` is ``None`` where they stay as they were."""

    queue: int
    seq: int
    attempt: int
    due: float
    headers: dict[str, str] | None


class DeadLetterMove(NamedTuple):
    """A message left its queue and its dead letter entered another, in one step."""

    queue: int
    seq: int
    letter: Publish


class Remove(NamedTuple):
    """These messages were purged, dropped or removed by hand."""

    queue: int
    seqs: tuple[int, ...]


class BulkImport(NamedTuple):
    """A bulk file was taken in whole, by the bulk messages ``first`` to ``last``; never again."""

    name: str
    first: int
    last: int


Record: TypeAlias = (
    Declare
    | Delete
    | Publish
    | Fanout
    | Claim
    | Ack
    | Release
    | DeadLetterMove
    | Remove
    | BulkImport
)


def decode(content: bytes) -> Record:
    """The record that a content holds; ``RecordError`` if it holds none."""
    try:
        return _DECODERS[content[0]](content)
    except RecordError:
        raise
    except (LookupError, ValueError, struct.error) as error:
        kind = content[0] if content else "none"
        raise RecordError(f"no record of this format: type {kind}: {error!r}") from error


def decode_publish(content: bytes, start: int = 0) -> Publish:
    """The message whose record begins at ``start``."""
    kind, flags, queue, seq, priority, at, id_length = MESSAGE.unpack_from(content, start)
    if kind != PUBLISH:
        raise RecordError(f"a record of type {kind} where a message was expected")
    position = start + MESSAGE.size
    if not flags & EXTENDED:
        end = position + id_length
        if end > len(content):
            raise RecordError("a message shorter than its own parts")
        name = content[position:end].decode()
        return Publish(
            queue, seq, name, content[end:], priority, at, 0.0, 0.0, None, None, 0, flags == BULK
        )
    due, expires, attempt, key_length, header_length = MESSAGE_EXTRA.unpack_from(content, position)
    at_id = position + MESSAGE_EXTRA.size
    at_key = at_id + id_length
    at_headers = at_key + key_length
    at_body = at_headers + header_length
    if at_body > len(content):
        raise RecordError("a message shorter than its own parts")
    return Publish(
        queue,
        seq,
        content[at_id:at_key].decode(),
        content[at_body:],
        priority,
        at,
        due,
        expires,
        content[at_key:at_headers].decode() if flags & KEYED else None,
        _unpack_headers(content[at_headers:at_body]) if header_length else None,
        attempt,
        bool(flags & BULK),
    )


def _unpack_headers(data: bytes) -> dict[str, str]:
    if data.startswith(b"{"):
        return cast("dict[str, str]", json.loads(data))
    parts = data.decode().split("\0") if data else []
    return dict(zip(parts[::2], parts[1::2], strict=True))


def _decode_declare(content: bytes) -> Declare:
    _, flags, queue, name_length, group_length = DECLARATION.unpack_from(content)
    at_group = DECLARATION.size + name_length
    at_config = at_group + group_length
    group = content[at_group:at_config].decode() if flags & GROUPED else None
    name = content[DECLARATION.size : at_group].decode()
    return Declare(queue, name, group, json.loads(content[at_config:]))


def _decode_fanout(content: bytes) -> Fanout:
    (count,) = struct.unpack_from("<H", content, 1)
    numbers = struct.Struct("<" + "IQ" * count)
    flat = cast("tuple[int, ...]", numbers.unpack_from(content, TARGETS.size))
    message = decode_publish(content, TARGETS.size + numbers.size)
    return Fanout(tuple(zip(flat[::2], flat[1::2], strict=True)), message)


def _decode_claim(content: bytes) -> Claim:
    count = (len(content) - QUEUE.size) // 12
    _, queue, *numbers = struct.unpack(f"<BI{count}Q{count}I", content)
    return Claim(queue, tuple(numbers[:count]), tuple(numbers[count:]))


def _decode_seqs(content: bytes) -> tuple[int, tuple[int, ...]]:
    _, queue, *seqs = struct.unpack(f"<BI{(len(content) - QUEUE.size) // 8}Q", content)
    return queue, tuple(seqs)


def _decode_release(content: bytes) -> Release:
    _, flags, queue, seq, attempt, due = RELEASE_LAYOUT.unpack_from(content)
    headers = _unpack_headers(content[RELEASE_LAYOUT.size :]) if flags & REPLACED else None
    return Release(queue, seq, attempt, due, headers)


def _decode_bulk_import(content: bytes) -> BulkImport:
    _, first, last = BULK_IMPORT_LAYOUT.unpack_from(content)
    return BulkImport(content[BULK_IMPORT_LAYOUT.size :].decode(), first, last)


def _decode_dead_letter_move(content: bytes) -> DeadLetterMove:
    _, queue, seq = ONE_SEQ.unpack_from(content)
    return DeadLetterMove(queue, seq, decode_publish(content, ONE_SEQ.size))


_DECODERS: Final[dict[int, Callable[[bytes], Record]]] = {
    DECLARE: _decode_declare,
    DELETE: lambda content: Delete(QUEUE.unpack(content)[1]),
    PUBLISH: decode_publish,
    FANOUT: _decode_fanout,
    CLAIM: _decode_claim,
    ACK: lambda content: Ack(*_decode_seqs(content)),
    RELEASE: _decode_release,
    DEAD_LETTER_MOVE: _decode_dead_letter_move,
    REMOVE: lambda content: Remove(*_decode_seqs(content)),
    BULK_IMPORT: _decode_bulk_import,
}
