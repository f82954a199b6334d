"""``queues``, ``stats`` and ``purge``: what there is, how it moves, and away with it."""

from __future__ import annotations

import asyncio
import time
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
from qkit.errors import QueueNotFound
from qkit.service import QueueService

__all__ = ["list_queues", "purge", "stats"]

Figures = dict[str, tuple[QueueStats, int]]
"""By queue: its figures, and how many dead letters it has."""


@command
def list_queues(config: Config = None, as_json: AsJson = False) -> None:
    """List every queue with what waits in it."""

    async def main() -> Figures:
        async with service(config) as running:
            return await figures(running)

    found = run(main())
    if as_json:
        print_json([_record(*found[name]) for name in found])
    elif found:
        out.print(_overview(found))
    else:
        print_note(
            "There are no queues yet. One is made by its first send, or by a consumer.", "dim"
        )


@command
def stats(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="QUEUE", help="These; else all.")
    ] = None,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Go on until Ctrl-C.")] = False,
    every: Annotated[float, typer.Option(min=0.1, help="Seconds between two looks.")] = 1.0,
    config: Config = None,
    as_json: AsJson = False,
) -> None:
    """Show a queue's figures, once or live.

    With [bold]--watch --json[/] each look is one line.
    """
    run(_stats(names or [], watch, every, config, as_json))


async def _stats(
    names: list[str], watch: bool, every: float, config: Path | None, as_json: bool
) -> None:
    async with service(config) as running:
        before, at = await figures(running, names), time.monotonic()
        if not watch:
            if as_json:
                print_json([_record(*item) for item in before.values()])
            else:
                out.print(_details(before, {}, 0.0))
            return
        live = Live(console=out, auto_refresh=False, screen=False)
        with nullcontext() if as_json else live:
            shown: Figures = {}
            while True:
                if as_json:
                    print_json_line([_record(*item) for item in before.values()])
                else:
                    live.update(_details(before, shown, time.monotonic() - at), refresh=True)
                shown, at = before, time.monotonic()
                await asyncio.sleep(every)
                before = await figures(running, names)


@command
def purge(
    name: Annotated[str, typer.Argument(metavar="QUEUE")],
    config: Config = None,
    yes: Yes = False,
    as_json: AsJson = False,
) -> None:
    """Delete every message of a queue that no consumer holds."""

    async def main() -> int | None:
        async with service(config) as running:
            depth = (await running.stats(name)).depth
            question = f"Delete {count(depth, 'message')} of {name} for good?"
            return await running.purge(name) if confirm(question, yes) else None

    gone = run(main())
    if gone is None:
        print_note("Nothing was deleted.")
        raise typer.Exit(1)
    if as_json:
        print_json({"queue": name, "purged": gone})
    else:
        print_note(f"{count(gone, 'message')} deleted.", "green")


async def figures(running: QueueService, names: list[str] | None = None) -> Figures:
    """The figures of these queues, or of all but the dead letters'; by name."""
    of = running.settings.dead_letter_name
    if not names:
        known = set(await running.queues())
        buried = {of(name) for name in known}
        names = sorted(known - buried)
    found: Figures = {}
    for name in names:
        try:
            letters = (await running.stats(of(name))).depth
        except QueueNotFound:
            letters = 0
        found[name] = await running.stats(name), letters
    return found


def _record(stats: QueueStats, letters: int) -> dict[str, object]:
    return {**asdict(stats), "dead_letters": letters}


def _overview(found: Figures) -> RenderableType:
    return table(
        ("queue", ">waiting", ">in flight", ">scheduled", ">oldest", ">dead letters"),
        [
            (
                Text(name, style="bold"),
                number(item.depth),
                number(item.in_flight),
                number(item.scheduled),
                age(item.oldest_message_age_secs),
                number(letters, "red"),
            )
            for name, (item, letters) in found.items()
        ],
    )


def _details(found: Figures, before: Figures, seconds: float) -> RenderableType:
    """All figures; with an earlier look at them, how fast they move as well."""

    def rate(name: str, field: str) -> Text:
        now = getattr(found[name][0], field)
        then = getattr(before[name][0], field) if name in before else None
        if now is None or then is None or seconds <= 0:
            return Text("–", style="dim")
        return Text(f"{max(0, now - then) / seconds:,.1f}")

    def row(name: str, item: QueueStats, letters: int) -> list[str | Text]:
        return [
            Text(name, style="bold"),
            number(item.depth),
            number(item.in_flight),
            number(item.scheduled),
            number(item.consumers),
            number(item.published_total),
            rate(name, "published_total"),
            number(item.acked_total),
            rate(name, "acked_total"),
            age(item.oldest_message_age_secs),
            number(letters, "red"),
        ]

    columns = (
        "queue", ">waiting", ">held", ">later", ">users", ">sent", ">/s", ">done", ">/s",
        ">oldest", ">dead",
    )  # fmt: skip
    return table(columns, [row(name, *item) for name, item in found.items()])
