"""A queue whose messages and what happens to them are in a log."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import ClassVar

from qkit.errors import LogDamaged, StorageError
from qkit.message import Envelope
from qkit.native.config import QueueConfig
from qkit.native.log.record import Publish
from qkit.native.queue.actor import EngineHooks, QueueActor
from qkit.native.queue.stored_message import StoredMessage, WaitingMessage
from qkit.native.storage.journal import Journal
from qkit.native.storage.replay import RecoveredMessage

__all__ = ["DurableActor"]

logger = logging.getLogger("qkit.native")


class DurableActor(QueueActor):
    """A ``QueueActor`` that writes down what happens, in the turn of the loop in which it does.

    Its methods change the state at once, like those of a queue in memory; a caller who must know
    that a crash cannot undo it awaits ``written``, or ``prepare`` for what it claimed.
    """

    __slots__ = ("gone", "journal", "number")

    durable: ClassVar[bool] = True

    def __init__(
        self,
        name: str,
        config: QueueConfig,
        *,
        hooks: EngineHooks,
        loop: asyncio.AbstractEventLoop,
        journal: Journal,
        number: int,
        group: str | None = None,
    ) -> None:
        super().__init__(name, config, hooks=hooks, loop=loop, group=group)
        self.journal = journal
        self.number = number
        self.gone = False  # deleted, or the engine closed: what happens now is not told

    def close(self, reason: str) -> None:
        """Stop; what was on its way here is dropped with the queue."""
        super().close(reason)
        self.gone = True

    def restore(self, message: RecoveredMessage) -> None:
        """Take back a message that the log tells of. A lease does not outlive its engine."""
        now, wall = self._clock.monotonic(), self._clock.time()
        since = now - max(0.0, wall - message.at)
        stored = self.state.restore(
            now,
            (message.id, message.body, message.headers, since, message.seq),
            priority=message.priority,
            key=message.key,
            due=message.due - wall + now if message.due else None,
            expires=message.expires - wall + now if message.expires else None,
            attempt=message.attempt,
        )
        limit = self.config.max_deliveries
        if message.held and stored is not None and limit is not None and stored.attempt >= limit:
            self.state.dead_letter_restored(stored)  # it may be what ended the engine

    def import_message(self, seq: int, message: Publish) -> None:
        """Add a message of a bulk file; a queue's limits do not hold for these."""
        if self.gone:
            self.journal.index.forget(seq)
            return
        recovered = RecoveredMessage(
            message, self.number, seq, self.journal.body_to_keep(message.body)
        )
        recovered.at = message.at or self._clock.time()
        recovered.priority = min(message.priority, self.config.max_priority)
        self.state.published += 1
        self.restore(recovered)

    def resume(self) -> None:
        """Every message was taken back: do what is due."""
        self._route_dead_and_wake(self.state.take_dead())
        self._rearm()

    def suspend(self) -> None:
        """The engine is being closed: what consumers hold was not ended by a crash."""
        for message in self.state.held():
            self.journal.release(self.number, message, None, None)

    def admit(
        self,
        now: float,
        id: str,
        body: bytes,
        headers: dict[str, str] | None,
        key: str | None,
        priority: int | None,
        due: float | None,
        expires: float | None,
        seq: int,
    ) -> int | None:
        """A message that was on its way to the disk has arrived."""
        if self.gone:
            self.journal.index.forget(seq)
            return None
        kept = self.journal.body_to_keep(body)
        return self.put(now, id, kept, headers, key, priority, due, expires, seq)

    def claim(
        self, now: float, limit: int, lease: float, consumer: str | None = None
    ) -> list[StoredMessage]:
        """As in memory; the count of the attempt is written before anything is handed out.

        Raises ``StorageError`` while the disk is full: each that is handed out and given back
        would be two more records that it owes.
        """
        if self.journal.log.deferred_records:
            self.wake()  # whoever was called for this message has not taken it
            raise StorageError(
                "nothing is delivered while the disk is full: free some space",
                backend="native",
                operation="consume",
                queue=self.name,
            )
        claimed = super().claim(now, limit, lease, consumer)
        if claimed:
            self.journal.claim(self.number, claimed)
        return claimed

    async def prepare(self, claimed: list[StoredMessage]) -> list[StoredMessage]:
        """Wait until the claim is written, and read the bodies that were left on the disk.

        If that fails or is cancelled the messages go back, with no attempt charged.
        """
        tokens = [message.state for message in claimed]
        try:
            missing = [(m.state, m) for m in claimed if m.body is None]
            written = self.journal.written()
            if missing:
                await self._load(missing)
            if written is not None:
                await written
        except BaseException:
            for token in tokens:
                if self.state.holds(token):
                    self.release(token, count_attempt=False)
            raise
        if missing:
            return [message for message in claimed if message.body is not None]
        return claimed

    async def _load(self, missing: list[tuple[int, StoredMessage]]) -> None:
        journal = self.journal
        messages = [message for _, message in missing]
        if journal.log.inline:
            bodies = journal.load(messages)
        else:
            bodies = await asyncio.to_thread(journal.load, messages)
        for (token, message), body in zip(missing, bodies, strict=True):
            if self.gone or not self.state.holds(token) or message.body is not None:
                continue  # its lease ended, and another delivery may have read it meanwhile
            if body is None:
                self._drop_unreadable(token, message)
            else:
                message.body = body
                journal.held += len(body)

    def _drop_unreadable(self, token: int, message: StoredMessage) -> None:
        logger.error(
            "message %s of %r cannot be read from the log any more and is left out; open the "
            "directory with repair=True to see what is damaged",
            message.id,
            self.name,
        )
        self.state.drop_unreadable(token)
        self._freed()

    async def written(self) -> None:
        """Wait until a crash of this process cannot undo what happened so far."""
        written = self.journal.written()
        if written is not None:
            await written

    def ack(self, token: int) -> StoredMessage:
        """The work is done; see ``QueueState.ack``."""
        message = super().ack(token)
        if not self.gone:
            self.journal.ack(self.number, message)
        return message

    def release(
        self,
        token: int,
        delay: float = 0.0,
        *,
        count_attempt: bool = True,
        headers: dict[str, str] | None = None,
    ) -> bool:
        """Give a held message back; see ``QueueState.release``."""
        message = self.state.lease(token)
        before = None if message is None else message.headers
        alive = super().release(token, delay, count_attempt=count_attempt, headers=headers)
        if alive and message is not None and not self.gone:
            due = self._clock.monotonic() + delay if delay > 0 else None
            changed = headers if headers is not None and headers != (before or {}) else None
            self.journal.release(self.number, message, due, changed)
        return alive

    def on_leases_ended(self, messages: Sequence[StoredMessage]) -> None:
        """These wait again: their bodies may stay on the disk."""
        for message in messages:
            self.journal.release_body(message)

    def on_removed(self, messages: Sequence[WaitingMessage]) -> None:
        """These have left the queue for good."""
        if messages and not self.gone:
            self.journal.remove(self.number, messages)

    def move_to_dead_letters(
        self, message: StoredMessage, target: QueueActor, letter: Envelope
    ) -> None:
        """A message has left the queue and its dead letter enters another, by one record."""
        assert isinstance(target, DurableActor)
        if self.gone:
            return
        priority = target.state.priority(None)
        seq = self.journal.dead_letter(
            self.number,
            message,
            target.number,
            letter.id,
            letter.body,
            letter.headers,
            letter.key,
            priority,
        )
        target.put(
            self._clock.monotonic(),
            letter.id,
            self.journal.body_to_keep(letter.body),
            letter.headers,
            letter.key,
            priority,
            seq=seq,
        )

    def envelope(
        self, message: StoredMessage, offset: float, not_before: float | None = None
    ) -> Envelope:
        """A message as it leaves the engine, its body read if need be; ``LogDamaged``."""
        envelope = super().envelope(message, offset, not_before)
        if message.body is None:
            body = self.journal.body(message)
            if body is None:
                raise LogDamaged(
                    "the body of a message cannot be read from the log any more: open the "
                    "directory with repair=True to see what is damaged",
                    backend="native",
                    operation="read",
                    queue=self.name,
                    message_id=message.id,
                )
            envelope.body = body
        return envelope
