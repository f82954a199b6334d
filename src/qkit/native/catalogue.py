"""``Catalogue``: the queues and topics of an engine, by name."""

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
# Fields that follow the settings of the process that owns the directory, unless a declaration sets
# them. They are written to the log only once a declaration has set them.
OWNER_FIELDS: Final = frozenset({"max_depth", "max_priority", "ack_deadline"})
_FIXED_FIELDS: Final = frozenset({"broadcast", "max_deliveries"})  # always in the log
MAX_QUEUES: Final = 50_000
_DEFAULT_CONFIG: Final = QueueConfig()


class Catalogue:
    """Queues and topics of an engine, and which of their fields were set.

    Args:
        hooks: Interface of the engine that its queues use.
        own_loop: Returns the engine's loop. Raises ``LifecycleError`` if the engine is not open or
            if another loop is running.
        defaults: Values of the fields that no declaration has set.
    """

    def __init__(
        self,
        hooks: EngineHooks,
        own_loop: Callable[[], asyncio.AbstractEventLoop],
        defaults: QueueConfig,
    ) -> None:
        self.channels: dict[str, Queue | Topic] = {}
        self.rejected: int = 0  # number of declarations beyond MAX_QUEUES
        self._hooks = hooks
        self._own_loop = own_loop
        self._defaults = defaults
        self._journal: Journal | None = None
        self._set: dict[str, frozenset[str]] = {}  # names of the fields that were set, by queue
        self._sets: dict[frozenset[str], frozenset[str]] = {}
        # Queues declared since the engine was opened; with their configuration if ``create``
        # declared them.
        self._declared: dict[str, QueueConfig | None] = {}

    # Lookup

    def find(self, name: str, operation: str) -> Queue | Topic:
        """Return a queue or topic by name; raise ``QueueNotFound`` if there is none."""
        channel = self.channels.get(name)
        if channel is None:
            self._own_loop()  # raises if the engine is closed
            raise QueueNotFound(
                f"no queue {name!r}: create it first (a service creates its queues itself)",
                backend="native",
                operation=operation,
                queue=name,
            )
        return channel

    def queue(self, name: str, operation: str, group: str | None = None) -> Queue:
        """Return a queue by name; for a topic, the queue of one of its groups."""
        channel = self.find(name, operation)
        if isinstance(channel, Queue):
            return channel
        if group is None:
            raise Unsupported(
                f"{name!r} is a topic: pass the group that consumes it",
                backend="native",
                operation=operation,
                queue=name,
            )
        return channel.group(group)

    def actors(self, name: str, operation: str) -> list[Queue]:
        """Return a list with one queue or, for a topic, the queues of its groups."""
        return _actors(self.find(name, operation))

    def all_actors(self) -> list[Queue]:
        """Return all queues, including the queues of topic groups."""
        return [actor for channel in self.channels.values() for actor in _actors(channel)]

    def numbers(self) -> set[int]:
        """Return the log numbers of all queues, topics and groups."""
        topics = {item.number for item in self.channels.values() if isinstance(item, Topic)}
        return topics | {actor.number for actor in self.all_actors()}

    # Declarations

    def create(self, name: str, config: QueueConfig) -> None:
        """Ensure that a queue exists with exactly this configuration.

        Raises:
            ConfigError: The queue was created or declared differently since the engine was opened.
        """
        if name in self.channels and name in self._declared:
            created = self._declared[name]
            before = created or self.channels[name].config
            for field in sorted(ALL_FIELDS if created else self._set[name]):
                old, new = getattr(before, field), getattr(config, field)
                if new != old:
                    raise ConfigError(
                        f"{name!r} was declared with {field}={old!r} and now with {new!r}: use the "
                        "same value everywhere, or delete the queue first",
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
        """Ensure that a queue exists, and set fields of its configuration. The last call wins.

        The name is not checked, because a prefix or suffix may make it longer than a channel name
        may be.

        Args:
            name: Name of the queue or topic.
            fields: Fields of ``QueueConfig`` to set.
            defaults: Fields to set unless a declaration has set them. Default: none.

        Raises:
            ConfigError: The name is a topic and is declared as a queue or the reverse, or a field
                is invalid.
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
            self._check_count(name, config)
            set_fields = self._shared(changes)
            number = self._write(name, None, self._stored(config, set_fields))
            self.channels[name] = self._new(name, config, number)
            self._set[name] = set_fields
            return
        if config.broadcast is not channel.config.broadcast:
            kinds = ("a topic", "a queue") if channel.config.broadcast else ("a queue", "a topic")
            raise ConfigError(
                f"{name!r} was declared as {kinds[0]} and now as {kinds[1]}: declare it the same "
                "way everywhere, or delete it first",
                backend="native",
                operation="declare",
                queue=name,
            )
        self._reconfigure(channel, config, self._shared(known.union(changes)))

    def _check_dead_letter(self, name: str, config: QueueConfig) -> None:
        letters = config.dead_letter
        if letters is not None and isinstance(self.channels.get(letters), Topic):
            raise ConfigError(
                f"{letters!r} is a topic and cannot be the dead-letter queue of {name!r}",
                backend="native",
                operation="declare",
                queue=name,
            )

    def _check_count(self, name: str, config: QueueConfig) -> None:
        # A dead-letter queue may exceed the limit, because each other queue has at most one.
        if len(self.channels) >= MAX_QUEUES and not config.drop_oldest:
            self.rejected += 1
            raise ConfigError(
                f"the engine has {MAX_QUEUES} queues, which is the limit: delete some, and do not "
                "derive queue names from data",
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
        """Return a set that all queues with the same fields share, to save memory."""
        found = frozenset(names)
        return self._sets.setdefault(found, found)

    @staticmethod
    def _stored(config: QueueConfig, set_fields: frozenset[str]) -> dict[str, object]:
        """Return the fields to write to the log, without unset fields that follow a default."""
        if set_fields >= ALL_FIELDS:
            return asdict(config)
        left_out = OWNER_FIELDS - set_fields
        default = asdict(_DEFAULT_CONFIG)
        return {
            field: value
            for field, value in asdict(config).items()
            if field not in left_out
            and (field in set_fields or field in _FIXED_FIELDS or value != default[field])
        }

    def of_bulk_file(self, name: str, config: Mapping[str, object]) -> Queue | Topic:
        """Return a queue or topic of a bulk file; create it with ``config`` if it is missing."""
        check_name(name)
        if name not in self.channels:
            self._ensure(name, config, {"dead_letter": name + DEAD_LETTER_SUFFIX})
        return self.channels[name]

    def dead_letter_queue_of(self, actor: Queue) -> Queue:
        """Return the dead-letter queue of a queue; create it if it is missing."""
        name = actor.config.dead_letter
        assert name is not None
        if name not in self.channels:
            limit = actor.config.dead_letter_max_depth
            self._ensure(name, {"max_depth": limit, "drop_oldest": True}, {})
        target = self.channels[name]
        assert isinstance(target, Queue)
        if not target.config.drop_oldest:  # created by the user, but it must never be full
            self._ensure(name, {"drop_oldest": True}, {})
        return target

    def delete(self, name: str) -> None:
        """Close a queue or topic, and delete it with its messages."""
        channel = self.find(name, "delete")
        channel.close("the queue was deleted")
        if self._journal is not None:
            for actor in _actors(channel):
                self._journal.delete(actor.number, actor.state.all_messages())
            if isinstance(channel, Topic):
                self._journal.delete(channel.number, ())
        del self.channels[name], self._set[name]
        self._declared.pop(name, None)

    # Construction

    def restore(self, replay: Replay, journal: Journal) -> dict[int, Queue]:
        """Create the queues that a replay found; they record their changes in ``journal``.

        Returns:
            The queues by log number.
        """
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
        """Record a declaration; return the log number of the queue."""
        self._own_loop()
        if self._journal is None:
            return 0
        return self._journal.declare(name, group, config)


def _actors(channel: Queue | Topic) -> list[Queue]:
    return [channel] if isinstance(channel, Queue) else [*channel.groups.values()]


def _set_in(config: Mapping[str, object]) -> Mapping[str, object]:
    """Return the fields that a ``Declare`` record sets.

    A record of version 0.1 contains every field. In such a record, an owner field with the default
    value counts as not set, so that the queue follows the settings of its owner.
    """
    if not config.keys() >= ALL_FIELDS:
        return config
    default = asdict(_DEFAULT_CONFIG)
    return {
        field: value
        for field, value in config.items()
        if field not in OWNER_FIELDS or value != default[field]
    }


def _known(config: Mapping[str, object]) -> dict[str, Any]:
    """Return the fields that this version supports; a later version may have written others."""
    return {name: value for name, value in config.items() if name in ALL_FIELDS}
