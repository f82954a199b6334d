"""Record types of the log, one for each kind of state change, and their binary layout.

The content of a record is a type byte, a fixed little-endian header and variable parts.
``encode.py`` writes contents, ``decode`` reads them, and ``segment.py`` frames them with a length
and checksums. Times are wall times in seconds, because monotonic time is meaningless after a
restart; 0 means none.

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

MAX_CONTENT: Final = 1 << 30  # bytes; twice as much still fits into the 32-bit offsets of a segment

# Record types are 1–31. Types from 0xF0 on are reserved for the segment itself.
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

EXTENDED: Final = 1  # PUBLISH: rarely used fields follow
KEYED: Final = 2  # PUBLISH: there is a key, possibly empty
BULK: Final = 4  # PUBLISH: from a bulk file; valid only if the BULK_IMPORT of the file follows
REPLACED: Final = 1  # RELEASE: new headers follow; without this flag, headers are unchanged
GROUPED: Final = 1  # DECLARE: the queue belongs to a topic's group

MESSAGE: Final = struct.Struct("<BBIQBdH")  # type, flags, queue, seq, priority, at, id length
QUEUE_SEQ: Final = struct.Struct("<IQ")  # queue and seq inside a MESSAGE
QUEUE_SEQ_OFFSET: Final = 2
MESSAGE_EXTRA: Final = struct.Struct("<ddIHI")  # due, expires, attempt, key length, header length
DECLARATION: Final = struct.Struct("<BBIHH")  # type, flags, queue, name length, group length
QUEUE: Final = struct.Struct("<BI")  # type, queue
ONE_SEQ: Final = struct.Struct("<BIQ")  # type, queue, seq
ONE_CLAIM: Final = struct.Struct("<BIQI")  # type, queue, seq, attempt
RELEASE_LAYOUT: Final = struct.Struct("<BBIQId")  # type, flags, queue, seq, attempt, due
TARGETS: Final = struct.Struct("<BH")  # type, number of targets
BULK_IMPORT_LAYOUT: Final = struct.Struct("<BQQ")  # type, first seq, last seq


class RecordError(QueueError, ValueError):
    """Error for bytes that are not a valid record, or for values that do not fit into one."""


class Declare(NamedTuple):
    """Record that a queue, or the queue of a topic's group, was created or reconfigured.

    ``queue`` is the number of the queue in the log. Numbers are never reused, so a queue that is
    deleted and created again under the same name shares nothing with the first.
    """

    queue: int
    name: str
    group: str | None
    config: dict[str, object]


class Delete(NamedTuple):
    """Record that a queue was deleted with its messages."""

    queue: int


class Publish(NamedTuple):
    """Record that a message was accepted.

    ``attempt`` is the number of deliveries so far. If ``bulk`` is true, the message is from a bulk
    file and valid only if the ``BulkImport`` of that file follows.
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
    """Record that a message was accepted for several groups of a topic, atomically.

    ``targets`` are (queue, seq) pairs. The first pair is also in ``message``.
    """

    targets: tuple[tuple[int, int], ...]
    message: Publish


class Claim(NamedTuple):
    """Record that messages were delivered; ``attempts`` has the attempt number of each."""

    queue: int
    seqs: tuple[int, ...]
    attempts: tuple[int, ...]


class Ack(NamedTuple):
    """Record that messages were acked."""

    queue: int
    seqs: tuple[int, ...]


class Release(NamedTuple):
    """Record that a message was released; ``headers`` is ``None`` if they are unchanged."""

    queue: int
    seq: int
    attempt: int
    due: float
    headers: dict[str, str] | None


class DeadLetterMove(NamedTuple):
    """Record that a message left its queue and became a dead letter in another, atomically."""

    queue: int
    seq: int
    letter: Publish


class Remove(NamedTuple):
    """Record that messages were removed without an ack, for example purged or dropped."""

    queue: int
    seqs: tuple[int, ...]


class BulkImport(NamedTuple):
    """Record that a bulk file was imported; ``first`` to ``last`` are the seqs of its messages."""

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
    """Decode the content of a record; raise ``RecordError`` if it is not valid."""
    try:
        return _DECODERS[content[0]](content)
    except RecordError:
        raise
    except (LookupError, ValueError, struct.error) as error:
        kind = content[0] if content else "none"
        raise RecordError(f"invalid record of type {kind}: {error!r}") from error


def decode_publish(content: bytes, start: int = 0) -> Publish:
    """Decode the ``Publish`` record that begins at ``start``."""
    kind, flags, queue, seq, priority, at, id_length = MESSAGE.unpack_from(content, start)
    if kind != PUBLISH:
        raise RecordError(f"expected a PUBLISH record, got a record of type {kind}")
    position = start + MESSAGE.size
    if not flags & EXTENDED:
        end = position + id_length
        if end > len(content):
            raise RecordError("the message is shorter than its parts")
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
        raise RecordError("the message is shorter than its parts")
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
