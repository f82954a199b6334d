"""One delivery of a message to a consumer that uses the engine by itself."""

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
    """One delivery of a message, to be settled with ``ack`` or ``nack`` before its lease ends."""

    __slots__ = ("_actor", "_message", "_token", "retry_count")

    def __init__(self, actor: Queue, message: StoredMessage) -> None:
        self._actor = actor
        self._message = message
        self._token = message.state
        self.retry_count = message.attempt - 1

    def __repr__(self) -> str:
        return f"<Delivery {self.message_id} of {self._actor.name}, retry {self.retry_count}>"

    @property
    def message_id(self) -> str:
        """The id that ``publish`` returned."""
        return self._message.id

    @property
    def body(self) -> bytes:
        """The bytes as published."""
        return self._message.body or b""

    @property
    def headers(self) -> dict[str, str]:
        """A copy of the headers as published."""
        return dict(self._message.headers or {})

    @property
    def priority(self) -> int:
        """The priority, 0 the lowest."""
        return self._message.priority

    @property
    def key(self) -> str | None:
        """The key, if it was published with one."""
        return self._message.key

    @property
    def held(self) -> bool:
        """Whether it still holds its message: not settled, and its lease not lost."""
        return self._token > 0 and self._actor.state.holds(self._token)

    async def ack(self) -> None:
        """The work is done: forget the message.

        Raises ``AckDeadlineExceeded`` if the lease is lost, ``MessageNotFound`` if this delivery
        was settled before, ``StorageError`` if it could not be written: the message is done with,
        but would come again if the engine were killed before there is space on the disk.
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
        """Give the message back, or up: with ``requeue=False``, or when no retry is left."""
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
        """Move the end of the lease to ``seconds`` from now."""
        if get_ident() != self._actor.portal.thread:
            await self._actor.portal.run(lambda: self.extend(seconds))
            return
        self._actor.extend(self._token if self._token > 0 else self._settled(), seconds)

    def release_uncharged(self) -> None:
        """Nobody will ever settle it: the message goes back with no attempt charged."""
        if self.held and self._actor.lost is None:
            self._actor.release(self._token, count_attempt=False)

    def _settled(self) -> int:
        raise MessageNotFound(
            "this delivery was settled before: settle each one once",
            queue=self._actor.name,
            message_id=self.message_id,
        )
