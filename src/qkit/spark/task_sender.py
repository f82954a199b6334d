"""A backend with a service's sending policies, for a task that has no event loop of its own."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Final, Self

from qkit._internal.clock import SystemClock
from qkit._internal.retry import Backoff
from qkit.backend import UnheardReporting
from qkit.backends.factory import open_backend
from qkit.errors import PartialSend, QueueError, QueueFull
from qkit.handlers.channel import Channel
from qkit.handlers.route import Route
from qkit.message import Envelope
from qkit.sending.producer import Producer
from qkit.settings.model import Settings
from qkit.wiring import Wiring

__all__ = ["TaskSender"]

BACKOFF: Final = Backoff(initial=0.05, multiplier=2.0, maximum=2.0, jitter=0.1)


class TaskSender:
    """Sends envelopes: declared channels, deadline, retries and breaker, as a service does.

    Nothing is connected before ``open``; ``route`` works without.
    """

    def __init__(self, settings: Settings) -> None:
        clock = SystemClock()
        self._timeout = settings.send_timeout
        self._runner: asyncio.Runner | None = None
        self._backend = open_backend(settings, clock)
        wiring = Wiring.build(self._backend, settings, clock)
        self._routes = wiring.routes
        self._producer = Producer(wiring, require=lambda verb: None)

    def route(self, channel: str, *, broadcast: bool = False) -> Route:
        """What a channel means on this backend; refuses what it cannot do."""
        return self._routes.resolve(
            Channel(channel, broadcast=True) if broadcast else Channel(channel)
        )

    @property
    def unheard(self) -> int:
        """How many messages no subscriber received, on a backend that keeps none."""
        return self._backend.unheard if isinstance(self._backend, UnheardReporting) else 0

    async def declare(self, route: Route) -> None:
        """Connect, make sure that a channel and its dead-letter queue exist, and disconnect."""
        await self._backend.start()
        try:
            await self._producer.declare(route)
        finally:
            await self._backend.aclose()

    def open(self) -> Self:
        """Connect. Raises ``BackendUnavailable``."""
        self._runner = asyncio.Runner()
        try:
            self._runner.run(self._backend.start())
        except BaseException:
            self._runner.close()
            self._runner = None
            raise
        return self

    def close(self) -> None:
        """Disconnect; idempotent."""
        runner, self._runner = self._runner, None
        if runner is not None:
            try:
                runner.run(self._close())
            finally:
                runner.close()

    async def _close(self) -> None:
        await self._producer.drain()
        await self._backend.aclose()

    def send(self, route: Route, envelopes: Sequence[Envelope]) -> None:
        """Return once every one is confirmed.

        A full queue is waited for as long as consumers take from it, and ``send_timeout`` more.
        """
        assert self._runner is not None, "open it first"
        self._runner.run(self._send(route, list(envelopes)))

    async def _send(self, route: Route, envelopes: list[Envelope]) -> None:
        tries, deadline = 0, time.monotonic() + self._timeout
        while envelopes:
            try:
                await self._producer.send_envelopes(route, envelopes)
            except PartialSend as partial:
                refused = [
                    (envelope, result)
                    for envelope, result in zip(envelopes, partial.results, strict=True)
                    if isinstance(result, QueueError)
                ]
                if not all(isinstance(result, QueueFull) for _, result in refused):
                    raise
                envelopes = [envelope for envelope, _ in refused]
                tries, deadline = 0, time.monotonic() + self._timeout
            except QueueFull:
                if time.monotonic() >= deadline:
                    raise
            else:
                return
            tries += 1
            await asyncio.sleep(BACKOFF.after(tries))
