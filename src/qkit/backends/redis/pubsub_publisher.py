"""Publish messages to Redis channels; count those that no subscriber received."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from qkit._internal.clock import Clock
from qkit._internal.logging import logger
from qkit.backends.redis import codec
from qkit.backends.redis.connection import ReconnectingConnection
from qkit.backends.redis.errors import translate_errors
from qkit.message import Envelope, Sent

__all__ = ["PubSubPublisher"]

LOG_INTERVAL_SECONDS: Final = 60.0  # between two warnings about one channel without subscribers


class PubSubPublisher:
    """Sends messages to the subscribers that a channel has now.

    Args:
        connection: Connection for commands.
        clock: Time of the warnings.
    """

    def __init__(self, connection: ReconnectingConnection, clock: Clock) -> None:
        self.unheard = 0
        """Number of messages that no subscriber received."""
        self._connection = connection
        self._clock = clock
        self._log_again: dict[str, float] = {}  # when to log again of a channel without subscribers

    async def publish(self, queue: str, envelopes: Sequence[Envelope]) -> list[Sent]:
        """Send messages to the channel, hundreds in one round trip."""
        with translate_errors("publish", queue):
            for batch in codec.batches(envelopes):
                receivers: list[int] = await self._connection.commands(
                    [("PUBLISH", queue, codec.encode(envelope)) for envelope in batch]
                )
                if 0 in receivers:
                    self._not_heard(queue, receivers.count(0))
        return [Sent(envelope.id) for envelope in envelopes]

    def _not_heard(self, queue: str, count: int) -> None:
        """Count messages that no subscriber received; log it once a minute for each channel."""
        self.unheard += count
        now = self._clock.monotonic()
        if now >= self._log_again.get(queue, now):
            self._log_again[queue] = now + LOG_INTERVAL_SECONDS
            logger.warning(
                "%s: %d messages were published and no subscriber received them: pub/sub keeps "
                "nothing, they are lost",
                queue,
                count,
                extra={"queue": queue},
            )
