"""``dlq``: list, show, replay and purge dead letters."""

from __future__ import annotations

import asyncio
import re
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.text import Text

from qkit.admin.views import DeadLetterView
from qkit.cli.common import AsJson, Config, Yes, command, confirm, find_settings, run, service
from qkit.cli.queues import figures
from qkit.cli.terminal import (
    ago,
    block,
    body_text,
    count,
    err,
    number,
    out,
    print_json,
    print_note,
    safe,
    safe_line,
    table,
)
from qkit.errors import ConfigError, MessageNotFound
from qkit.message import DeadLetter, Reason
from qkit.queue_lookup import require_queue
from qkit.service import QueueService

__all__ = ["app"]

app: typer.Typer = typer.Typer(
    help="List, show, replay and purge dead letters.", no_args_is_help=True
)

MAX_SELECTED = 1_000_000
COUNT_COLUMNS = ("queue", ">dead letters")  # a leading ``>`` aligns to the right
UNITS = {"s": 1.0, "m": 60.0, "h": 3_600.0, "d": 86_400.0}

Queue = Annotated[str, typer.Argument(metavar="QUEUE", help="Channel of the dead letters.")]
Ids = Annotated[
    list[str] | None, typer.Argument(metavar="ID", help="Ids of dead letters; default all.")
]
OfReason = Annotated[
    Reason | None,
    typer.Option("--reason", "-r", help="Only dead letters with this reason."),
]
OfError = Annotated[
    str | None,
    typer.Option("--error", "-e", help="Only this error type, or errors that contain this text."),
]
Older = Annotated[
    str | None,
    typer.Option(
        metavar="AGE",
        help="Only dead letters whose last failure is older than this, such as 90s, 10m, 2h or 7d.",
    ),
]
Newer = Annotated[
    str | None,
    typer.Option(metavar="AGE", help="Only dead letters whose last failure is newer than this."),
]
Limit = Annotated[
    int | None,
    typer.Option("--limit", "-n", min=1, help="Maximum number of dead letters, oldest first."),
]
DryRun = Annotated[
    bool,
    typer.Option("--dry-run", help="Show the dead letters that would be affected; change nothing."),
]
Rate = Annotated[
    float | None, typer.Option(min=0.01, help="Maximum number of dead letters per second.")
]


@dataclass(frozen=True, slots=True)
class Selection:
    """Filters that select dead letters. Ages are in seconds; ``None`` selects all."""

    ids: list[str] | None
    reason: str | None
    error: str | None
    older_than: float | None
    newer_than: float | None
    limit: int | None

    async def of(self, running: QueueService, queue: str) -> list[DeadLetter]:
        """Return the selected dead letters, oldest first.

        Raises:
            MessageNotFound: An id is not among the dead letters.
            QueueNotFound: The queue does not exist.
        """
        await require_queue(running, queue)
        letters = await running.dead_letters(queue).list(
            MAX_SELECTED, reason=self.reason, error=self.error, ids=self.ids or None
        )
        missing = set(self.ids or ()) - {letter.message_id for letter in letters}
        if missing:
            raise MessageNotFound(f"{queue} has no dead letter {', '.join(sorted(missing))}")
        now = time.time()
        selected = [
            letter
            for letter in letters
            if (self.older_than is None or now - letter.last_failed_at >= self.older_than)
            and (self.newer_than is None or now - letter.last_failed_at <= self.newer_than)
        ]
        return selected[: self.limit]


def _selection(
    ids: list[str] | None,
    reason: str | None,
    error: str | None,
    older_than: str | None,
    newer_than: str | None,
    limit: int | None,
) -> Selection:
    return Selection(
        ids or None, reason, error, seconds("--older-than", older_than),
        seconds("--newer-than", newer_than), limit,
    )  # fmt: skip


