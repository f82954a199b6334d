"""Validation of channel names and of a caller's headers."""

from __future__ import annotations

import re
from collections.abc import Mapping

from qkit._internal.text import is_plain_text
from qkit.errors import InvalidHeader, InvalidName

__all__ = ["MAX_HEADERS", "MAX_HEADER_BYTES", "RESERVED_PREFIX", "check_headers", "check_name"]

RESERVED_PREFIX = "qkit-"
MAX_HEADERS = 128
MAX_HEADER_BYTES = 32_768

_NAME = re.compile(r"[A-Za-z0-9._-]{1,200}")
_HEADER_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]{1,200}")  # an HTTP token: legal everywhere


def check_name(name: str, what: str = "channel") -> str:
    """Return ``name`` if every broker can carry it, else raise ``InvalidName``.

    >>> check_name("orders.eu-1")
    'orders.eu-1'
    """
    if not isinstance(name, str) or not _NAME.fullmatch(name) or name in {".", ".."}:
        shown = repr(name) if len(repr(name)) <= 80 else f"{repr(name)[:77]}…"
        raise InvalidName(
            f"{shown} is no {what} name: use 1–200 characters of A-Z a-z 0-9 . _ - "
            "(other than '.' and '..'), so that every broker can carry it"
        )
    return name


def check_headers(headers: Mapping[str, str]) -> dict[str, str]:
    """Return a copy of a caller's ``headers`` if they can travel, else raise ``InvalidHeader``."""
    if not isinstance(headers, Mapping):
        raise InvalidHeader(f"headers are a mapping of str to str, not {type(headers).__name__}")
    if len(headers) > MAX_HEADERS:
        raise InvalidHeader(f"{len(headers)} headers: {MAX_HEADERS} at most; put data in the body")
    size = 0
    for name, value in headers.items():
        if not isinstance(name, str) or not _HEADER_NAME.fullmatch(name):
            raise InvalidHeader(f"header name {name!r:.80}: use letters, digits and - _ . only")
        if name.lower().startswith(RESERVED_PREFIX):
            raise InvalidHeader(f"header {name!r}: names beginning with 'qkit-' are qkit's own")
        if not isinstance(value, str):
            raise InvalidHeader(
                f"header {name!r} has a value of type {type(value).__name__}: pass a str, "
                "and let Annotated[…, Header()] convert it in the handler"
            )
        if not is_plain_text(value):
            raise InvalidHeader(f"header {name!r} holds a control character: encode its value")
        size += len(name) + len(value.encode())
    if size > MAX_HEADER_BYTES:
        raise InvalidHeader(f"{size} bytes of headers: {MAX_HEADER_BYTES} at most; use the body")
    return dict(headers)
