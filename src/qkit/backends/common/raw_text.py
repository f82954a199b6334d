"""Text for bytes that are not UTF-8, and the header ``qkit-raw`` that keeps the original bytes.

The id, the key and the headers of a foreign message may contain arbitrary bytes, but qkit
represents them as text. ``text_of`` converts bytes to readable text that is valid UTF-8. The header
``qkit-raw`` keeps the original bytes as a JSON object with these base64 entries:

| entry | original bytes of |
|---|---|
| ``id``, ``key`` | the id or key of the message |
| ``header:<name>`` | the value of a header |
| ``name:<name>`` | the name of the header that is now ``<name>`` |
| ``headers`` | all headers, if they could not be parsed |
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from typing import Final, cast

__all__ = ["RAW", "keep", "kept", "text_of"]

RAW: Final = "qkit-raw"


def text_of(raw: bytes | bytearray) -> str:
    r"""Decode ``raw`` as UTF-8; a byte that is not valid becomes ``\xNN``.

    >>> text_of(b"caf\xe9")
    'caf\\xe9'
    """
    return raw.decode(errors="backslashreplace")


def keep(headers: dict[str, str], values: Mapping[str, bytes]) -> None:
    """Add the original bytes of ``values`` to the header ``qkit-raw``.

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
    """Return the original bytes by entry of ``qkit-raw``; skip invalid base64."""
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
