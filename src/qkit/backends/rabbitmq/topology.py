"""Queues, exchanges and bindings that qkit declares on the broker.

A queue has the name of its channel. A topic is a fanout exchange with the name of its channel, and
each group has a queue that is bound to it. Every vhost has one exchange for dead letters, and one
exit exchange that routes messages from the delay cascade to their queues.
"""

from __future__ import annotations

import hashlib
from typing import Any, Final

from aiormq import Channel, exceptions

from qkit._internal.logging import logger
from qkit.backend import QueueSpec
from qkit.backends.rabbitmq.connection import ReconnectingConnection
from qkit.backends.rabbitmq.errors import BACKEND, Difference, difference_of
from qkit.errors import ConfigError

__all__ = ["ACTIVE", "DEAD_LETTERS", "DELAY", "EXIT", "Topology", "active_queue", "group_queue"]

ACTIVE: Final = "qkit.active"
DEAD_LETTERS: Final = "qkit.dead-letters"
DELAY: Final = "qkit.delay"
EXIT: Final = f"{DELAY}.out"
LOST: Final = f"{DELAY}.lost"
MAX_LOST_DELAYED: Final = 10_000
# Levels of the delay cascade. The TTL of the highest is 39 days; RabbitMQ allows at most 49.
LEVELS: Final = 26
MAX_NAME_BYTES: Final = 255  # limit for names of queues and exchanges, and for routing keys
ANY_DELAY: Final = "*." * LEVELS
CLASSIC: Final = {"x-queue-type": "classic"}  # explicit, because a vhost can have another default
DELIVERY_LIMIT: Final = 1_000_000_000
DEFAULT_MAX_PRIORITY: Final = 9  # x-max-priority of a classic queue
# Without these, a quorum queue can lose the messages that it is forwarding when the broker dies.
AT_LEAST_ONCE_DEAD_LETTERING: Final = {
    "x-dead-letter-strategy": "at-least-once",
    "x-overflow": "reject-publish",
}
EXPIRY_ARGUMENTS: Final = (
    "x-dead-letter-exchange",
    "x-dead-letter-routing-key",
    *AT_LEAST_ONCE_DEAD_LETTERING,
)


def group_queue(topic: str, group: str) -> str:
    """Return the queue name of a topic's group; channel names contain no colon, so it is unique.

    >>> group_queue("prices", "mail")
    'prices:mail'
    """
    return _shortened(f"{topic}:{group}")


def active_queue(queue: str) -> str:
    """Return the name of the exclusive queue that the active consumer of an ordered queue holds.

    >>> active_queue("orders")
    'qkit.active:orders'
    """
    return _shortened(f"{ACTIVE}:{queue}")


def _shortened(name: str) -> str:
    if len(name) <= MAX_NAME_BYTES:
        return name
    digest = hashlib.sha256(name.encode()).hexdigest()[:12]
    return f"{name[: MAX_NAME_BYTES - 13]}~{digest}"


def address(name: str) -> str:
    """Return the last part of a delayed message's routing key.

    It is the name of the queue or topic, or a hash if the name is too long.
    """
    limit = MAX_NAME_BYTES - len(ANY_DELAY)
    return name if len(name) <= limit else f"~{hashlib.sha256(name.encode()).hexdigest()[:32]}"


def quorum_queue(copies: int | None) -> dict[str, Any]:
    """Return the arguments of a quorum queue.

    By default RabbitMQ 4 removes a message after 20 deliveries, and ``peek`` counts as a delivery.
    The high delivery limit prevents that. Every RabbitMQ version accepts it, so the arguments stay
    the same after an upgrade.

    Args:
        copies: Number of replicas; ``None`` for the default of the broker.
    """
    arguments: dict[str, Any] = {"x-queue-type": "quorum", "x-delivery-limit": DELIVERY_LIMIT}
    if copies is not None:
        arguments["x-quorum-initial-group-size"] = copies
    return arguments


