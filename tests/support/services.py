"""Services for tests: quick to make, on a virtual clock, with retries that are exact."""

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
    """A native service with these handlers; its backoff has no jitter unless asked for."""
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
    """Let the loop run until ``condition`` holds, without letting virtual time pass.

    For what threads do; ``seconds`` are real ones and only bound a test that fails.
    """
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it never happened"
        await asyncio.sleep(0)


async def only_letter(service: QueueService, channel: str) -> DeadLetter:
    """The one dead letter of a channel."""
    letters = await service.dead_letters(channel).list()
    assert len(letters) == 1, letters
    return letters[0]


def failures(service: QueueService, channel: str) -> tuple[int, int, int]:
    """A channel's retried, failed and dead-lettered messages."""
    counters = service.metrics().channels[channel]
    return counters.messages_retried, counters.messages_failed, counters.messages_dead_lettered
