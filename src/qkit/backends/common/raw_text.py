"""Text for bytes that are not UTF-8, and the header that keeps the bytes.

A message of another program may hold bytes where qkit has text: an id, a key, a header. Its text is
then readable everywhere and can be encoded everywhere, and ``qkit-raw`` holds the bytes: a JSON
object of base64 values by what they belong to.

| entry | bytes of |
|---|---|
| ``id``, ``key`` | the message's id or key |
| ``header:<name>`` | the value of a header |
| ``name:<name>`` | the name of a header, which is ``<name>`` now |
| ``headers`` | all headers together, where they could not be read |
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from typing import Final, cast

__all__ = ["RAW", "keep", "kept", "text_of"]

RAW: Final = "qkit-raw"


def text_of(raw: bytes | bytearray) -> str:
    r"""Return the text of ``raw``; a byte that is not UTF-8 becomes ``\xNN``.

    >>> text_of(b"caf\xe9")
    'caf\\xe9'
    """
    return raw.decode(errors="backslashreplace")


def keep(headers: dict[str, str], values: Mapping[str, bytes]) -> None:
    """Add raw bytes to the header that keeps them.

    >>> headers = {"a": "1"}
    >>> keep(headers, {"key": b"\\xff"})
    >>> headers
    {'a': '1', 'qkit-raw': '{"key": "/w=="}'}
    """
    entries = _entries(headers.get(RAW))
    for entry, raw in values.items():
        entries[entry] = base64.b64encode(raw).decode()
    headers[RAW] = json.dumps(entries)


def kept(headers: Mapping[str, str]) -> dict[str, bytes]:
    """Return the raw bytes that ``headers`` keep, by entry; none if another program wrote it."""
    found: dict[str, bytes] = {}
    for entry, value in _entries(headers.get(RAW)).items():
        try:
            found[entry] = base64.b64decode(value, validate=True)
        except ValueError:
            continue
    return found


def _entries(text: str | None) -> dict[str, str]:
    try:
        found: object = json.loads(text or "{}")
    except (ValueError, RecursionError):
        return {}
    if not isinstance(found, dict):
        return {}
    entries = cast("dict[str, object]", found)
    return {entry: value for entry, value in entries.items() if isinstance(value, str)}
