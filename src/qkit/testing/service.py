"""``TestService``: runs a service and its handlers on the native engine, in virtual time."""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, Self, TypeVar, Unpack, cast, overload

from qkit._internal.coroutines import returns_coroutine
from qkit._internal.ids import new_id
from qkit.backends.capability_matrix import MATRIX
from qkit.backends.native.backend import NativeBackend
from qkit.backends.native.factory import queue_defaults
from qkit.errors import QueueNotFound
from qkit.handlers.channel import Channel
from qkit.handlers.registry import Handler
from qkit.message import DeadLetter, Envelope, Message, Sent
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
    """Recorded call to a handler.

    Attributes:
        body: The body; a list of bodies for a batch, ``None`` if the handler takes no body.
        message: The ``Message``, or a list for a batch; ``None`` if the handler takes none.
        error: The exception that the handler raised, or ``None``.

    Example:
        >>> from qkit.testing import Handled
        >>> Handled(body={"id": 1}, message=None, error=None).body
        {'id': 1}
    """

    body: object
    message: Message | list[Message] | None
    error: BaseException | None


class TestService:
    """Service under test on the in-memory native engine, in virtual time.

    Retries and delays take no real time. A feature that the configured backend lacks raises
    ``Unsupported``, as it would in production. Use it as an asynchronous context manager.

    Args:
        service: The service. It must not have been started.
        clock: A clock that you have entered, such as the ``virtual_clock`` fixture. Default: a new
            clock.

    Attributes:
        service: The service under test.
        clock: The virtual clock.

    Example:
        >>> import asyncio
        >>> from qkit import QueueService, Settings, consume
        >>> from qkit.testing import TestService
        >>> @consume("orders")
        ... async def place(order: dict) -> None:
        ...     if order["total"] < 0:
        ...         raise ValueError("negative total")
        >>> service = QueueService(Settings(type="native"))
        >>> service.register(place)
        >>> async def main() -> None:
        ...     async with TestService(service) as t:
        ...         await t.send("orders", {"total": -5})
        ...         await t.drain()
        ...         print(len(t.handled(place)), t.dead_letters("orders")[0].error)
        >>> asyncio.run(main())
        3 negative total
    """

    __test__ = False  # keeps pytest from collecting this class

    def __init__(self, service: QueueService, *, clock: VirtualClock | None = None) -> None:
        self.service = service
        self.clock: VirtualClock = clock if clock is not None else VirtualClock()
        self._owns_clock = clock is None  # the caller enters and exits a clock that it passes
        self._calls: dict[object, list[Handled]] = {}
        self._engine = Engine(clock=self.clock, defaults=queue_defaults(service.settings))
        self._backend = NativeBackend(engine=self._engine)

    async def __aenter__(self) -> Self:
        """Enter the clock and start the service."""
        if self._owns_clock:
            self.clock.__enter__()
        try:
            backend = self._backend
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
        """Shut the service down and exit the clock."""
        try:
            await self.service.shutdown()
            await self._engine.aclose()
        finally:
            if self._owns_clock:
                self.clock.__exit__(None, None, None)

    # -- actions -----------------------------------------------------------------------------

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
        """Send one message to a queue; see ``QueueService.send``.

        Args:
            channel: The queue, as a ``Channel`` or by name.
            body: The body. It must match the channel's type.
            **options: See ``SendOptions``.

        Returns:
            The id and the position of the message.

        Raises:
            QueueError: See ``QueueService.send``.

        Example:
            >>> import asyncio
            >>> from qkit import QueueService, Settings
            >>> from qkit.testing import TestService
            >>> async def main() -> None:
            ...     async with TestService(QueueService(Settings(type="native"))) as t:
            ...         await t.send("orders", {"id": 1}, delay=60)
            ...         print(t.metrics.messages_sent)
            >>> asyncio.run(main())
            1
        """
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
        """Publish one message to a topic; see ``QueueService.publish``.

        Args:
            channel: The topic, as a ``Channel`` or by name.
            body: The body. It must match the channel's type.
            **options: See ``SendOptions``.

        Returns:
            The id and the position of the message.

        Raises:
            QueueError: See ``QueueService.publish``.

        Example:
            >>> import asyncio
            >>> from qkit import QueueService, Settings
            >>> from qkit.testing import TestService
            >>> async def main() -> None:
            ...     async with TestService(QueueService(Settings(type="native"))) as t:
            ...         await t.publish("prices", 7)
            ...         print(t.metrics.messages_sent)
            >>> asyncio.run(main())
            1
        """
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
        """Send many messages to a queue; see ``QueueService.send_many``.

        Args:
            channel: The queue, as a ``Channel`` or by name.
            bodies: The bodies. Each must match the channel's type.
            **options: See ``SendOptions``; they apply to every message.

        Returns:
            One ``Sent`` for each body, in order.

        Raises:
            QueueError: See ``QueueService.send_many``.

        Example:
            >>> import asyncio
            >>> from qkit import QueueService, Settings
            >>> from qkit.testing import TestService
            >>> async def main() -> None:
            ...     async with TestService(QueueService(Settings(type="native"))) as t:
            ...         print(len(await t.send_many("orders", [{"id": 1}, {"id": 2}])))
            >>> asyncio.run(main())
            2
        """
        return self.service.send_many(cast("str", channel), bodies, **options)

    async def inject(
        self, channel: Channel[T] | str, body: bytes, *, headers: Mapping[str, str] | None = None
    ) -> str:
        """Put a message into a channel as another program would, without encoding or checks.

        Use it to test how your handlers treat foreign, malformed or compressed bodies.

        Args:
            channel: The queue or topic, as a ``Channel`` or by name.
            body: The body, exactly as it is stored.
            headers: The headers, including ``content-type`` if the message has one. Default: none.

        Returns:
            The id of the message.

        Raises:
            QueueNotFound: The service has neither declared the channel nor sent to it.

        Example:
            >>> import asyncio
            >>> from qkit import QueueService, Settings, consume
            >>> from qkit.testing import TestService
            >>> @consume("orders")
            ... async def place(order: dict) -> None: ...
            >>> service = QueueService(Settings(type="native"))
            >>> service.register(place)
            >>> async def main() -> None:
            ...     async with TestService(service) as t:
            ...         await t.inject("orders", b"{not JSON")
            ...         await t.drain()
            ...         print(t.dead_letters("orders")[0].reason)
            >>> asyncio.run(main())
            Undecodable
        """
        name = channel.name if isinstance(channel, Channel) else channel
        envelope = Envelope(new_id(), body, dict(headers or {}))
        await self._backend.publish(self.service.settings.broker_name(name), [envelope])
        return envelope.id

    async def settle(self) -> None:
        """Run the handlers of all messages that are due now, without advancing time.

        Example:
            >>> import asyncio
            >>> from qkit import QueueService, Settings, consume
            >>> from qkit.testing import TestService
            >>> @consume("orders")
            ... async def place(order: int) -> None:
            ...     print("order", order)
            >>> service = QueueService(Settings(type="native"))
            >>> service.register(place)
            >>> async def main() -> None:
            ...     async with TestService(service) as t:
            ...         await t.send("orders", 1)
            ...         await t.settle()
            >>> asyncio.run(main())
            order 1
        """
        await self.clock.idle()

    async def advance(self, seconds: float) -> None:
        """Let virtual time pass and run everything that becomes due.

        Args:
            seconds: How much time passes, in seconds.

        Example:
            >>> import asyncio
            >>> from qkit import QueueService, Settings, consume
            >>> from qkit.testing import TestService
            >>> @consume("orders")
            ... async def place(order: int) -> None:
            ...     print("order", order)
            >>> service = QueueService(Settings(type="native"))
            >>> service.register(place)
            >>> async def main() -> None:
            ...     async with TestService(service) as t:
            ...         await t.send("orders", 1, delay=60)
            ...         await t.advance(60)
            >>> asyncio.run(main())
            order 1
        """
        await self.clock.advance(seconds)

    async def drain(self) -> None:
        """Run until the queues of all handlers are empty, including delayed and retried messages.

        Raises:
            AssertionError: Messages remain, but no timer is set: a channel is paused, or a handler
                waits for an event that never occurs.

        Example:
            >>> import asyncio
            >>> from qkit import QueueService, Settings, consume
            >>> from qkit.testing import TestService
            >>> @consume("orders")
            ... async def place(order: int) -> None:
            ...     print("order", order)
            >>> service = QueueService(Settings(type="native"))
            >>> service.register(place)
            >>> async def main() -> None:
            ...     async with TestService(service) as t:
            ...         await t.send("orders", 1, delay=7 * 24 * 3600)
            ...         await t.drain()
            >>> asyncio.run(main())
            order 1
        """
        while True:
            await self.clock.idle()
            remaining = await self._remaining()
            if not remaining:
                return
            try:
                await self.clock.step()
            except RuntimeError:
                counts = ", ".join(f"{name}: {count}" for name, count in remaining.items())
                raise AssertionError(
                    f"messages remain and no timer is set ({counts}): is a channel paused, or does "
                    "a handler wait for something?"
                ) from None

    async def _remaining(self) -> dict[str, int]:
        remaining: dict[str, int] = {}
        for name in {handler.channel for handler in self.service.handlers}:
            stats = await self._engine.stats(self.service.settings.broker_name(name))
            count = stats.depth + (stats.in_flight or 0) + (stats.scheduled or 0)
            if count:
                remaining[name] = count
        return remaining

    # -- results -----------------------------------------------------------------------------

    def handled(self, handler: Callable[..., object]) -> list[Handled]:
        """Return the calls to a handler so far, in order, including failed calls.

        Args:
            handler: The function, or the method of a class or of an instance.

        Returns:
            The recorded calls.

        Raises:
            AssertionError: ``handler`` is not a handler of this service.

        Example:
            >>> import asyncio
            >>> from qkit import QueueService, Settings, consume
            >>> from qkit.testing import TestService
            >>> @consume("orders")
            ... async def place(order: int) -> None: ...
            >>> service = QueueService(Settings(type="native"))
            >>> service.register(place)
            >>> async def main() -> None:
            ...     async with TestService(service) as t:
            ...         await t.send_many("orders", [1, 2])
            ...         await t.drain()
            ...         print([call.body for call in t.handled(place)])
            >>> asyncio.run(main())
            [1, 2]
        """
        function = getattr(handler, "__func__", handler)
        known = [getattr(item.call, "__wrapped__", None) for item in self.service.handlers]
        if function not in known:
            raise AssertionError(f"{handler!r} is not a handler of this service")
        return list(self._calls.get(function, ()))

    def dead_letters(self, channel: str) -> list[DeadLetter]:
        """Return the dead letters of a channel, oldest first.

        Args:
            channel: The name of the channel.

        Returns:
            The dead letters. The list is empty if the channel has none.

        Example:
            >>> import asyncio
            >>> from qkit import QueueService, Reject, Settings, consume
            >>> from qkit.testing import TestService
            >>> @consume("orders")
            ... async def place(order: int) -> None:
            ...     raise Reject("out of stock")
            >>> service = QueueService(Settings(type="native"))
            >>> service.register(place)
            >>> async def main() -> None:
            ...     async with TestService(service) as t:
            ...         await t.send("orders", 1)
            ...         await t.drain()
            ...         print(t.dead_letters("orders")[0].error)
            >>> asyncio.run(main())
            out of stock
        """
        settings = self.service.settings
        queue = settings.broker_name(settings.dead_letter_name(channel))
        try:
            found = self._engine.queue(queue, "peek").peek(PEEK_LIMIT)
        except QueueNotFound:
            return []
        return [replace(DeadLetter.from_envelope(item), channel=channel) for item in found]

    @property
    def metrics(self) -> Metrics:
        """Counters of the service, in total and for each channel.

        Example:
            >>> import asyncio
            >>> from qkit import QueueService, Settings
            >>> from qkit.testing import TestService
            >>> async def main() -> None:
            ...     async with TestService(QueueService(Settings(type="native"))) as t:
            ...         await t.send("orders", {"id": 1})
            ...         print(t.metrics.messages_sent)
            >>> asyncio.run(main())
            1
        """
        return self.service.metrics()

    def _recorded(self, handler: Handler) -> Handler:
        """Return a copy of the handler that records its calls."""
        function = getattr(handler.call, "__func__", handler.call)
        calls = self._calls.setdefault(function, [])
        positions: dict[str, int] = {param.kind: at for at, param in enumerate(handler.params)}
        names: dict[str, str] = {param.kind: param.name for param in handler.params}

        def record_call(
            args: tuple[object, ...], kwargs: dict[str, object], error: BaseException | None
        ) -> None:
            def argument(kind: str) -> object:
                position = positions.get(kind, len(args))
                if position < len(args):
                    return args[position]
                return kwargs.get(names.get(kind, ""))

            message = cast("Message | list[Message] | None", argument("message"))
            calls.append(Handled(argument("body"), message, error))

        async def record_async(*args: object, **kwargs: object) -> object:
            try:
                result = await cast("Awaitable[object]", handler.call(*args, **kwargs))
            except BaseException as error:
                record_call(args, kwargs, error)
                raise
            record_call(args, kwargs, None)
            return result

        def record(*args: object, **kwargs: object) -> object:
            try:
                result = handler.call(*args, **kwargs)
            except BaseException as error:
                record_call(args, kwargs, error)
                raise
            record_call(args, kwargs, None)
            return result

        call = functools.wraps(function)(record_async if handler.is_async else record)
        return replace(handler, call=call)
