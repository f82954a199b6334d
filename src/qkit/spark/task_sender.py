"""Blocking sender for Spark tasks, with the send policies of a service."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Final, Self

from qkit._internal.clock import SystemClock
from qkit._internal.loop_thread import LoopThread
from qkit._internal.retry import Backoff
from qkit.backend import UnheardReporting
from qkit.backends.factory import open_backend
from qkit.errors import PartialSend, QueueError, QueueFull
from qkit.handlers.channel import undeclared
from qkit.handlers.route import Route
from qkit.message import Envelope
from qkit.service.runtime import ServiceRuntime
from qkit.settings.model import Settings
from qkit.wiring import Wiring

__all__ = ["TaskSender"]

QUEUE_FULL_BACKOFF: Final = Backoff(initial=0.05, multiplier=2.0, maximum=2.0, jitter=0.1)


class TaskSender:
    """Blocking sender with the retries and deadlines of a service.

    Its event loop runs in a background thread. ``open`` connects; ``route`` works without a
    connection.
    """

    def __init__(self, settings: Settings) -> None:
        clock = SystemClock()
        self._timeout = settings.send_timeout
        self._backend = open_backend(settings, clock)
        self._runtime = ServiceRuntime(Wiring.build(self._backend, settings, clock))
        self._loop: LoopThread | None = None

    def route(self, channel: str, *, broadcast: bool = False) -> Route:
        """Return the route of a channel; raise ``Unsupported`` if the backend cannot serve it."""
        return self._runtime.wiring.routes.resolve(undeclared(channel, broadcast=broadcast))

    @property
    def unheard(self) -> int:
        """Number of messages that no subscriber received; 0 on backends that store messages."""
        return self._backend.unheard if isinstance(self._backend, UnheardReporting) else 0

    def open(self) -> Self:
        """Connect, and declare each channel that was passed to ``route``.

        Raises:
            BackendUnavailable: The broker cannot be reached.
        """
        self._loop = LoopThread("qkit-spark")
        try:
            self._loop.call(self._runtime.start)
        except BaseException:
            self.close()
            raise
        return self

    def close(self) -> None:
        """Disconnect; idempotent."""
        loop, self._loop = self._loop, None
        if loop is not None:
            with loop:
                loop.call(self._runtime.shutdown)

    def send(self, route: Route, envelopes: Sequence[Envelope]) -> None:
        """Send envelopes and wait until all are confirmed.

        While the queue is full, the send is retried until no message has been accepted for
        ``send_timeout`` seconds.

        Raises:
            QueueFull: The queue stayed full.
            QueueError: The messages could not be sent.
        """
        assert self._loop is not None, "the sender is not open"
        self._loop.call(lambda: self._send(route, list(envelopes)))

    async def _send(self, route: Route, envelopes: list[Envelope]) -> None:
        attempt, deadline = 0, time.monotonic() + self._timeout
        while envelopes:
            try:
                await self._runtime.producer.send_envelopes(route, envelopes)
            except PartialSend as partial:
                failed = [
                    (envelope, result)
                    for envelope, result in zip(envelopes, partial.results, strict=True)
                    if isinstance(result, QueueError)
                ]
                if not all(isinstance(result, QueueFull) for _, result in failed):
                    raise
                envelopes = [envelope for envelope, _ in failed]
                attempt, deadline = 0, time.monotonic() + self._timeout
            except QueueFull:
                if time.monotonic() >= deadline:
                    raise
            else:
                return
            attempt += 1
            await asyncio.sleep(QUEUE_FULL_BACKOFF.after(attempt))
