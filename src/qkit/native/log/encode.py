"""Encoding of records into the bytes that ``record.decode`` reads.

>>> from qkit.native.log.record import decode
>>> decode(encode_publish(1, 7, "0190", b"{}", priority=9)).body
b'{}'
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Sequence
from typing import Final

from qkit.errors import PayloadTooLarge
from qkit.native.log.record import (
    ACK,
    BULK,
    BULK_IMPORT,
    BULK_IMPORT_LAYOUT,
    CLAIM,
    DEAD_LETTER_MOVE,
    DECLARATION,
    DECLARE,
    DELETE,
    EXTENDED,
    FANOUT,
    GROUPED,
    KEYED,
    MAX_CONTENT,
    MESSAGE,
    MESSAGE_EXTRA,
    ONE_CLAIM,
    ONE_SEQ,
    PUBLISH,
    QUEUE,
    QUEUE_SEQ,
    QUEUE_SEQ_OFFSET,
    RELEASE,
    RELEASE_LAYOUT,
    REMOVE,
    REPLACED,
    TARGETS,
    RecordError,
)

__all__ = [
    "encode_ack",
    "encode_bulk_import",
    "encode_claim",
    "encode_dead_letter_move",
    "encode_declare",
    "encode_delete",
    "encode_fanout",
    "encode_publish",
    "encode_release",
    "encode_remove",
    "renumbered",
    "without_body",
]

_pack_publish: Final = MESSAGE.pack
_pack_extra: Final = MESSAGE_EXTRA.pack


def encode_publish(
    queue: int,
    seq: int,
    id: str,
    body: bytes,
    *,
    priority: int = 5,
    at: float = 0.0,
    due: float = 0.0,
    expires: float = 0.0,
    key: str | None = None,
    headers: dict[str, str] | None = None,
    attempt: int = 0,
) -> bytes:
    """Encode a ``Publish`` record: a message was accepted at wall time ``at``.

    Raises ``PayloadTooLarge`` above 1 GiB, and ``RecordError`` for values out of range.

    >>> len(encode_publish(1, 1, "0190", b"hello"))
    34
    """
    name = id.encode()
    try:
        if headers or key is not None or due or expires or attempt:
            return _sized(_extended(queue, seq, name, body, priority, at, due, expires, key,
                                    headers, attempt))  # fmt: skip
        head = _pack_publish(PUBLISH, 0, queue, seq, priority, at, len(name))
    except struct.error as error:
        raise RecordError(
            f"the message does not fit into a record: {error}", message_id=id
        ) from error
    if len(body) > MAX_CONTENT - 100_000:
        return _sized(head + name + body)
    return head + name + body


def _extended(
    queue: int,
    seq: int,
    name: bytes,
    body: bytes,
    priority: int,
    at: float,
    due: float,
    expires: float,
    key: str | None,
    headers: dict[str, str] | None,
    attempt: int,
) -> bytes:
    flags = EXTENDED if key is None else EXTENDED | KEYED
    key_bytes = key.encode() if key else b""
    header_bytes = _pack_headers(headers) if headers else b""
    return b"".join(
        (
            _pack_publish(PUBLISH, flags, queue, seq, priority, at, len(name)),
            _pack_extra(due, expires, attempt, len(key_bytes), len(header_bytes)),
            name,
            key_bytes,
            header_bytes,
            body,
        )
    )


def _pack_headers(headers: dict[str, str]) -> bytes:
    """Encode headers as names and values separated by NUL, which is ten times as fast as JSON.

    Headers that qkit has checked contain no NUL. Other headers are written as JSON, which is
    recognised by its opening brace.
    """
    flat = "\0".join([part for pair in headers.items() for part in pair])
    if flat.count("\0") == 2 * len(headers) - 1 and not flat.startswith("{"):
        try:
            return flat.encode()
        except UnicodeEncodeError:
            pass  # a lone surrogate; JSON escapes it
    return json.dumps(headers).encode()


def _sized(content: bytes) -> bytes:
    if len(content) > MAX_CONTENT:
        raise PayloadTooLarge(f"a record may have at most {MAX_CONTENT} bytes, got {len(content)}")
    return content


def encode_declare(
    queue: int, name: str, group: str | None = None, config: dict[str, object] | None = None
) -> bytes:
    """Encode a ``Declare`` record: a queue, or a topic's group, was created or reconfigured."""
    name_bytes, group_bytes = name.encode(), (group or "").encode()
    flags = 0 if group is None else GROUPED
    head = _packed(DECLARATION.pack, DECLARE, flags, queue, len(name_bytes), len(group_bytes))
    return head + name_bytes + group_bytes + json.dumps(config or {}).encode()


def encode_delete(queue: int) -> bytes:
    """Encode a ``Delete`` record: a queue was deleted with its messages."""
    return _packed(QUEUE.pack, DELETE, queue)


