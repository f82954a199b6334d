"""Raw broker state as lines of JSON: text where bytes are text, base64 elsewhere."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

__all__ = ["DATA", "PREFIX", "as_bytes", "as_text", "read", "write"]

DATA = Path(__file__).resolve().parents[1] / "data" / "upgrade"

#: Stands before every name in the data; a test puts a prefix of its own in its place.
PREFIX = "upgrade-prefix."


def as_text(value: bytes) -> Any:
    """Bytes as JSON holds them.

    >>> as_text(b"{}"), as_text(b"\\xff")
    ('{}', {'base64': '/w=='})
    """
    try:
        return value.decode()
    except UnicodeDecodeError:
        assert PREFIX.encode() not in value, "the prefix inside binary data cannot be replaced"
        return {"base64": base64.b64encode(value).decode()}


def as_bytes(value: Any) -> bytes:
    """The reverse of ``as_text``.

    >>> as_bytes(as_text(b"\\xff"))
    b'\\xff'
    """
    return base64.b64decode(value["base64"]) if isinstance(value, dict) else str(value).encode()


def write(path: Path, commands: Iterable[Any]) -> None:
    """One command in each line."""
    path.write_text("".join(json.dumps(command) + "\n" for command in commands))


def read(path: Path, prefix: str) -> list[Any]:
    """The commands, with ``prefix`` in the place of the one in the data."""
    return [json.loads(line) for line in path.read_text().replace(PREFIX, prefix).splitlines()]
