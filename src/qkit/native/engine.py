"""``Engine``: the native engine, with queues and topics inside this process, without a broker.

``catalogue.py`` maps names to queues; this module publishes to them, consumes from them and closes
them. An engine belongs to the event loop that opened it. Calls from other threads run in that loop
(``cross_thread.py``). An engine with a directory is durable (``storage/journal.py``,
``log/log.py``).
"""

from __future__ import annotations

import asyncio
import builtins  # Engine.list shadows the built-in list
import contextlib
import logging
import os
import sys
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import Final, Self

from qkit._internal.clock import Clock, SystemClock
from qkit._internal.forks import watch_forks
from qkit._internal.ids import new_id
from qkit._internal.loop_calls import require_asyncio
from qkit._internal.names import check_name
from qkit.backend import QueueStats
from qkit.errors import (
    ConsumerNotFound,
    InvalidBody,
    InvalidName,
    LifecycleError,
    QueueError,
    Unsupported,
)
from qkit.message import DeadLetter, Envelope, Sent
from qkit.native.catalogue import DEAD_LETTER_SUFFIX, Catalogue
from qkit.native.config import Balance, QueueConfig
from qkit.native.cross_thread import LoopPortal, callable_from_any_thread, get_ident
from qkit.native.dead_letter_router import DeadLetterRouter
from qkit.native.delivery import Delivery
from qkit.native.log.disk import Disk
from qkit.native.queue.consumers import DEFAULT_PREFETCH, Consumer, Consumers
from qkit.native.queue.queue import Queue
from qkit.native.queue.topic import Topic
from qkit.native.storage.history import StatusChange
from qkit.native.storage.journal import Journal
from qkit.native.storage.storage import Fsync, Storage
from qkit.native.storage.write_batch import PendingMessage

__all__ = ["Engine"]

logger: logging.Logger = logging.getLogger("qkit.native")

RESTORE_BATCH_SIZE: Final = 1_000
MAX_BACKLOG_BEFORE_YIELD: Final = 50  # messages; above this, a send lets consumers run first
MEMORY_LIMIT: Final = 64 << 20  # bytes
UNLIMITED: Final = QueueConfig(max_deliveries=None)


