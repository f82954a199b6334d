"""Compression of bodies with gzip, with a limit on the decompressed size."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Mapping

from qkit.errors import DecodeError, PayloadTooLarge
from qkit.message import CONTENT_ENCODING

_STEP = 16_384
_MAGIC = b"\x1f\x8b"
# kombu and others write the charset into content-encoding; such a body is not compressed.
_NOT_ENCODED = frozenset({"", "identity", "binary", "8bit", "utf-8", "utf8", "us-ascii", "ascii"})


def compress(body: bytes) -> bytes:
    """Compress a body with gzip. Equal bodies give equal results."""
    return gzip.compress(body, 6, mtime=0)


def decompress(body: bytes, headers: Mapping[str, str], limit: int) -> bytes:
    """Decompress a body as its ``content-encoding`` header requires.

    Raises:
        PayloadTooLarge: The body is larger than ``limit`` bytes. Decompression stops at the limit.
        DecodeError: The data is damaged or the encoding is unknown.

    Example:
        >>> decompress(gzip.compress(b"{}"), {"content-encoding": "gzip"}, 1024)
        b'{}'
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
    """Decompress all gzip members in steps, so that many small members cost no more than one."""
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
                raise _too_large("the body decompresses to more than the limit", limit)
            parts.append(part)
            position += len(step) - len(member.unused_data)
        if bytes(body[position : position + 2]) != _MAGIC:
            # gzip allows only zero bytes after the end, as padding.
            if body[position:].tobytes().strip(b"\0"):
                raise DecodeError("damaged gzip: other data follows the end")
            return b"".join(parts)


def check_size(body: bytes, limit: int, what: str) -> None:
    """Raise ``PayloadTooLarge`` if the body has more than ``limit`` bytes."""
    if len(body) > limit:
        raise _too_large(f"{what} has {len(body)} bytes", limit)


def _too_large(fact: str, limit: int) -> PayloadTooLarge:
    return PayloadTooLarge(
        f"{fact}: at most {limit} bytes are allowed; send a reference to the data, or raise "
        "max_message_bytes"
    )
