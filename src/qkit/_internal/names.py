"""Validation of channel names and headers."""

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
_HEADER_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]{1,200}")  # an HTTP token


def check_name(name: str, what: str = "channel") -> str:
    """Return ``name`` if it is valid on every broker, else raise ``InvalidName``.

    ``what`` is the kind of name, for the error message.

    >>> check_name("orders.eu-1")
    'orders.eu-1'
    """
    if not isinstance(name, str) or not _NAME.fullmatch(name) or name in {".", ".."}:
        shown = repr(name) if len(repr(name)) <= 80 else f"{repr(name)[:77]}…"
        raise InvalidName(
            f"{shown} is not a valid {what} name: use 1–200 characters of A-Z a-z 0-9 . _ - "
            "(but not '.' or '..'), which every broker accepts"
        )
    return name


def check_headers(headers: Mapping[str, str]) -> dict[str, str]:
    """Return a copy of the headers if they are valid, else raise ``InvalidHeader``."""
    if not isinstance(headers, Mapping):
        raise InvalidHeader(
            f"headers: expected a mapping of str to str, got {type(headers).__name__}"
        )
    if len(headers) > MAX_HEADERS:
        raise InvalidHeader(
            f"expected at most {MAX_HEADERS} headers, got {len(headers)}; put data in the body"
        )
    size = 0
    for name, value in headers.items():
        if not isinstance(name, str) or not _HEADER_NAME.fullmatch(name):
            raise InvalidHeader(
                f"header name {name!r:.80} is not valid: use 1–200 letters, digits and - _ ."
            )
        if name.lower().startswith(RESERVED_PREFIX):
            raise InvalidHeader(f"header {name!r}: the prefix 'qkit-' is reserved")
        if not isinstance(value, str):
            raise InvalidHeader(
                f"header {name!r}: expected a str, got {type(value).__name__}; use "
                "Annotated[…, Header()] to convert it in the handler"
            )
        if not is_plain_text(value):
            raise InvalidHeader(f"header {name!r} contains a control character: encode its value")
        size += len(name) + len(value.encode())
    if size > MAX_HEADER_BYTES:
        raise InvalidHeader(
            f"expected at most {MAX_HEADER_BYTES} bytes of headers, got {size}; put data in the "
            "body"
        )
    return dict(headers)
