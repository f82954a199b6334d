"""Routing of dead messages to their dead-letter queues."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine

from qkit._internal.clock import Clock
from qkit.errors import LogDamaged
from qkit.message import DeadLetter, Envelope
from qkit.native.cross_thread import LoopPortal
from qkit.native.queue.dead_message import DeadMessage
from qkit.native.queue.queue import Queue

__all__ = ["DeadLetterRouter"]

logger: logging.Logger = logging.getLogger("qkit.native")


class DeadLetterRouter:
    """Router that moves dead messages to their dead-letter queues and reports them.

    It is the only link between the queues of an engine.

    Args:
        clock: Clock of the engine.
        portal: Portal of the engine for calls from other threads.
    """

    target_of: Callable[[Queue], Queue]
    """Function that returns the dead-letter queue of a queue; set by the engine."""

    def __init__(self, clock: Clock, portal: LoopPortal) -> None:
        self.clock = clock
        self.portal = portal
        self.callbacks: list[Callable[[DeadLetter], None]] = []  # for dead letters
        self.drop_callbacks: list[Callable[[DeadLetter], None]] = []  # for dropped letters
        self._background: set[asyncio.Task[None]] = set()  # tasks that read bodies

    def route(self, queue: Queue, dead: list[DeadMessage]) -> None:
        """Move dead messages to the dead-letter queue, or drop them if the queue has none.

        If their bodies are only on disk, this happens once a thread has read them. Until then the
        log contains the messages, so a crash loses none.
        """
        unread = [item for item in dead if queue.must_read(item.message)]
        if unread:
            self.run_in_background(self._read_and_route(queue, unread))
            dead = [item for item in dead if item not in unread]
        self._route(queue, dead)

    async def _read_and_route(self, queue: Queue, dead: list[DeadMessage]) -> None:
        if await queue.keep_bodies([item.message for item in dead]):
            self._route(queue, dead)

    def run_in_background(self, work: Coroutine[None, None, None]) -> None:
        """Run a coroutine that reads bodies from the disk."""
        task = asyncio.get_running_loop().create_task(work, name="qkit-native-read")
        self._background.add(task)
        task.add_done_callback(self._finished)

    def _finished(self, task: asyncio.Task[None]) -> None:
        self._background.discard(task)
        if not task.cancelled() and task.exception() is not None:
            logger.error("reading dead messages from the log failed", exc_info=task.exception())

    async def finish_background(self) -> None:
        """Wait until all bodies that are being read have been used."""
        while self._background:
            await asyncio.wait(self._background)

    def _route(self, queue: Queue, dead: list[DeadMessage]) -> None:
        at = self.clock.time()
        offset = at - self.clock.monotonic()
        for message, reason, error in dead:
            try:
                envelope = queue.envelope(message, offset)
            except LogDamaged:
                logger.exception("a dead message cannot be read; its dead letter is not written")
                queue.state.dropped += 1
                continue
            letter = DeadLetter.of(
                envelope, channel=queue.name, group=queue.group, reason=reason, at=at, error=error
            )
            if queue.config.dead_letter is None:
                queue.state.dropped += 1
                queue.on_removed((message,))
            else:
                queue.move_to_dead_letters(message, self.target_of(queue), letter.to_envelope())
                queue.state.dead_lettered += 1
            _report(self.callbacks, letter)

    def dropped(self, envelopes: list[Envelope]) -> None:
        """Report dead letters that were dropped from a full dead-letter queue."""
        for envelope in envelopes:
            _report(self.drop_callbacks, DeadLetter.from_envelope(envelope))


def _report(callbacks: list[Callable[[DeadLetter], None]], letter: DeadLetter) -> None:
    for callback in callbacks:
        try:
            callback(letter)
        except Exception:
            logger.exception("a dead-letter callback failed; the dead letter is not affected")
