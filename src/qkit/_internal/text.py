"""Validation and escaping of text for brokers, headers and logs."""

from __future__ import annotations

import re

__all__ = ["MAX_ERROR_TEXT", "encodable", "error_text", "escape_control", "is_plain_text"]

MAX_ERROR_TEXT = 2_000

# Control characters, line separators, and lone surrogates, which cannot be encoded.
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")
# Also the characters that change the direction of text, which hide what a terminal shows.
_UNSAFE = re.compile(r"[\x00-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
_UNSAFE_LINES = re.compile(_UNSAFE.pattern.replace(r"\x00-\x1f", r"\x00-\x08\x0b-\x1f"))


def is_plain_text(text: str) -> bool:
    """Return whether ``text`` has no control characters and can be encoded as UTF-8."""
    return _CONTROL.search(text) is None


def escape_control(text: str, *, lines: bool = False) -> str:
    r"""Escape control characters, direction marks and surrogates, for logs and terminals.

    Args:
        text: Any text.
        lines: Whether to keep newlines and tabs. Default: escape them too, so that the text cannot
            add a line.

    >>> escape_control("\x1b[2Jgone\n")
    '\\x1b[2Jgone\\n'
    """
    pattern = _UNSAFE_LINES if lines else _UNSAFE
    return pattern.sub(_escaped, text)


def _escaped(match: re.Match[str]) -> str:
    return match[0].encode("unicode_escape").decode()


def encodable(text: str) -> str:
    r"""Escape every lone surrogate as ``\udNNN``, so that the text can be encoded as UTF-8.

    >>> encodable("caf\udce9")
    'caf\\udce9'
    """
    return text if text.isascii() else text.encode(errors="backslashreplace").decode()


def error_text(error: BaseException) -> str:
    """Return the text of an error, limited in length and with control characters escaped."""
    try:
        text = str(error)
    except Exception:  # a user's __str__ may fail, but the dead letter must be written
        text = "(the error has no text: its __str__ failed)"
    escaped = _CONTROL.sub(_escaped, text)
    return escaped if len(escaped) <= MAX_ERROR_TEXT else f"{escaped[: MAX_ERROR_TEXT - 1]}…"
