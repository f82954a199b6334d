"""Raw broker state as lines of JSON; bytes are stored as text if possible, otherwise as base64."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

__all__ = ["DATA", "PREFIX", "as_bytes", "as_text", "read", "write"]

DATA = Path(__file__).resolve().parents[1] / "data" / "upgrade"

#: Prefix of every name in the data; each test replaces it with a unique prefix.
PREFIX = "upgrade-prefix."


def as_text(value: bytes) -> Any:
    """Return bytes as a JSON value: text if they are UTF-8, otherwise base64.

    >>> as_text(b"{}"), as_text(b"\\xff")
    ('{}', {'base64': '/w=='})
    """
    try:
        return value.decode()
    except UnicodeDecodeError:
        assert PREFIX.encode() not in value, "cannot replace the prefix inside binary data"
        return {"base64": base64.b64encode(value).decode()}


def as_bytes(value: Any) -> bytes:
    """Return the bytes that ``as_text`` has converted.

    >>> as_bytes(as_text(b"\\xff"))
    b'\\xff'
    """
    return base64.b64decode(value["base64"]) if isinstance(value, dict) else str(value).encode()


def write(path: Path, commands: Iterable[Any]) -> None:
    """Write one command per line."""
    path.write_text("".join(json.dumps(command) + "\n" for command in commands))


def read(path: Path, prefix: str) -> list[Any]:
    """Return the commands, in which ``prefix`` replaces ``PREFIX``."""
    return [json.loads(line) for line in path.read_text().replace(PREFIX, prefix).splitlines()]
