"""The native engine: queues and topics inside this process, without a broker.

It moves messages in and out of the queues, whose names are in ``catalogue.py``, and closes them. It
belongs to the event loop that opened it; calls from other threads run in that loop: see
``cross_thread.py``. With a directory it is durable: see ``storage/journal.py`` and ``log/log.py``.
"""

from __future__ import annotations

import asyncio
import builtins  # Engine.list hides the type
import contextlib
import logging
import os
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import Final, Self

from qkit._internal.clock import Clock, SystemClock
from qkit._internal.ids import new_id
from qkit._internal.names import check_name
from qkit.backend import QueueStats
from qkit.errors import (
    ConsumerNotFound,
    InvalidBody,
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

logger = logging.getLogger("qkit.native")

RESTORE_BATCH_SIZE: Final = 1_000
MAX_BACKLOG_BEFORE_YIELD: Final = 50  # messages; with more, a send lets consumers run first
MEMORY_LIMIT: Final = 64 << 20
UNLIMITED: Final = QueueConfig(max_deliveries=None)


class Engine:
    """Queues and topics: ``Engine()`` in memory, ``await Engine.open(path)`` in a directory.

    >>> async def main() -> None:
    ...     async with Engine() as engine:
    ...         await engine.create("orders")
    ...         await engine.publish("orders", b"one", priority=8, headers={"tenant": "acme"})
    ...         delivery = await engine.consume("orders", timeout=5)
    ...         print(delivery.body, delivery.retry_count)
    ...         await delivery.ack()
    >>> asyncio.run(main())
    b'one' 0

    Its coroutines, and those of a ``Delivery``, may be awaited in any thread and event loop while
    the loop that opened it runs.
    """

    def __init__(self, *, clock: Clock | None = None, defaults: QueueConfig | None = None) -> None:
        self.clock: Clock = clock if clock is not None else SystemClock()
        self.portal = LoopPortal()
        self._now = self.clock.monotonic
        self._loop: asyncio.AbstractEventLoop | None = None
        self._storage: Storage | None = None
        self._journal: Journal | None = None
        self._entered = False
        self._closed = False
        self._dead_letters = DeadLetterRouter(self.clock, self.portal)
        self.catalogue = Catalogue(self._dead_letters, self._own_loop, defaults or UNLIMITED)
        self._dead_letters.target_of = self.catalogue.dead_letter_queue_of
        self._channels = self.catalogue.channels

    # Life

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
        """Open a durable engine in a directory, which is made if need be, and recover it.

        A ``publish`` returns when the message is on the disk (``fsync="always"``), at most
        ``fsync_interval`` seconds earlier (``"interval"``), or once the operating system has it
        (``"never"``). Bodies above ``memory_limit`` bytes in sum stay on the disk. What consumers
        held is delivered again, its attempts kept. ``defaults`` configures queues for which a
        declaration of the SDK or a bulk file sets nothing; ``create`` does not use it.

        Raises ``LogLocked`` (another process has it), ``LogDamaged`` (stored messages cannot be
        read; ``repair=True`` keeps all that is whole), ``LogVersion``, ``StorageError``.
        """
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
        """Recover from storage and be durable from now on."""
        loop = asyncio.get_running_loop()
        replay = await storage.recover()
        self._loop, self._storage, self._journal = loop, storage, storage.journal
        self.portal.open(loop)
        try:
            actors = self.catalogue.restore(replay, storage.journal)
            if replay.orphans:
                names = ", ".join(replay.orphans)
                logger.warning("queues whose declaration was lost have new names: %s", names)
            recovered, storage.recovered = storage.recovered, []
            for at, message in enumerate(recovered):
                if at % RESTORE_BATCH_SIZE == 0:
                    await asyncio.sleep(0)  # others have the loop too
                actor = actors.get(message.queue)
                if actor is not None:
                    actor.restore(message)
            for actor in actors.values():
                actor.resume()
            storage.start(self.catalogue.numbers, self.import_bulk_files)
        except BaseException:
            await self.aclose()
            raise

    @property
    def running(self) -> bool:
        """Whether it was opened and not closed yet."""
        return self._loop is not None and not self._closed

    @property
    def closed(self) -> bool:
        """Whether it was closed; an engine is opened once."""
        return self._closed

    @property
    def durable(self) -> bool:
        """Whether it keeps its messages in a directory."""
        return self._storage is not None

    @property
    def read_only(self) -> bool:
        """Whether the disk failed: nothing is taken until the directory is opened again."""
        return self._storage is not None and self._storage.log.read_only

    @property
    def storage(self) -> Storage:
        """The directory of a durable engine; ``Unsupported`` in memory."""
        if self._storage is None:
            raise Unsupported("this engine is in memory: it has no directory", backend="native")
        return self._storage

    async def __aenter__(self) -> Self:
        if self._entered or self._closed:
            raise LifecycleError("an engine is opened once: make a new one")
        self._entered = True
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
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
        """Close every queue, let parked consumers go, write what is pending; idempotent."""
        if get_ident() != self.portal.thread and (self._closed or self.portal.accepts_calls):
            with contextlib.suppress(LifecycleError):  # it is closed already
                await self.portal.run(self.aclose)
            return
        was_open, self._closed = self.portal.close(), True
        for channel in self._channels.values():
            channel.close("the engine was closed")
        for actor in self.catalogue.all_actors():
            actor.suspend()
        self._channels.clear()
        if self._storage is not None:
            await self._storage.close()
        if was_open and self._loop is asyncio.get_running_loop():
            await self.portal.wait_drained()

    def _own_loop(self) -> asyncio.AbstractEventLoop:
        """The engine's loop, which must be the running one. Not asked for each message."""
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
        """Create a queue, or a topic with ``broadcast``; again with equal options is no error.

        ``max_retries`` is how often a message may come again after a ``nack`` or a lost lease
        (``None``: for ever), ``backoff`` the delay before the first return after a ``nack``,
        doubled each time. Dead letters go to ``{name}_dlq``. ``balance`` says which of several
        waiting consumers gets a message: ``round_robin`` (who waited longest), ``least_busy`` (who
        holds least), ``random``. Raises ``ConfigError`` if it exists with other options,
        ``InvalidName``.
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
        """Make sure that a queue exists, and set fields of its ``QueueConfig``; the last call wins.

        Unlike ``create`` it does not check the name, and a queue may be declared in several ways.

        Args:
            name: Name of the queue or topic.
            fields: What to set.
            defaults: What to set where no declaration has set anything.

        Raises:
            ConfigError: It exists as the other kind.
        """
        self.catalogue.declare(name, fields, defaults=defaults)
        await self.written()

    def __contains__(self, name: object) -> bool:
        return name in self._channels

    def check_exists(self, name: str, operation: str) -> None:
        """Raise ``QueueNotFound`` unless the queue or topic exists."""
        self.catalogue.find(name, operation)

    def queue(self, name: str, operation: str, group: str | None = None) -> Queue:
        """Return a queue, or a group's share of a topic; the group is declared by this.

        For callers in the engine's own loop. Raises ``QueueNotFound``; ``Unsupported`` for a topic
        without ``group``.
        """
        return self.catalogue.queue(name, operation, group)

    @callable_from_any_thread
    async def written(self) -> None:
        """Wait until a crash of this process cannot undo what happened so far."""
        if self._journal is not None:
            written = self._journal.written()
            if written is not None:
                await written

    @callable_from_any_thread
    async def delete(self, name: str) -> None:
        """Delete a queue with all that is in it; its dead letters stay."""
        self.catalogue.delete(name)
        await self.written()

    @callable_from_any_thread
    async def list(self) -> builtins.list[str]:
        """The names of all queues and topics, sorted."""
        return sorted(self._channels)

    @callable_from_any_thread
    async def stats(self, name: str) -> QueueStats:
        """A queue's figures now; a topic's are the sums of its groups'."""
        return self.catalogue.find(name, "stats").stats()

    @callable_from_any_thread
    async def peek(self, name: str, limit: int = 1) -> builtins.list[Envelope]:
        """The next messages in order of delivery, delayed ones last; nothing is consumed."""
        return self.catalogue.find(name, "peek").peek(limit)

    @callable_from_any_thread
    async def purge(self, name: str) -> int:
        """Delete every message that no consumer holds; return how many."""
        removed = sum(actor.purge() for actor in self.catalogue.actors(name, "purge"))
        await self.written()
        return removed

    @callable_from_any_thread
    async def remove(self, name: str, ids: Collection[str]) -> int:
        """Delete these messages unless a consumer holds them; return how many were there."""
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
        """Make a consumer known that may hold ``prefetch`` unsettled messages (1–1000).

        Again changes its limit. On a topic, ``group`` says whose share it consumes.
        """
        actor = self.catalogue.queue(queue, "register", group)
        check_name(consumer, "consumer")
        if actor.members is None:
            actor.members = Consumers(queue, actor.state.leases.busy)
        if actor.members.register(consumer, prefetch):
            actor.consumers += 1

    @callable_from_any_thread
    async def unregister(self, queue: str, consumer: str, *, group: str | None = None) -> None:
        """Forget a consumer; what it holds goes back with no attempt charged.

        Raises ``ConsumerNotFound``, also in a ``consume`` that waits in its name.
        """
        actor = self.catalogue.queue(queue, "unregister", group)
        if actor.members is None:
            raise ConsumerNotFound(
                f"no consumer {consumer!r} of this queue: register it first",
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
        """The consumers of a queue, or of every group of a topic."""
        found: builtins.list[Consumer] = []
        for actor in self.catalogue.actors(queue, "consumers"):
            if actor.members is not None:
                found += actor.members.listed(actor.group)
            found += [subscriber.listed() for subscriber in actor.subscribed]
        return found

    @callable_from_any_thread
    async def import_bulk_files(self) -> int:
        """Import the bulk files that other processes published; return the number of messages.

        A running engine looks for them every second by itself. Queues that do not exist are
        created. Raises ``LogDamaged`` for a file that is not whole.
        """
        return await self.storage.import_bulk_files(self.catalogue.of_bulk_file)

    @callable_from_any_thread
    async def history(self, message_id: str) -> builtins.list[StatusChange]:
        """What the log of a durable engine still tells of a message, oldest first.

        Compaction takes out what is settled, in its own time. Raises ``Unsupported`` in memory.
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
        """Add a message, of priority 5 unless told otherwise.

        It is delivered no earlier than after ``delay`` seconds, and becomes a dead letter if no
        consumer took it within ``ttl``. In a full queue it waits up to ``wait`` seconds for room
        (``None``: for ever). Raises ``QueueNotFound``, ``QueueFull``, ``InvalidPriority``,
        ``ValueError`` unless delay < ttl, and ``StorageError`` if the disk refused it.
        """
        if not isinstance(body, bytes):
            raise InvalidBody(f"a body is bytes, not {type(body).__name__}", queue=queue)
        if wait != 0 or get_ident() != self.portal.thread:
            publish = partial(  # no closure: it would make every publish slower
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
            _times(0.0, delay, ttl)  # what cannot be need not wait
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
        # What Sent(…) does, in half its time; the checker cannot see a generic class's __new__.
        return tuple.__new__(Sent, (message_id, position))  # pyright: ignore[reportUnknownMemberType]

    async def _publish_after_wait(
        self, queue: str, wait: float | None, publish: Callable[[], Awaitable[Sent]]
    ) -> Sent:
        """Publish when the queue has capacity, or after ``wait`` seconds (``None``: no limit)."""
        channel = self.catalogue.find(queue, "publish")
        await channel.wait_for_capacity(wait)
        try:
            return await publish()
        finally:
            channel.wake_capacity_waiters()

    async def publish_many(
        self, queue: str, envelopes: Sequence[Envelope]
    ) -> builtins.list[Sent | QueueError]:
        """Add messages in order, as many as can be; an error in the place of each other."""
        channel = self._channels.get(queue) or self.catalogue.find(queue, "publish")
        if channel.consumers and channel.backlog >= MAX_BACKLOG_BEFORE_YIELD:
            # Nothing below waits for anything, so a loop of sends would starve its own consumers:
            # let them have a turn to fetch and one to work for as many as they usually take.
            for _ in range(2 * -(-len(envelopes) // MAX_BACKLOG_BEFORE_YIELD)):
                await asyncio.sleep(0)
            channel = self.catalogue.find(queue, "publish")  # or it was deleted meanwhile
        now, journal = self._now(), self._journal
        offset = self.clock.time() - now  # wall time less monotonic time
        results: builtins.list[Sent | QueueError] = []
        pending: builtins.list[PendingMessage] = []
        for item in envelopes:
            id, body, priority, key = item.id, item.body, item.priority, item.key
            due, expires = item.not_before, item.expires_at
            due = None if due is None else due - offset
            expires = None if expires is None else expires - offset
            headers = dict(item.headers) if item.headers else None
            position = None
            try:
                if journal is None:
                    position = channel.put(now, id, body, headers, key, priority, due, expires)
                else:
                    queues, headers = channel.reserve(id, headers, priority)
                    pending.append((id, body, headers, key, priority, due, expires, queues))
                results.append(Sent(id, position))
            except QueueError as error:
                results.append(error)
        if journal is not None and pending:
            positions = iter(await journal.publish(pending))
            for at, sent in enumerate(results):
                if isinstance(sent, Sent):
                    results[at] = Sent(sent.message_id, next(positions))
        return results

    async def consume(
        self,
        queue: str,
        timeout: float | None = 0,
        ack_deadline: float | None = None,
        consumer: str | None = None,
        *,
        group: str | None = None,
    ) -> Delivery | None:
        """The next message, leased for ``ack_deadline`` seconds (default: the queue's, 30).

        Waits up to ``timeout`` seconds for one (``None``: for ever) and may be cancelled at any
        moment without loss. A registered ``consumer`` gets none while it holds all it may. On a
        topic, ``group`` says whose share. Raises ``QueueNotFound``, and ``SubscriptionLost`` if
        the queue is deleted or the engine closed meanwhile.
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
            # Once registered it must stay so: this raises when it was unregistered.
            nonlocal members
            members = members or actor.registered(consumer)
            return int(members is None or consumer is None or members.has_capacity(consumer))

        counted = members is None  # a registered one is counted
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
                        await members.wait(consumer)  # it holds all it may
        except ConsumerNotFound:
            actor.pass_wakeup_on()
            raise
        except TimeoutError:  # perhaps one came at the very end
            if actor.lost is not None:
                raise actor.lost_error("consume") from None
            if consumer is not None and members is not None:
                members.prefetch(consumer, "consume")
            return await self.consume(actor.name, 0, lease, consumer, group=actor.group)
        finally:
            actor.consumers -= counted

    # Dead letters

    def on_dead_letter(self, callback: Callable[[DeadLetter], None]) -> None:
        """Call ``callback`` for each dead letter, also one dropped for want of a queue."""
        self._dead_letters.callbacks.append(callback)

    def on_dropped_letter(self, callback: Callable[[DeadLetter], None]) -> None:
        """Call ``callback`` for each dead letter that a full dead-letter queue pushed out."""
        self._dead_letters.drop_callbacks.append(callback)

    @callable_from_any_thread
    async def dead_letters(self, name: str, limit: int = 10_000) -> builtins.list[DeadLetter]:
        """The dead letters of a queue, in their queue's order."""
        letters = self._letters(name)
        if letters is None:
            return []
        return [DeadLetter.from_envelope(item, channel=name) for item in letters.peek(limit)]

    @callable_from_any_thread
    async def retry_dead_letters(self, name: str, ids: Collection[str] | None = None) -> int:
        """Publish dead letters again, all unless ``ids`` names some; return how many.

        Each keeps its id and starts at its first attempt. If the queue fills up, the rest stays
        where it is and ``QueueFull`` is raised.
        """
        letters, channel = self._letters(name), self.catalogue.find(name, "retry")
        done: builtins.list[str] = []
        try:
            for letter in await self.dead_letters(name):
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
        """Delete the dead letters of a queue; return how many."""
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
        raise ValueError(f"delay={delay!r}: zero or more seconds")
    if ttl is not None and not ttl > 0:
        raise ValueError(f"ttl={ttl!r}: more than zero seconds")
    if delay is not None and ttl is not None and delay >= ttl:
        raise ValueError(f"delay={delay!r} is not shorter than ttl={ttl!r}: it could only expire")
    return (now + delay if delay else None), (now + ttl if ttl is not None else None)
