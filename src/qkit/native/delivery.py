"""``Delivery``: one delivery of a message, for consumers that call the engine directly."""

from __future__ import annotations

from typing import Final, Literal

from qkit.errors import MessageNotFound
from qkit.message import Reason
from qkit.native.cross_thread import get_ident
from qkit.native.queue.queue import Queue
from qkit.native.queue.stored_message import StoredMessage

__all__ = ["Delivery"]

_SETTLED: Final = -1


class Delivery:
    """Delivery of a message. Settle it with ``ack`` or ``nack`` before its lease expires.

    ``Engine.consume`` returns deliveries; do not create them yourself.

    Args:
        actor: Queue that delivers the message.
        message: Message that the delivery holds.

    Attributes:
        retry_count: Number of earlier attempts with this message.

    Example:
        >>> import asyncio
        >>> from qkit.native import Engine
        >>> async def main() -> None:
        ...     async with Engine() as engine:
        ...         await engine.create("orders")
        ...         await engine.publish("orders", b"one")
        ...         delivery = await engine.consume("orders")
        ...         print(delivery.body, delivery.retry_count)
        ...         await delivery.ack()
        >>> asyncio.run(main())
        b'one' 0
    """

    __slots__ = ("_actor", "_message", "_token", "retry_count")

    def __init__(self, actor: Queue, message: StoredMessage) -> None:
        self._actor = actor
        self._message = message
        self._token = message.state
        self.retry_count: int = message.attempt - 1

    def __repr__(self) -> str:
        return f"<Delivery {self.message_id} of {self._actor.name}, retry {self.retry_count}>"

    @property
    def message_id(self) -> str:
        """Id of the message, as returned by ``publish``.

        Example:
            >>> import asyncio
            >>> from qkit.native import Engine
            >>> async def main() -> None:
            ...     async with Engine() as engine:
            ...         await engine.create("orders")
            ...         await engine.publish("orders", b"one", message_id="order-1")
            ...         print((await engine.consume("orders")).message_id)
            >>> asyncio.run(main())
            order-1
        """
        return self._message.id

    @property
    def body(self) -> bytes:
        """Body of the message.

        Example:
            >>> import asyncio
            >>> from qkit.native import Engine
            >>> async def main() -> None:
            ...     async with Engine() as engine:
            ...         await engine.create("orders")
            ...         await engine.publish("orders", b"one")
            ...         print((await engine.consume("orders")).body)
            >>> asyncio.run(main())
            b'one'
        """
        return self._message.body or b""

    @property
    def headers(self) -> dict[str, str]:
        """Copy of the message's headers.

        Example:
            >>> import asyncio
            >>> from qkit.native import Engine
            >>> async def main() -> None:
            ...     async with Engine() as engine:
            ...         await engine.create("orders")
            ...         await engine.publish("orders", b"one", headers={"tenant": "acme"})
            ...         print((await engine.consume("orders")).headers)
            >>> asyncio.run(main())
            {'tenant': 'acme'}
        """
        return dict(self._message.headers or {})

    @property
    def priority(self) -> int:
        """Priority of the message; 0 is the lowest.

        Example:
            >>> import asyncio
            >>> from qkit.native import Engine
            >>> async def main() -> None:
            ...     async with Engine() as engine:
            ...         await engine.create("orders")
            ...         await engine.publish("orders", b"one", priority=8)
            ...         print((await engine.consume("orders")).priority)
            >>> asyncio.run(main())
            8
        """
        return self._message.priority

    @property
    def key(self) -> str | None:
        """Key of the message, or ``None``.

        Example:
            >>> import asyncio
            >>> from qkit.native import Engine
            >>> async def main() -> None:
            ...     async with Engine() as engine:
            ...         await engine.create("orders")
            ...         await engine.publish("orders", b"one", key="customer-7")
            ...         print((await engine.consume("orders")).key)
            >>> asyncio.run(main())
            customer-7
        """
        return self._message.key

    @property
    def held(self) -> bool:
        """Whether the delivery is not settled and its lease has not expired.

        Example:
            >>> import asyncio
            >>> from qkit.native import Engine
            >>> async def main() -> None:
            ...     async with Engine() as engine:
            ...         await engine.create("orders")
            ...         await engine.publish("orders", b"one")
            ...         print((await engine.consume("orders")).held)
            >>> asyncio.run(main())
            True
        """
        return self._token > 0 and self._actor.state.holds(self._token)

    async def ack(self) -> None:
        """Acknowledge the message, which removes it from the queue.

        Raises:
            AckDeadlineExceeded: The lease has expired.
            MessageNotFound: The delivery is already settled.
            StorageError: The ack could not be written to disk. The message has left the queue, but
                it is delivered again if the process ends before the ack is written.

        Example:
            >>> import asyncio
            >>> from qkit.native import Engine
            >>> async def main() -> None:
            ...     async with Engine() as engine:
            ...         await engine.create("orders")
            ...         await engine.publish("orders", b"one")
            ...         await (await engine.consume("orders")).ack()
            ...         print((await engine.stats("orders")).acked_total)
            >>> asyncio.run(main())
            1
        """
        actor = self._actor
        if get_ident() != actor.portal.thread:
            await actor.portal.run(self.ack)
            return
        actor.ack(self._token if self._token > 0 else self._settled())
        self._token = _SETTLED
        if actor.journal is not None:
            await actor.written()

    async def nack(self, requeue: bool = True) -> Literal["requeued", "dead_lettered"]:
        """Release the message for a retry, or dead-letter it if no retry is left.

        Args:
            requeue: Retry the message. If false, dead-letter it. Default: true.

        Returns:
            ``"requeued"`` or ``"dead_lettered"``.

        Raises:
            AckDeadlineExceeded: The lease has expired.
            MessageNotFound: The delivery is already settled.
            StorageError: The change could not be written to disk.

        Example:
            >>> import asyncio
            >>> from qkit.native import Engine
            >>> async def main() -> None:
            ...     async with Engine() as engine:
            ...         await engine.create("orders", max_retries=1)
            ...         await engine.publish("orders", b"one")
            ...         print(await (await engine.consume("orders")).nack())
            ...         print(await (await engine.consume("orders")).nack())
            >>> asyncio.run(main())
            requeued
            dead_lettered
        """
        if get_ident() != self._actor.portal.thread:
            return await self._actor.portal.run(lambda: self.nack(requeue))
        token = self._token if self._token > 0 else self._settled()
        actor, attempt = self._actor, self.retry_count + 1
        limit = actor.config.max_deliveries
        alive = False
        if not requeue:
            actor.reject(token, Reason.EXPLICIT_NACK)
        elif limit is not None and attempt >= limit:
            actor.reject(token, Reason.MAX_RETRIES_EXCEEDED)
        else:
            alive = actor.release(token, actor.config.delay_after(attempt))
        self._token = _SETTLED
        if actor.journal is not None:
            await actor.written()
        return "requeued" if alive else "dead_lettered"

    async def extend(self, seconds: float) -> None:
        """Extend the lease so that it expires ``seconds`` from now.

        Args:
            seconds: Seconds from now until the lease expires.

        Raises:
            AckDeadlineExceeded: The lease has expired.
            MessageNotFound: The delivery is already settled.

        Example:
            >>> import asyncio
            >>> from qkit.native import Engine
            >>> async def main() -> None:
            ...     async with Engine() as engine:
            ...         await engine.create("orders")
            ...         await engine.publish("orders", b"one")
            ...         delivery = await engine.consume("orders", ack_deadline=1)
            ...         await delivery.extend(60)
            ...         print(delivery.held)
            >>> asyncio.run(main())
            True
        """
        if get_ident() != self._actor.portal.thread:
            await self._actor.portal.run(lambda: self.extend(seconds))
            return
        self._actor.extend(self._token if self._token > 0 else self._settled(), seconds)

    def release_uncharged(self) -> None:
        """Release the message immediately, without counting the attempt.

        Does nothing if the delivery is settled or its lease has expired. Call this only in the
        engine's loop.

        Example:
            >>> import asyncio
            >>> from qkit.native import Engine
            >>> async def main() -> None:
            ...     async with Engine() as engine:
            ...         await engine.create("orders")
            ...         await engine.publish("orders", b"one")
            ...         (await engine.consume("orders")).release_uncharged()
            ...         print((await engine.consume("orders")).retry_count)
            >>> asyncio.run(main())
            0
        """
        if self.held and self._actor.lost is None:
            self._actor.release(self._token, count_attempt=False)

    def _settled(self) -> int:
        raise MessageNotFound(
            "this delivery is already settled: settle each delivery once",
            queue=self._actor.name,
            message_id=self.message_id,
        )
