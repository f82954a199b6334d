"""``Queue``: one queue of a running engine, and the only owner of its state.

A queue has waiting consumers, one timer and, in a durable engine, the journal that records its
changes. Everything runs in the engine's event loop. No method awaits between reading the state and
changing it, so a queue needs no lock and never waits for another queue.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import Callable, Collection, Coroutine, Iterable, Sequence
from random import Random
from typing import Final, Protocol

from qkit._internal.clock import Clock
from qkit.backend import QueueStats
from qkit.errors import LogDamaged, StorageError, SubscriptionLost
from qkit.message import Envelope, Reason
from qkit.native.config import QueueConfig
from qkit.native.cross_thread import LoopPortal
from qkit.native.queue.consumers import Consumers
from qkit.native.queue.dead_message import DeadMessage
from qkit.native.queue.key_locks import KeyLocks
from qkit.native.queue.protocols import QueueJournal, RestoredMessage, Subscriber
from qkit.native.queue.state import QueueState
from qkit.native.queue.stored_message import StoredMessage, WaitingMessage
from qkit.native.queue.wait_list import WaitList

__all__ = ["EngineHooks", "Queue", "envelope_of"]

logger: logging.Logger = logging.getLogger("qkit.native")

# Shared by all queues that have had no waiter yet, so that an unused queue needs little memory.
EMPTY_WAIT_LIST: Final = WaitList(lambda: None)


class EngineHooks(Protocol):
    """Interface of the engine that a queue uses."""

    clock: Clock
    portal: LoopPortal

    def route(self, queue: Queue, dead: list[DeadMessage]) -> None:
        """Move dead messages to the dead-letter queue, which ``queue`` itself cannot access."""
        ...

    def dropped(self, envelopes: list[Envelope]) -> None:
        """Report dead letters that were dropped from a full dead-letter queue."""
        ...

    def run_in_background(self, work: Coroutine[None, None, None]) -> None:
        """Run a coroutine that reads bodies from the disk."""
        ...


class Queue:
    """Queue, or queue of a topic's group, in a running engine.

    Methods change the state immediately. In a durable engine they also record the change, in the
    same loop iteration. A caller that relies on the change surviving a crash awaits ``written``,
    or ``prepare`` for claimed messages.

    Args:
        name: Name of the queue or topic.
        config: Configuration of the queue or topic.
        hooks: Engine of the queue.
        loop: Event loop of the engine.
        group: Group of a topic. Default: none.
        journal: Journal that records changes; ``None`` (the default) in memory.
        number: Number of the queue in the log; 0 (the default) in memory.
    """

    __slots__ = (
        "_armed_at",
        "_capacity_waiters",
        "_clock",
        "_hooks",
        "_loop",
        "_random",
        "_timer",
        "_warned",
        "config",
        "consumers",
        "group",
        "journal",
        "lost",
        "members",
        "name",
        "number",
        "portal",
        "state",
        "subscribed",
        "waiters",
    )

    def __init__(
        self,
        name: str,
        config: QueueConfig,
        *,
        hooks: EngineHooks,
        loop: asyncio.AbstractEventLoop,
        group: str | None = None,
        journal: QueueJournal | None = None,
        number: int = 0,
    ) -> None:
        self.name: str = name
        self.group: str | None = group
        self.journal: QueueJournal | None = journal
        self.number: int = number
        self.config: QueueConfig = config
        self.state: QueueState = QueueState(
            name,
            max_depth=config.max_depth,
            max_priority=config.max_priority,
            max_deliveries=config.max_deliveries,
            drop_oldest=config.drop_oldest,
        )
        self.consumers: int = (
            0  # open subscriptions, registered consumers, waiting ``consume`` calls
        )
        self.members: Consumers | None = None  # created with the first registered consumer
        self.subscribed: list[Subscriber] = []
        self.lost: str | None = None  # why the queue is closed
        self.portal: LoopPortal = hooks.portal
        self._hooks = hooks
        self._clock = hooks.clock
        self._loop = loop
        self.waiters: WaitList = EMPTY_WAIT_LIST  # consumers that wait for a message
        self._capacity_waiters = EMPTY_WAIT_LIST  # senders that wait for capacity
        self._random: Random | None = Random() if config.balance == "random" else None
        self._timer: asyncio.TimerHandle | None = None
        self._armed_at = float("inf")
        self._warned = False  # of unordered consumers beside ordered ones

    def reconfigure(self, config: QueueConfig) -> None:
        """Apply a new configuration; messages already in the queue are kept."""
        self.config = config
        self._random = Random() if config.balance == "random" else None
        self.state.set_limits(
            max_depth=config.max_depth,
            max_priority=config.max_priority,
            max_deliveries=config.max_deliveries,
            drop_oldest=config.drop_oldest,
        )
        self.wake_capacity_waiters()

    # Messages

    def targets(
        self, headers: dict[str, str] | None
    ) -> tuple[Sequence[Queue], dict[str, str] | None]:
        """Return the queues that receive a message with these headers, and the headers to store."""
        return (self,), headers

    def reserve(
        self, id: str, headers: dict[str, str] | None, priority: int | None
    ) -> tuple[Sequence[Queue], dict[str, str] | None]:
        """Reserve capacity for a message; return its ``targets``.

        The journal frees the reserved capacity when the message is written or its write fails.

        Raises:
            InvalidPriority: The priority is out of range.
            QueueFull: The queue is full.
        """
        self.state.reserve(id, priority)
        return (self,), headers

    def put(
        self,
        now: float,
        id: str,
        body: bytes,
        headers: dict[str, str] | None = None,
        key: str | None = None,
        priority: int | None = None,
        due: float | None = None,
        expires: float | None = None,
        seq: int = 0,
    ) -> int | None:
        """Add a message and wake a consumer for it; see ``QueueState.put``.

        In a durable engine the message is already written to the log, with the number ``seq``.
        """
        state, journal = self.state, self.journal
        kept: bytes | None = body
        if journal is not None:
            if self.lost is not None:
                journal.forget(seq)
                return None
            kept = journal.body_to_keep(body)
        position = state.put(now, id, kept, headers, key, priority, due, expires, seq)
        if state.evicted:
            evicted, state.evicted = state.evicted, ()
            self._evict(evicted)
        if self.waiters.waiters and position is not None:
            self.wake()
        if due is not None or expires is not None:
            self._rearm()
        return position

    async def take(
        self,
        limit: int,
        lease: float,
        consumer: str | None,
        free: Callable[[], int],
        operation: str = "receive",
        holder: int = 0,
    ) -> list[StoredMessage]:
        """Wait for messages and claim them. Safe to cancel. Call ``prepare`` with the result.

        Args:
            limit: Maximum number of messages to claim.
            lease: Length of the lease in seconds.
            consumer: Name of the consumer, if it has one.
            free: Returns how many more messages the consumer may hold.
            operation: Name of the operation, for the error. Default: ``"receive"``.
            holder: Number of an ordered subscription. Default: 0, an unordered consumer.

        Returns:
            The messages; empty if ``free`` returned 0 or less.

        Raises:
            SubscriptionLost: The queue was deleted or the engine closed.
            StorageError: The disk is full.
        """
        place = 0
        while self.lost is None:
            slots = free()
            if slots <= 0:
                self.pass_wakeup_on()  # this consumer may have been woken for a message
                return []
            claimed = self.claim(
                self._clock.monotonic(), min(limit, slots), lease, consumer, holder
            )
            if claimed:
                return claimed
            if holder and self.state.claimable:
                await self._yield_claim()  # messages were set aside; there are more
                continue
            if self.waiters is EMPTY_WAIT_LIST:
                self.waiters = WaitList(self.pass_wakeup_on)
            # If another consumer was faster, this one keeps its place in the list.
            place = await self.waiters.wait(self._loop.create_future(), consumer, place)
        raise self.lost_error(operation)

    async def _yield_claim(self) -> None:
        """Let other tasks run. If cancelled, wake another consumer for the remaining messages."""
        try:
            await asyncio.sleep(0)
        except BaseException:
            self.pass_wakeup_on()
            raise

    def claim(
        self,
        now: float,
        limit: int,
        lease: float,
        consumer: str | None = None,
        holder: int = 0,
    ) -> list[StoredMessage]:
        """Lease ready messages; see ``QueueState.claim``.

        A durable queue records the attempts before the messages are delivered.

        Raises:
            StorageError: The disk is full. Each delivery would add records: one when it is claimed
                and one when it is released.
        """
        state, waiters, journal = self.state, self.waiters, self.journal
        if journal is not None and journal.disk_full:
            self.wake()  # pass the wake-up on: this consumer takes no message
            raise StorageError(
                "no messages are delivered while the disk is full: free some space",
                backend="native",
                operation="consume",
                queue=self.name,
            )
        if limit > 1 and (waiters.waiters or waiters.woken):
            # Other consumers are waiting too: leave them their share of the ready messages.
            waiting = 1 + len(waiters.woken) + len(waiters.waiters)
            limit = min(limit, max(1, -(-state.claimable // waiting)))
        claimed = state.claim(now, limit, lease, consumer, holder)
        if claimed and now + lease < self._armed_at:
            self._arm(now + lease)
        if state.dead:  # their TTL expired
            self._route_dead(state.take_dead())
        if state.leases.locks is not None:
            self._wake_holders(state.leases.locks)
            if not holder:
                self._warn_of_unordered()
        if waiters.waiters:
            # A woken consumer takes as many messages as it can and wakes the next consumer for the
            # remaining ones. So while messages are ready and consumers are parked, a wake-up is
            # always pending.
            self.pass_wakeup_on()
        if journal is not None and claimed:
            journal.claim(self.number, claimed)
        return claimed

    async def prepare(self, claimed: list[StoredMessage]) -> list[StoredMessage]:
        """Wait until a claim is written, and read the bodies that are only on disk.

        If this fails or is cancelled, the messages are released without counting an attempt.

        Returns:
            The messages whose leases have not expired and whose bodies can be read.
        """
        journal = self.journal
        if journal is None:
            return claimed
        tokens = [message.state for message in claimed]
        try:
            missing = [(m.state, m) for m in claimed if m.body is None]
            written = journal.written()
            if missing:
                await self._load(journal, missing)
            if written is not None:
                await written
        except BaseException:
            for token in tokens:
                if self.state.holds(token):
                    self.release(token, count_attempt=False)
            raise
        return [
            message
            for token, message in zip(tokens, claimed, strict=True)
            if message.state == token and message.body is not None
        ]

    async def _load(self, journal: QueueJournal, missing: list[tuple[int, StoredMessage]]) -> None:
        messages = [message for _, message in missing]
        if journal.reads_inline:
            bodies = journal.load(messages)
        else:
            bodies = await asyncio.to_thread(journal.load, messages)
        for (token, message), body in zip(missing, bodies, strict=True):
            if self.lost is not None or not self.state.holds(token) or message.body is not None:
                continue  # the lease expired, and another delivery may have read the body
            if body is None:
                self._drop_unreadable(token, message)
            else:
                message.body = body
                journal.held += len(body)

    def _drop_unreadable(self, token: int, message: StoredMessage) -> None:
        logger.error(
            "message %s of %r cannot be read from the log and is dropped; open the directory with "
            "repair=True to see what is damaged",
            message.id,
            self.name,
        )
        self.state.drop_unreadable(token)
        self._freed()

    async def written(self) -> None:
        """Wait until all changes so far survive a crash of this process."""
        written = None if self.journal is None else self.journal.written()
        if written is not None:
            await written

    def ack(self, token: int) -> StoredMessage:
        """Ack a delivery and remove its message; see ``QueueState.ack``."""
        state = self.state
        message = state.ack(token)
        if state.leases.locks is not None and state.leases.locks.freed:
            self._wake_freed(state.leases.locks)
        if self._capacity_waiters.waiters or self.members is not None:
            self._freed()
        if self.journal is not None and self.lost is None:
            self.journal.ack(self.number, message)
        return message

    def release(
        self,
        token: int,
        delay: float = 0.0,
        *,
        count_attempt: bool = True,
        headers: dict[str, str] | None = None,
    ) -> bool:
        """Release a message in flight; see ``QueueState.release``."""
        journal, message = self.journal, None
        if journal is not None and self.lost is None:
            message = self.state.leases.get(token)
        before = None if message is None else message.headers
        now = self._clock.monotonic()
        alive = self.state.release(now, token, delay, count_attempt=count_attempt, headers=headers)
        self._route_dead_and_wake(self.state.take_dead())
        self._rearm()
        if journal is not None and message is not None and alive:
            changed = headers if headers is not None and headers != (before or {}) else None
            due = now + delay if delay > 0 else None
            journal.release(self.number, message, due, changed)
        return alive

    def reject(self, token: int, reason: Reason, error: Exception | None = None) -> None:
        """Dead-letter a message in flight."""
        self.state.reject(token, reason, error)
        self._route_dead_and_wake(self.state.take_dead())

    def extend(self, token: int, seconds: float) -> None:
        """Extend a lease; see ``QueueState.extend``."""
        now = self._clock.monotonic()
        self.state.extend(now, token, seconds)
        if now + seconds < self._armed_at:
            self._arm(now + seconds)

    def abandon(self, tokens: Iterable[int]) -> None:
        """End the leases of a consumer that is gone; see ``QueueState.abandon``."""
        self._route_dead_and_wake(self.state.abandon(self._clock.monotonic(), tokens))

    def remove(self, ids: Collection[str]) -> int:
        """Remove messages by id; return their number. See ``QueueState.remove``."""
        removed = self.state.remove(ids)
        self.on_removed(removed)
        self._freed()
        return len(removed)

    def purge(self) -> int:
        """Remove all messages that are not in flight; return their number."""
        removed = self.state.purge()
        self.on_removed(removed)
        self._freed()
        return len(removed)

    # Durable queues

    def restore(self, message: RestoredMessage) -> None:
        """Add a message recovered from the log. Its lease, if it had one, has ended."""
        now, wall = self._clock.monotonic(), self._clock.time()
        since = now - max(0.0, wall - message.at)
        stored = self.state.restore(
            now,
            (message.id, message.body, message.headers, since, message.seq),
            priority=message.priority,
            key=message.key,
            due=message.due - wall + now if message.due else None,
            expires=message.expires - wall + now if message.expires else None,
            attempt=message.attempt,
        )
        limit = self.config.max_deliveries
        if message.held and stored is not None and limit is not None and stored.attempt >= limit:
            self.state.dead_letter_restored(stored)  # the message may have crashed the engine

    def resume(self) -> None:
        """Route dead messages, wake consumers and start the timer, after all ``restore`` calls."""
        self._route_dead_and_wake(self.state.take_dead())
        self._rearm()

    def suspend(self) -> None:
        """Record that messages in flight are released, because the engine shuts down normally."""
        if self.journal is not None:
            for message in self.state.leases:
                self.journal.release(self.number, message, None, None)

    def on_removed(self, messages: Sequence[WaitingMessage]) -> None:
        """Record that messages were removed."""
        if messages and self.journal is not None and self.lost is None:
            self.journal.remove(self.number, messages)

    def move_to_dead_letters(self, message: StoredMessage, target: Queue, letter: Envelope) -> None:
        """Add the dead letter of a message that left this queue to ``target``, atomically."""
        now, journal = self._clock.monotonic(), self.journal
        if journal is None:
            target.put(now, letter.id, letter.body, letter.headers, letter.key)
        elif self.lost is None:
            priority = target.state.default_priority
            seq = journal.dead_letter(self.number, message, target.number, letter, priority)
            target.put(now, letter.id, letter.body, letter.headers, letter.key, priority, seq=seq)

    def envelope(
        self, message: StoredMessage, offset: float, not_before: float | None = None
    ) -> Envelope:
        """Return the envelope of a message; read its body from the disk if needed.

        Raises:
            LogDamaged: The body cannot be read.
        """
        envelope = envelope_of(message, offset, not_before)
        if message.body is None and self.journal is not None:
            body = self.journal.body(message)
            if body is None:
                raise LogDamaged(
                    "the body of a message cannot be read from the log: open the directory with "
                    "repair=True to see what is damaged",
                    backend="native",
                    operation="read",
                    queue=self.name,
                    message_id=message.id,
                )
            envelope.body = body
        return envelope

    def _evict(self, messages: Sequence[StoredMessage]) -> None:
        unread = [message for message in messages if self.must_read(message)]
        if unread:
            # Until the bodies are read, the messages stay in the log, so that it keeps the bodies.
            self._hooks.run_in_background(self._read_and_evict(messages, unread))
        else:
            self._evict_read(messages)

    async def _read_and_evict(
        self, messages: Sequence[StoredMessage], unread: Sequence[StoredMessage]
    ) -> None:
        if await self.keep_bodies(unread):
            self._evict_read(messages)

    async def keep_bodies(self, messages: Sequence[StoredMessage]) -> bool:
        """Read the bodies of messages that have left the queue, and keep them in memory.

        Returns:
            False if the queue was deleted meanwhile, with these messages.
        """
        bodies, journal = await self.read(messages), self.journal
        assert journal is not None
        for message, body in zip(messages, bodies, strict=True):
            if self.lost is not None:
                journal.forget(message.seq)
            elif body is not None:
                message.body = body
                journal.held += len(body)
        return self.lost is None

    def _evict_read(self, messages: Sequence[StoredMessage]) -> None:
        offset = self._clock.time() - self._clock.monotonic()
        envelopes: list[Envelope] = []
        for message in messages:
            try:
                envelopes.append(self.envelope(message, offset))
            except LogDamaged:
                logger.exception("a dropped message cannot be read")
        self.on_removed(messages)
        self._hooks.dropped(envelopes)

    def _route_dead(self, dead: list[DeadMessage]) -> None:
        self._hooks.route(self, dead)
        self._freed()

    # Inspection

    def peek(self, limit: int) -> list[Envelope]:
        """Return the next messages in order of delivery; blocking if bodies are only on disk."""
        self._route_dead_and_wake(self.state.advance(self._clock.monotonic()))
        offset = self._clock.time() - self._clock.monotonic()
        return [
            self.envelope(message, offset, None if due is None else due + offset)
            for message, due in self.state.peek(limit)
        ]

    async def browse(self, limit: int) -> list[Envelope]:
        """Return the next messages in order of delivery, as ``peek`` does, without blocking.

        Bodies that are only on disk are read in a thread. Messages that are removed meanwhile are
        left out.
        """
        self._route_dead_and_wake(self.state.advance(self._clock.monotonic()))
        offset = self._clock.time() - self._clock.monotonic()
        found = self.state.peek(limit)
        unread = [message for message, _ in found if self.must_read(message)]
        read = dict(zip(map(id, unread), await self.read(unread), strict=True))
        envelopes: list[Envelope] = []
        for message, due in found:
            not_before = None if due is None else due + offset
            body = read.get(id(message))
            if body is not None:
                envelope = envelope_of(message, offset, not_before)
                envelope.body = body
                envelopes.append(envelope)
            elif id(message) not in read or self._is_live(message):
                envelopes.append(self.envelope(message, offset, not_before))
        return envelopes

    def must_read(self, message: StoredMessage) -> bool:
        """Return whether the body of a message has to be read in a thread."""
        journal = self.journal
        return message.body is None and journal is not None and not journal.reads_inline

    async def read(self, messages: Sequence[StoredMessage]) -> list[bytes | None]:
        """Read the bodies of messages in a thread; ``None`` for each that cannot be read."""
        if not messages or self.journal is None:
            return []
        return await asyncio.to_thread(self.journal.load, messages)

    def _is_live(self, message: StoredMessage) -> bool:
        return self.lost is None and self.journal is not None and self.journal.is_live(message.seq)

    def stats(self) -> QueueStats:
        """Return the current figures of the queue."""
        state, now = self.state, self._clock.monotonic()
        self._route_dead_and_wake(state.advance(now))
        since = state.oldest_since()
        return QueueStats(
            queue=self.name,
            depth=state.ready,
            in_flight=state.in_flight,
            scheduled=state.scheduled,
            consumers=self.consumers,
            published_total=state.published,
            consumed_total=state.claimed,
            acked_total=state.acked,
            nacked_total=state.released,
            dead_lettered_total=state.dead_lettered,
            dropped_total=state.dropped,
            avg_wait_time_ms=(
                1000 * state.waited / state.first_claimed if state.first_claimed else None
            ),
            oldest_message_age_secs=None if since is None else max(0.0, now - since),
        )

    def _route_dead_and_wake(self, dead: list[DeadMessage]) -> None:
        """Route dead messages, and wake consumers for messages that became ready."""
        if self.state.uncharged:
            uncharged, self.state.uncharged = self.state.uncharged, ()
            if self.journal is not None and self.lost is None:
                for message in uncharged:
                    self.journal.release(self.number, message, None, None)
        if self.state.returned:
            returned, self.state.returned = self.state.returned, []
            if self.journal is not None:
                for message in returned:  # ready again, so their bodies may stay on disk
                    self.journal.release_body(message)
        if dead:
            self._route_dead(dead)
        elif self.members is not None:
            self._freed()
        for _ in range(min(self.state.claimable, len(self.waiters.waiters))):
            self.wake()
        if self.state.leases.locks is not None:
            self._wake_holders(self.state.leases.locks)

    @property
    def backlog(self) -> int:
        """Number of ready messages; 0 if there is no consumer."""
        return self.state.ready if self.consumers else 0

    # Senders that wait for capacity

    async def wait_for_capacity(self, timeout: float | None) -> None:
        """Wait until the queue has capacity for a message, at most ``timeout`` seconds.

        Waiting senders are woken in FIFO order. A sender that does not wait may take free capacity
        before them. The caller must put its message before it awaits anything else, and then call
        ``wake_capacity_waiters``, because the message may not have used the capacity.
        """
        place = 0
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                while self.lost is None and (self.state.full if place else self.capacity_reserved):
                    waiter = self._loop.create_future()
                    if self._capacity_waiters is EMPTY_WAIT_LIST:
                        self._capacity_waiters = WaitList(self.wake_capacity_waiters)
                    place = await self._capacity_waiters.wait(waiter, place=place)

    @property
    def capacity_reserved(self) -> bool:
        """Whether all free capacity is reserved for senders that have been woken."""
        return self.state.free <= len(self._capacity_waiters.woken)

    def wake_capacity_waiters(self) -> None:
        """Wake as many waiting senders as there is capacity for."""
        while self._capacity_waiters.waiters and not self.capacity_reserved:
            self._capacity_waiters.wake()

    def _freed(self) -> None:
        """Wake senders and consumers for which there is capacity again."""
        self.wake_capacity_waiters()
        if self.members is not None:
            self.members.wake_unblocked()

    # Subscriptions and parked consumers

    def subscribe(self, subscriber: Subscriber) -> None:
        """Add a subscription; its ``refresh`` is called when leases expire."""
        self.consumers += 1
        self.subscribed.append(subscriber)

    def unsubscribe(self, subscriber: Subscriber) -> None:
        """Remove a subscription."""
        self.subscribed.remove(subscriber)
        self.consumers -= 1

    def forget_holder(self, holder: int) -> None:
        """Forget an ordered subscription that has ended and holds no message."""
        if self.state.leases.locks is not None:
            self.state.leases.locks.forget(holder)

    def _warn_of_unordered(self) -> None:
        """Log once that an unordered consumer claims messages of a queue with ordered ones."""
        if not self._warned and any(other.holder for other in self.subscribed):
            self._warned = True
            logger.warning(
                "queue %r has ordered and unordered consumers: messages of one key may be handled "
                "out of order or at the same time; set ordered=True on all consumers of the queue",
                self.name,
            )

    def _wake_holders(self, locks: KeyLocks) -> None:
        """Wake parked subscriptions for whose keys another one has set messages aside."""
        if locks.wanted:
            wanted, locks.wanted = locks.wanted, set()
            for subscriber in self.subscribed:
                if subscriber.holder in wanted:
                    subscriber.wake()

    def _wake_freed(self, locks: KeyLocks) -> None:
        """Wake a parked consumer because a key became free that has messages set aside."""
        locks.freed = False
        self.pass_wakeup_on()

    def wake_consumer(self, consumer: str) -> None:
        """Wake all waiting calls of a consumer, even if no message is ready."""
        places = self.waiters.waiters
        for at in reversed(range(len(places))):
            if places[at][2] == consumer:
                self.waiters.wake(at)

    def wake(self) -> None:
        """Wake the parked consumer that the queue's ``balance`` selects."""
        waiters = self.waiters
        while waiters.waiters:
            at = 0 if len(waiters.waiters) == 1 else self._choose()
            if waiters.wake(at):
                break  # otherwise that waiter was just cancelled

    def _choose(self) -> int:
        places = self.waiters.waiters
        if self.config.balance == "round_robin":
            return 0
        if self._random is not None:
            return self._random.randrange(len(places))
        # For a consumer that was just woken, count the message that it is about to take.
        coming, busy = Counter(self.waiters.woken.values()), self.state.leases.busy
        loads = [0 if name is None else busy(name) + coming[name] for *_, name in places]
        return loads.index(min(loads))

    def registered(self, consumer: str | None) -> Consumers | None:
        """Return the registered consumers if ``consumer`` is one of them, otherwise ``None``."""
        members = self.members
        return members if members is not None and consumer in members else None

    def pass_wakeup_on(self) -> None:
        """Wake another parked consumer if a message can be claimed."""
        if self.waiters.waiters and self.state.claimable:
            self.wake()

    def lost_error(self, operation: str) -> SubscriptionLost:
        """Return the error for a queue that was deleted or whose engine was closed."""
        reason = self.lost or "the queue is closed"
        return SubscriptionLost(reason, backend="native", operation=operation, queue=self.name)

    def close(self, reason: str) -> None:
        """Close the queue: stop the timer and wake all waiters, which raise an error."""
        self.lost = reason
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._armed_at = float("-inf")  # so that the timer is not started again
        for subscriber in tuple(self.subscribed):
            subscriber.refresh()
        if self.members is not None:
            self.members.close()
        self._capacity_waiters.wake_all()
        self.waiters.wake_all()

    # Time

    def _arm(self, due: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._armed_at = due
        self._timer = self._loop.call_at(due, self._fire)

    def _rearm(self) -> None:
        due = self.state.next_due()
        if due is not None and due < self._armed_at:
            self._arm(due)

    def _fire(self) -> None:
        self._timer = None
        self._armed_at = float("-inf")  # do not start the timer until this call is finished
        now = self._clock.monotonic()
        try:
            self._route_dead_and_wake(self.state.advance(now))
        except BaseException:
            self._armed_at = float("inf")
            self._rearm()
            raise
        lease = self.state.leases.next_end()
        if lease is not None and lease <= now:
            # The loop may have been blocked past the end of the lease. Two passes of the loop let
            # pending renewals and acks run first: timers, then the tasks that they woke. Leases
            # expire only here. Comparing clocks in ``ack`` would reject work that is already done.
            self._loop.call_soon(self._loop.call_soon, self._expire)
        else:
            self._armed_at = float("inf")
            self._rearm()

    def _expire(self) -> None:
        if self.lost is not None:
            return
        in_flight = self.state.in_flight
        try:
            self._route_dead_and_wake(self.state.expire(self._clock.monotonic()))
        finally:
            self._armed_at = float("inf")
            self._rearm()
        if self.state.in_flight < in_flight:
            for subscriber in tuple(self.subscribed):
                subscriber.refresh()


def envelope_of(message: StoredMessage, offset: float, not_before: float | None = None) -> Envelope:
    """Return the envelope of a message; ``offset`` is wall time minus monotonic time."""
    return Envelope(
        message.id,
        message.body or b"",
        dict(message.headers) if message.headers else {},
        message.key,
        message.priority,
        not_before,
        None if message.expires is None else message.expires + offset,
        message.attempt,
    )
