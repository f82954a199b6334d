"""What qkit declares on the broker: names, arguments and bindings.

A queue is named as its channel; a topic is a fanout exchange of that name, with one queue for each
group. Every vhost has one exchange for dead letters, and one at which delayed messages come out.
"""

from __future__ import annotations

import hashlib
from typing import Any, Final

from aiormq import Channel

from qkit.backend import QueueSpec
from qkit.errors import ConfigError

__all__ = ["BACKEND", "DEAD_LETTERS", "DELAY", "EXIT", "Topology", "group_queue"]

BACKEND: Final = "rabbitmq"
DEAD_LETTERS: Final = "qkit.dead-letters"
DELAY: Final = "qkit.delay"
EXIT: Final = f"{DELAY}.out"
LOST: Final = f"{DELAY}.lost"
KEPT_LOST: Final = 10_000
LEVELS: Final = 26
LONGEST_NAME: Final = 255  # bytes, of queues, exchanges and keys
ANY_DELAY: Final = "*." * LEVELS
CLASSIC: Final = {"x-queue-type": "classic"}  # a vhost may have another default
NO_LIMIT: Final = 1_000_000_000
# Without these two a quorum queue on a broker that is killed loses what is just on its way.
SAFE_DEATH: Final = {"x-dead-letter-strategy": "at-least-once", "x-overflow": "reject-publish"}


def group_queue(topic: str, group: str) -> str:
    """The queue of a topic's group; no channel's name can hold a colon.

    >>> group_queue("prices", "mail")
    'prices:mail'
    """
    name = f"{topic}:{group}"
    if len(name) <= LONGEST_NAME:
        return name
    digest = hashlib.sha256(name.encode()).hexdigest()[:12]
    return f"{name[: LONGEST_NAME - 13]}~{digest}"


def address(name: str) -> str:
    """A queue's or topic's name at the end of a delayed message's routing key."""
    room = LONGEST_NAME - len(ANY_DELAY)
    return name if len(name) <= room else f"~{hashlib.sha256(name.encode()).hexdigest()[:32]}"


def quorum_queue(copies: int | None) -> dict[str, Any]:
    """The arguments of a quorum queue, with so many copies or the broker's usual number.

    RabbitMQ 4 takes a message out of one after 20 deliveries, looks included, unless a limit is
    given; every version takes this one, so the arguments outlive an upgrade.
    """
    arguments: dict[str, Any] = {"x-queue-type": "quorum", "x-delivery-limit": NO_LIMIT}
    if copies is not None:
        arguments["x-quorum-initial-group-size"] = copies
    return arguments


class Topology:
    """Declares queues and topics; ``quorum`` ones are kept on ``replicas`` nodes."""

    def __init__(self, *, quorum: bool, replicas: int) -> None:
        self.quorum = quorum
        self.replicas = replicas
        self._ready = False

    def forget(self) -> None:
        """Something that every vhost has may be gone: declare it again."""
        self._ready = False

    async def declare(self, channel: Channel, spec: QueueSpec) -> None:
        """A queue with what belongs to it, or a topic, which has no queue yet."""
        if not self._ready:
            await self._declare_common(channel)
            self._ready = True
        if spec.broadcast:
            await channel.exchange_declare(spec.name, exchange_type="fanout", durable=True)
            await self.bind_delays(channel, spec.name, topic=True)
            return
        await self._declare_queue(channel, spec.name, spec)
        if spec.drop_oldest:
            await channel.queue_bind(spec.name, DEAD_LETTERS, spec.name)

    async def declare_group(self, channel: Channel, spec: QueueSpec, group: str) -> str:
        """A group of a topic, which receives from now on; returns its queue."""
        queue = group_queue(spec.name, group)
        await self._declare_queue(channel, queue, spec)
        await channel.queue_bind(queue, spec.name)
        return queue

    async def _declare_queue(self, channel: Channel, name: str, spec: QueueSpec) -> None:
        await channel.queue_declare(name, durable=True, arguments=self.arguments(spec))
        await self.bind_delays(channel, name, topic=False)

    async def bind_delays(self, channel: Channel, name: str, *, topic: bool) -> None:
        """Let what waited for a queue or topic come out there; without it, it would be lost."""
        bind = channel.exchange_bind if topic else channel.queue_bind
        await bind(name, EXIT, ANY_DELAY + address(name))

    async def _declare_common(self, channel: Channel) -> None:
        await channel.exchange_declare(DEAD_LETTERS, exchange_type="direct", durable=True)
        await channel.exchange_declare(LOST, exchange_type="fanout", durable=True)
        await channel.queue_declare(
            LOST,
            durable=True,
            arguments={**CLASSIC, "x-max-length": KEPT_LOST, "x-overflow": "drop-head"},
        )
        await channel.queue_bind(LOST, LOST)
        await channel.exchange_declare(
            EXIT, exchange_type="topic", durable=True, arguments={"alternate-exchange": LOST}
        )

    def arguments(self, spec: QueueSpec) -> dict[str, Any]:
        """A queue's arguments. Dead letters lie by their age, so they have no priorities.

        ``max_depth`` of a queue is no argument: the broker would refuse, that is drop, a message
        that comes back to a full queue after its delay or for its retry.
        """
        arguments = self.kind()
        if spec.dead_letter is not None:
            arguments["x-dead-letter-exchange"] = DEAD_LETTERS
            arguments["x-dead-letter-routing-key"] = spec.dead_letter
        if self.quorum:
            if spec.max_priority:
                raise ConfigError(
                    "a quorum queue has no priorities before RabbitMQ 4.0: leave max_priority "
                    "out, or set replicas=1",
                    backend=BACKEND,
                    operation="declare",
                    queue=spec.name,
                )
            if spec.dead_letter is not None:
                arguments |= SAFE_DEATH
        elif spec.max_priority and not spec.drop_oldest:
            arguments["x-max-priority"] = spec.max_priority
        if spec.drop_oldest and spec.max_depth is not None:
            arguments["x-max-length"] = spec.max_depth
            arguments["x-overflow"] = "drop-head"
        return arguments

    def kind(self) -> dict[str, Any]:
        """What every queue has."""
        return quorum_queue(self.replicas) if self.quorum else dict(CLASSIC)
