"""Terminal output: tables and JSON on stdout, notes and errors on stderr.

Control characters in messages are escaped, because they could take control of the terminal.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterable, Sequence
from typing import Any

from pydantic import TypeAdapter
from rich.console import Console, ConsoleDimensions, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from qkit._internal.text import escape_control
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
    "safe_line",
    "table",
]

MAX_SPACED_COLUMNS = 8  # a table with more columns has smaller gaps
WIDE_TERMINAL = 100

UNLIMITED_WIDTH = 10_000  # characters


class SafeConsole(Console):
    """Console that escapes control characters in everything it prints, except its own codes."""

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        """Render an object; escape the text of its segments."""
        for segment in super().render(renderable, options):
            text = segment.text if segment.control else safe(segment.text)
            yield segment if text == segment.text else Segment(text, segment.style)


class _Output(SafeConsole):
    """Console that limits the width of its lines only on a terminal, not in a pipe or a file."""

    @property
    def size(self) -> ConsoleDimensions:
        if self.is_terminal or getattr(self, "_width", None) or os.environ.get("COLUMNS"):
            return super().size
        return ConsoleDimensions(UNLIMITED_WIDTH, super().size.height)

    @size.setter
    def size(self, new_size: tuple[int, int]) -> None:
        width, height = new_size
        self._width, self._height = width, height


out: Console = _Output(highlight=False, soft_wrap=False)
err: Console = SafeConsole(stderr=True, highlight=False)


def safe(text: object) -> str:
    """Escape control characters except newline and tab, direction marks and surrogates.

    >>> safe("\\x1b[2Jgone")
    '\\\\x1b[2Jgone'
    """
    return escape_control(str(text), lines=True)


def safe_line(text: object) -> str:
    """Escape all control characters, for text that must stay on one line.

    >>> safe_line("7\\n8")
    '7\\\\n8'
    """
    return escape_control(str(text))


def print_note(text: str, style: str = "") -> None:
    """Print a note to stderr."""
    err.print(Text(safe(text), style=style))


def print_json(value: object) -> None:
    """Print a value as indented JSON, in colour on a terminal."""
    text = json.dumps(TypeAdapter[Any](Any).dump_python(value, mode="json"), indent=2)
    if out.is_terminal:
        out.print_json(text)
    else:
        sys.stdout.write(f"{text}\n")


def print_json_line(value: object) -> None:
    """Print a value as one line of JSON and flush it, for programs that read a stream."""
    sys.stdout.write(f"{json.dumps(TypeAdapter[Any](Any).dump_python(value, mode='json'))}\n")
    sys.stdout.flush()


def table(
    columns: Sequence[str], rows: Iterable[Sequence[str | Text]], *, gap: int | None = None
) -> Table:
    """Build a table without borders.

    Args:
        columns: Titles of the columns; a leading ``>`` aligns a column to the right.
        rows: Cells of each row.
        gap: Spaces between columns. Default: 3, or fewer in a table with many columns, whose titles
            also wrap so that it fits in 80 characters.
    """
    wide = len(columns) > MAX_SPACED_COLUMNS
    if gap is None:
        gap = 3 if not wide else 2 if out.width >= WIDE_TERMINAL else 1
    made = Table(box=None, header_style="dim", pad_edge=False, padding=(0, gap, 0, 0))
    for column in columns:
        right = column.startswith(">")
        made.add_column(
            _title(column, wrap=wide),
            justify="right" if right else "left",
            no_wrap=right,
            overflow="fold",
        )
    for row in rows:
        made.add_row(*map(_cell, row))
    return made


def _cell(cell: str | Text) -> Text:
    """Return a cell on one line. A cell with control characters loses its inner styles."""
    if isinstance(cell, str):
        return Text(safe_line(cell))
    text = safe_line(cell.plain)
    return cell if text == cell.plain else Text(text, style=cell.style)


def _title(column: str, *, wrap: bool) -> str:
    title = column.removeprefix(">")
    return title.replace(" ", "\n") if wrap else title


def block(id: str, facts: Iterable[str | Text], text: str) -> Text:
    """Format an entry: id and facts on one line, with the text indented below."""
    entry = Text(safe_line(id), style="bold")
    for fact in facts:
        entry.append("  ")
        entry.append_text(fact if isinstance(fact, Text) else Text(safe_line(fact), style="dim"))
    for line in safe(text).splitlines() or [""]:
        entry.append(f"\n  {line}", style="default not bold")
    return entry


def number(value: float | None, style: str = "") -> Text:
    """Format a number: a dash if it is unknown, dim if it is zero."""
    if value is None:
        return Text("–", style="dim")
    return Text(f"{value:,}", style=style if value else "dim")


def count(value: int, word: str) -> str:
    """Format a count with its noun.

    >>> count(2, "message")
    '2 messages'
    """
    return f"{value:,} {word}{'' if value == 1 else 's'}"


def age(seconds: float | None) -> str:
    """Format a duration in one suitable unit.

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
    """Format the time since a timestamp."""
    return "–" if at is None else f"{age(max(0.0, time.time() - at))} ago"


def body_text(body: BodyView) -> str:
    """Format a body: text and JSON unchanged, bytes as base64, with an ellipsis if truncated."""
    ellipsis = " …" if body.truncated else ""
    return f"{'base64:' if body.format == 'base64' else ''}{body.content}{ellipsis}"
