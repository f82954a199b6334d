"""The queues and topics of an engine by their names: declared, found, changed, deleted."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, fields, replace
from typing import Any, Final

from qkit._internal.names import check_name
from qkit.errors import ConfigError, QueueNotFound, Unsupported
from qkit.native.config import QueueConfig
from qkit.native.queue.queue import EngineHooks, Queue
from qkit.native.queue.topic import Topic
from qkit.native.storage.journal import Journal
from qkit.native.storage.replay import Replay

__all__ = ["ALL_FIELDS", "DEAD_LETTER_SUFFIX", "Catalogue"]

DEAD_LETTER_SUFFIX: Final = "_dlq"
ALL_FIELDS: Final = frozenset(item.name for item in fields(QueueConfig))
# Fields that follow the settings of the process that owns the directory unless a declaration sets
# them. They are left out of the log until then.
OWNER_FIELDS: Final = frozenset({"max_depth", "max_priority", "ack_deadline"})
_FIXED_FIELDS: Final = frozenset({"broadcast", "max_deliveries"})  # always in the log
MAX_QUEUES: Final = 50_000
_USUAL: Final = QueueConfig()


class Catalogue:
    """Every queue and topic that exists, and which of its fields were set.

    ``own_loop`` returns the engine's loop, or raises where nothing may be declared. ``defaults``
    is the configuration of a queue for which nothing was set.
    """

    def __init__(
        self,
        hooks: EngineHooks,
        own_loop: Callable[[], asyncio.AbstractEventLoop],
        defaults: QueueConfig,
    ) -> None:
        self.channels: dict[str, Queue | Topic] = {}
        self.refused = 0  # because there were too many
        self._hooks = hooks
        self._own_loop = own_loop
        self._defaults = defaults
        self._journal: Journal | None = None
        self._set: dict[str, frozenset[str]] = {}  # the fields that were set, by queue
        self._sets: dict[frozenset[str], frozenset[str]] = {}
        # What was declared since the engine was opened, and how it was created if it was.
        self._declared: dict[str, QueueConfig | None] = {}

    # Finding

    def find(self, name: str, operation: str) -> Queue | Topic:
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

    def queue(self, name: str, operation: str, group: str | None = None) -> Queue:
        """The queue of that name, or a group's share of the topic of that name."""
        channel = self.find(name, operation)
        if isinstance(channel, Queue):
            return channel
        if group is None:
            raise Unsupported(
                f"{name!r} is a topic: name the group that consumes",
                backend="native",
                operation=operation,
                queue=name,
            )
        return channel.group(group)

    def actors(self, name: str, operation: str) -> list[Queue]:
        """A queue, or a topic's groups."""
        return _actors(self.find(name, operation))

    def all_actors(self) -> list[Queue]:
        """Every queue, and every group of every topic."""
        return [actor for channel in self.channels.values() for actor in _actors(channel)]

    def numbers(self) -> set[int]:
        """The numbers in the log of all queues, topics and groups that exist."""
        topics = {item.number for item in self.channels.values() if isinstance(item, Topic)}
        return topics | {actor.number for actor in self.all_actors()}

    # Declaring

    def create(self, name: str, config: QueueConfig) -> None:
        """Make sure that a queue exists; one that exists must have been made like this.

        Raises ``ConfigError`` if it was created or declared otherwise since the engine was opened.
        """
        if name in self.channels and name in self._declared:
            created = self._declared[name]
            before = created or self.channels[name].config
            for field in sorted(ALL_FIELDS if created else self._set[name]):
                old, new = getattr(before, field), getattr(config, field)
                if new != old:
                    raise ConfigError(
                        f"{name!r} was declared with {field}={old!r} and now with {new!r}: declare "
                        "it alike everywhere, or delete it first",
                        backend="native",
                        operation="create",
                        queue=name,
                    )
            if created:
                return
        self.declare(name, asdict(config))
        self._declared[name] = self.channels[name].config

    def declare(
        self,
        name: str,
        fields: Mapping[str, object],
        *,
        defaults: Mapping[str, object] | None = None,
    ) -> None:
        """Make sure that a queue exists, and set ``fields`` of it: the last declaration wins.

        ``defaults`` are set where no declaration has set anything. The name is taken as it is: a
        prefix or suffix may have made it longer than a channel's name can be. Raises
        ``ConfigError`` if the queue exists as the other kind.
        """
        self._ensure(name, fields, defaults or {})
        self._declared.setdefault(name, None)

    def _ensure(
        self, name: str, fields: Mapping[str, object], defaults: Mapping[str, object]
    ) -> None:
        self._own_loop()
        channel = self.channels.get(name)
        known = self._set.get(name, frozenset())
        changes = _known(fields)
        for field, value in defaults.items():
            if value is not None and field not in known:
                changes.setdefault(field, value)
        config = replace(self._defaults if channel is None else channel.config, **changes)
        self._check_dead_letter(name, config)
        if channel is None:
            self._check_room(name, config)
            set_fields = self._shared(changes)
            number = self._write(name, None, self._stored(config, set_fields))
            self.channels[name] = self._new(name, config, number)
            self._set[name] = set_fields
            return
        if config.broadcast is not channel.config.broadcast:
            kinds = ("a topic", "a queue") if channel.config.broadcast else ("a queue", "a topic")
            raise ConfigError(
                f"{name!r} was declared as {kinds[0]} and now as {kinds[1]}: declare it alike "
                "everywhere, or delete it first",
                backend="native",
                operation="declare",
                queue=name,
            )
        self._reconfigure(channel, config, self._shared(known.union(changes)))

    def _check_dead_letter(self, name: str, config: QueueConfig) -> None:
        letters = config.dead_letter
        if letters is not None and isinstance(self.channels.get(letters), Topic):
            raise ConfigError(
                f"{letters!r} is a topic and cannot keep the dead letters of {name!r}",
                backend="native",
                operation="declare",
                queue=name,
            )

    def _check_room(self, name: str, config: QueueConfig) -> None:
        # Dead-letter queues are not limited: there is at most one for each other queue.
        if len(self.channels) >= MAX_QUEUES and not config.drop_oldest:
            self.refused += 1
            raise ConfigError(
                f"the engine has {MAX_QUEUES} queues and takes no more: delete some, and name "
                "queues in the program, not in its data",
                backend="native",
                operation="declare",
                queue=name,
            )

    def _reconfigure(
        self, channel: Queue | Topic, config: QueueConfig, set_fields: frozenset[str]
    ) -> None:
        before = self._stored(channel.config, self._set[channel.name])
        after = self._stored(config, set_fields)
        self._set[channel.name] = set_fields
        if self._journal is not None and after != before:
            self._journal.declare(channel.name, None, after, channel.number)
        if config != channel.config:
            channel.reconfigure(config)

    def _shared(self, names: Collection[str]) -> frozenset[str]:
        """One set for all queues with the same fields: there may be many queues."""
        found = frozenset(names)
        return self._sets.setdefault(found, found)

    @staticmethod
    def _stored(config: QueueConfig, set_fields: frozenset[str]) -> dict[str, object]:
        """What the log says of a queue: everything but defaults that may change."""
        if set_fields >= ALL_FIELDS:
            return asdict(config)
        left_out = OWNER_FIELDS - set_fields
        usual = asdict(_USUAL)
        return {
            field: value
            for field, value in asdict(config).items()
            if field not in left_out
            and (field in set_fields or field in _FIXED_FIELDS or value != usual[field])
        }

    def of_bulk_file(self, name: str, config: Mapping[str, object]) -> Queue | Topic:
        """What a bulk file is for, made as it says unless it exists."""
        check_name(name)
        if name not in self.channels:
            self._ensure(name, config, {"dead_letter": name + DEAD_LETTER_SUFFIX})
        return self.channels[name]

    def dead_letter_queue_of(self, actor: Queue) -> Queue:
        """The queue of an actor's dead letters, made by need."""
        name = actor.config.dead_letter
        assert name is not None
        if name not in self.channels:
            limit = actor.config.dead_letter_max_depth
            self._ensure(name, {"max_depth": limit, "drop_oldest": True}, {})
        target = self.channels[name]
        assert isinstance(target, Queue)
        if not target.config.drop_oldest:  # made by hand: yet no dead letter may find it full
            self._ensure(name, {"drop_oldest": True}, {})
        return target

    def delete(self, name: str) -> None:
        """Close a queue or topic and forget it with all that is in it."""
        channel = self.find(name, "delete")
        channel.close("the queue was deleted")
        if self._journal is not None:
            for actor in _actors(channel):
                self._journal.delete(actor.number, actor.state.all_messages())
            if isinstance(channel, Topic):
                self._journal.delete(channel.number, ())
        del self.channels[name], self._set[name]
        self._declared.pop(name, None)

    # Making

    def restore(self, replay: Replay, journal: Journal) -> dict[int, Queue]:
        """Everything that a log tells of, to be written down in ``journal``; by its number."""
        self._journal = journal
        for number, record in sorted(replay.queues.items()):
            if record.group is None:
                values = _known(_set_in(record.config))
                config = replace(self._defaults, **values)
                self._set[record.name] = self._shared(values)
                self.channels[record.name] = self._new(record.name, config, number)
            else:
                topic = self.channels.get(record.name)
                if isinstance(topic, Topic):
                    topic.groups[record.group] = self._actor(
                        record.name, topic.config, number, record.group
                    )
        for number in sorted(replay.assumed):
            record = replay.queues[number]
            journal.declare(record.name, record.group, record.config, number)
        return {actor.number: actor for actor in self.all_actors()}

    def _new(self, name: str, config: QueueConfig, number: int) -> Queue | Topic:
        if config.broadcast:
            return Topic(name, config, self._new_group, number)
        return self._actor(name, config, number)

    def _new_group(self, topic: Topic, group: str) -> Queue:
        check_name(group, "group")
        number = self._write(topic.name, group, {})
        return self._actor(topic.name, topic.config, number, group)

    def _actor(
        self, name: str, config: QueueConfig, number: int, group: str | None = None
    ) -> Queue:
        return Queue(
            name,
            config,
            hooks=self._hooks,
            loop=self._own_loop(),
            group=group,
            journal=self._journal,
            number=number,
        )

    def _write(self, name: str, group: str | None, config: dict[str, object]) -> int:
        """Write a declaration down; the number under which it stands."""
        self._own_loop()
        if self._journal is None:
            return 0
        return self._journal.declare(name, group, config)


def _actors(channel: Queue | Topic) -> list[Queue]:
    return [channel] if isinstance(channel, Queue) else [*channel.groups.values()]


def _set_in(config: Mapping[str, object]) -> Mapping[str, object]:
    """The fields that a record of the log sets.

    A record of version 0.1 names every field. There, what equals the default counts as not set, so
    that the queue follows the settings of its owner as others do.
    """
    if not config.keys() >= ALL_FIELDS:
        return config
    usual = asdict(_USUAL)
    return {
        field: value
        for field, value in config.items()
        if field not in OWNER_FIELDS or value != usual[field]
    }


def _known(config: Mapping[str, object]) -> dict[str, Any]:
    """The fields that this version knows: a later one may have written more."""
    return {name: value for name, value in config.items() if name in ALL_FIELDS}
