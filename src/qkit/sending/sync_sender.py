"""``SyncSender``: blocking sends for threads other than the event loop's."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterable
from typing import Protocol, TypeVar, Unpack, cast, overload

from qkit._internal.loop_calls import LoopCaller, running_loop
from qkit.errors import LifecycleError
from qkit.handlers.channel import Channel
from qkit.message import Sent
from qkit.sending.envelope_builder import SendOptions

__all__ = ["BlockingSends", "SyncSender"]

T = TypeVar("T")
R = TypeVar("R")


class AsyncSender(Protocol):
    """Asynchronous send methods of a ``QueueService``."""

    def send(
        self, channel: str, body: object, **options: Unpack[SendOptions]
    ) -> Coroutine[object, object, Sent]: ...
    def publish(
        self, channel: str, body: object, **options: Unpack[SendOptions]
    ) -> Coroutine[object, object, Sent]: ...
    def send_many(
        self, channel: str, bodies: Iterable[object], **options: Unpack[SendOptions]
    ) -> Coroutine[object, object, list[Sent]]: ...


class BlockingSends:
    """Blocking ``send``, ``send_many`` and ``publish``.

    A subclass implements ``_in_loop``.
    """

    _sends: AsyncSender

    def _in_loop(self, operation: str, work: Callable[[], Coroutine[object, object, R]]) -> R:
        """Create a coroutine in the event loop, run it there and return its result."""
        raise NotImplementedError

    @overload
    def send(self, channel: Channel[T], body: T, **options: Unpack[SendOptions]) -> Sent: ...
    @overload
    def send(self, channel: str, body: object, **options: Unpack[SendOptions]) -> Sent: ...
    def send(
        self, channel: Channel[T] | str, body: T | object, **options: Unpack[SendOptions]
    ) -> Sent:
        """Send one message to a queue and wait until the broker has confirmed it.

        Args:
            channel: The queue, as a ``Channel`` or by name.
            body: The body. It must match the channel's type.
            **options: ``priority``, ``delay``, ``ttl``, ``key`` and ``headers``; see
                ``SendOptions``.

        Returns:
            The id of the message and, if the broker reports it, its position.

        Raises:
            LifecycleError: The service is not running, the call was made in the thread of its event
                loop or in a forked process, or the event loop ended during the call.
            QueueError: See ``QueueService.send``.

        Example:
            >>> from qkit import Settings, SyncQueueService
            >>> with SyncQueueService(Settings(type="native")) as service:
            ...     sent = service.send("orders", {"id": 1}, priority=8, ttl=60)
            ...     service.stats("orders").depth
            1
        """
        return self._in_loop("send", lambda: self._sends.send(_name(channel), body, **options))

    @overload
    def publish(self, channel: Channel[T], body: T, **options: Unpack[SendOptions]) -> Sent: ...
    @overload
    def publish(self, channel: str, body: object, **options: Unpack[SendOptions]) -> Sent: ...
    def publish(
        self, channel: Channel[T] | str, body: T | object, **options: Unpack[SendOptions]
    ) -> Sent:
        """Publish one message to a topic and wait until the broker has confirmed it.

        Every group of the topic receives a copy.

        Args:
            channel: The topic, as a ``Channel`` or by name.
            body: The body. It must match the channel's type.
            **options: As for ``send``.

        Returns:
            The id of the message and, if the broker reports it, its position.

        Raises:
            LifecycleError: See ``send``.
            QueueError: See ``QueueService.publish``.

        Example:
            >>> from qkit import Settings, SyncQueueService, consume
            >>> @consume("prices", broadcast=True, group="audit")
            ... def audit(price: int) -> None:
            ...     print("price", price)
            ...     service.stop()
            >>> service = SyncQueueService(Settings(type="native"))
            >>> service.register(audit)
            >>> with service:
            ...     sent = service.publish("prices", 7)
            ...     service.run()
            price 7
        """
        return self._in_loop(
            "publish", lambda: self._sends.publish(_name(channel), body, **options)
        )

    @overload
    def send_many(
        self, channel: Channel[T], bodies: Iterable[T], **options: Unpack[SendOptions]
    ) -> list[Sent]: ...
    @overload
    def send_many(
        self, channel: str, bodies: Iterable[object], **options: Unpack[SendOptions]
    ) -> list[Sent]: ...
    def send_many(
        self,
        channel: Channel[T] | str,
        bodies: Iterable[T] | Iterable[object],
        **options: Unpack[SendOptions],
    ) -> list[Sent]:
        """Send many messages to a queue and wait until the broker has confirmed them.

        Args:
            channel: The queue, as a ``Channel`` or by name.
            bodies: The bodies. All are read in the calling thread before the first is sent.
            **options: As for ``send``; they apply to every message.

        Returns:
            One ``Sent`` for each body, in order.

        Raises:
            PartialSend: Only some messages were confirmed. Its ``results`` holds a ``Sent`` or an
                error for each body.
            LifecycleError: See ``send``.
            QueueError: See ``QueueService.send_many``.

        Example:
            >>> from qkit import Settings, SyncQueueService
            >>> with SyncQueueService(Settings(type="native")) as service:
            ...     len(service.send_many("orders", [{"id": 1}, {"id": 2}]))
            2
        """
        many: list[object] = list(bodies)  # an iterator may block, so do not read it in the loop
        return self._in_loop(
            "send_many", lambda: self._sends.send_many(_name(channel), many, **options)
        )


class SyncSender(BlockingSends):
    """Blocking sends of a ``QueueService`` for other threads, such as synchronous handlers.

    Use it as ``service.sync``. Each call blocks its thread until the broker has confirmed the
    message. A message that a handler sends is therefore confirmed before the handled message
    is acked. The calls also work while the service drains.

    Args:
        service: The service.
        caller: Takes the name of an operation and returns the ``LoopCaller`` of the service's
            event loop. Raises ``LifecycleError`` if the service is not running.

    Example:
        >>> import asyncio
        >>> from qkit import QueueService, Settings, consume
        >>> @consume("orders")
        ... def place(order: int) -> None:  # synchronous: runs in a thread
        ...     service.sync.send("invoices", order)
        ...     service.stop()
        >>> service = QueueService(Settings(type="native"))
        >>> service.register(place)
        >>> async def main() -> None:
        ...     async with service:
        ...         await service.send("orders", 7)
        ...         await service.run()
        >>> asyncio.run(main())
        >>> service.metrics().channels["invoices"].messages_sent
        1
    """

    def __init__(self, service: AsyncSender, caller: Callable[[str], LoopCaller]) -> None:
        self._sends = service
        self._caller = caller

    def _in_loop(self, operation: str, work: Callable[[], Coroutine[object, object, R]]) -> R:
        caller = self._caller(operation)
        if running_loop() is caller.loop:
            raise LifecycleError(
                f"service.sync.{operation}() would block the event loop that it waits for: use "
                f"`await service.{operation}(…)` in asynchronous code",
                operation=operation,
            )
        return caller.submit(work).result()


def _name(channel: Channel[T] | str) -> str:
    """Return the channel unchanged, cast to ``str`` because the overloads have checked it."""
    return cast("str", channel)
