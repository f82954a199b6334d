"""The queues and topics of an engine by their names: declared, found, changed, deleted."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, fields, replace
from typing import Any, Final

from qkit.errors import ConfigError, QueueNotFound, Unsupported
from qkit.message import check_name
from qkit.native.actor import Manager, QueueActor
from qkit.native.config import QueueConfig
from qkit.native.durable import DurableActor
from qkit.native.journal import Journal
from qkit.native.replay import Replay
from qkit.native.topic import Topic

__all__ = ["ALL_FIELDS", "DEAD_LETTER_SUFFIX", "Catalogue"]

DEAD_LETTER_SUFFIX: Final = "_dlq"
ALL_FIELDS: Final = frozenset(item.name for item in fields(QueueConfig))
MAX_QUEUES: Final = 50_000


class Catalogue:
    """Every queue and topic that exists, and what its declarations insisted on.

    ``own_loop`` returns the engine's loop, or raises where nothing may be declared.
    """

    def __init__(self, manager: Manager, own_loop: Callable[[], asyncio.AbstractEventLoop]) -> None:
        self.channels: dict[str, QueueActor | Topic] = {}
        self.refused = 0  # because there were too many
        self._manager = manager
        self._own_loop = own_loop
        self._journal: Journal | None = None
        self._insisted: dict[str, frozenset[str]] = {}  # the fields its declarations named

    # Finding

    def find(self, name: str, operation: str) -> QueueActor | Topic:
        """The queue or topic of that name, or ``QueueNotFound``."""
        channel = self.channels.get(name)
        if channel is None:
            self._own_loop()  # a closed engine says so
            raise QueueNotFound(
                f"no queue {name!r}: create it first; a service does that by itself",
                backend="native",
                operation=operation,
                queue=name,
            )
        return channel

    def queue(self, name: str, operation: str, group: str | None = None) -> QueueActor:
        """The queue of that name, or a group's share of the topic of that name."""
        channel = self.find(name, operation)
        if isinstance(channel, QueueActor):
            return channel
        if group is None:
            raise Unsupported(
                f"{name!r} is a topic: name the group that consumes",
                backend="native",
                operation=operation,
                queue=name,
            )
        return channel.group(group)

    def actors(self, name: str, operation: str) -> list[QueueActor]:
        """A queue, or a topic's groups."""
        return _actors(self.find(name, operation))

    def all_actors(self) -> list[QueueActor]:
        """Every queue, and every group of every topic."""
        return [actor for channel in self.channels.values() for actor in _actors(channel)]

    def numbers(self) -> set[int]:
        """The numbers in the log of all queues, topics and groups that exist."""
        topics = {item.number for item in self.channels.values() if isinstance(item, Topic)}
        return topics | {
            actor.number for actor in self.all_actors() if isinstance(actor, DurableActor)
        }

    # Declaring

    def declare(
        self, name: str, config: QueueConfig, insisted: Collection[str] = ALL_FIELDS
    ) -> None:
        """Make sure that a queue exists with those fields of ``config`` that are insisted on.

        The others are what it gets if nobody says otherwise. Raises ``ConfigError`` when two
        declarations insist on different things. The name is taken as it is: a prefix or suffix
        may have made it longer than a channel's name can be.
        """
        self._own_loop()
        if config.dead_letter is not None and isinstance(
            self.channels.get(config.dead_letter), Topic
        ):
            raise ConfigError(
                f"{config.dead_letter!r} is a topic and cannot keep the dead letters of {name!r}",
                backend="native",
                operation="declare",
                queue=name,
            )
        channel = self.channels.get(name)
        if channel is None and len(self.channels) >= MAX_QUEUES and not config.drop_oldest:
            # But for the queues of dead letters, which are as many as the others at most.
            self.refused += 1
            raise ConfigError(
                f"the engine has {MAX_QUEUES} queues and takes no more: delete some, and name "
                "queues in the program, not in its data",
                backend="native",
                operation="declare",
                queue=name,
            )
        if channel is None:
            self.channels[name] = self._new(name, config, self._write(name, None, config))
            self._insisted[name] = _with_kind(insisted)
            return
        for field in sorted({*insisted, "broadcast"} & self._insisted[name]):
            new, old = getattr(config, field), getattr(channel.config, field)
            if new != old:
                raise ConfigError(
                    f"{name!r} was declared with {field}={old!r} and now with {new!r}: declare "
                    "it alike everywhere, or delete it first",
                    backend="native",
                    operation="declare",
                    queue=name,
                )
        self.reconfigure(channel, **{field: getattr(config, field) for field in insisted})
        self._insisted[name] |= frozenset(insisted)

    def reconfigure(self, channel: QueueActor | Topic, **changes: object) -> None:
        """Change some fields of what exists, whatever was insisted on."""
        config = replace(channel.config, **changes)  # type: ignore[arg-type]  # its own fields
        if config != channel.config:
            if self._journal is not None:
                assert isinstance(channel, DurableActor | Topic)
                self._journal.declare(channel.name, None, asdict(config), channel.number)
            channel.reconfigure(config)

    def of_bulk_file(self, name: str, config: Mapping[str, object]) -> QueueActor | Topic:
        """What a bulk file is for, made as it says unless it exists."""
        check_name(name)
        if name not in self.channels:
            usual: dict[str, object] = {"dead_letter": name + DEAD_LETTER_SUFFIX}
            self.declare(name, QueueConfig(**_known(usual | dict(config))), insisted=())
        return self.channels[name]

    def letters_of(self, actor: QueueActor) -> QueueActor:
        """The queue of an actor's dead letters, made by need."""
        name = actor.config.dead_letter
        assert name is not None
        if name not in self.channels:
            config = QueueConfig(
                max_depth=actor.config.dead_letter_max_depth,
                max_priority=actor.config.max_priority,
                max_deliveries=None,
                drop_oldest=True,
            )
            self.declare(name, config, insisted=())
        target = self.channels[name]
        assert isinstance(target, QueueActor)
        if not target.config.drop_oldest:  # made by hand: yet no dead letter may find it full
            self.reconfigure(target, drop_oldest=True)
        return target

    def delete(self, name: str) -> None:
        """Close a queue or topic and forget it with all that is in it."""
        channel = self.find(name, "delete")
        channel.close("the queue was deleted")
        if self._journal is not None:
            for actor in _actors(channel):
                assert isinstance(actor, DurableActor)
                self._journal.delete(actor.number, actor.state.everything())
            if isinstance(channel, Topic):
                self._journal.delete(channel.number, ())
        del self.channels[name], self._insisted[name]

    # Making

    def restore(self, replay: Replay, journal: Journal) -> dict[int, DurableActor]:
        """Everything that a log tells of, to be written down in ``journal``; by its number."""
        self._journal = journal
        for number, record in sorted(replay.queues.items()):
            if record.group is None:
                config = QueueConfig(**_known(record.config))
                self.channels[record.name] = self._new(record.name, config, number)
            else:
                topic = self.channels.get(record.name)
                if isinstance(topic, Topic):
                    topic.groups[record.group] = self._actor(
                        record.name, topic.config, number, record.group
                    )
            # The declarations of this run decide what they want; only the kind is given.
            self._insisted.setdefault(record.name, frozenset({"broadcast"}))
        for number in sorted(replay.assumed):
            record = replay.queues[number]
            journal.declare(record.name, record.group, record.config, number)
        actors = [actor for actor in self.all_actors() if isinstance(actor, DurableActor)]
        return {actor.number: actor for actor in actors}

    def _new(self, name: str, config: QueueConfig, number: int) -> QueueActor | Topic:
        if config.broadcast:
            return Topic(name, config, self._new_group, number)
        return self._actor(name, config, number)

    def _new_group(self, topic: Topic, group: str) -> QueueActor:
        check_name(group, "group")
        number = self._write(topic.name, group, topic.config)
        return self._actor(topic.name, topic.config, number, group)

    def _actor(
        self, name: str, config: QueueConfig, number: int, group: str | None = None
    ) -> QueueActor:
        manager, loop, journal = self._manager, self._own_loop(), self._journal
        if journal is None:
            return QueueActor(name, config, manager=manager, loop=loop, group=group)
        return DurableActor(
            name, config, manager=manager, loop=loop, journal=journal, number=number, group=group
        )

    def _write(self, name: str, group: str | None, config: QueueConfig) -> int:
        """Write a declaration down; the number under which it stands."""
        self._own_loop()
        if self._journal is None:
            return 0
        return self._journal.declare(name, group, {} if group is not None else asdict(config))


def _actors(channel: QueueActor | Topic) -> list[QueueActor]:
    return [channel] if isinstance(channel, QueueActor) else [*channel.groups.values()]


def _with_kind(insisted: Collection[str]) -> frozenset[str]:
    """These fields, and the kind, on which everybody insists; one set for all who name them all."""
    return ALL_FIELDS if insisted is ALL_FIELDS else frozenset({*insisted, "broadcast"})


def _known(config: Mapping[str, object]) -> dict[str, Any]:
    """The fields that this version knows: a later one may have written more."""
    return {name: value for name, value in config.items() if name in ALL_FIELDS}
