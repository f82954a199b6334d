"""Helpers that wait in real time for other processes and brokers."""

from __future__ import annotations

import asyncio
import inspect
import os
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

__all__ = ["eventually", "scaled"]


def scaled(seconds: float) -> float:
    """Return a time limit, multiplied by the load per CPU if that is more than 1.

    ``seconds`` is the limit on an idle machine.
    """
    average, _, _, running, _ = Path("/proc/loadavg").read_text().split()
    wanted = max(float(average), float(running.partition("/")[0]))
    return seconds * max(1.0, wanted / (os.cpu_count() or 1))


async def eventually(
    condition: Callable[[], object] | Callable[[], Awaitable[object]], within: float = 60.0
) -> float:
    """Wait until ``condition`` is true and return the seconds elapsed; fail after ``within``."""
    started_at = time.monotonic()
    while True:
        holds = condition()
        if inspect.isawaitable(holds):
            holds = await holds
        took = time.monotonic() - started_at
        if holds:
            return took
        assert took < within, f"not true within {within:g} s: {_source(condition)}"
        await asyncio.sleep(0.02)


def _source(condition: Callable[[], object]) -> str:
    try:
        return inspect.getsource(condition).strip()
    except (OSError, TypeError):
        return repr(condition)
