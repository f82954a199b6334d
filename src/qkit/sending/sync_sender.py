"""``service.sync``: blocking sends for threads other than the event loop's."""

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
    """What ``SyncSender`` calls in the event loop: the sends of a ``QueueService``."""

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
    """``send``, ``send_many`` and ``publish`` as plain calls that wait for an event loop.

    A subclass says how a coroutine gets into the loop.
    """

    _sends: AsyncSender

    def _in_loop(self, operation: str, work: Callable[[], Coroutine[object, object, R]]) -> R:
        """Create a coroutine in the loop, run it there and wait for its result."""
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
            channel: The queue, by its ``Channel`` or its name.
            body: What is sent; checked against the channel's type.
            **options: ``priority``, ``delay`` and ``ttl`` in seconds, ``key``, ``headers``.

        Returns:
            The message's id and, where the broker knows it, its position.

        Raises:
            LifecycleError: In the thread of the service's event loop, before ``start``, after
                ``shutdown``, in a forked process, or if the event loop ends meanwhile.
            QueueError: As ``QueueService.send``.
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

        Args:
            channel: The topic, by its ``Channel`` or its name.
            body: What is published; checked against the channel's type.
            **options: As for ``send``.

        Returns:
            The message's id.

        Raises:
            LifecycleError: As ``send``.
            QueueError: As ``QueueService.publish``.
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
            channel: The queue, by its ``Channel`` or its name.
            bodies: What is sent. An iterator is read in this thread, before anything is sent.
            **options: As for ``send``; the same for all.

        Returns:
            One ``Sent`` for each body, in order.

        Raises:
            PartialSend: Only some were accepted; its ``results`` says which.
            LifecycleError: As ``send``.
            QueueError: As ``QueueService.send_many``.
        """
        many: list[object] = list(bodies)  # reading an iterator may block, and must not in the loop
        return self._in_loop(
            "send_many", lambda: self._sends.send_many(_name(channel), many, **options)
        )


class SyncSender(BlockingSends):
    """The sends of a ``QueueService`` for other threads, such as a synchronous handler's.

    A service has one as ``service.sync``. Each call blocks its thread until the broker has
    confirmed, so what a handler sent is safe before its own message is acknowledged. The calls
    also work while the service drains.

    >>> import asyncio
    >>> from qkit import QueueService, Settings, consume
    >>> @consume("orders")
    ... def place(order: int) -> None:  # synchronous: it runs in a thread
    ...     service.sync.send("invoices", order)
    >>> @consume("invoices")
    ... async def bill(order: int) -> None:
    ...     print("invoice for order", order)
    ...     service.stop()
    >>> service = QueueService(Settings(type="native"))
    >>> service.register(place)
    >>> service.register(bill)
    >>> async def main() -> None:
    ...     async with service:
    ...         await service.send("orders", 7)
    ...         await service.run()
    >>> asyncio.run(main())
    invoice for order 7

    Args:
        service: Where the sends run.
        caller: Returns the entry to the service's event loop for the operation named; raises
            ``LifecycleError`` if the service has not started or was shut down.
    """

    def __init__(self, service: AsyncSender, caller: Callable[[str], LoopCaller]) -> None:
        self._sends = service
        self._caller = caller

    def _in_loop(self, operation: str, work: Callable[[], Coroutine[object, object, R]]) -> R:
        caller = self._caller(operation)
        if running_loop() is caller.loop:
            raise LifecycleError(
                f"service.sync.{operation}() would block the event loop that it waits for: write "
                f"`await service.{operation}(…)` in asynchronous code",
                operation=operation,
            )
        return caller.submit(work).result()


def _name(channel: Channel[T] | str) -> str:
    """Pass a channel on where the overloads have already checked its type."""
    return cast("str", channel)