def encode_fanout(targets: Sequence[tuple[int, int]], publish: bytes) -> bytes:
    """Encode a ``Fanout`` record: a message was accepted for several queues.

    ``publish`` is the ``Publish`` record of the first target.
    """
    flat = [number for target in targets for number in target]
    head = _packed(TARGETS.pack, FANOUT, len(targets))
    return _sized(head + _packed(struct.Struct("<" + "IQ" * len(targets)).pack, *flat) + publish)


def without_body(publish: bytes) -> bytes:
    """Return a ``Publish`` record without the body of its message.

    >>> without_body(encode_publish(1, 1, "0190", b"{}")) == encode_publish(1, 1, "0190", b"")
    True
    """
    end: int = MESSAGE.size + MESSAGE.unpack_from(publish)[-1]
    if publish[1] & EXTENDED:
        key_length, header_length = MESSAGE_EXTRA.unpack_from(publish, MESSAGE.size)[-2:]
        end += MESSAGE_EXTRA.size + key_length + header_length
    return publish[:end]


def renumbered(
    publish: bytes, targets: Sequence[tuple[int, int]], *, bulk: bool | None = None
) -> bytes:
    """Return a ``Publish`` record with a new (queue, seq) target; with several, a ``Fanout``.

    ``bulk`` sets whether the message is valid only if a ``BulkImport`` follows. ``None`` leaves it
    unchanged.

    >>> from qkit.native.log.record import decode
    >>> decode(renumbered(encode_publish(1, 1, "0190", b"{}"), [(7, 9)])).queue
    7
    """
    content = bytearray(publish)
    QUEUE_SEQ.pack_into(content, QUEUE_SEQ_OFFSET, *targets[0])
    if bulk is not None:
        content[1] = content[1] | BULK if bulk else content[1] & ~BULK
    one = bytes(content)
    return one if len(targets) == 1 else encode_fanout(targets, one)


def encode_claim(queue: int, seqs: Sequence[int], attempts: Sequence[int]) -> bytes:
    """Encode a ``Claim`` record: messages were delivered.

    >>> len(encode_claim(1, [4, 5], [1, 2]))
    29
    """
    count = len(seqs)
    if count != len(attempts) or not count:
        raise RecordError(
            "expected at least one message and one attempt for each, "
            f"got {count} messages and {len(attempts)} attempts"
        )
    if count == 1:
        return _packed(ONE_CLAIM.pack, CLAIM, queue, seqs[0], attempts[0])
    return _packed(struct.Struct(f"<BI{count}Q{count}I").pack, CLAIM, queue, *seqs, *attempts)


def encode_ack(queue: int, seqs: Sequence[int]) -> bytes:
    """Encode an ``Ack`` record: messages were acked."""
    return _encode_seqs(ACK, queue, seqs)


def encode_remove(queue: int, seqs: Sequence[int]) -> bytes:
    """Encode a ``Remove`` record: messages were removed without an ack."""
    return _encode_seqs(REMOVE, queue, seqs)


def _encode_seqs(kind: int, queue: int, seqs: Sequence[int]) -> bytes:
    if len(seqs) == 1:
        return _packed(ONE_SEQ.pack, kind, queue, seqs[0])
    if not seqs:
        raise RecordError("expected at least one message")
    return _sized(_packed(struct.Struct(f"<BI{len(seqs)}Q").pack, kind, queue, *seqs))


def encode_release(
    queue: int, seq: int, attempt: int, due: float = 0.0, headers: dict[str, str] | None = None
) -> bytes:
    """Encode a ``Release`` record: a message was released.

    ``headers`` replace the headers of the message, even if they are empty. ``None`` keeps them.
    """
    flags = 0 if headers is None else REPLACED
    head = _packed(RELEASE_LAYOUT.pack, RELEASE, flags, queue, seq, attempt, due)
    return head + _pack_headers(headers) if headers else head


def encode_dead_letter_move(queue: int, seq: int, letter: bytes) -> bytes:
    """Encode a ``DeadLetterMove`` record; ``letter`` is the encoded ``Publish`` of the letter."""
    return _sized(_packed(ONE_SEQ.pack, DEAD_LETTER_MOVE, queue, seq) + letter)


def encode_bulk_import(name: str, first: int, last: int) -> bytes:
    """Encode a ``BulkImport`` record: a file was imported as messages ``first`` to ``last``."""
    return _packed(BULK_IMPORT_LAYOUT.pack, BULK_IMPORT, first, last) + name.encode()


def _packed(pack: Callable[..., bytes], *values: object) -> bytes:
    try:
        return pack(*values)
    except struct.error as error:
        raise RecordError(f"a value does not fit into a record: {error}") from error
