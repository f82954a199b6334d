"""The sending half of a service: find the channel, check, encode, declare if need be, hand over."""

from __future__ import annotations

import asyncio
import difflib
import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Literal, TypeVar, cast

from qkit._internal.clock import Clock
from qkit._internal.coroutines import shown_as
from qkit.backend import Backend
from qkit.errors import PartialSend, QueueError, QueueNotFound, Unsupported
from qkit.handlers.channel import Channel
from qkit.handlers.registry import Registry
from qkit.handlers.route import Route, Routes
from qkit.message import Envelope, Sent
from qkit.observability.telemetry import Telemetry
from qkit.sending.envelope_builder import SendOptions, make_envelope
from qkit.sending.sender import Sender

__all__ = ["Producer"]

T = TypeVar("T")

SEND_GROUP = 500


class Producer:
    """What ``QueueService.send`` and its siblings do; ``ready`` raises where that is too early."""

    def __init__(
        self,
        backend: Backend,
        *,
        clock: Clock,
        registry: Registry,
        routes: Routes,
        sender: Sender,
        telemetry: Telemetry,
        ready: Callable[[str], None],
    ) -> None:
        self._backend = backend
        self._clock = clock
        self._registry = registry
        self._routes = routes
        self._sender = sender
        self._telemetry = telemetry
        self._ready = ready
        self._declaring = asyncio.Lock()

    @shown_as("QueueService.send")
    async def send(self, channel: Channel[T] | str, body: object, options: SendOptions) -> Sent:
        """One message to a queue."""
        route = self._route(channel, "send")
        return (await self.hand_over(route, [self._envelope(route, body, options)]))[0]

    @shown_as("QueueService.publish")
    async def publish(self, channel: Channel[T] | str, body: object, options: SendOptions) -> Sent:
        """One message to every group of a topic."""
        route = self._route(channel, "publish")
        return (await self.hand_over(route, [self._envelope(route, body, options)]))[0]

    @shown_as("QueueService.send_many")
    async def send_many(
        self, channel: Channel[T] | str, bodies: Iterable[object], options: SendOptions
    ) -> list[Sent]:
        """Many messages to a queue, in groups; ``PartialSend`` unless all were accepted."""
        route = self._route(channel, "send")
        envelopes = [self._envelope(route, body, options) for body in bodies]
        results: list[Sent | QueueError] = []
        for start in range(0, len(envelopes), SEND_GROUP):
            group = envelopes[start : start + SEND_GROUP]
            try:
                results += await self.hand_over(route, group)
            except PartialSend as error:
                results += error.results
            except QueueError as error:
                if start == 0:
                    raise  # nothing was accepted: the plain error says more
                results += [error] * (len(envelopes) - start)
                break
        sent = [item for item in results if isinstance(item, Sent)]
        if len(sent) < len(envelopes):
            raise PartialSend(
                f"{len(sent)} of {len(envelopes)} messages were accepted; see .results",
                results,
                backend=self._backend.name,
                operation="send_many",
                queue=route.name,
            )
        return sent

    async def replay(self, name: str, envelopes: Sequence[Envelope], *, topic: bool) -> list[Sent]:
        """Messages that were sent before, as they are, to their channel."""
        return await self.hand_over(
            self._routes.of(self._channel(name, broadcast=topic)), list(envelopes)
        )

    async def hand_over(self, route: Route, envelopes: list[Envelope]) -> list[Sent]:
        """Under a producer span, and counted."""
        try:
            if self._telemetry.enabled:
                with self._telemetry.sending(route.name, envelopes):
                    sent = await self.carry(route, route.queue, envelopes)
            else:
                sent = await self.carry(route, route.queue, envelopes)
        except PartialSend as error:
            route.counters.sent += sum(isinstance(item, Sent) for item in error.results)
            raise
        route.counters.sent += len(sent)
        return sent

    async def carry(self, route: Route, queue: str, envelopes: list[Envelope]) -> list[Sent]:
        """Through the sender; declares the channel if need be, also if it was deleted since."""
        if route.declared:
            try:
                return await self._sender.send(queue, envelopes)
            except QueueNotFound:
                route.declared = False
        declare = functools.partial(self.declare, route)
        return await self._sender.send(queue, envelopes, prepare=declare)

    async def declare(self, route: Route) -> None:
        """Declare a channel and its dead-letter queue, unless that was done."""
        async with self._declaring:
            if route.declared:
                return
            await self._declare(route, again=False)

    async def declare_again(self, route: Route) -> None:
        """Declare a channel that may be gone; what another service declared since stays."""
        async with self._declaring:
            await self._declare(route, again=True)

    async def _declare(self, route: Route, *, again: bool) -> None:
        if route.dead_letter is not None:
            await self._backend.declare(replace(route.dead_letter, again=again))
        await self._backend.declare(replace(route.spec, again=again))
        route.declared = True

    def _envelope(self, route: Route, body: object, options: SendOptions) -> Envelope:
        if options:
            _check_options(options)
        try:
            return make_envelope(route, body, self._clock, options)
        except QueueError as error:
            error.located(backend=self._backend.name, operation="send", queue=route.name)
            raise

    def _route(self, channel: Channel[T] | str, verb: Literal["send", "publish"]) -> Route:
        """The channel's route; the wrong verb is refused."""
        self._ready(verb)
        route = self._routes.get(channel) if isinstance(channel, str) else None
        if route is None:
            route = self._routes.of(self._channel(channel, broadcast=verb == "publish"))
        # Without queues both verbs say the same.
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
        return Channel(channel, broadcast=True) if broadcast else Channel(channel)


def _check_options(options: SendOptions) -> None:
    for option in options:
        if option not in SendOptions.__annotations__:
            near = difflib.get_close_matches(option, SendOptions.__annotations__, 1)
            known = near[0] if near else ", ".join(SendOptions.__annotations__)
            raise TypeError(f"a send has no option {option!r}; did you mean {known}?")
