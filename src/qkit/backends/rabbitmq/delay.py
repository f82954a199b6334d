"""Delay cascade: queues that delay messages, shared by all channels of a vhost.

RabbitMQ removes an expired message only at the head of its queue, so all messages of a delay queue
need the same delay. The queue of level *i* holds each message for 0.1 s × 2^*i* and then forwards
it to the level below. The bits in the routing key select the levels that hold the message, and its
delay is the sum of their times. Levels are never deleted, because RabbitMQ deletes a queue together
with its messages.

Every level is a quorum queue, even if the channels use classic queues. A classic queue forwards a
message without waiting until the next queue has stored it. In a test in which the broker was
killed, a fifth of the messages that were forwarded in the last two seconds were lost.
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

__all__ = ["MAX_DELAY_SECONDS", "DelayCascade"]

UNIT_SECONDS: Final = 0.1  # delay of the lowest level
DEFAULT_REPLICAS: Final = 3  # RabbitMQ's default if the cluster has enough nodes
MAX_DELAY_SECONDS: Final = UNIT_SECONDS * (2**LEVELS - 1)  # 77 days


class DelayCascade:
    """Delay cascade of a vhost.

    A cascade with more than ``DEFAULT_REPLICAS`` replicas has its own name, because RabbitMQ does
    not change the replicas of existing queues.
    """

    def __init__(self, topology: Topology) -> None:
        self._replicas = topology.replicas
        self._name = (
            DELAY if topology.replicas <= DEFAULT_REPLICAS else f"{DELAY}.r{topology.replicas}"
        )
        #: Whether the cascade is known to exist.
        self.ready: bool = False

    def level(self, number: int) -> str:
        """Return the name that the exchange and the queue of a level share."""
        return f"{self._name}.{number:02d}"

    def route(self, name: str, seconds: float) -> tuple[str, str]:
        """Return the exchange and the routing key that delay a message for a queue or topic.

        Args:
            name: Name of the queue or topic.
            seconds: Delay, rounded up to 0.1 s and limited to ``MAX_DELAY_SECONDS``.
        """
        units = min(max(1, math.ceil(round(seconds / UNIT_SECONDS, 6))), 2**LEVELS - 1)
        bits = format(units, f"0{LEVELS}b")
        return self.level(units.bit_length() - 1), f"{'.'.join(bits)}.{address(name)}"

    async def declare(self, channel: Channel) -> None:
        """Declare all levels; only the last request waits for a response.

        Raises:
            AMQPError: The broker rejected a declaration.
        """
        try:
            await self._declare(channel)
        except ChannelInvalidStateError:
            reason = await asyncio.wait_for(_close_reason(channel), timeout=1.0)
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
        """Raise the driver's ``ChannelNotFoundEntity`` if the highest level does not exist."""
        await channel.exchange_declare(self.level(LEVELS - 1), passive=True)

    def _arguments(self, number: int, below: str) -> dict[str, Any]:
        copies = self._replicas if self._replicas > DEFAULT_REPLICAS else None
        return {
            **quorum_queue(copies),
            **AT_LEAST_ONCE_DEAD_LETTERING,
            "x-message-ttl": round(UNIT_SECONDS * 1000) * 2**number,
            "x-dead-letter-exchange": below,
        }

    async def remove_delayed(self, connection: ReconnectingConnection, name: str) -> int:
        """Remove the delayed messages of a queue or topic; return how many.

        This reads every message in the cascade. Messages for other queues keep their age and return
        to their place when the channel that has read them is closed.
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


async def _close_reason(channel: Channel) -> Exception | None:
    """Return the error with which the broker closed a channel, because calls do not raise it."""
    (closing,), _ = await asyncio.wait({closing_future(channel)})
    error = None if closing.cancelled() else closing.exception()
    return error if isinstance(error, Exception) else None


def _target(message: DeliveredMessage) -> str:
    return (message.routing_key or "")[len(ANY_DELAY) :]