def seconds(option: str, text: str | None) -> float | None:
    """Parse an age such as ``90s``, ``10m``, ``2h`` or ``7d``; return seconds.

    >>> seconds("--older-than", "2h")
    7200.0
    """
    if text is None:
        return None
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd])", text.strip())
    if match is None:
        raise ConfigError(f"{option}: expected an age such as 90s, 10m, 2h or 7d, got {text!r}")
    return float(match[1]) * UNITS[match[2]]


@app.command("list")
@command
def list_letters(
    queue: Annotated[
        str | None,
        typer.Argument(
            metavar="QUEUE", help="Channel; if omitted, the dead letters of all queues are counted."
        ),
    ] = None,
    reason: OfReason = None,
    error: OfError = None,
    older_than: Older = None,
    newer_than: Newer = None,
    limit: Limit = 50,
    config: Config = None,
    as_json: AsJson = False,
) -> None:
    """List the dead letters of a queue, or count those of all queues."""
    if queue is None:
        _count_all(config, as_json)
        return
    selection = _selection(None, reason, error, older_than, newer_than, limit)

    async def main() -> list[DeadLetter]:
        async with service(config) as running:
            return await selection.of(running, queue)

    letters = run(main())
    if as_json:
        print_json([asdict(DeadLetterView.of(letter)) for letter in letters])
    elif not letters:
        print_note(f"{queue} has no matching dead letters.", "dim")
    else:
        _print_list(letters)


def _count_all(config: Path | None, as_json: bool) -> None:
    async def main() -> dict[str, int]:
        async with service(config) as running:
            return {name: letters for name, (_, letters) in (await figures(running)).items()}

    counts = {name: letters for name, letters in run(main()).items() if letters}
    if as_json:
        print_json(counts)
    elif not counts:
        print_note("No queue has dead letters.", "green")
    else:
        rows = [
            (Text(name, style="bold"), number(letters, "red")) for name, letters in counts.items()
        ]
        out.print(table(COUNT_COLUMNS, rows))


def _print_list(letters: list[DeadLetter]) -> None:
    for letter in letters:
        facts = [
            Text(safe_line(letter.reason), style="red"),
            Text(count(letter.attempts, "attempt"), style="dim"),
            Text(ago(letter.last_failed_at), style="dim"),
        ]
        out.print(block(letter.message_id, facts, _error(letter)))


def _error(letter: DeadLetter) -> str:
    return ": ".join(part for part in (letter.error_type, letter.error) if part) or "–"


@app.command()
@command
def show(
    queue: Queue,
    id: Annotated[str, typer.Argument(metavar="ID", help="Id of the dead letter.")],
    config: Config = None,
    as_json: AsJson = False,
) -> None:
    """Show a dead letter: error, attempts, times, headers and body."""

    async def main() -> DeadLetter:
        async with service(config) as running:
            return (await _selection([id], None, None, None, None, None).of(running, queue))[0]

    view = DeadLetterView.of(run(main()))
    if as_json:
        print_json(asdict(view))
        return
    facts: dict[str, object] = {
        "id": view.id,
        "channel": view.channel,
        "group": view.group,
        "reason": view.reason,
        "error": ": ".join(part for part in (view.error_type, view.error) if part),
        "attempts": view.attempts,
        "sent": ago(view.sent_at) if view.sent_at else None,
        "first failed": ago(view.first_failed_at),
        "last failed": ago(view.last_failed_at),
        "key": view.key,
        "priority": view.priority,
        "trace": view.trace_id,
    }
    for name, value in facts.items():
        if value not in (None, ""):
            out.print(Text(f"{name:>13}  ", style="dim").append(safe_line(value), style="default"))
    for name, text in view.headers.items():
        out.print(Text(f"{'header':>13}  ", style="dim").append(safe_line(f"{name}: {text}")))
    out.print()
    if view.body.format == "json":
        out.print_json(view.body.content)
    else:
        out.print(Text(safe(body_text(view.body))))


