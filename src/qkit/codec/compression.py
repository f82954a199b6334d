"""``content-encoding``: gzip and back, never beyond a limit. Private; see ``qkit.codec``."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Mapping

from qkit.errors import DecodeError, PayloadTooLarge
from qkit.message import CONTENT_ENCODING

_STEP = 16_384
_MAGIC = b"\x1f\x8b"
# kombu and others name the charset here; such a body is as it was.
_NOT_ENCODED = frozenset({"", "identity", "binary", "8bit", "utf-8", "utf8", "us-ascii", "ascii"})


def compress(body: bytes) -> bytes:
    """The body in gzip; equal bodies give equal bytes."""
    return gzip.compress(body, 6, mtime=0)


def decompress(body: bytes, headers: Mapping[str, str], limit: int) -> bytes:
    """The body as it was before ``content-encoding``, never more than ``limit`` bytes of it.

    >>> decompress(gzip.compress(b"{}"), {"content-encoding": "gzip"}, 1024)
    b'{}'

    Raises ``PayloadTooLarge`` as soon as the limit is passed, and ``DecodeError`` for damaged data
    or an unknown encoding.
    """
    check_size(body, limit, "the body")
    encoding = headers.get(CONTENT_ENCODING, "").strip().lower()
    if encoding in _NOT_ENCODED:
        return body
    if encoding not in {"gzip", "x-gzip"}:
        shown = encoding[:40]
        raise DecodeError(f"unknown content-encoding {shown!r}: send gzip, or no encoding")
    try:
        return _gunzip(memoryview(body), limit)
    except zlib.error as exc:
        raise DecodeError(f"damaged gzip: {str(exc)[:80]}") from exc


def _gunzip(body: memoryview, limit: int) -> bytes:
    """Every member of a gzip body. Fed in steps, so that many small ones cost no more than one."""
    parts: list[bytes] = []
    size = position = 0
    while True:
        member = zlib.decompressobj(wbits=31)
        while not member.eof:
            step = body[position : position + _STEP]
            if not step:
                raise DecodeError("truncated gzip: the end is missing")
            part = member.decompress(step, limit - size + 1)
            size += len(part)
            if size > limit:
                raise _too_large("the body opens to more than the limit", limit)
            parts.append(part)
            position += len(step) - len(member.unused_data)
        if bytes(body[position : position + 2]) != _MAGIC:
            # gzip itself allows zero bytes after the end, as padding, and nothing else.
            if body[position:].tobytes().strip(b"\0"):
                raise DecodeError("damaged gzip: other data follows its end")
            return b"".join(parts)


def check_size(body: bytes, limit: int, what: str) -> None:
    """Raise ``PayloadTooLarge`` if the body has more than ``limit`` bytes."""
    if len(body) > limit:
        raise _too_large(f"{what} has {len(body)} bytes", limit)


def _too_large(fact: str, limit: int) -> PayloadTooLarge:
    return PayloadTooLarge(
        f"{fact}: {limit} at most; send a reference to it, or raise max_message_bytes"
    )
