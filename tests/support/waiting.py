"""Waiting for what other processes and brokers do, in real time."""

from __future__ import annotations

import asyncio
import inspect
import os
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

__all__ = ["eventually", "scaled"]


def scaled(seconds: float) -> float:
    """Return a promised time, longer in proportion if more processes want to run than can.

    A quiet machine has to keep the promise; a busy one has to come to the same end.
    """
    average, _, _, running, _ = Path("/proc/loadavg").read_text().split()
    wanted = max(float(average), float(running.partition("/")[0]))
    return seconds * max(1.0, wanted / (os.cpu_count() or 1))


async def eventually(
    condition: Callable[[], object] | Callable[[], Awaitable[object]], within: float = 60.0
) -> float:
    """Wait until ``condition`` holds, and say how long it took; fail after ``within`` seconds."""
    began = time.monotonic()
    while True:
        holds = condition()
        if inspect.isawaitable(holds):
            holds = await holds
        took = time.monotonic() - began
        if holds:
            return took
        assert took < within, f"not within {within:g} s: {_source(condition)}"
        await asyncio.sleep(0.02)


def _source(condition: Callable[[], object]) -> str:
    try:
        return inspect.getsource(condition).strip()
    except (OSError, TypeError):
        return repr(condition)