@app.command()
@command
def replay(
    queue: Queue,
    ids: Ids = None,
    reason: OfReason = None,
    error: OfError = None,
    older_than: Older = None,
    newer_than: Newer = None,
    limit: Limit = None,
    dry_run: DryRun = False,
    rate: Rate = None,
    config: Config = None,
    as_json: AsJson = False,
) -> None:
    """Replay dead letters: all, or those that match the filters."""
    find_settings(config).require_mode()
    selection = _selection(ids, reason, error, older_than, newer_than, limit)

    async def main() -> tuple[list[DeadLetter], int]:
        async with service(config) as running:
            letters = await selection.of(running, queue)
            if not letters or dry_run:
                return letters, len(letters)
            replay, done = running.dead_letters(queue).replay, 0
            for group in dict.fromkeys(letter.group for letter in letters):
                ids = [letter.message_id for letter in letters if letter.group == group]
                done += await _replay_in_batches(ids, partial(replay, group=group), rate)
            return letters, done

    _report(*run(main()), queue, "replayed", dry_run, as_json)


@app.command()
@command
def purge(
    queue: Queue,
    ids: Ids = None,
    reason: OfReason = None,
    error: OfError = None,
    older_than: Older = None,
    newer_than: Newer = None,
    limit: Limit = None,
    dry_run: DryRun = False,
    yes: Yes = False,
    config: Config = None,
    as_json: AsJson = False,
) -> None:
    """Delete dead letters: all, or those that match the filters."""
    selection = _selection(ids, reason, error, older_than, newer_than, limit)

    async def main() -> tuple[list[DeadLetter], int] | None:
        async with service(config) as running:
            letters = await selection.of(running, queue)
            if not letters or dry_run:
                return letters, len(letters)
            question = f"Permanently delete {count(len(letters), 'dead letter')} of {queue}?"
            if not confirm(question, yes):
                return None
            # Purge by id even if all are selected: the user has not confirmed later dead letters.
            purge, done = running.dead_letters(queue).purge, 0
            for group in dict.fromkeys(letter.group for letter in letters):
                ids = {letter.message_id for letter in letters if letter.group == group}
                done += await purge(ids, group=group)
            return letters, done

    answer = run(main())
    if answer is None:
        print_note("Nothing was deleted.")
        raise typer.Exit(1)
    _report(*answer, queue, "purged", dry_run, as_json)


async def _replay_in_batches(
    ids: list[str], replay: Callable[[list[str]], Awaitable[int]], rate: float | None
) -> int:
    """Replay at most ``rate`` dead letters per second; return how many were replayed."""
    ids = list(dict.fromkeys(ids))  # a message may have several dead letters
    batch_size = len(ids) if rate is None else max(1, int(rate / 4))
    loop = asyncio.get_running_loop()
    began, replayed = loop.time(), 0
    bar = Progress(
        TextColumn("replaying"), BarColumn(), MofNCompleteColumn(),
        console=err, transient=True, disable=rate is None or not err.is_terminal,
    )  # fmt: skip
    with bar:
        task = bar.add_task("replaying", total=len(ids))
        for start in range(0, len(ids), batch_size):
            if rate is not None:
                await asyncio.sleep(max(0.0, began + start / rate - loop.time()))
            replayed += await replay(ids[start : start + batch_size])
            bar.update(task, completed=min(start + batch_size, len(ids)))
    return replayed


def _report(
    letters: list[DeadLetter], done: int, queue: str, verb: str, dry_run: bool, as_json: bool
) -> None:
    """Print how many dead letters were processed and, for a dry run, the selected ones."""
    if as_json:
        ids = [letter.message_id for letter in letters]
        print_json({"queue": queue, verb: done, "dry_run": dry_run, "message_ids": ids})
        return
    if dry_run and letters:
        _print_list(letters)
    reasons = ", ".join(
        f"{number} {name}" for name, number in Counter(item.reason for item in letters).items()
    )
    would = "would be " if dry_run else ""
    suffix = f" ({reasons})" if reasons and done == len(letters) else ""
    suffix += f" of {len(letters):,} selected" if done < len(letters) else ""
    print_note(f"{count(done, 'dead letter')} of {queue} {would}{verb}{suffix}.", "green")
