"""``queues``, ``stats`` and ``purge``: list queues, show statistics, delete messages."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import RenderableType
from rich.live import Live
from rich.text import Text

from qkit.backend import QueueStats
from qkit.cli.common import AsJson, Config, Yes, command, confirm, run, service
from qkit.cli.terminal import (
    age,
    count,
    number,
    out,
    print_json,
    print_json_line,
    print_note,
    table,
)
from qkit.errors import QueueNotFound, Unsupported
from qkit.service import QueueService

__all__ = ["list_queues", "purge", "stats"]

Figures = dict[str, tuple[QueueStats, int]]
"""Statistics and number of dead letters, by queue."""

# A leading ``>`` aligns a column to the right.
QUEUE_COLUMNS = ("queue", ">depth", ">in flight", ">scheduled", ">oldest", ">dead letters")
STATS_COLUMNS = (
    "queue", ">depth", ">in flight", ">scheduled", ">consumers", ">published", ">published/s",
    ">acked", ">acked/s", ">oldest", ">dead letters",
)  # fmt: skip
RATES = {"published/s": "published_total", "acked/s": "acked_total"}
TOTALS_AND_RATES_WIDTH = 110  # characters; a narrower terminal shows only the rates


@command
def list_queues(config: Config = None, as_json: AsJson = False) -> None:
    """List queues with their depth and number of dead letters."""

    async def main() -> Figures:
        async with service(config) as running:
            return await figures(running)

    found = run(main())
    if as_json:
        print_json([_record(*found[name]) for name in found])
    elif found:
        out.print(_queue_table(found))
    else:
        print_note(
            "There are no queues yet. The first send or the first consumer creates one.", "dim"
        )


@command
def stats(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="QUEUE", help="Queues to show; default all.")
    ] = None,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Repeat until Ctrl-C.")] = False,
    every: Annotated[float, typer.Option(min=0.1, help="Seconds between samples.")] = 1.0,
    config: Config = None,
    as_json: AsJson = False,
) -> None:
    """Show queue statistics, once or continuously.

    With [bold]--watch --json[/] each sample is one line of JSON.
    """
    run(_stats(names or [], watch, every, config, as_json))


async def _stats(
    names: list[str], watch: bool, every: float, config: Path | None, as_json: bool
) -> None:
    async with service(config) as running:
        current, at = await figures(running, names), time.monotonic()
        if not watch:
            if as_json:
                print_json([_record(*item) for item in current.values()])
            else:
                out.print(_stats_table(current))
            return
        live = Live(console=out, auto_refresh=False, screen=False)
        with nullcontext() if as_json else live:
            previous: Figures = {}
            while True:
                if as_json:
                    print_json_line([_record(*item) for item in current.values()])
                else:
                    rates = _rates(current, previous, time.monotonic() - at)
                    live.update(_stats_table(current, rates), refresh=True)
                previous, at = current, time.monotonic()
                await asyncio.sleep(every)
                current = await figures(running, names)


@command
def purge(
    name: Annotated[str, typer.Argument(metavar="QUEUE", help="Name of the queue.")],
    config: Config = None,
    yes: Yes = False,
    as_json: AsJson = False,
) -> None:
    """Delete all messages of a queue that are not in flight."""

    async def main() -> int | None:
        async with service(config) as running:
            depth = (await running.stats(name)).depth
            question = f"Permanently delete {count(depth, 'message')} of {name}?"
            return await running.purge(name) if confirm(question, yes) else None

    purged = run(main())
    if purged is None:
        print_note("Nothing was deleted.")
        raise typer.Exit(1)
    if as_json:
        print_json({"queue": name, "purged": purged})
    else:
        print_note(f"{count(purged, 'message')} deleted.", "green")


async def figures(running: QueueService, names: list[str] | None = None) -> Figures:
    """Return the statistics of the named queues; by default, of all but dead-letter queues."""
    dead_letter_name = running.settings.dead_letter_name
    if not names:
        try:
            known = set(await running.queues())
        except Unsupported as error:
            raise Unsupported(
                f"{error.message}: qkit stats QUEUE, qkit dlq list QUEUE", operation="queues"
            ) from error
        names = sorted(known - {dead_letter_name(name) for name in known})
    found: Figures = {}
    for name in names:
        try:
            dead_letters = (await running.stats(dead_letter_name(name))).depth
        except QueueNotFound:
            dead_letters = 0
        found[name] = await running.stats(name), dead_letters
    return found


def _record(stats: QueueStats, dead_letters: int) -> dict[str, object]:
    return {**asdict(stats), "dead_letters": dead_letters}


def _cells(stats: QueueStats, dead_letters: int) -> dict[str, str | Text]:
    """Return the statistics of a queue by column."""
    return {
        "queue": Text(stats.queue, style="bold"),
        "depth": number(stats.depth),
        "in flight": number(stats.in_flight),
        "scheduled": number(stats.scheduled),
        "consumers": number(stats.consumers),
        "published": number(stats.published_total),
        "acked": number(stats.acked_total),
        "oldest": age(stats.oldest_message_age_secs),
        "dead letters": number(dead_letters, "red"),
    }


def _queue_table(found: Figures) -> RenderableType:
    return _table(QUEUE_COLUMNS, [_cells(*item) for item in found.values()])


def _stats_table(
    found: Figures, rates: dict[str, dict[str, str | Text]] | None = None
) -> RenderableType:
    """Return the table of all statistics, with rates if they are given.

    A narrow terminal has no space for both totals and rates, so the totals are omitted.
    """
    left_out = {f">{name}" for name in RATES} if rates is None else set[str]()
    if rates is not None and out.width < TOTALS_AND_RATES_WIDTH:
        left_out = {">published", ">acked"}
    columns = [name for name in STATS_COLUMNS if name not in left_out]
    rows = [_cells(*item) | (rates or {}).get(name, {}) for name, item in found.items()]
    return _table(columns, rows)


def _rates(current: Figures, previous: Figures, seconds: float) -> dict[str, dict[str, str | Text]]:
    """Return messages per second since the previous sample, by queue and column."""

    def rate(name: str, field: str) -> Text:
        now = getattr(current[name][0], field)
        before = getattr(previous[name][0], field) if name in previous else None
        if now is None or before is None or seconds <= 0:
            return Text("–", style="dim")
        return Text(f"{max(0, now - before) / seconds:,.1f}")

    return {
        name: {column: rate(name, field) for column, field in RATES.items()} for name in current
    }


def _table(columns: Sequence[str], rows: list[dict[str, str | Text]]) -> RenderableType:
    names = [column.removeprefix(">") for column in columns]
    return table(columns, [[row[name] for name in names] for row in rows])
