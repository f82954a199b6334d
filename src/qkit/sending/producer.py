"""``Producer``: sends the messages of a service and waits for their confirmation."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from dataclasses import replace
from typing import Any, Literal, TypeVar, cast

from qkit._internal.channel_errors import ChannelErrors
from qkit._internal.coroutines import shown_as
from qkit._internal.retry import Backoff
from qkit.errors import PartialSend, QueueError, Unsupported
from qkit.handlers.channel import Channel, undeclared
from qkit.handlers.route import Route
from qkit.message import DeadLetter, Envelope, Sent
from qkit.sending.envelope_builder import SendOptions, build_envelope
from qkit.sending.guarded_backend import GuardedBackend
from qkit.sending.send_batcher import SendBatcher
from qkit.wiring import Wiring

__all__ = ["Producer"]

T = TypeVar("T")

MAX_MESSAGES_PER_SEND = 500

#: Delays between the attempts of one send, until its deadline.
SEND_BACKOFF = Backoff(initial=0.05, multiplier=2.0, maximum=2.0, jitter=0.1)


class Producer:
    """Implementation of ``QueueService.send``, ``publish`` and ``send_many``.

    Args:
        wiring: Objects shared by all parts of the service.
        require: Takes the name of an operation; raises ``LifecycleError`` if the service is not
            running.
    """

    def __init__(self, wiring: Wiring, require: Callable[[str], None]) -> None:
        self.guarded: GuardedBackend = GuardedBackend(wiring)
        self._backend = wiring.backend
        self._clock = wiring.clock
        self._prefix = wiring.settings.prefix
        self._registry = wiring.registry
        self._routes = wiring.routes
        self._telemetry = wiring.telemetry
        self._require = require
        self._batchers: dict[str, SendBatcher] = {}
        self._declaring = asyncio.Lock()
        self._transmit = self.send_to_queue
        self._accepting = False

    def open(self) -> None:
        """Start accepting sends, and trace them if telemetry is enabled."""
        self._accepting = True
        self._transmit = self._send_traced if self._telemetry.enabled else self.send_to_queue

    def close(self) -> None:
        """Reject further sends."""
        self._accepting = False

    @shown_as("QueueService.send")
    async def send(self, channel: Channel[T] | str, body: object, options: SendOptions) -> Sent:
        """Send one message to a queue."""
        route = self._routes.queues.get(channel) if isinstance(channel, str) else None
        if route is None or not self._accepting:
            route = self._route(channel, "send")
        envelope = build_envelope(route, body, self._clock, options)
        (sent,) = await self._transmit(route, route.queue, [envelope])
        route.counters.sent += 1
        return sent

    @shown_as("QueueService.publish")
    async def publish(self, channel: Channel[T] | str, body: object, options: SendOptions) -> Sent:
        """Send one message to every group of a topic."""
        route = self._route(channel, "publish")
        envelope = build_envelope(route, body, self._clock, options)
        (sent,) = await self._transmit(route, route.queue, [envelope])
        route.counters.sent += 1
        return sent

    @shown_as("QueueService.send_many")
    async def send_many(
        self, channel: Channel[T] | str, bodies: Iterable[object], options: SendOptions
    ) -> list[Sent]:
        """Send many messages to a queue, in batches; raise ``PartialSend`` unless all succeed."""
        route = self._route(channel, "send")
        envelopes = [build_envelope(route, body, self._clock, options) for body in bodies]
        results: list[Sent | QueueError] = []
        for start in range(0, len(envelopes), MAX_MESSAGES_PER_SEND):
            group = envelopes[start : start + MAX_MESSAGES_PER_SEND]
            try:
                results += await self.send_envelopes(route, group)
            except PartialSend as error:
                results += error.results
            except QueueError as error:
                if start == 0:
                    raise  # nothing was confirmed, so this error says more than ``PartialSend``
                results += [error] * (len(envelopes) - start)
                break
        sent = [item for item in results if isinstance(item, Sent)]
        if len(sent) < len(envelopes):
            raise PartialSend(
                f"{len(sent)} of {len(envelopes)} messages were confirmed; see .results",
                results,
                backend=self._backend.name,
                operation="send_many",
                queue=route.name,
            )
        return sent

    async def replay(self, name: str, envelopes: Sequence[Envelope], *, topic: bool) -> list[Sent]:
        """Send the envelopes of dead letters back to their channel, unchanged."""
        return await self.send_envelopes(
            self._routes.resolve(self._channel(name, broadcast=topic)), list(envelopes)
        )

    async def send_envelopes(self, route: Route, envelopes: list[Envelope]) -> list[Sent]:
        """Send envelopes to a channel and count them."""
        try:
            sent = await self._transmit(route, route.queue, envelopes)
        except PartialSend as error:
            route.counters.sent += sum(isinstance(item, Sent) for item in error.results)
            raise
        route.counters.sent += len(sent)
        return sent

    async def _send_traced(self, route: Route, queue: str, envelopes: list[Envelope]) -> list[Sent]:
        with self._telemetry.producer_span(route.name, envelopes):
            return await self.send_to_queue(route, queue, envelopes)

    def send_to_queue(
        self, route: Route, queue: str, envelopes: list[Envelope]
    ) -> Coroutine[Any, Any, list[Sent]]:
        """Send to a queue of the route; declare it if it was never declared or was deleted."""
        batcher = self._batchers.get(queue)
        if batcher is None:
            batcher = self._batchers[queue] = SendBatcher(
                self.guarded,
                queue,
                SEND_BACKOFF,
                self.declare,
                channel=queue.removeprefix(self._prefix),
            )
        return batcher.send(envelopes, route)

    def dead_letter_writer(self, route: Route) -> Callable[[DeadLetter], Awaitable[None]] | None:
        """Return a function that writes a dead letter and waits for the confirmation.

        Returns ``None`` if the channel has no dead-letter queue.
        """
        letters = route.dead_letter
        if letters is None:
            return None

        async def write(letter: DeadLetter) -> None:
            await self.send_to_queue(route, letters.name, [letter.to_envelope()])

        return write

    async def drain(self) -> None:
        """Wait up to the send timeout until all sends have returned, then fail the rest."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self.guarded.timer.seconds):
                while busy := [item for item in self._batchers.values() if item.in_progress]:
                    await busy[0].drain()
        for batcher in self._batchers.values():
            await batcher.close()

    async def declare(self, route: Route) -> None:
        """Declare a channel and its dead-letter queue, unless this was already done."""
        async with self._declaring:
            if route.declared:
                return
            await self._declare(route, again=False)

    async def redeclare(self, route: Route) -> None:
        """Declare a channel that may have been deleted.

        If another service has declared the channel in the meantime, its options are kept.
        """
        async with self._declaring:
            await self._declare(route, again=True)

    async def _declare(self, route: Route, *, again: bool) -> None:
        with ChannelErrors(route.name):
            if route.dead_letter is not None:
                await self._backend.declare(replace(route.dead_letter, again=again))
            await self._backend.declare(replace(route.spec, again=again))
        route.declared = True

    def _route(self, channel: Channel[T] | str, verb: Literal["send", "publish"]) -> Route:
        """Return the route of a channel; raise if ``verb`` does not match its kind."""
        self._require(verb)
        route = self._routes.get(channel) if isinstance(channel, str) else None
        if route is None:
            route = self._routes.resolve(self._channel(channel, broadcast=verb == "publish"))
        # On a backend without queues, both verbs do the same.
        if route.broadcast is not (verb == "publish") and self._backend.capabilities.queues:
            kind, right = ("topic", "publish") if route.broadcast else ("queue", "send")
            raise Unsupported(
                f"{route.name!r} is a {kind}: use service.{right}(…)",
                backend=self._backend.name,
                operation=verb,
                queue=route.name,
            )
        return route

    def _channel(self, channel: Channel[T] | str, *, broadcast: bool) -> Channel[object]:
        if isinstance(channel, Channel):
            return cast("Channel[object]", channel)
        known = self._registry.channels.get(channel)
        if known is not None:
            return known
        return undeclared(channel, broadcast=broadcast)
