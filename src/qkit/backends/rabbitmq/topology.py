"""What qkit declares on the broker: names, arguments and bindings.

A queue is named as its channel; a topic is a fanout exchange of that name, with one queue for each
group. Every vhost has one exchange for dead letters, and one at which delayed messages come out.
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

__all__ = ["DEAD_LETTERS", "DELAY", "EXIT", "Topology", "group_queue"]

DEAD_LETTERS: Final = "qkit.dead-letters"
DELAY: Final = "qkit.delay"
EXIT: Final = f"{DELAY}.out"
LOST: Final = f"{DELAY}.lost"
MAX_LOST_DELAYED: Final = 10_000
LEVELS: Final = 26
LONGEST_NAME: Final = 255  # bytes, of queues, exchanges and keys
ANY_DELAY: Final = "*." * LEVELS
CLASSIC: Final = {"x-queue-type": "classic"}  # a vhost may have another default
NO_LIMIT: Final = 1_000_000_000
USUAL_LEVELS: Final = 9  # x-max-priority of a classic queue
# Without these two a quorum queue loses messages that are being moved when the broker is killed.
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
    """Declares queues and topics; ``quorum`` ones are kept on ``replicas`` nodes.

    ``dead_letter_suffix`` makes the name of a queue's dead-letter queue, as the settings have it;
    ``None`` where the settings keep no dead letters.
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
        self.expiring: set[str] = set()
        """Queues in which the broker may let messages expire: quorum queues that hand them over to
        qkit's dead letters safely. A classic queue can lose them on their way there."""
        self._arguments: dict[str, dict[str, Any]] = {}  # that queues have on the broker
        self._ready = False

    def forget(self) -> None:
        """Declare what every vhost has again: something of it may be gone."""
        self._ready = False

    async def declare(self, connection: ReconnectingConnection, spec: QueueSpec) -> None:
        """Declare a queue with what belongs to it, or a topic, which has no queue yet."""
        if not self._ready:
            async with connection.control() as channel:
                await self._declare_common(channel)
            self._ready = True
        letters = self._dead_letter(spec)
        if letters is not None and letters != spec.dead_letter:
            # The channel keeps no dead letters. The broker needs a place for what it takes out of
            # the queue by itself, and arguments are the same for all who declare the queue.
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
        """Declare the queue of a topic's group, which receives from now on."""
        queue = group_queue(spec.name, group)
        await self._declare_queue(connection, queue, self.arguments(spec), spec)
        async with connection.control() as channel:
            await channel.queue_bind(queue, spec.name)

    def max_length(self, queue: str) -> int | None:
        """The limit that a dead-letter queue has on the broker, if this process declared it."""
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
        there = await self._declare_as_it_is(connection, name, wanted)
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

    async def _declare_as_it_is(
        self, connection: ReconnectingConnection, name: str, wanted: dict[str, Any]
    ) -> dict[str, Any] | None:
        """Declare a queue with the arguments that it has; return them, ``None`` if unknown.

        RabbitMQ fixes arguments at creation and names one difference each time. A queue that loses
        messages by its nature (not durable, deleted with its last consumer) is refused.
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
            str(there), "name another channel"
        )
        return ConfigError(
            f"the queue {name!r} exists as a {there} queue and replicas={self.replicas} asks for "
            f"a {'quorum' if self.quorum else 'classic'} queue: {advice}, or delete the queue",
            backend=BACKEND,
            operation="declare",
            queue=name,
        )

    def _check(self, name: str, spec: QueueSpec, there: dict[str, Any]) -> None:
        """Raise for what a queue that exists cannot do."""
        levels, wanted = there.get("x-max-priority", 0), spec.max_priority or 0
        if wanted > levels:
            raise ConfigError(
                f"max_priority={wanted}: the queue {name!r} was created with {levels} priorities, "
                "which RabbitMQ cannot change: delete the queue, and qkit creates it anew",
                backend=BACKEND,
                operation="declare",
                queue=name,
            )
        copies = there.get("x-quorum-initial-group-size")
        if self.quorum and isinstance(copies, int) and copies < self.replicas:
            raise ConfigError(
                f"replicas={self.replicas}: the queue {name!r} was created with {copies} copies, "
                "which RabbitMQ cannot change: lower replicas, or delete the queue",
                backend=BACKEND,
                operation="declare",
                queue=name,
            )

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
            arguments={**CLASSIC, "x-max-length": MAX_LOST_DELAYED, "x-overflow": "drop-head"},
        )
        await channel.queue_bind(LOST, LOST)
        await channel.exchange_declare(
            EXIT, exchange_type="topic", durable=True, arguments={"alternate-exchange": LOST}
        )

    def _dead_letter(self, spec: QueueSpec) -> str | None:
        """The dead-letter queue that the settings give a queue, whatever its channel says."""
        if spec.dead_letter is not None or spec.drop_oldest or self._suffix is None:
            return spec.dead_letter
        return spec.name + self._suffix

    def arguments(self, spec: QueueSpec) -> dict[str, Any]:
        """A queue's arguments: by the settings alone, so that all declare it alike.

        Only priorities above the usual ones are the channel's. ``max_depth`` of a queue is no
        argument: the broker would refuse, that is drop, a message that comes back to a full queue
        after its delay or for its retry.
        """
        arguments = self.kind()
        letters = self._dead_letter(spec)
        if letters is not None:
            arguments["x-dead-letter-exchange"] = DEAD_LETTERS
            arguments["x-dead-letter-routing-key"] = letters
        if not self.quorum:
            arguments["x-max-priority"] = max(USUAL_LEVELS, spec.max_priority or 0)
            return arguments
        if spec.max_priority:
            raise ConfigError(
                "a quorum queue has no priorities before RabbitMQ 4.0: leave max_priority "
                "out, or set replicas=1",
                backend=BACKEND,
                operation="declare",
                queue=spec.name,
            )
        return arguments if letters is None else arguments | AT_LEAST_ONCE_DEAD_LETTERING

    def kind(self) -> dict[str, Any]:
        """What every queue has."""
        return quorum_queue(self.replicas) if self.quorum else dict(CLASSIC)


def _log_differences(name: str, wanted: dict[str, Any], there: dict[str, Any] | None) -> None:
    if there is None:
        differences = "RabbitMQ does not tell which"
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