class Engine:
    """Queues and topics, in memory (``Engine()``) or in a directory (``await Engine.open(path)``).

    Use an engine as an async context manager, once. Its coroutines, and those of a ``Delivery``,
    may be awaited in any thread and event loop while the loop that opened the engine runs, except
    where a method says otherwise. In a forked child process they raise ``LifecycleError``.

    Args:
        clock: Source of time. Default: the system clock.
        defaults: Values of the fields that ``declare`` or a bulk file does not set. ``create`` does
            not use them. Default: ``QueueConfig(max_deliveries=None)``.

    Example:
        >>> import asyncio
        >>> from qkit.native import Engine
        >>> async def main() -> None:
        ...     async with Engine() as engine:
        ...         await engine.create("orders")
        ...         await engine.publish("orders", b"one", priority=8)
        ...         delivery = await engine.consume("orders", timeout=5)
        ...         print(delivery.body, delivery.retry_count)
        ...         await delivery.ack()
        >>> asyncio.run(main())
        b'one' 0
    """

    def __init__(self, *, clock: Clock | None = None, defaults: QueueConfig | None = None) -> None:
        self.clock: Clock = clock if clock is not None else SystemClock()
        self.portal: LoopPortal = LoopPortal()
        self._now = self.clock.monotonic
        self._loop: asyncio.AbstractEventLoop | None = None
        self._storage: Storage | None = None
        self._journal: Journal | None = None
        self._entered = False
        self._closed = False
        self._dead_letters = DeadLetterRouter(self.clock, self.portal)
        self.catalogue: Catalogue = Catalogue(
            self._dead_letters, self._own_loop, defaults or UNLIMITED
        )
        self._dead_letters.target_of = self.catalogue.dead_letter_queue_of
        self._channels = self.catalogue.channels
        watch_forks(self)

    # Lifecycle

    @classmethod
    async def open(
        cls,
        path: str | os.PathLike[str],
        *,
        fsync: Fsync = "always",
        fsync_interval: float = 1.0,
        memory_limit: int = MEMORY_LIMIT,
        repair: bool = False,
        clock: Clock | None = None,
        defaults: QueueConfig | None = None,
    ) -> Engine:
        """Open a durable engine in a directory, and recover its messages.

        Messages that were in flight are delivered again and keep their attempt counts.

        Args:
            path: Directory of the engine; created if missing.
            fsync: When ``publish`` returns. ``"always"`` (the default): when the message is on
                disk. ``"interval"``: when the operating system has the message, which is on disk
                at most ``fsync_interval`` seconds later. ``"never"``: when the operating system
                has the message.
            fsync_interval: Maximum time until written records are synced, in seconds. Default: 1.
            memory_limit: Bytes of message bodies that are kept in memory; other bodies stay on
                disk. Default: 64 MiB.
            repair: Keep the intact records of a damaged log instead of raising ``LogDamaged``.
                Default: false.
            clock: Source of time. Default: the system clock.
            defaults: Values of the fields that ``declare`` or a bulk file does not set. ``create``
                does not use them. Default: ``QueueConfig(max_deliveries=None)``.

        Returns:
            The open engine. Close it with ``aclose`` or ``async with``.

        Raises:
            LogLocked: Another process has the directory open.
            LogDamaged: Stored messages cannot be read, and ``repair`` is false.
            LogVersion: This version of qkit does not read the format of the log.
            StorageError: The directory cannot be used.

        Example:
            >>> import asyncio, tempfile
            >>> from qkit.native import Engine
            >>> async def main() -> None:
            ...     with tempfile.TemporaryDirectory() as path:
            ...         async with await Engine.open(path) as engine:
            ...             await engine.create("orders")
            ...             print(engine.durable)
            >>> asyncio.run(main())
            True
        """
        require_asyncio("Engine.open")  # before the directory is locked
        engine = cls(clock=clock, defaults=defaults)
        storage = Storage(
            Disk(path),
            clock=engine.clock,
            fsync=fsync,
            fsync_interval=fsync_interval,
            memory_limit=memory_limit,
            repair=repair,
        )
        await engine.attach(storage)
        return engine

    async def attach(self, storage: Storage) -> None:
        """Recover the messages in a storage, and record every change there from now on.

        ``open`` calls this method. Tests call it with their own storage.

        Args:
            storage: Storage that is not started yet. The engine closes it.

        Raises:
            LogDamaged: Stored messages cannot be read.
            LogVersion: This version of qkit does not read the format of the log.
            StorageError: The directory cannot be used.

        Example:
            >>> import asyncio, tempfile
            >>> from qkit.native import Engine
            >>> async def main() -> None:
            ...     with tempfile.TemporaryDirectory() as path:
            ...         async with Engine() as engine:
            ...             await engine.attach(Storage(Disk(path), clock=engine.clock))
            ...             print(engine.durable)
            >>> asyncio.run(main())
            True
        """
        loop = require_asyncio("Engine.attach")
        replay = await storage.recover()
        self._loop, self._storage, self._journal = loop, storage, storage.journal
        self.portal.open(loop)
        try:
            actors = self.catalogue.restore(replay, storage.journal)
            if replay.orphans:
                names = ", ".join(replay.orphans)
                logger.warning("queues whose declarations were lost got new names: %s", names)
            recovered, storage.recovered = storage.recovered, []
            for at, message in enumerate(recovered):
                if at % RESTORE_BATCH_SIZE == 0:
                    await asyncio.sleep(0)  # let other tasks run
                actor = actors.get(message.queue)
                if actor is not None:
                    actor.restore(message)
            for actor in actors.values():
                actor.resume()
            await self._dead_letters.finish_background()
            storage.start(self.catalogue.numbers, self.import_bulk_files)
        except BaseException:
            await self.aclose()
            raise

    @property
    def running(self) -> bool:
        """Whether the engine is open.

        Example:
            >>> Engine().running
            False
        """
        return self._loop is not None and not self._closed

    @property
    def closed(self) -> bool:
        """Whether the engine was closed. A closed engine cannot be reopened.

        Example:
            >>> Engine().closed
            False
        """
        return self._closed

    @property
    def durable(self) -> bool:
        """Whether the engine stores its messages in a directory.

        Example:
            >>> Engine().durable
            False
        """
        return self._storage is not None

    @property
    def read_only(self) -> bool:
        """Whether the disk failed so that the engine accepts no messages until it is reopened.

        Example:
            >>> Engine().read_only
            False
        """
        return self._storage is not None and self._storage.log.read_only

    @property
    def storage(self) -> Storage:
        """Storage of a durable engine; raises ``Unsupported`` for an engine in memory.

        Example:
            >>> Engine().storage
            Traceback (most recent call last):
            ...
            qkit.errors.Unsupported: ...
        """
        if self._storage is None:
            raise Unsupported(
                "this engine is in memory and has no directory: use Engine.open", backend="native"
            )
        return self._storage

    async def __aenter__(self) -> Self:
        self.portal.check_process()
        if self._entered or self._closed:
            raise LifecycleError("an engine can be opened only once: create a new one")
        self._entered = True
        if self._loop is None:
            self._loop = require_asyncio("Engine")
            self.portal.open(self._loop)
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Close every queue and write pending records. Idempotent.

        Waiting ``consume`` calls raise ``SubscriptionLost``.

        Raises:
            ReadOnly: The last sync failed. The engine is closed anyway.

        Example:
            >>> import asyncio
            >>> from qkit.native import Engine
            >>> async def main() -> None:
            ...     engine = Engine()
            ...     await engine.aclose()
            ...     print(engine.closed)
            >>> asyncio.run(main())
            True
        """
        if self.portal.in_fork:
            self._closed = True  # everything else belongs to the process that opened the engine
            return
        if get_ident() != self.portal.thread and (self._closed or self.portal.accepts_calls):
            with contextlib.suppress(LifecycleError):  # already closed
                await self.portal.run(self.aclose)
            return
        was_open, self._closed = self.portal.close(), True
        await self._dead_letters.finish_background()
        for channel in self._channels.values():
            channel.close("the engine was closed")
        for actor in self.catalogue.all_actors():
            actor.suspend()
        self._channels.clear()
        if self._storage is not None:
            await self._storage.close()
        if was_open and self._loop is asyncio.get_running_loop():
            await self.portal.wait_drained()

    def after_fork(self) -> None:
        """Make every use in a forked child process raise ``LifecycleError``, if the engine is open.

        The child closes its descriptors, so that it does not keep the directory locked after the
        end of the process that opened the engine.

        Example:
            >>> engine = Engine()
            >>> engine.after_fork()
            >>> engine.check_process()  # not open yet: it can be opened in the child
        """
        if self._loop is None:
            return
        self.portal.after_fork()
        self._channels.clear()  # so that no call finds a queue
        if self._storage is not None:
            self._storage.log.disk.close()

    def check_process(self) -> None:
        """Raise ``LifecycleError`` in a fork of the process that opened the engine.

        Example:
            >>> Engine().check_process()
        """
        self.portal.check_process()

    def _own_loop(self) -> asyncio.AbstractEventLoop:
        """Return the engine's loop; raise ``LifecycleError`` unless it is the running loop.

        This is too slow to call for each message.
        """
        self.portal.check_process()
        if self._closed or self._loop is None:
            state = "closed" if self._closed else "not open: use 'async with Engine() as engine'"
            raise LifecycleError(f"the engine is {state}", backend="native")
        if self._loop is not asyncio.get_running_loop():
            raise LifecycleError(
                "the engine belongs to another event loop: call it from the loop that opened it",
                backend="native",
            )
        return self._loop

    # Queues

    @callable_from_any_thread
    async def create(
        self,
        name: str,
        *,
        broadcast: bool = False,
        max_depth: int = 100_000,
        max_priority: int = 9,
        max_retries: int | None = 3,
        ack_deadline: float = 30.0,
        dead_letter: bool = True,
        dead_letter_max_depth: int = 10_000,
        backoff: float = 0.0,
        max_backoff: float = 60.0,
        balance: Balance = "round_robin",
    ) -> None:
        """Create a queue or topic. Does nothing if it was created with the same options.

        Args:
            name: Name of the queue or topic.
            broadcast: Create a topic instead of a queue. Default: false.
            max_depth: Maximum number of messages in the queue. Default: 100,000.
            max_priority: Highest priority that a message may have, at most 255. Default: 9.
            max_retries: Number of redeliveries after a ``nack`` or an expired lease. ``None``: no
                limit. Default: 3.
            ack_deadline: Length of a lease in seconds. Default: 30.
            dead_letter: Move messages that failed for good to ``{name}_dlq``. If false, they are
                dropped. Default: true.
            dead_letter_max_depth: Maximum number of dead letters; the oldest are dropped.
                Default: 10,000.
            backoff: Seconds before the first redelivery after a ``nack``; doubles with each further
                one. Default: 0.
            max_backoff: Upper limit of ``backoff`` in seconds. Default: 60.
            balance: Which of several waiting consumers receives a message: ``"round_robin"``
                (the longest waiting; the default), ``"least_busy"`` (the one with the fewest
                messages in flight) or ``"random"``.

        Raises:
            ConfigError: The queue exists with other options, or an option is invalid.
            InvalidName: The name is invalid.

        Example:
            >>> import asyncio
            >>> from qkit.native import Engine
            >>> async def main() -> None:
            ...     async with Engine() as engine:
            ...         await engine.create("orders", max_retries=5, backoff=0.5)
            ...         await engine.create("news", broadcast=True)
            ...         print(await engine.list())
            >>> asyncio.run(main())
            ['news', 'orders']
        """
        check_name(name)
        config = QueueConfig(
            broadcast=broadcast,
            max_depth=max_depth,
            max_priority=max_priority,
            max_deliveries=None if max_retries is None else max_retries + 1,
            ack_deadline=ack_deadline,
            dead_letter=name + DEAD_LETTER_SUFFIX if dead_letter else None,
            dead_letter_max_depth=dead_letter_max_depth,
            backoff=backoff,
            max_backoff=max_backoff,
            balance=balance,
        )
        self.catalogue.create(name, config)
        await self.written()

    async def declare(
        self,
        name: str,
        fields: Mapping[str, object],
        *,
        defaults: Mapping[str, object] | None = None,
    ) -> None:
        """Ensure that a queue exists, and set fields of its ``QueueConfig``. The last call wins.

        Unlike ``create``, this method accepts any name, and different values for an existing
        queue. Call it only in the engine's loop.

        Args:
            name: Name of the queue or topic.
            fields: Fields of ``QueueConfig`` to set.
            defaults: Fields to set unless a declaration has set them. Default: none.

        Raises:
            ConfigError: The name is a topic and is declared as a queue or the reverse, or a field
                is invalid.

        Example:
            >>> import asyncio
            >>> from qkit.native import Engine
            >>> async def main() -> None:
            ...     async with Engine() as engine:
            ...         await engine.declare("orders", {"max_depth": 1000})
            ...         print(await engine.list())
            >>> asyncio.run(main())
            ['orders']
        """
        self.catalogue.declare(name, fields, defaults=defaults)
        await self.written()

    def __contains__(self, name: object) -> bool:
        return name in self._channels

    def check_exists(self, name: str, operation: str) -> None:
        """Raise ``QueueNotFound`` unless the queue or topic exists.

        Args:
            name: Name of the queue or topic.
            operation: Name of the operation, for the error.

        Raises:
            QueueNotFound: There is no such queue or topic.

        Example:
            >>> import asyncio
            >>> from qkit.native import Engine
            >>> async def main() -> None:
            ...     async with Engine() as engine:
            ...         await engine.create("orders")
            ...         engine.check_exists("orders", "report")
            >>> asyncio.run(main())
        """
        self.catalogue.find(name, operation)

    def queue(self, name: str, operation: str, group: str | None = None) -> Queue:
        """Return a queue, or the queue of a topic's group. Call this only in the engine's loop.

        A group that does not exist is created.

        Args:
            name: Name of the queue or topic.
            operation: Name of the operation, for the error.
            group: Group of a topic. Default: none; required for a topic.

        Returns:
            The queue.

        Raises:
            QueueNotFound: There is no such queue or topic.
            Unsupported: The name is a topic, and ``group`` is missing.

        Example:
            >>> import asyncio
            >>> from qkit.native import Engine
            >>> async def main() -> None:
            ...     async with Engine() as engine:
            ...         await engine.create("orders")
            ...         print(engine.queue("orders", "report").name)
            >>> asyncio.run(main())
            orders
        """
        return self.catalogue.queue(name, operation, group)

    @callable_from_any_thread
    async def written(self) -> None:
        """Wait until all changes so far survive a crash of this process.

        Returns immediately for an engine in memory.

        Raises:
            StorageError: The changes could not be written.

        Example:
            >>> import asyncio
            >>> from qkit.native import Engine
            >>> async def main() -> None:
            ...     async with Engine() as engine:
            ...         await engine.written()
            >>> asyncio.run(main())
        """
        if self._journal is not None:
            written = self._journal.written()
            if written is not None:
                await written

    @callable_from_any_thread
    async def delete(self, name: str) -> None:
        """Delete a queue or topic and its messages. Its dead-letter queue stays.

        Args:
            name: Name of the queue or topic.

        Raises:
            QueueNotFound: There is no such queue or topic.

        Example:
            >>> import asyncio
            >>> from qkit.native import Engine
            >>> async def main() -> None:
            ...     async with Engine() as engine:
            ...         await engine.create("orders")
            ...         await engine.delete("orders")
            ...         print(await engine.list())
            >>> asyncio.run(main())
            []
        """
        self.catalogue.delete(name)
        await self.written()

    @callable_from_any_thread
    async def list(self) -> builtins.list[str]:
        """Return the names of all queues and topics.

        Returns:
            The names, sorted.

        Example:
            >>> import asyncio
            >>> from qkit.native import Engine
            >>> async def main() -> None:
            ...     async with Engine() as engine:
            ...         await engine.create("orders")
            ...         print(await engine.list())
            >>> asyncio.run(main())
            ['orders']
        """
        return sorted(self._channels)

    @callable_from_any_thread
    async def stats(self, name: str) -> QueueStats:
        """Return the current statistics of a queue or topic.

        Args:
            name: Name of the queue or topic.

        Returns:
            The statistics. Those of a topic cover all its groups.

        Raises:
            QueueNotFound: There is no such queue or topic.

        Example:
            >>> import asyncio
            >>> from qkit.native import Engine
            >>> async def main() -> None:
            ...     async with Engine() as engine:
            ...         await engine.create("orders")
            ...         await engine.publish("orders", b"one")
            ...         print((await engine.stats("orders")).depth)
            >>> asyncio.run(main())
            1
        """
        return self.catalogue.find(name, "stats").stats()

    @callable_from_any_thread
    async def peek(self, name: str, limit: int = 1) -> builtins.list[Envelope]:
        """Return the next messages without consuming them.

        Args:
            name: Name of the queue or topic.
            limit: Maximum number of messages to return. Default: 1.

        Returns:
            The messages in order of delivery, scheduled ones last.

        Raises:
            QueueNotFound: There is no such queue or topic.
            LogDamaged: The body of a message cannot be read.

        Example:
            >>> import asyncio
            >>> from qkit.native import Engine
            >>> async def main() -> None:
            ...     async with Engine() as engine:
            ...         await engine.create("orders")
            ...         await engine.publish("orders", b"one")
            ...         print([item.body for item in await engine.peek("orders")])
            >>> asyncio.run(main())
            [b'one']
        """
        return await self.catalogue.find(name, "peek").browse(limit)

    @callable_from_any_thread
    async def purge(self, name: str) -> int:
        """Delete every message of a queue or topic that is not in flight.

        Args:
            name: Name of the queue or topic.

        Returns:
            The number of deleted messages.

        Raises:
            QueueNotFound: There is no such queue or topic.

        Example:
            >>> import asyncio
            >>> from qkit.native import Engine
            >>> async def main() -> None:
            ...     async with Engine() as engine:
            ...         await engine.create("orders")
            ...         await engine.publish("orders", b"one")
            ...         print(await engine.purge("orders"))
            >>> asyncio.run(main())
            1
        """
        removed = sum(actor.purge() for actor in self.catalogue.actors(name, "purge"))
        await self.written()
        return removed

    @callable_from_any_thread
    async def remove(self, name: str, ids: Collection[str]) -> int:
        """Delete messages by id, unless they are in flight.

        Args:
            name: Name of the queue or topic.
            ids: Ids of the messages. Unknown ids are ignored.

        Returns:
            The number of deleted messages.

        Raises:
            QueueNotFound: There is no such queue or topic.

        Example:
            >>> import asyncio
            >>> from qkit.native import Engine
            >>> async def main() -> None:
            ...     async with Engine() as engine:
            ...         await engine.create("orders")
            ...         sent = await engine.publish("orders", b"one")
            ...         print(await engine.remove("orders", [sent.message_id]))
            >>> asyncio.run(main())
            1
        """
        removed = sum(actor.remove(ids) for actor in self.catalogue.actors(name, "remove"))
        await self.written()
        return removed

    # Consumers

    @callable_from_any_thread
    async def register(
        self,
        queue: str,
        consumer: str,
        prefetch: int = DEFAULT_PREFETCH,
        *,
        group: str | None = None,
    ) -> None:
        """Register a named consumer, or change the prefetch of a registered one.

        Pass the name of the consumer to ``consume``.

        Args:
            queue: Name of the queue or topic.
            consumer: Name of the consumer.
            prefetch: Number of unsettled messages that the consumer may hold, 1–1000. Default: 10.
            group: Group of a topic. Default: none; required for a topic.

        Raises:
            ConfigError: ``prefetch`` is out of range.
            InvalidName: The name of the consumer or of a new group is invalid.
            QueueNotFound: There is no such queue or topic.
            Unsupported: ``queue`` is a topic, and ``group`` is missing.

        Example:
            >>> import asyncio
            >>> from qkit.native import Engine
            >>> async def main() -> None:
            ...     async with Engine() as engine:
            ...         await engine.create("orders")
            ...         await engine.register("orders", "worker-1", prefetch=2)
            ...         print((await engine.consumers("orders"))[0].prefetch)
            >>> asyncio.run(main())
            2
        """
        actor = self.catalogue.queue(queue, "register", group)
        check_name(consumer, "consumer")
        if actor.members is None:
            actor.members = Consumers(queue, actor.state.leases.busy)
        if actor.members.register(consumer, prefetch):
            actor.consumers += 1

    @callable_from_any_thread
    async def unregister(self, queue: str, consumer: str, *, group: str | None = None) -> None:
        """Remove a registered consumer, and release its messages without counting an attempt.

        Its waiting ``consume`` calls raise ``ConsumerNotFound``.

        Args:
            queue: Name of the queue or topic.
            consumer: Name of the consumer.
            group: Group of a topic. Default: none; required for a topic.

        Raises:
            ConsumerNotFound: The consumer is not registered.
            QueueNotFound: There is no such queue or topic.
            Unsupported: ``queue`` is a topic, and ``group`` is missing.

        Example:
            >>> import asyncio
            >>> from qkit.native import Engine
            >>> async def main() -> None:
            ...     async with Engine() as engine:
            ...         await engine.create("orders")
            ...         await engine.register("orders", "worker-1")
            ...         await engine.unregister("orders", "worker-1")
            ...         print(await engine.consumers("orders"))
            >>> asyncio.run(main())
            []
        """
        actor = self.catalogue.queue(queue, "unregister", group)
        if actor.members is None:
            raise ConsumerNotFound(
                f"no consumer {consumer!r} on this queue: register it first",
                backend="native",
                operation="unregister",
                queue=queue,
            )
        actor.members.unregister(consumer)
        actor.consumers -= 1
        actor.wake_consumer(consumer)
        for token in actor.state.leases.held_by(consumer):
            actor.release(token, count_attempt=False)
        await self.written()

    @callable_from_any_thread
    async def consumers(self, queue: str) -> builtins.list[Consumer]:
        """Return the consumers of a queue, or of all groups of a topic.

        Args:
            queue: Name of the queue or topic.

        Returns:
            Registered consumers, then subscriptions.

        Raises:
            QueueNotFound: There is no such queue or topic.

        Example:
            >>> import asyncio
            >>> from qkit.native import Engine
            >>> async def main() -> None:
            ...     async with Engine() as engine:
            ...         await engine.create("orders")
            ...         await engine.register("orders", "worker-1")
            ...         print([item.consumer for item in await engine.consumers("orders")])
            >>> asyncio.run(main())
            ['worker-1']
        """
        found: builtins.list[Consumer] = []
        for actor in self.catalogue.actors(queue, "consumers"):
            if actor.members is not None:
                found += actor.members.listed(actor.group)
            found += [subscriber.listed() for subscriber in actor.subscribed]
        return found

    @callable_from_any_thread
    async def import_bulk_files(self) -> int:
        """Import the bulk files that other processes have published.

        A running engine does this every second. Queues that do not exist are created. A file that
        cannot be imported stays in the inbox; the first such error is raised after the other files
        are imported.

        Returns:
            The number of imported messages.

        Raises:
            LogDamaged: A file is damaged.
            InvalidName: A file declares a queue with an invalid name.
            ConfigError: A file declares an invalid configuration.
            Unsupported: The engine is in memory.

        Example:
            >>> import asyncio, tempfile
            >>> from qkit.native import Engine
            >>> async def main() -> None:
            ...     with tempfile.TemporaryDirectory() as path:
            ...         async with await Engine.open(path) as engine:
            ...             print(await engine.import_bulk_files())
            >>> asyncio.run(main())
            0
        """
        return await self.storage.import_bulk_files(self.catalogue.of_bulk_file)

    @callable_from_any_thread
    async def history(self, message_id: str) -> builtins.list[StatusChange]:
        """Return the status changes of a message that the log still contains.

        Compaction eventually removes the changes of settled messages.

        Args:
            message_id: Id of the message.

        Returns:
            The changes, oldest first.

        Raises:
            Unsupported: The engine is in memory.

        Example:
            >>> import asyncio, tempfile
            >>> from qkit.native import Engine
            >>> async def main() -> None:
            ...     with tempfile.TemporaryDirectory() as path:
            ...         async with await Engine.open(path) as engine:
            ...             await engine.create("orders")
            ...             sent = await engine.publish("orders", b"one")
            ...             history = await engine.history(sent.message_id)
            ...             print([str(change.status) for change in history])
            >>> asyncio.run(main())
            ['Pending']
        """
        return await self.storage.history(message_id)

    # Messages

    async def publish(
        self,
        queue: str,
        body: bytes,
        priority: int | None = None,
        *,
        delay: float | None = None,
        ttl: float | None = None,
        headers: Mapping[str, str] | None = None,
        key: str | None = None,
        message_id: str | None = None,
        wait: float | None = 0,
    ) -> Sent:
        """Publish a message.

        Args:
            queue: Name of the queue or topic.
            body: Body of the message.
            priority: Priority of the message; a higher priority is delivered first. Default: 5, or
                the queue's ``max_priority`` if that is lower.
            delay: Seconds until the message may be delivered. Default: none.
            ttl: Seconds until the message expires and becomes a dead letter. Default: never.
            headers: Headers of the message. Default: none.
            key: Key of the message. Default: none.
            message_id: Id of the message. Default: a new id.
            wait: Seconds to wait for capacity while the queue is full. ``None``: no limit.
                Default: 0.

        Returns:
            The id of the message, and the number of messages ahead of it in the queue (``None`` for
            a delayed message or a topic).

        Raises:
            QueueNotFound: There is no such queue or topic.
            QueueFull: The queue is still full after ``wait`` seconds.
            InvalidPriority: ``priority`` is outside the queue's range.
            InvalidBody: ``body`` is not bytes.
            ValueError: ``delay`` is not less than ``ttl``, or one of them is out of range.
            StorageError: The message could not be written to disk.

        Example:
            >>> import asyncio
            >>> from qkit.native import Engine
            >>> async def main() -> None:
            ...     async with Engine() as engine:
            ...         await engine.create("orders")
            ...         await engine.publish("orders", b"one", headers={"tenant": "acme"})
            ...         print((await engine.publish("orders", b"two")).position)
            >>> asyncio.run(main())
            1
        """
        if not isinstance(body, bytes):
            raise InvalidBody(f"expected a body of bytes, got {type(body).__name__}", queue=queue)
        if wait != 0 or get_ident() != self.portal.thread:
            publish = partial(  # a closure would make every publish slower
                self.publish,
                queue,
                body,
                priority,
                delay=delay,
                ttl=ttl,
                headers=headers,
                key=key,
                message_id=message_id,
            )
            if get_ident() != self.portal.thread:
                return await self.portal.run(partial(publish, wait=wait))
            _times(0.0, delay, ttl)  # reject invalid times before waiting
            return await self._publish_after_wait(queue, wait, publish)
        channel = self._channels.get(queue) or self.catalogue.find(queue, "publish")
        if message_id is None:
            message_id = new_id()
        now = self._now()
        due = expires = None
        if delay is not None or ttl is not None:
            due, expires = _times(now, delay, ttl)
        own = dict(headers) if headers else None
        if self._journal is None:
            position = channel.put(now, message_id, body, own, key, priority, due, expires)
        else:
            queues, own = channel.reserve(message_id, own, priority)
            message = message_id, body, own, key, priority, due, expires, queues
            (position,) = await self._journal.publish((message,))
        # Twice as fast as Sent(…). The type checker does not know the __new__ of a generic class.
        return tuple.__new__(Sent, (message_id, position))  # pyright: ignore[reportUnknownMemberType]

    async def _publish_after_wait(
        self, queue: str, wait: float | None, publish: Callable[[], Awaitable[Sent]]
    ) -> Sent:
        """Wait for capacity, at most ``wait`` seconds (``None``: no limit), then publish."""
        channel = self.catalogue.find(queue, "publish")
        await channel.wait_for_capacity(wait)
        try:
            return await publish()
        finally:
            channel.wake_capacity_waiters()

    async def publish_many(
        self, queue: str, envelopes: Sequence[Envelope]
    ) -> builtins.list[Sent | QueueError]:
        """Publish messages in order. Call this only in the engine's loop.

        Args:
            queue: Name of the queue or topic.
            envelopes: Messages to publish.

        Returns:
            For each message, its id and position, or the error for which it was rejected.

        Raises:
            QueueNotFound: There is no such queue or topic.
            StorageError: The messages could not be written to disk.

        Example:
            >>> import asyncio
            >>> from qkit.native import Engine
            >>> async def main() -> None:
            ...     async with Engine() as engine:
            ...         await engine.create("orders")
            ...         messages = [Envelope("1", b"one"), Envelope("2", b"two")]
            ...         sent = await engine.publish_many("orders", messages)
            ...         print([item.message_id for item in sent])
            >>> asyncio.run(main())
            ['1', '2']
        """
        channel = self._channels.get(queue) or self.catalogue.find(queue, "publish")
        if channel.consumers and channel.backlog >= MAX_BACKLOG_BEFORE_YIELD:
            # In memory, nothing below suspends, so sends in a loop would starve the consumers in
            # the same event loop. For each batch of the usual size, give the consumers one loop
            # iteration to fetch messages and one to handle them.
            for _ in range(2 * -(-len(envelopes) // MAX_BACKLOG_BEFORE_YIELD)):
                await asyncio.sleep(0)
            channel = self.catalogue.find(queue, "publish")  # raises if it was just deleted
        journal, now = self._journal, self._now()
        if journal is None:
            return self._put_in_memory(channel, envelopes, now)
        results: builtins.list[Sent | QueueError] = []
        pending: builtins.list[PendingMessage] = []
        for item in envelopes:
            headers = dict(item.headers) if item.headers else None
            due, expires = item.not_before, item.expires_at
            if due is not None or expires is not None:
                due, expires = self._engine_times(item, now)
            try:
                if not item.id.isascii() or not (item.key is None or item.key.isascii()):
                    _check_text(item.id, item.key, queue)
                queues, headers = channel.reserve(item.id, headers, item.priority)
            except QueueError as error:
                results.append(error)
                continue
            pending.append(
                (item.id, item.body, headers, item.key, item.priority, due, expires, queues)
            )
            results.append(Sent(item.id))
        if pending:
            positions = iter(await journal.publish(pending))
            for at, sent in enumerate(results):
                if isinstance(sent, Sent):
                    results[at] = Sent(sent.message_id, next(positions))
        return results

    def publish_now(
        self, queue: str, envelopes: Sequence[Envelope]
    ) -> builtins.list[Sent | QueueError] | None:
        """Publish messages without waiting, if possible. Call this only in the engine's loop.

        Args:
            queue: Name of the queue or topic.
            envelopes: Messages to publish.

        Returns:
            For each message, its id and position, or the error for which it was rejected.
            ``None`` if nothing was published and ``publish_many`` must be used: the engine is
            durable, there is no such queue, or its consumers need time to catch up.

        Example:
            >>> import asyncio
            >>> from qkit.native import Engine
            >>> async def main() -> None:
            ...     async with Engine() as engine:
            ...         await engine.create("orders")
            ...         print(engine.publish_now("orders", [Envelope("1", b"one")]))
            >>> asyncio.run(main())
            [Sent(message_id='1', position=0)]
        """
        channel = self._channels.get(queue)
        if channel is None or self._journal is not None:
            return None
        if channel.backlog >= MAX_BACKLOG_BEFORE_YIELD:
            return None
        return self._put_in_memory(channel, envelopes, self._now())

    def _put_in_memory(
        self, channel: Queue | Topic, envelopes: Sequence[Envelope], now: float
    ) -> builtins.list[Sent | QueueError]:
        """Add messages in memory."""
        results: builtins.list[Sent | QueueError] = []
        for item in envelopes:
            id, headers = item.id, item.headers
            due, expires = item.not_before, item.expires_at
            if due is not None or expires is not None:
                due, expires = self._engine_times(item, now)
            try:
                position = channel.put(
                    now,
                    id,
                    item.body,
                    dict(headers) if headers else None,
                    item.key,
                    item.priority,
                    due,
                    expires,
                )
            except QueueError as error:
                results.append(error)
            else:
                results.append(Sent(id, position))
        return results

    def _engine_times(self, envelope: Envelope, now: float) -> tuple[float | None, float | None]:
        """Return the due time and the expiry of a message in the engine's monotonic time."""
        due, expires = envelope.not_before, envelope.expires_at
        offset = self.clock.time() - now
        return (
            None if due is None else due - offset,
            None if expires is None else expires - offset,
        )

    async def consume(
        self,
        queue: str,
        timeout: float | None = 0,
        ack_deadline: float | None = None,
        consumer: str | None = None,
        *,
        group: str | None = None,
    ) -> Delivery | None:
        """Receive the next message and lease it. Cancelling the call loses no message.

        Args:
            queue: Name of the queue or topic.
            timeout: Seconds to wait for a message. ``None``: no limit. Default: 0.
            ack_deadline: Length of the lease in seconds. Default: the queue's ``ack_deadline``.
            consumer: Name of a registered consumer. It receives nothing while it holds as many
                messages as its prefetch. Default: none.
            group: Group of a topic. Default: none; required for a topic.

        Returns:
            The delivery, or ``None`` if no message was ready in time.

        Raises:
            QueueNotFound: There is no such queue or topic.
            Unsupported: ``queue`` is a topic, and ``group`` is missing.
            ConsumerNotFound: The consumer was unregistered during the call.
            SubscriptionLost: The queue was deleted, or the engine closed, during the call.
            StorageError: The disk is full.

        Example:
            >>> import asyncio
            >>> from qkit.native import Engine
            >>> async def main() -> None:
            ...     async with Engine() as engine:
            ...         await engine.create("orders")
            ...         await engine.publish("orders", b"one")
            ...         delivery = await engine.consume("orders", timeout=5)
            ...         await delivery.ack()
            ...         print(await engine.consume("orders"))
            >>> asyncio.run(main())
            None
        """
        if get_ident() != self.portal.thread:
            return await self.portal.run(
                partial(self.consume, queue, timeout, ack_deadline, consumer, group=group),
                unwanted=_release_uncharged,
            )
        actor = self._channels.get(queue)
        if not isinstance(actor, Queue):
            actor = self.catalogue.queue(queue, "consume", group)
        lease = actor.config.ack_deadline if ack_deadline is None else ack_deadline
        members = None if consumer is None else actor.registered(consumer)
        while members is None or consumer is None or members.has_capacity(consumer):
            claimed = actor.claim(self._now(), 1, lease, consumer)
            if not claimed:
                break
            if actor.journal is not None:
                claimed = await actor.prepare(claimed)
            if claimed:
                return Delivery(actor, claimed[0])
            if actor.lost is not None:
                raise actor.lost_error("consume")
        if timeout == 0:
            return None
        return await self._wait(actor, timeout, lease, consumer, members)

    async def _wait(
        self,
        actor: Queue,
        timeout: float | None,
        lease: float,
        consumer: str | None,
        members: Consumers | None,
    ) -> Delivery | None:
        def free() -> int:
            # A registered consumer must stay registered; otherwise ``has_capacity`` raises.
            nonlocal members
            members = members or actor.registered(consumer)
            return int(members is None or consumer is None or members.has_capacity(consumer))

        counted = members is None  # registered consumers are already counted
        actor.consumers += counted
        try:
            async with asyncio.timeout(timeout):
                while True:
                    claimed = await actor.take(1, lease, consumer, free, "consume")
                    if claimed:
                        ready = await actor.prepare(claimed)
                        if ready:
                            return Delivery(actor, ready[0])
                    elif members is not None and consumer is not None:
                        await members.wait(consumer)  # its prefetch is used up
        except ConsumerNotFound:
            actor.pass_wakeup_on()
            raise
        except TimeoutError:  # a message may have arrived at the last moment
            if actor.lost is not None:
                raise actor.lost_error("consume") from None
            if consumer is not None and members is not None:
                members.prefetch(consumer, "consume")
            return await self.consume(actor.name, 0, lease, consumer, group=actor.group)
        finally:
            actor.consumers -= counted

    # Dead letters

    def on_dead_letter(self, callback: Callable[[DeadLetter], None]) -> None:
        """Register a function to call for each message that becomes a dead letter.

        It is also called for failed messages of a queue that has no dead-letter queue.

        Args:
            callback: Called in the engine's loop. Its errors are logged.

        Example:
            >>> import asyncio
            >>> from qkit.native import Engine
            >>> async def main() -> None:
            ...     async with Engine() as engine:
            ...         engine.on_dead_letter(lambda letter: print(letter.reason))
            ...         await engine.create("orders")
            ...         await engine.publish("orders", b"one")
            ...         await (await engine.consume("orders")).nack(requeue=False)
            >>> asyncio.run(main())
            ExplicitNack
        """
        self._dead_letters.callbacks.append(callback)

    def on_dropped_letter(self, callback: Callable[[DeadLetter], None]) -> None:
        """Register a function to call for each letter dropped from a full dead-letter queue.

        Args:
            callback: Called in the engine's loop. Its errors are logged.

        Example:
            >>> import asyncio
            >>> from qkit.native import Engine
            >>> async def main() -> None:
            ...     async with Engine() as engine:
            ...         engine.on_dropped_letter(lambda letter: print(letter.body))
            ...         await engine.create("orders", dead_letter_max_depth=1)
            ...         for body in (b"one", b"two"):
            ...             await engine.publish("orders", body)
            ...             await (await engine.consume("orders")).nack(requeue=False)
            >>> asyncio.run(main())
            b'one'
        """
        self._dead_letters.drop_callbacks.append(callback)

    @callable_from_any_thread
    async def dead_letters(self, name: str, limit: int = 10_000) -> builtins.list[DeadLetter]:
        """Return the dead letters of a queue or topic.

        Args:
            name: Name of the queue or topic.
            limit: Maximum number of dead letters to return. Default: 10,000.

        Returns:
            The dead letters, in the order of the dead-letter queue.

        Raises:
            QueueNotFound: There is no such queue or topic.

        Example:
            >>> import asyncio
            >>> from qkit.native import Engine
            >>> async def main() -> None:
            ...     async with Engine() as engine:
            ...         await engine.create("orders")
            ...         await engine.publish("orders", b"one")
            ...         await (await engine.consume("orders")).nack(requeue=False)
            ...         print([letter.body for letter in await engine.dead_letters("orders")])
            >>> asyncio.run(main())
            [b'one']
        """
        letters = self._letters(name)
        if letters is None:
            return []
        found = await letters.browse(limit)
        return [DeadLetter.from_envelope(item, channel=name) for item in found]

    @callable_from_any_thread
    async def retry_dead_letters(self, name: str, ids: Collection[str] | None = None) -> int:
        """Replay dead letters. Each keeps its id and restarts at its first attempt.

        Args:
            name: Name of the queue or topic.
            ids: Ids of the dead letters to replay. Default: all.

        Returns:
            The number of replayed messages.

        Raises:
            QueueNotFound: There is no such queue or topic.
            QueueFull: The queue is full. The remaining dead letters stay in their queue.

        Example:
            >>> import asyncio
            >>> from qkit.native import Engine
            >>> async def main() -> None:
            ...     async with Engine() as engine:
            ...         await engine.create("orders")
            ...         await engine.publish("orders", b"one")
            ...         await (await engine.consume("orders")).nack(requeue=False)
            ...         print(await engine.retry_dead_letters("orders"))
            >>> asyncio.run(main())
            1
        """
        letters, channel = self._letters(name), self.catalogue.find(name, "retry")
        done: builtins.list[str] = []
        try:
            for letter in await self.dead_letters(name, limit=sys.maxsize):
                if ids is None or letter.message_id in ids:
                    item = letter.to_replay()
                    await self._put(channel, item)
                    done.append(item.id)
        finally:
            if letters is not None and done:
                letters.remove(done)
        await self.written()
        return len(done)

    async def _put(self, channel: Queue | Topic, item: Envelope) -> None:
        id, body, headers, key, priority = item.id, item.body, item.headers, item.key, item.priority
        if self._journal is None:
            channel.put(self._now(), id, body, headers, key, priority)
        else:
            queues, own = channel.reserve(id, headers, priority)
            message = id, body, own, key, priority, None, None, queues
            await self._journal.publish((message,))

    @callable_from_any_thread
    async def purge_dead_letters(self, name: str) -> int:
        """Delete the dead letters of a queue or topic.

        Args:
            name: Name of the queue or topic.

        Returns:
            The number of deleted dead letters.

        Raises:
            QueueNotFound: There is no such queue or topic.

        Example:
            >>> import asyncio
            >>> from qkit.native import Engine
            >>> async def main() -> None:
            ...     async with Engine() as engine:
            ...         await engine.create("orders")
            ...         await engine.publish("orders", b"one")
            ...         await (await engine.consume("orders")).nack(requeue=False)
            ...         print(await engine.purge_dead_letters("orders"))
            >>> asyncio.run(main())
            1
        """
        letters = self._letters(name)
        purged = 0 if letters is None else letters.purge()
        await self.written()
        return purged

    def _letters(self, name: str) -> Queue | None:
        target = self.catalogue.find(name, "dead_letters").config.dead_letter
        channel = self._channels.get(target) if target is not None else None
        return channel if isinstance(channel, Queue) else None


def _release_uncharged(delivery: Delivery | None) -> None:
    if delivery is not None:
        delivery.release_uncharged()


def _times(now: float, delay: float | None, ttl: float | None) -> tuple[float | None, float | None]:
    if delay is not None and not delay >= 0:
        raise ValueError(f"delay must be at least 0 seconds, got {delay!r}")
    if ttl is not None and not ttl > 0:
        raise ValueError(f"ttl must be greater than 0 seconds, got {ttl!r}")
    if delay is not None and ttl is not None and delay >= ttl:
        raise ValueError(
            f"delay={delay!r} must be less than ttl={ttl!r}: the message would expire before its "
            "delivery"
        )
    return (now + delay if delay else None), (now + ttl if ttl is not None else None)


def _check_text(id: str, key: str | None, queue: str) -> None:
    """Raise ``InvalidName`` if the id or the key cannot be stored in the log as UTF-8."""
    for what, text in ("id", id), ("key", key or ""):
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise InvalidName(
                f"the {what} {text!r} contains a lone surrogate and cannot be stored: use valid "
                "Unicode text",
                backend="native",
                operation="publish",
                queue=queue,
                message_id=id,
            ) from error
