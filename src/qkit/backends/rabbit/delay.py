"""The delay cascade: one for the whole vhost, and never changed.

RabbitMQ lets a message expire only at the head of its queue, so a queue holds delays of one length
only. Level *i* holds each message for 0.1 s times 2 to the *i*, then passes it down; a delay is the
sum of the levels whose bits are set in the routing key. No level is ever deleted: a queue that
expires takes along what it holds.
"""

from __future__ import annotations

import math
from typing import Any, Final

from aiormq import Channel
from aiormq.abc import DeliveredMessage

from qkit.backends.rabbit.connection import Link
from qkit.backends.rabbit.topology import ANY_DELAY, DELAY, EXIT, LEVELS, Topology, address

__all__ = ["LONGEST", "Cascade"]

UNIT: Final = 0.1  # seconds in the lowest level
LONGEST: Final = UNIT * (2**LEVELS - 1)  # 77 days; a queue's TTL ends at 49


class Cascade:
    """The way of delayed messages. A vhost has a second one for what is kept on several nodes."""

    def __init__(self, topology: Topology) -> None:
        self._topology = topology
        self._name = f"{DELAY}.quorum" if topology.quorum else DELAY
        self.ready = False

    def level(self, number: int) -> str:
        """The exchange and the queue of a level."""
        return f"{self._name}.{number:02d}"

    def way(self, name: str, seconds: float) -> tuple[str, str]:
        """The exchange and the routing key for a delay on the way to a queue or topic."""
        units = min(max(1, math.ceil(round(seconds / UNIT, 6))), 2**LEVELS - 1)
        bits = format(units, f"0{LEVELS}b")
        return self.level(units.bit_length() - 1), f"{'.'.join(bits)}.{address(name)}"

    async def declare(self, channel: Channel) -> None:
        """Make sure that it is there; nothing waits for an answer but the last call."""
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
        self.ready = True

    async def check(self, channel: Channel) -> None:
        """Raise if its highest level is not there."""
        await channel.exchange_declare(self.level(LEVELS - 1), passive=True)

    def _arguments(self, number: int, below: str) -> dict[str, Any]:
        arguments: dict[str, Any] = {
            **self._topology.kind(),
            "x-message-ttl": round(UNIT * 1000) * 2**number,
            "x-dead-letter-exchange": below,
        }
        if self._topology.quorum:
            arguments["x-dead-letter-strategy"] = "at-least-once"
            arguments["x-overflow"] = "reject-publish"
        return arguments

    async def sweep(self, link: Link, name: str) -> int:
        """Take out what waits here for a queue or topic; return how many.

        Everything has to be looked at. What is not meant goes back, in its old place and as old as
        before, when the channel that it was read on is closed.
        """
        swept = 0
        target = address(name)
        async with link.own_channel() as counting:
            for number in range(LEVELS):
                level = self.level(number)
                held = (await counting.queue_declare(level, passive=True)).message_count or 0
                if not held:
                    continue
                async with link.own_channel() as reading:
                    for _ in range(held):
                        message = await reading.basic_get(level)
                        tag = message.delivery_tag
                        if tag is None:
                            break
                        if _target(message) == target:
                            await reading.basic_ack(tag, wait=False)
                            swept += 1
        return swept


def _target(message: DeliveredMessage) -> str:
    return (message.routing_key or "")[len(ANY_DELAY) :]
