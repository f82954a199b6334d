"""Shared machinery: figures with their bars, interleaved repetitions, waivers, table and JSON.

A suite measures some figures together, once for each repetition; both sides of a ratio run in the
same repetition, one right after the other. The repetitions of all suites are interleaved, so that
a machine that is busy for a while disturbs one repetition of each and not all of one. A figure is
the median of its repetitions; the lowest and highest are printed with it.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import platform
import statistics
import sys
import tempfile
import time
import tomllib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from typing import Final, Literal

__all__ = ["Figure", "Missing", "Result", "Scale", "Suite", "Waiver", "judge", "main", "measure"]

State = Literal["pass", "fail", "waived", "obsolete", "missing", "info"]
WAIVERS: Final = Path(__file__).with_name("waivers.toml")
COSTLY: Final = 1  # repetitions of a suite that takes minutes for each


class Missing(Exception):
    """What a suite compares with is not there; the text says what."""


@dataclass(frozen=True, slots=True)
class Figure:
    """One figure and its bar; without a bar it is only reported."""

    name: str
    title: str
    bar: float | None = None
    unit: str = "×"
    at_most: bool = False  # else the bar is the least

    def meets(self, value: float) -> bool:
        """Whether a value is on the right side of the bar."""
        if self.bar is None:
            return True
        return value <= self.bar if self.at_most else value >= self.bar


@dataclass(frozen=True, slots=True)
class Scale:
    """How much a repetition does, and where it may write."""

    count: int
    quick: bool
    directory: Path

    def of(self, full: int, quick: int) -> int:
        """A number of its own for what ``count`` does not fit."""
        return quick if self.quick else full


@dataclass(frozen=True, slots=True)
class Suite:
    """Figures that are measured together; ``run`` gives the values of one repetition."""

    name: str
    figures: tuple[Figure, ...]
    run: Callable[[Scale], Awaitable[Mapping[str, float]]]
    costly: bool = False


@dataclass(frozen=True, slots=True)
class Waiver:
    """A bar that is known to be missed: why, and what was measured then."""

    reason: str
    measured: float | None = None


@dataclass(slots=True)
class Result:
    """What came of a figure."""

    figure: Figure
    samples: list[float] = field(default_factory=list[float])
    state: State = "missing"
    note: str = ""

    @property
    def median(self) -> float | None:
        """The figure itself, ``None`` if it is missing."""
        return statistics.median(self.samples) if self.samples else None


def waivers(path: Path = WAIVERS) -> dict[str, Waiver]:
    """The waivers that are written down."""
    if not path.exists():
        return {}
    return {
        name: Waiver(str(entry["reason"]), entry.get("measured"))
        for name, entry in tomllib.loads(path.read_text()).items()
    }


def judge(results: Sequence[Result], waived: Mapping[str, Waiver]) -> bool:
    """Set the state of every result; whether all is as it should be.

    A missing figure counts like a missed one: a peer that is no longer installed must not make a
    check pass. A waiver is for either. Its figure may meet the bar again: then it is obsolete,
    which is said and is no failure.
    """
    for result in results:
        value, waiver = result.median, waived.get(result.figure.name)
        if value is None:
            result.state = "waived" if waiver else "missing"
        elif result.figure.bar is None:
            result.state = "info"
        elif result.figure.meets(value):
            result.state = "obsolete" if waiver else "pass"
        else:
            result.state = "waived" if waiver else "fail"
        if waiver is not None and result.state == "waived":
            result.note = "; ".join(filter(None, (result.note, waiver.reason)))
        elif result.state == "obsolete":
            result.note = "meets its bar: take it out of waivers.toml"
    return all(result.state not in ("fail", "missing") for result in results)


def measure(
    suites: Sequence[Suite], scale: Scale, repeat: int, *, say: Callable[[str], None] = print
) -> list[Result]:
    """Run the suites, their repetitions interleaved."""
    results = {figure.name: Result(figure) for suite in suites for figure in suite.figures}
    gone: set[str] = set()
    for turn in range(repeat):
        for suite in suites:
            if suite.name in gone or (suite.costly and turn >= COSTLY):
                continue
            started = time.perf_counter()
            try:
                values = _once(suite, scale)
            except Missing as reason:
                gone.add(suite.name)
                for figure in suite.figures:
                    results[figure.name].note = str(reason)
                continue
            for name, value in values.items():
                results[name].samples.append(value)
            say(f"  {turn + 1}/{repeat} {suite.name} ({time.perf_counter() - started:.1f} s)")
    return list(results.values())


def _once(suite: Suite, scale: Scale) -> Mapping[str, float]:
    gc.collect()
    with tempfile.TemporaryDirectory(dir=scale.directory, ignore_cleanup_errors=True) as directory:
        own = Scale(scale.count, scale.quick, Path(directory))

        async def run() -> Mapping[str, float]:
            return await suite.run(own)

        return asyncio.run(run())


def table(results: Sequence[Result]) -> str:
    """The results as text, a line for each."""
    rows = [("figure", "", "median", "spread", "bar", "")]
    for result in results:
        figure, value = result.figure, result.median
        bar = "" if figure.bar is None else f"{'≤' if figure.at_most else '≥'} {_(figure.bar)}"
        spread = f"{_(min(result.samples))}–{_(max(result.samples))}" if result.samples else ""
        shown = "—" if value is None else f"{_(value)} {figure.unit}"
        rows.append((figure.name, figure.title, shown, spread, bar, result.state))
    widths = [max(len(row[at]) for row in rows) for at in range(6)]
    lines = [
        f"{row[0]:<{widths[0]}}  {row[1]:<{widths[1]}}  {row[2]:>{widths[2]}}  "
        f"{row[3]:>{widths[3]}}  {row[4]:>{widths[4]}}  {row[5]}".rstrip()
        for row in rows
    ]
    lines += [f"{item.figure.name}: {item.note}" for item in results if item.note]
    return "\n".join(lines)


def _(value: float) -> str:
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"


def select(suites: Sequence[Suite], pattern: str | None) -> list[Suite]:
    """The suites with a figure, or of a name, that the pattern matches."""
    if pattern is None:
        return list(suites)
    return [
        suite
        for suite in suites
        if any(
            fnmatch(name, pattern) or pattern in name
            for name in (suite.name, *(figure.name for figure in suite.figures))
        )
    ]


def main(
    suites: Sequence[Suite],
    output: Path,
    description: str,
    arguments: Sequence[str] | None = None,
    waived: Mapping[str, Waiver] | None = None,
) -> int:
    """The command line of a benchmark; the exit code."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--count", type=int, help="messages in a repetition")
    parser.add_argument("--repeat", type=int, help="repetitions of each suite")
    parser.add_argument("--only", metavar="PATTERN", help="suites or figures of such a name")
    parser.add_argument("--quick", action="store_true", help="small counts: only to see it run")
    parser.add_argument("--check", action="store_true", help="exit 1 if a bar is missed")
    parser.add_argument("--directory", type=Path, help="where to write (default: here)")
    options = parser.parse_args(arguments)
    directory = options.directory or output.parent
    scale = Scale(options.count or (500 if options.quick else 20_000), options.quick, directory)
    repeat = options.repeat or (1 if options.quick else 5)
    chosen = select(suites, options.only)
    if not chosen:
        parser.error(f"no figure is called {options.only!r}")
    before = os.getloadavg()
    results = measure(chosen, scale, repeat, say=lambda line: print(line, file=sys.stderr))
    good = judge(results, waivers() if waived is None else waived)
    print(table(results))
    load = f"load {before[0]:.1f} before, {os.getloadavg()[0]:.1f} after, {os.cpu_count()} CPUs"
    print(f"{platform.python_implementation()} {platform.python_version()}, {load}")
    record = {
        "python": platform.python_version(),
        "load": load,
        "count": scale.count,
        "repeat": repeat,
        "figures": {
            item.figure.name: {
                **asdict(item.figure),
                "median": item.median,
                "samples": item.samples,
                "state": item.state,
                "note": item.note,
            }
            for item in results
        },
    }
    output.write_text(json.dumps(record, indent=2, ensure_ascii=False) + "\n")
    return 0 if good or not options.check else 1
