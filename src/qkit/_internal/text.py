"""Text that any broker, header and log can hold: control characters, surrogates, bounded errors."""

from __future__ import annotations

import re

__all__ = ["MAX_ERROR_TEXT", "encodable", "error_text", "is_plain_text"]

MAX_ERROR_TEXT = 2_000

# Control characters and line ends, and lone surrogates, which no encoding can carry.
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")


def is_plain_text(text: str) -> bool:
    """Whether ``text`` has neither control characters nor anything that cannot be encoded."""
    return _CONTROL.search(text) is None


def encodable(text: str) -> str:
    r"""Return ``text`` with every lone surrogate as ``\udNNN``, so that UTF-8 can encode it.

    >>> encodable("caf\udce9")
    'caf\\udce9'
    """
    return text if text.isascii() else text.encode(errors="backslashreplace").decode()


def error_text(error: BaseException) -> str:
    """An error's text as a header or a log can hold it: bounded, control characters visible."""
    try:
        text = str(error)
    except Exception:  # a handler's exception may be broken itself; its message must still be kept
        text = "(this error cannot be shown: its __str__ failed)"
    escaped = _CONTROL.sub(lambda match: match[0].encode("unicode_escape").decode(), text)
    return escaped if len(escaped) <= MAX_ERROR_TEXT else f"{escaped[: MAX_ERROR_TEXT - 1]}…"
