"""Move messages that died from their queue to its dead-letter queue, and report them."""

from __future__ import annotations

import logging
from collections.abc import Callable

from qkit._internal.clock import Clock
from qkit.errors import LogDamaged
from qkit.message import DeadLetter, Envelope
from qkit.native.cross_thread import LoopPortal
from qkit.native.queue.dead_message import DeadMessage
from qkit.native.queue.queue import Queue

__all__ = ["DeadLetterRouter"]

logger = logging.getLogger("qkit.native")


class DeadLetterRouter:
    """Link between the queues of an engine: no queue knows another.

    Args:
        clock: The engine's clock.
        portal: The engine's portal for calls from other threads.
    """

    target_of: Callable[[Queue], Queue]
    """Returns the dead-letter queue of a queue; set by the engine."""

    def __init__(self, clock: Clock, portal: LoopPortal) -> None:
        self.clock = clock
        self.portal = portal
        self.callbacks: list[Callable[[DeadLetter], None]] = []  # for each dead letter
        self.drop_callbacks: list[Callable[[DeadLetter], None]] = []  # for each that was pushed out

    def route(self, queue: Queue, dead: list[DeadMessage]) -> None:
        """Move messages that died to their queue's dead letters, or drop them if it has none."""
        at = self.clock.time()
        offset = at - self.clock.monotonic()
        for message, reason, error in dead:
            try:
                envelope = queue.envelope(message, offset)
            except LogDamaged:
                logger.exception("a message died and its dead letter cannot be written")
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
        """Report dead letters that a full dead-letter queue pushed out."""
        for envelope in envelopes:
            _report(self.drop_callbacks, DeadLetter.from_envelope(envelope))


def _report(callbacks: list[Callable[[DeadLetter], None]], letter: DeadLetter) -> None:
    for callback in callbacks:
        try:
            callback(letter)
        except Exception:
            logger.exception("a dead-letter callback failed; nothing else did")
