"""``TestService``: a user's service, handlers and all, on the real engine in virtual time."""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, Self, TypeVar, Unpack, cast, overload

from qkit._internal.coroutines import returns_coroutine
from qkit.backends.capability_matrix import MATRIX
from qkit.backends.native.backend import NativeBackend
from qkit.backends.native.factory import queue_defaults
from qkit.errors import QueueNotFound
from qkit.handlers.channel import Channel
from qkit.handlers.registry import Handler
from qkit.message import DeadLetter, Message, Sent
from qkit.native import Engine
from qkit.observability.metrics import Metrics
from qkit.sending.envelope_builder import SendOptions
from qkit.service import QueueService
from qkit.testing.clock import VirtualClock

__all__ = ["Handled", "TestService"]

T = TypeVar("T")
PEEK_LIMIT = 1_000_000


@dataclass(frozen=True, slots=True)
class Handled:
    """One call of a handler: what it got, and what it raised.

    ``body`` is a list for a batch; ``message`` is ``None`` unless the handler takes it.
    """

    body: object
    message: Message | list[Message] | None
    error: BaseException | None


class TestService:
    """Runs a service that was never started on qkit's own engine, whatever its settings say.

    Time is virtual: ``drain`` plays retries and delays through at once, a backoff of seven days
    included. What the configured backend could not do is refused as it would refuse it.

    >>> import asyncio
    >>> from qkit import QueueService, Settings, consume
    >>> @consume("orders")
    ... async def place(order: dict) -> None:
    ...     if order["total"] < 0:
    ...         raise ValueError("negative total")
    >>> service = QueueService(Settings(type="native"))
    >>> service.register(place)
    >>> async def main() -> None:
    ...     async with TestService(service) as t:
    ...         await t.send("orders", {"total": 5})
    ...         await t.send("orders", {"total": -5})
    ...         await t.drain()
    ...         print([call.body for call in t.handled(place)])
    ...         print([letter.error for letter in t.dead_letters("orders")])
    >>> asyncio.run(main())
    [{'total': 5}, {'total': -5}, {'total': -5}, {'total': -5}]
    ['negative total']
    """

    __test__ = False  # pytest: it is a tool, not a test

    def __init__(self, service: QueueService, *, clock: VirtualClock | None = None) -> None:
        self.service = service
        self.clock = clock if clock is not None else VirtualClock()
        self._entered = clock is None  # a given clock is its owner's to enter
        self._calls: dict[object, list[Handled]] = {}
        self._engine = Engine(clock=self.clock, defaults=queue_defaults(service.settings))

    async def __aenter__(self) -> Self:
        """Enter virtual time and start the service."""
        if self._entered:
            self.clock.__enter__()
        try:
            backend = NativeBackend(engine=self._engine)
            column = self.service.settings.backend_key
            if column in MATRIX:
                backend.capabilities = MATRIX[column]
            await self._engine.__aenter__()
            self.service.replace_backend_for_testing(
                backend, self.clock, wrap_handler=self._recorded
            )
            await self.service.start()
        except BaseException:
            await self.__aexit__(None, None, None)
            raise
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Shut the service down and leave virtual time."""
        try:
            await self.service.shutdown()
            await self._engine.aclose()
        finally:
            if self._entered:
                self.clock.__exit__(None, None, None)

    # -- doing -------------------------------------------------------------------------------

    @overload
    def send(
        self, channel: Channel[T], body: T, **options: Unpack[SendOptions]
    ) -> Coroutine[Any, Any, Sent]: ...
    @overload
    def send(
        self, channel: str, body: object, **options: Unpack[SendOptions]
    ) -> Coroutine[Any, Any, Sent]: ...
    @returns_coroutine
    def send(
        self, channel: Channel[T] | str, body: T | object, **options: Unpack[SendOptions]
    ) -> Coroutine[Any, Any, Sent]:
        """As ``QueueService.send``."""
        return self.service.send(cast("str", channel), body, **options)

    @overload
    def publish(
        self, channel: Channel[T], body: T, **options: Unpack[SendOptions]
    ) -> Coroutine[Any, Any, Sent]: ...
    @overload
    def publish(
        self, channel: str, body: object, **options: Unpack[SendOptions]
    ) -> Coroutine[Any, Any, Sent]: ...
    @returns_coroutine
    def publish(
        self, channel: Channel[T] | str, body: T | object, **options: Unpack[SendOptions]
    ) -> Coroutine[Any, Any, Sent]:
        """As ``QueueService.publish``."""
        return self.service.publish(cast("str", channel), body, **options)

    @overload
    def send_many(
        self, channel: Channel[T], bodies: Iterable[T], **options: Unpack[SendOptions]
    ) -> Coroutine[Any, Any, list[Sent]]: ...
    @overload
    def send_many(
        self, channel: str, bodies: Iterable[object], **options: Unpack[SendOptions]
    ) -> Coroutine[Any, Any, list[Sent]]: ...
    @returns_coroutine
    def send_many(
        self,
        channel: Channel[T] | str,
        bodies: Iterable[T] | Iterable[object],
        **options: Unpack[SendOptions],
    ) -> Coroutine[Any, Any, list[Sent]]:
        """As ``QueueService.send_many``."""
        return self.service.send_many(cast("str", channel), bodies, **options)

    async def settle(self) -> None:
        """Let everything happen that can happen now; no time passes."""
        await self.clock.idle()

    async def advance(self, seconds: float) -> None:
        """Let time pass."""
        await self.clock.advance(seconds)

    async def drain(self) -> None:
        """Play everything through: until no consumed queue holds a message, delayed or not.

        Raises ``AssertionError`` if a handler waits for something that will never come, or a
        paused channel holds messages.
        """
        while True:
            await self.clock.idle()
            left = await self._left()
            if not left:
                return
            try:
                await self.clock.step()
            except RuntimeError:
                held = ", ".join(f"{name}: {count}" for name, count in left.items())
                raise AssertionError(
                    f"messages are left and nothing is due that could bring them on ({held}): is "
                    "a channel paused, or does a handler wait for something?"
                ) from None

    async def _left(self) -> dict[str, int]:
        left: dict[str, int] = {}
        for name in {handler.channel for handler in self.service.handlers}:
            stats = await self._engine.stats(self.service.settings.broker_name(name))
            count = stats.depth + (stats.in_flight or 0) + (stats.scheduled or 0)
            if count:
                left[name] = count
        return left

    # -- looking -----------------------------------------------------------------------------

    def handled(self, handler: Callable[..., object]) -> list[Handled]:
        """The calls of a handler so far, failed ones included, in order.

        ``handler`` is the function, or the method of the class or of an instance.
        """
        function = getattr(handler, "__func__", handler)
        known = [getattr(item.call, "__wrapped__", None) for item in self.service.handlers]
        if function not in known:
            raise AssertionError(f"{handler!r} is not a handler of this service")
        return list(self._calls.get(function, ()))

    def dead_letters(self, channel: str) -> list[DeadLetter]:
        """The dead letters of a channel, oldest first."""
        settings = self.service.settings
        queue = settings.broker_name(settings.dead_letter_name(channel))
        try:
            found = self._engine.queue(queue, "peek").peek(PEEK_LIMIT)
        except QueueNotFound:
            return []
        return [replace(DeadLetter.from_envelope(item), channel=channel) for item in found]

    @property
    def metrics(self) -> Metrics:
        """As ``QueueService.metrics()``."""
        return self.service.metrics()

    def _recorded(self, handler: Handler) -> Handler:
        """Return the handler with its calls recorded."""
        function = getattr(handler.call, "__func__", handler.call)
        calls = self._calls.setdefault(function, [])
        position: dict[str, int] = {param.kind: at for at, param in enumerate(handler.params)}

        names: dict[str, str] = {param.kind: param.name for param in handler.params}

        def note(
            args: tuple[object, ...], kwargs: dict[str, object], error: BaseException | None
        ) -> None:
            def part(kind: str) -> object:
                at = position.get(kind, len(args))
                return args[at] if at < len(args) else kwargs.get(names.get(kind, ""))

            message = cast("Message | list[Message] | None", part("message"))
            calls.append(Handled(part("body"), message, error))

        async def record_async(*args: object, **kwargs: object) -> object:
            try:
                result = await cast("Awaitable[object]", handler.call(*args, **kwargs))
            except BaseException as error:
                note(args, kwargs, error)
                raise
            note(args, kwargs, None)
            return result

        def record(*args: object, **kwargs: object) -> object:
            try:
                result = handler.call(*args, **kwargs)
            except BaseException as error:
                note(args, kwargs, error)
                raise
            note(args, kwargs, None)
            return result

        call = functools.wraps(function)(record_async if handler.is_async else record)
        return replace(handler, call=call)
