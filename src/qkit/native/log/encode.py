"""Writing records: the contents that ``record.decode`` reads.

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
    """A message was accepted at wall time ``at``.

    Raises ``PayloadTooLarge`` above 1 GiB and ``RecordError`` for values out of range.

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
        raise RecordError(f"a message that no record can hold: {error}", message_id=id) from error
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
    """Names and values with a NUL between: a tenth of JSON's cost.

    Headers that qkit checked hold no NUL. Any others are written as JSON, told by its brace.
    """
    flat = "\0".join([part for pair in headers.items() for part in pair])
    if flat.count("\0") == 2 * len(headers) - 1 and not flat.startswith("{"):
        try:
            return flat.encode()
        except UnicodeEncodeError:
            pass  # a lone surrogate, which JSON can escape
    return json.dumps(headers).encode()


def _sized(content: bytes) -> bytes:
    if len(content) > MAX_CONTENT:
        raise PayloadTooLarge(f"a record of {len(content)} bytes: the log takes {MAX_CONTENT}")
    return content


def encode_declare(
    queue: int, name: str, group: str | None = None, config: dict[str, object] | None = None
) -> bytes:
    """A queue, or a group of a topic, exists or has other limits."""
    name_bytes, group_bytes = name.encode(), (group or "").encode()
    flags = 0 if group is None else GROUPED
    head = _packed(DECLARATION.pack, DECLARE, flags, queue, len(name_bytes), len(group_bytes))
    return head + name_bytes + group_bytes + json.dumps(config or {}).encode()


def encode_delete(queue: int) -> bytes:
    """A queue and all it held are gone."""
    return _packed(QUEUE.pack, DELETE, queue)


def encode_fanout(targets: Sequence[tuple[int, int]], publish: bytes) -> bytes:
    """One message for several queues; ``publish`` is encoded for the first target."""
    flat = [number for target in targets for number in target]
    head = _packed(TARGETS.pack, FANOUT, len(targets))
    return _sized(head + _packed(struct.Struct("<" + "IQ" * len(targets)).pack, *flat) + publish)


def without_body(publish: bytes) -> bytes:
    """The content of a message less its body.

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
    """The content of a message as one for these (queue, seq) targets, one or several.

    ``bulk``: whether it counts only if a ``BulkImport`` follows; else that stays as it is.

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
    """Messages were handed out.

    >>> len(encode_claim(1, [4, 5], [1, 2]))
    29
    """
    count = len(seqs)
    if count != len(attempts) or not count:
        raise RecordError(f"{count} messages claimed with {len(attempts)} attempts")
    if count == 1:
        return _packed(ONE_CLAIM.pack, CLAIM, queue, seqs[0], attempts[0])
    return _packed(struct.Struct(f"<BI{count}Q{count}I").pack, CLAIM, queue, *seqs, *attempts)


def encode_ack(queue: int, seqs: Sequence[int]) -> bytes:
    """The work on these messages is done."""
    return _encode_seqs(ACK, queue, seqs)


def encode_remove(queue: int, seqs: Sequence[int]) -> bytes:
    """These messages were purged, dropped or removed by hand."""
    return _encode_seqs(REMOVE, queue, seqs)


def _encode_seqs(kind: int, queue: int, seqs: Sequence[int]) -> bytes:
    if len(seqs) == 1:
        return _packed(ONE_SEQ.pack, kind, queue, seqs[0])
    if not seqs:
        raise RecordError("a record about no message")
    return _sized(_packed(struct.Struct(f"<BI{len(seqs)}Q").pack, kind, queue, *seqs))


def encode_release(
    queue: int, seq: int, attempt: int, due: float = 0.0, headers: dict[str, str] | None = None
) -> bytes:
    """A message was given back; ``headers``, also empty ones, replace its own."""
    flags = 0 if headers is None else REPLACED
    head = _packed(RELEASE_LAYOUT.pack, RELEASE, flags, queue, seq, attempt, due)
    return head + _pack_headers(headers) if headers else head


def encode_dead_letter_move(queue: int, seq: int, letter: bytes) -> bytes:
    """A message left ``queue``; ``letter`` is the ``encode_publish`` of its dead letter."""
    return _sized(_packed(ONE_SEQ.pack, DEAD_LETTER_MOVE, queue, seq) + letter)


def encode_bulk_import(name: str, first: int, last: int) -> bytes:
    """A bulk file was taken in whole, by the bulk messages ``first`` to ``last``."""
    return _packed(BULK_IMPORT_LAYOUT.pack, BULK_IMPORT, first, last) + name.encode()


def _packed(pack: Callable[..., bytes], *values: object) -> bytes:
    try:
        return pack(*values)
    except struct.error as error:
        raise RecordError(f"a value that no record can hold: {error}") from error
