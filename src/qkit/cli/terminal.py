"""Words to the terminal: tables and JSON on stdout, everything else on stderr, nothing raw.

What comes out of a message may hold control characters that would steer the terminal; they are
shown, never sent.
"""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Iterable, Sequence
from typing import Any

from pydantic import TypeAdapter
from rich.console import Console
from rich.table import Table
from rich.text import Text

from qkit.admin.views import BodyView

__all__ = [
    "age",
    "ago",
    "block",
    "body_text",
    "count",
    "err",
    "number",
    "out",
    "print_json",
    "print_json_line",
    "print_note",
    "safe",
    "table",
]

out = Console(highlight=False, soft_wrap=False)
err = Console(stderr=True, highlight=False)

# Control characters except the line's end, and those that change the direction of writing.
_UNSAFE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]"
)


def safe(text: object) -> str:
    """Text that can do nothing to a terminal.

    >>> safe("\\x1b[2Jgone")
    '\\\\x1b[2Jgone'
    """
    return _UNSAFE.sub(lambda match: match[0].encode("unicode_escape").decode(), str(text))


def print_note(text: str, style: str = "") -> None:
    """Print a note to stderr, beside the output."""
    err.print(Text(safe(text), style=style))


def print_json(value: object) -> None:
    """A value as JSON, for programs; in colours if a person reads it."""
    text = json.dumps(TypeAdapter[Any](Any).dump_python(value, mode="json"), indent=2)
    if out.is_terminal:
        out.print_json(text)
    else:
        sys.stdout.write(f"{text}\n")


def print_json_line(value: object) -> None:
    """A value as one line of JSON, at once: for a program that reads as they come."""
    sys.stdout.write(f"{json.dumps(TypeAdapter[Any](Any).dump_python(value, mode='json'))}\n")
    sys.stdout.flush()


def table(
    columns: Sequence[str], rows: Iterable[Sequence[str | Text]], *, gap: int | None = None
) -> Table:
    """A table whose columns of numbers stand right: those named with a leading ``>``."""
    if gap is None:
        gap = 3 if len(columns) <= 8 else 2  # names must fit beside many figures in 80 columns
    made = Table(box=None, header_style="dim", pad_edge=False, padding=(0, gap, 0, 0))
    for column in columns:
        right = column.startswith(">")
        made.add_column(
            column.removeprefix(">"),
            justify="right" if right else "left",
            no_wrap=right,
            overflow="fold",
        )
    for row in rows:
        made.add_row(*(cell if isinstance(cell, Text) else Text(safe(cell)) for cell in row))
    return made


def block(id: str, facts: Iterable[str | Text], text: str) -> Text:
    """An entry that needs its width: what it is on one line, what it says below, indented."""
    entry = Text(id, style="bold")
    for fact in facts:
        entry.append("  ")
        entry.append_text(fact if isinstance(fact, Text) else Text(safe(fact), style="dim"))
    for line in safe(text).splitlines() or [""]:
        entry.append(f"\n  {line}", style="default not bold")
    return entry


def number(value: float | None, style: str = "") -> Text:
    """A figure; a dash where nobody knows, faint where it is nothing."""
    if value is None:
        return Text("–", style="dim")
    return Text(f"{value:,}", style=style if value else "dim")


def count(value: int, word: str) -> str:
    """``1 message``, ``2 messages``.

    >>> count(2, "message")
    '2 messages'
    """
    return f"{value:,} {word}{'' if value == 1 else 's'}"


def age(seconds: float | None) -> str:
    """A duration in its largest unit.

    >>> age(7200)
    '2 h'
    """
    if seconds is None:
        return "–"
    for unit, size, limit in (("s", 1, 90), ("min", 60, 5_400), ("h", 3_600, 129_600)):
        if seconds < limit:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds / 86_400:.0f} d"


def ago(at: float | None) -> str:
    """How long ago a wall time was."""
    return "–" if at is None else f"{age(max(0.0, time.time() - at))} ago"


def body_text(body: BodyView) -> str:
    """A body as it is printed: JSON on one line, bytes in base64."""
    cut = " …" if body.cut else ""
    return f"{'base64:' if body.format == 'base64' else ''}{body.content}{cut}"
