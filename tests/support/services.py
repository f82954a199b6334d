"""Native services for tests, and helpers to inspect them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from typing import Any

from qkit import DeadLetter, QueueService, Settings
from qkit._internal.clock import Clock
from qkit.backend import Backend
from qkit.handlers.channel import Middleware

__all__ = ["failures", "make_service", "only_letter", "until"]


def make_service(
    *handlers: object,
    clock: Clock | None = None,
    backend: Backend | None = None,
    middleware: list[Middleware] | None = None,
    retry: Mapping[str, object] | None = None,
    **settings: Any,
) -> QueueService:
    """Return a native service with these handlers; by default, backoff has no jitter."""
    service = QueueService(
        Settings(type="native", retry={"jitter": 0, **(retry or {})}, **settings),
        backend=backend,
        clock=clock,
        middleware=middleware or [],
    )
    for handler in handlers:
        service.register(handler)
    return service


async def until(condition: Callable[[], object], seconds: float = 5.0) -> None:
    """Run the loop until ``condition`` is true, without advancing the virtual clock.

    Use it to wait for events in other threads. Fails after ``seconds`` of real time.
    """
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"condition not true within {seconds:g} s"
        await asyncio.sleep(0)


async def only_letter(service: QueueService, channel: str) -> DeadLetter:
    """Return the only dead letter of a channel; fail if there is not exactly one."""
    letters = await service.dead_letters(channel).list()
    assert len(letters) == 1, letters
    return letters[0]


def failures(service: QueueService, channel: str) -> tuple[int, int, int]:
    """Return the numbers of retried, failed and dead-lettered messages of a channel."""
    counters = service.metrics().channels[channel]
    return counters.messages_retried, counters.messages_failed, counters.messages_dead_lettered
