"""Benchmark runner: figures with targets, interleaved repetitions, waivers, table and JSON.

A suite measures several figures in each repetition. Both sides of a ratio run in the same
repetition, one directly after the other. The repetitions of all suites are interleaved, so that a
short load on the machine disturbs one repetition of each suite, not every repetition of one suite.
The value of a figure is the median of its repetitions; the lowest and highest are also printed.
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
COSTLY_REPETITIONS: Final = 1  # for a suite that takes minutes


class Missing(Exception):
    """A peer or broker that a suite needs is missing; the message names it."""


@dataclass(frozen=True, slots=True)
class Figure:
    """A measured value and its target; without a target it is only reported."""

    name: str
    title: str
    target: float | None = None
    unit: str = "×"
    at_most: bool = False  # whether the target is a maximum instead of a minimum

    def meets(self, value: float) -> bool:
        """Return whether a value meets the target."""
        if self.target is None:
            return True
        return value <= self.target if self.at_most else value >= self.target


@dataclass(frozen=True, slots=True)
class Scale:
    """Size of a repetition, and the directory for its data."""

    count: int
    quick: bool
    directory: Path

    def of(self, full: int, quick: int) -> int:
        """Return ``quick`` in a quick run, otherwise ``full``; for sizes other than ``count``."""
        return quick if self.quick else full


@dataclass(frozen=True, slots=True)
class Suite:
    """Figures that are measured together; ``run`` returns the values of one repetition."""

    name: str
    figures: tuple[Figure, ...]
    run: Callable[[Scale], Awaitable[Mapping[str, float]]]
    costly: bool = False


@dataclass(frozen=True, slots=True)
class Waiver:
    """Reason why a figure may miss its target, and the measured value."""

    reason: str
    measured: float | None = None


@dataclass(slots=True)
class Result:
    """Samples of a figure, and its state."""

    figure: Figure
    samples: list[float] = field(default_factory=list[float])
    state: State = "missing"
    note: str = ""

    @property
    def median(self) -> float | None:
        """Median of the samples; ``None`` if there are none."""
        return statistics.median(self.samples) if self.samples else None


def waivers(path: Path = WAIVERS) -> dict[str, Waiver]:
    """Return the waivers in a file, by name of the figure."""
    if not path.exists():
        return {}
    return {
        name: Waiver(str(entry["reason"]), entry.get("measured"))
        for name, entry in tomllib.loads(path.read_text()).items()
    }


def judge(results: Sequence[Result], waived: Mapping[str, Waiver]) -> bool:
    """Set the state of every result, and return whether the check passes.

    A missing figure fails the check like a missed target: otherwise the check would pass when a
    peer is not installed. A waiver excuses both. A waiver whose figure meets its target is
    obsolete; it is reported but does not fail the check.
    """
    for result in results:
        value, waiver = result.median, waived.get(result.figure.name)
        if value is None:
            result.state = "waived" if waiver else "missing"
        elif result.figure.target is None:
            result.state = "info"
        elif result.figure.meets(value):
            result.state = "obsolete" if waiver else "pass"
        else:
            result.state = "waived" if waiver else "fail"
        if waiver is not None and result.state == "waived":
            result.note = "; ".join(filter(None, (result.note, waiver.reason)))
        elif result.state == "obsolete":
            result.note = "meets its target: remove its waiver from waivers.toml"
    return all(result.state not in ("fail", "missing") for result in results)


def measure(
    suites: Sequence[Suite], scale: Scale, repeat: int, *, report: Callable[[str], None] = print
) -> list[Result]:
    """Run the suites with interleaved repetitions, and return the results."""
    results = {figure.name: Result(figure) for suite in suites for figure in suite.figures}
    skipped: set[str] = set()
    for repetition in range(repeat):
        for suite in suites:
            if suite.name in skipped or (suite.costly and repetition >= COSTLY_REPETITIONS):
                continue
            started = time.perf_counter()
            try:
                values = _once(suite, scale)
            except Missing as reason:
                skipped.add(suite.name)
                for figure in suite.figures:
                    results[figure.name].note = str(reason)
                continue
            for name, value in values.items():
                results[name].samples.append(value)
            report(
                f"  {repetition + 1}/{repeat} {suite.name} ({time.perf_counter() - started:.1f} s)"
            )
    return list(results.values())


def _once(suite: Suite, scale: Scale) -> Mapping[str, float]:
    gc.collect()
    with tempfile.TemporaryDirectory(dir=scale.directory, ignore_cleanup_errors=True) as directory:
        suite_scale = Scale(scale.count, scale.quick, Path(directory))

        async def run() -> Mapping[str, float]:
            return await suite.run(suite_scale)

        return asyncio.run(run())


def table(results: Sequence[Result]) -> str:
    """Return the results as a text table."""
    rows = [("figure", "", "median", "spread", "target", "")]
    for result in results:
        figure, value = result.figure, result.median
        target = (
            "" if figure.target is None else f"{'≤' if figure.at_most else '≥'} {_(figure.target)}"
        )
        spread = f"{_(min(result.samples))}–{_(max(result.samples))}" if result.samples else ""
        median = "—" if value is None else f"{_(value)} {figure.unit}"
        rows.append((figure.name, figure.title, median, spread, target, result.state))
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
    """Return the suites whose own name or a figure's name matches or contains the pattern."""
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
    """Run the command line of a benchmark, and return the exit code."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--count", type=int, help="set the messages per repetition")
    parser.add_argument("--repeat", type=int, help="set the repetitions of each suite")
    parser.add_argument(
        "--only", metavar="PATTERN", help="run only suites with a matching name or figure"
    )
    parser.add_argument("--quick", action="store_true", help="use tiny counts, as a smoke test")
    parser.add_argument("--check", action="store_true", help="exit 1 if a target is missed")
    parser.add_argument(
        "--directory", type=Path, help="write data to this directory (default: that of the results)"
    )
    options = parser.parse_args(arguments)
    directory = options.directory or output.parent
    scale = Scale(options.count or (500 if options.quick else 20_000), options.quick, directory)
    repeat = options.repeat or (1 if options.quick else 5)
    chosen = select(suites, options.only)
    if not chosen:
        parser.error(f"no suite or figure matches {options.only!r}")
    before = os.getloadavg()
    results = measure(chosen, scale, repeat, report=lambda line: print(line, file=sys.stderr))
    passed = judge(results, waivers() if waived is None else waived)
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
    return 0 if passed or not options.check else 1
