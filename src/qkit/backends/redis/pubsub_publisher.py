"""Publishing to Redis channels, with a count of unheard messages."""

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

LOG_INTERVAL_SECONDS: Final = 60.0  # minimum time between warnings about one channel


class PubSubPublisher:
    """Publisher that sends messages to the current subscribers of a channel.

    Args:
        connection: Connection for commands.
        clock: Clock used to limit the rate of warnings.
    """

    def __init__(self, connection: ReconnectingConnection, clock: Clock) -> None:
        self.unheard: int = 0
        """Number of messages that were published without a subscriber."""
        self._connection = connection
        self._clock = clock
        self._next_log: dict[str, float] = {}  # earliest time of the next warning, by channel

    async def publish(self, queue: str, envelopes: Sequence[Envelope]) -> list[Sent]:
        """Publish messages to the channel, one round trip per batch."""
        with translate_errors("publish", queue):
            for batch in codec.batches(envelopes):
                receivers: list[int] = await self._connection.commands(
                    [("PUBLISH", queue, codec.encode(envelope)) for envelope in batch]
                )
                if 0 in receivers:
                    self._count_unheard(queue, receivers.count(0))
        return [Sent(envelope.id) for envelope in envelopes]

    def _count_unheard(self, queue: str, count: int) -> None:
        """Count unheard messages; warn at most once a minute per channel."""
        self.unheard += count
        now = self._clock.monotonic()
        if now >= self._next_log.get(queue, now):
            self._next_log[queue] = now + LOG_INTERVAL_SECONDS
            logger.warning(
                "%s: %d messages were lost: the channel has no subscriber, and pub/sub does not "
                "store messages",
                queue,
                count,
                extra={"queue": queue},
            )
