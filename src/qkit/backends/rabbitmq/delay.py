"""The delay cascade: one for the whole vhost, and never changed.

RabbitMQ lets a message expire only at the head of its queue, so a queue holds delays of one length
only. Level *i* holds each message for 0.1 s times 2 to the *i*, then passes it down; a delay is the
sum of the levels whose bits are set in the routing key. No level is ever deleted: a queue that
expires takes along what it holds.

Every level is a quorum queue, also where the channels' queues are classic. A classic queue passes a
message on without waiting until it is safe in the next: a broker that was killed lost a fifth of
what had moved in the last two seconds.
"""

from __future__ import annotations

import asyncio
import math
from typing import Any, Final

from aiormq import Channel
from aiormq.abc import DeliveredMessage
from aiormq.exceptions import ChannelInvalidStateError

from qkit.backends.rabbitmq.connection import ReconnectingConnection
from qkit.backends.rabbitmq.driver import closing_future
from qkit.backends.rabbitmq.topology import (
    ANY_DELAY,
    AT_LEAST_ONCE_DEAD_LETTERING,
    DELAY,
    EXIT,
    LEVELS,
    Topology,
    address,
    quorum_queue,
)

__all__ = ["LONGEST", "DelayCascade"]

UNIT: Final = 0.1  # seconds in the lowest level
USUAL_COPIES: Final = 3  # as many as a quorum queue has where there are so many nodes
LONGEST: Final = UNIT * (2**LEVELS - 1)  # 77 days; a queue's TTL ends at 49


class DelayCascade:
    """The cascade of the vhost, or one with more copies than the broker's default."""

    def __init__(self, topology: Topology) -> None:
        self._replicas = topology.replicas
        self._name = DELAY if topology.replicas <= USUAL_COPIES else f"{DELAY}.r{topology.replicas}"
        self.ready = False

    def level(self, number: int) -> str:
        """The exchange and the queue of a level."""
        return f"{self._name}.{number:02d}"

    def route(self, name: str, seconds: float) -> tuple[str, str]:
        """Return the exchange and the routing key that delay a message to a queue or topic."""
        units = min(max(1, math.ceil(round(seconds / UNIT, 6))), 2**LEVELS - 1)
        bits = format(units, f"0{LEVELS}b")
        return self.level(units.bit_length() - 1), f"{'.'.join(bits)}.{address(name)}"

    async def declare(self, channel: Channel) -> None:
        """Make sure that it is there; nothing waits for an answer but the last call."""
        try:
            await self._declare(channel)
        except ChannelInvalidStateError:
            reason = await asyncio.wait_for(_why_closed(channel), timeout=1.0)
            if reason is None:
                raise
            raise reason from None
        self.ready = True

    async def _declare(self, channel: Channel) -> None:
        for number in range(LEVELS):
            level = self.level(number)
            below = self.level(number - 1) if number else EXIT
            above = "*." * (LEVELS - 1 - number)
            await channel.exchange_declare(level, exchange_type="topic", durable=True, nowait=True)
            await channel.queue_declare(
                level, durable=True, nowait=True, arguments=self._arguments(number, below)
            )
            await channel.queue_bind(level, level, f"{above}1.#", nowait=True)
            await channel.exchange_bind(below, level, f"{above}0.#", nowait=True)
        await self.check(channel)

    async def check(self, channel: Channel) -> None:
        """Raise if its highest level is not there."""
        await channel.exchange_declare(self.level(LEVELS - 1), passive=True)

    def _arguments(self, number: int, below: str) -> dict[str, Any]:
        copies = self._replicas if self._replicas > USUAL_COPIES else None
        return {
            **quorum_queue(copies),
            **AT_LEAST_ONCE_DEAD_LETTERING,
            "x-message-ttl": round(UNIT * 1000) * 2**number,
            "x-dead-letter-exchange": below,
        }

    async def remove_delayed(self, connection: ReconnectingConnection, name: str) -> int:
        """Remove the messages that wait for a queue or topic; return how many.

        Every message has to be read. Those for other queues go back, in their old places and with
        their old age, when the channel that read them is closed.
        """
        removed = 0
        target = address(name)
        async with connection.own_channel() as counting:
            for number in range(LEVELS):
                level = self.level(number)
                held = (await counting.queue_declare(level, passive=True)).message_count or 0
                if not held:
                    continue
                async with connection.own_channel() as reading:
                    for _ in range(held):
                        message = await reading.basic_get(level)
                        tag = message.delivery_tag
                        if tag is None:
                            break
                        if _target(message) == target:
                            await reading.basic_ack(tag, wait=False)
                            removed += 1
        return removed


async def _why_closed(channel: Channel) -> Exception | None:
    """What the broker said when it closed the channel: whoever comes after that hears nothing."""
    (closing,), _ = await asyncio.wait({closing_future(channel)})
    error = None if closing.cancelled() else closing.exception()
    return error if isinstance(error, Exception) else None


def _target(message: DeliveredMessage) -> str:
    return (message.routing_key or "")[len(ANY_DELAY) :]