class Topology:
    """Declarations of queues and topics.

    Args:
        quorum: Whether to declare quorum queues instead of classic queues.
        replicas: Number of replicas of a quorum queue.
        dead_letter_suffix: Suffix of dead-letter queue names; ``None`` (default) if the service
            does not use dead letters.
        dead_letter_max_size: Maximum number of messages in the dead-letter queue of a channel that
            disables dead letters; 10,000 by default.
    """

    def __init__(
        self,
        *,
        quorum: bool,
        replicas: int,
        dead_letter_suffix: str | None = None,
        dead_letter_max_size: int = 10_000,
    ) -> None:
        self.quorum = quorum
        self.replicas = replicas
        self._suffix = dead_letter_suffix
        self._max_letters = dead_letter_max_size
        #: Queues whose messages may have an AMQP expiration: quorum queues that dead-letter without
        #: loss. A classic queue can lose an expired message.
        self.expiring: set[str] = set()
        self._arguments: dict[str, dict[str, Any]] = {}  # arguments of each queue on the broker
        self._ready = False

    def invalidate(self) -> None:
        """Make the next declaration declare the common exchanges of the vhost again."""
        self._ready = False

    async def declare(self, connection: ReconnectingConnection, spec: QueueSpec) -> None:
        """Declare a queue with its bindings and its dead-letter queue, or the exchange of a topic.

        Raises:
            ConfigError: The existing queue does not support what ``spec`` requires.
        """
        if not self._ready:
            async with connection.control() as channel:
                await self._declare_common(channel)
            self._ready = True
        letters = self._dead_letter(spec)
        if letters is not None and letters != spec.dead_letter:
            # The channel disables dead letters, but the broker still dead-letters its messages:
            # the queue has the same arguments in all services.
            await self._declare_letters(connection, letters, self._max_letters)
        if spec.drop_oldest:
            await self._declare_letters(connection, spec.name, spec.max_depth)
        elif spec.broadcast:
            async with connection.control() as channel:
                await channel.exchange_declare(spec.name, exchange_type="fanout", durable=True)
                await self.bind_delays(channel, spec.name, topic=True)
        else:
            await self._declare_queue(connection, spec.name, self.arguments(spec), spec)

    async def declare_group(
        self, connection: ReconnectingConnection, spec: QueueSpec, group: str
    ) -> None:
        """Declare the queue of a topic's group and bind it to the topic."""
        queue = group_queue(spec.name, group)
        await self._declare_queue(connection, queue, self.arguments(spec), spec)
        async with connection.control() as channel:
            await channel.queue_bind(queue, spec.name)

    def max_length(self, queue: str) -> int | None:
        """Return the maximum length of a dead-letter queue on the broker; ``None`` if unknown."""
        limit = self._arguments.get(queue, {}).get("x-max-length")
        return limit if isinstance(limit, int) else None

    async def _declare_letters(
        self, connection: ReconnectingConnection, name: str, max_depth: int | None
    ) -> None:
        arguments = self.kind()
        if max_depth is not None:
            arguments |= {"x-max-length": max_depth, "x-overflow": "drop-head"}
        await self._declare_queue(connection, name, arguments, None)
        async with connection.control() as channel:
            await channel.queue_bind(name, DEAD_LETTERS, name)

    async def _declare_queue(
        self,
        connection: ReconnectingConnection,
        name: str,
        wanted: dict[str, Any],
        spec: QueueSpec | None,
    ) -> None:
        there = await self._declare_existing(connection, name, wanted)
        if there is not None and spec is not None:
            self._check(name, spec, there)
        if there != wanted and self._arguments.get(name) != (there or {}):
            _log_differences(name, wanted, there)
        self._arguments[name] = there = there or {}
        safe = all(there.get(key) == wanted.get(key) for key in EXPIRY_ARGUMENTS)
        if self.quorum and safe and spec is not None and spec.dead_letter is not None:
            self.expiring.add(name)
        else:
            self.expiring.discard(name)
        async with connection.control() as channel:
            await self.bind_delays(channel, name, topic=False)

    async def _declare_existing(
        self, connection: ReconnectingConnection, name: str, wanted: dict[str, Any]
    ) -> dict[str, Any] | None:
        """Declare a queue; return the arguments that it has, or ``None`` if they are unknown.

        RabbitMQ does not change the arguments of an existing queue, and rejects a declaration with
        an error that reports one difference. This method adopts the reported value and tries again.

        Raises:
            ChannelPreconditionFailed: The queue is not durable, or is deleted automatically.
            ConfigError: The queue has another type, classic or quorum.
        """
        arguments = dict(wanted)
        seen: set[str] = set()
        while True:
            try:
                async with connection.control() as channel:
                    await channel.queue_declare(name, durable=True, arguments=arguments)
            except exceptions.ChannelPreconditionFailed as error:
                found = difference_of(error, arguments)
                if found is None or not found.argument.startswith("x-"):
                    raise
                if found.argument == "x-queue-type":
                    raise self._wrong_type(name, found) from error
                if not found.known or found.argument in seen:
                    break
                seen.add(found.argument)
                arguments.pop(found.argument, None)
                if found.value is not None:
                    arguments[found.argument] = found.value
            else:
                return arguments
        async with connection.control() as channel:
            await channel.queue_declare(name, passive=True)
        return None

    def _wrong_type(self, name: str, found: Difference) -> ConfigError:
        there = found.value or ("classic" if self.quorum else "quorum")
        advice = {"classic": "set replicas=1", "quorum": "set replicas above 1"}.get(
            str(there), "use another channel"
        )
        return ConfigError(
            f"the queue {name!r} exists as a {there} queue, but replicas={self.replicas} needs "
            f"a {'quorum' if self.quorum else 'classic'} queue: {advice}, or delete the queue",
            backend=BACKEND,
            operation="declare",
            queue=name,
        )

    def _check(self, name: str, spec: QueueSpec, there: dict[str, Any]) -> None:
        """Raise ``ConfigError`` if an existing queue does not support what ``spec`` requires."""
        levels, wanted = there.get("x-max-priority", 0), spec.max_priority or 0
        if wanted > levels:
            raise ConfigError(
                f"max_priority={wanted}: the queue {name!r} was created with a maximum priority of "
                f"{levels}, which RabbitMQ cannot change; delete the queue, so that qkit creates "
                "it again",
                backend=BACKEND,
                operation="declare",
                queue=name,
            )
        copies = there.get("x-quorum-initial-group-size")
        if self.quorum and isinstance(copies, int) and copies < self.replicas:
            raise ConfigError(
                f"replicas={self.replicas}: the queue {name!r} was created with "
                f"x-quorum-initial-group-size={copies}, which RabbitMQ cannot change; decrease "
                "replicas, or delete the queue",
                backend=BACKEND,
                operation="declare",
                queue=name,
            )

    async def bind_delays(self, channel: Channel, name: str, *, topic: bool) -> None:
        """Bind a queue or topic to the exit exchange, from which it gets its delayed messages."""
        bind = channel.exchange_bind if topic else channel.queue_bind
        await bind(name, EXIT, ANY_DELAY + address(name))

    async def _declare_common(self, channel: Channel) -> None:
        await channel.exchange_declare(DEAD_LETTERS, exchange_type="direct", durable=True)
        await channel.exchange_declare(LOST, exchange_type="fanout", durable=True)
        await channel.queue_declare(
            LOST,
            durable=True,
            arguments={**CLASSIC, "x-max-length": MAX_LOST_DELAYED, "x-overflow": "drop-head"},
        )
        await channel.queue_bind(LOST, LOST)
        await channel.exchange_declare(
            EXIT, exchange_type="topic", durable=True, arguments={"alternate-exchange": LOST}
        )

    def _dead_letter(self, spec: QueueSpec) -> str | None:
        """Return the dead-letter queue of a queue, even if the channel disables dead letters."""
        if spec.dead_letter is not None or spec.drop_oldest or self._suffix is None:
            return spec.dead_letter
        return spec.name + self._suffix

    def arguments(self, spec: QueueSpec) -> dict[str, Any]:
        """Return the arguments of a queue.

        They depend on the settings and not on the channel, so that all services declare the same
        arguments. The exception is a ``max_priority`` above the default. ``max_depth`` does not
        become an argument, because the broker would drop a delayed or retried message that returns
        to a full queue.

        Raises:
            ConfigError: ``max_priority`` is set for a quorum queue.
        """
        arguments = self.kind()
        letters = self._dead_letter(spec)
        if letters is not None:
            arguments["x-dead-letter-exchange"] = DEAD_LETTERS
            arguments["x-dead-letter-routing-key"] = letters
        if not self.quorum:
            arguments["x-max-priority"] = max(DEFAULT_MAX_PRIORITY, spec.max_priority or 0)
            return arguments
        if spec.max_priority:
            raise ConfigError(
                f"max_priority={spec.max_priority}: qkit does not support priorities on quorum "
                "queues; omit max_priority, or set replicas=1",
                backend=BACKEND,
                operation="declare",
                queue=spec.name,
            )
        return arguments if letters is None else arguments | AT_LEAST_ONCE_DEAD_LETTERING

    def kind(self) -> dict[str, Any]:
        """Return the arguments that all queues have in common: type and replicas."""
        return quorum_queue(self.replicas) if self.quorum else dict(CLASSIC)


def _log_differences(name: str, wanted: dict[str, Any], there: dict[str, Any] | None) -> None:
    if there is None:
        differences = "RabbitMQ does not report which arguments differ"
    else:
        differences = "; ".join(
            f"{argument} is {there.get(argument)!r}, qkit declares {wanted.get(argument)!r}"
            for argument in sorted(wanted.keys() | there.keys())
            if there.get(argument) != wanted.get(argument)
        )
    logger.warning(
        "the queue %s exists with other arguments and is used as it is: %s",
        name,
        differences,
        extra={"queue": name},
    )
