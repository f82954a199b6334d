"""The native engine: queues and topics inside this process, without a broker.

It is the manager of the queues: it names them, moves dead letters between them and closes them.
It belongs to one event loop.
"""

from __future__ import annotations

import asyncio
import builtins  # Engine.list hides the type
import logging
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import fields, replace
from types import TracebackType
from typing import Final, Self

from qkit.backend import QueueStats
from qkit.clock import Clock, SystemClock
from qkit.errors import (
    ConfigError,
    InvalidBody,
    LifecycleError,
    QueueNotFound,
    SubscriptionLost,
    Unsupported,
)
from qkit.message import DeadLetter, Envelope, Sent, check_name, new_id
from qkit.native.actor import QueueActor, envelope_of
from qkit.native.config import QueueConfig
from qkit.native.dead import Dead
from qkit.native.delivery import Delivery
from qkit.native.stored import Stored
from qkit.native.topic import Topic

__all__ = ["Engine"]

logger = logging.getLogger("qkit.native")

DEAD_LETTER_SUFFIX: Final = "_dlq"
ALL_FIELDS: Final = frozenset(item.name for item in fields(QueueConfig))


class Engine:
    """Queues and topics in memory.

    >>> async def main() -> None:
    ...     async with Engine() as engine:
    ...         await engine.create("orders")
    ...         await engine.publish("orders", b"one", priority=8, headers={"tenant": "acme"})
    ...         delivery = await engine.consume("orders", timeout=5)
    ...         print(delivery.body, delivery.retry_count)
    ...         await delivery.ack()
    >>> asyncio.run(main())
    b'one' 0
    """

    def __init__(self, *, clock: Clock | None = None) -> None:
        self.clock: Clock = clock if clock is not None else SystemClock()
        self._now = self.clock.monotonic
        self._loop: asyncio.AbstractEventLoop | None = None
        self._closed = False
        self._channels: dict[str, QueueActor | Topic] = {}
        self._insisted: dict[str, frozenset[str]] = {}  # the fields its declarations named
        self._callbacks: builtins.list[Callable[[DeadLetter], None]] = []
        self._drop_callbacks: builtins.list[Callable[[DeadLetter], None]] = []

    # Life

    @property
    def running(self) -> bool:
        """Whether it was opened and not closed yet."""
        return self._loop is not None and not self._closed

    @property
    def closed(self) -> bool:
        """Whether it was closed; an engine is opened once."""
        return self._closed

    async def __aenter__(self) -> Self:
        if self._loop is not None:
            raise LifecycleError("an engine is opened once: make a new one")
        self._loop = asyncio.get_running_loop()
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Close every queue and let parked consumers go; idempotent."""
        self._closed = True
        for channel in self._channels.values():
            channel.close("the engine was closed")
        self._channels.clear()

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
    ) -> None:
        """Create a queue, or a topic with ``broadcast``; again with equal options is no error.

        ``max_retries`` is how often a message may come again after a ``nack`` or a lost lease
        (``None``: for ever), ``backoff`` the delay before the first return after a ``nack``,
        doubled each time. Dead letters go to ``{name}_dlq``. Raises ``ConfigError`` if it exists
        with other options, ``InvalidName``.
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
        )
        self.declare(name, config)

    def declare(
        self, name: str, config: QueueConfig, insisted: Collection[str] = ALL_FIELDS
    ) -> None:
        """Make sure that a queue exists with those fields of ``config`` that are insisted on.

        The others are what it gets if nobody says otherwise. Raises ``ConfigError`` when two
        declarations insist on different things. The name is taken as it is: a prefix or suffix
        may have made it longer than a channel's name can be.
        """
        loop = self._own_loop()
        if config.dead_letter is not None and isinstance(
            self._channels.get(config.dead_letter), Topic
        ):
            raise ConfigError(
                f"{config.dead_letter!r} is a topic and cannot keep the dead letters of {name!r}",
                backend="native",
                operation="declare",
                queue=name,
            )
        channel = self._channels.get(name)
        if channel is None:
            self._channels[name] = (
                Topic(name, config, self._new_group)
                if config.broadcast
                else self._new_actor(loop, name, config)
            )
            self._insisted[name] = frozenset(insisted) | {"broadcast"}
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
        changes = {field: getattr(config, field) for field in insisted}
        channel.reconfigure(replace(channel.config, **changes))
        self._insisted[name] |= frozenset(insisted)

    def _new_actor(
        self,
        loop: asyncio.AbstractEventLoop,
        name: str,
        config: QueueConfig,
        group: str | None = None,
    ) -> QueueActor:
        return QueueActor(
            name,
            config,
            clock=self.clock,
            loop=loop,
            on_dead=self._route,
            on_evicted=self._tell_dropped,
            group=group,
        )

    def _new_group(self, topic: Topic, group: str) -> QueueActor:
        check_name(group, "group")
        return self._new_actor(self._own_loop(), topic.name, topic.config, group)

    async def delete(self, name: str) -> None:
        """Delete a queue with all that is in it; its dead letters stay."""
        self.channel(name, "delete").close("the queue was deleted")
        del self._channels[name], self._insisted[name]

    async def list(self) -> builtins.list[str]:
        """The names of all queues and topics, sorted."""
        return sorted(self._channels)

    async def stats(self, name: str) -> QueueStats:
        """A queue's figures now; a topic's are the sums of its groups'."""
        return self.channel(name, "stats").stats()

    async def peek(self, name: str, limit: int = 1) -> builtins.list[Envelope]:
        """The next messages in order of delivery, delayed ones last; nothing is consumed."""
        return self.channel(name, "peek").peek(limit)

    async def purge(self, name: str) -> int:
        """Delete every message that no consumer holds; return how many."""
        return sum(actor.state.purge() for actor in self._actors(name, "purge"))

    async def remove(self, name: str, ids: Collection[str]) -> int:
        """Delete these messages unless a consumer holds them; return how many were there."""
        return sum(actor.state.remove(ids) for actor in self._actors(name, "remove"))

    def channel(self, name: str, operation: str) -> QueueActor | Topic:
        """The queue or topic of that name, or ``QueueNotFound``."""
        channel = self._channels.get(name)
        if channel is None:
            self._own_loop()  # a closed engine says so
            raise QueueNotFound(
                f"no queue {name!r}: create it first",
                backend="native",
                operation=operation,
                queue=name,
            )
        return channel

    def queue(self, name: str, operation: str, group: str | None = None) -> QueueActor:
        """The queue of that name, or a group's share of the topic of that name."""
        channel = self.channel(name, operation)
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

    def _actors(self, name: str, operation: str) -> Iterable[QueueActor]:
        channel = self.channel(name, operation)
        return [channel] if isinstance(channel, QueueActor) else channel.groups.values()

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
    ) -> Sent:
        """Add a message, of priority 5 unless told otherwise.

        It is delivered no earlier than after ``delay`` seconds, and becomes a dead letter if no
        consumer took it within ``ttl``. Raises ``QueueNotFound``, ``QueueFull``,
        ``InvalidPriority``, and ``ValueError`` unless delay < ttl.
        """
        channel = self._channels.get(queue) or self.channel(queue, "publish")
        if not isinstance(body, bytes):
            raise InvalidBody(f"a body is bytes, not {type(body).__name__}", queue=queue)
        if message_id is None:
            message_id = new_id()
        now = self._now()
        due = expires = None
        if delay is not None or ttl is not None:
            due, expires = _times(now, delay, ttl)
        position = channel.put(
            now, message_id, body, dict(headers) if headers else None, key, priority, due, expires
        )
        # What Sent(…) does, in half its time; the checker cannot see a generic class's __new__.
        return tuple.__new__(Sent, (message_id, position))  # pyright: ignore[reportUnknownMemberType]

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
        moment without loss. On a topic, ``group`` says whose share. Raises ``QueueNotFound``,
        and ``SubscriptionLost`` if the queue is deleted or the engine closed meanwhile.
        """
        actor = self._channels.get(queue)
        if not isinstance(actor, QueueActor):
            actor = self.queue(queue, "consume", group)
        lease = actor.config.ack_deadline if ack_deadline is None else ack_deadline
        claimed = actor.claim(self._now(), 1, lease, consumer)
        if not claimed and timeout != 0:
            claimed = await self._wait(actor, timeout, lease, consumer)
        return Delivery(actor, claimed[0]) if claimed else None

    async def _wait(
        self, actor: QueueActor, timeout: float | None, lease: float, consumer: str | None
    ) -> builtins.list[Stored]:
        loop = self._own_loop()
        claimed: builtins.list[Stored] = []
        again = False
        actor.consumers += 1
        try:
            async with asyncio.timeout(timeout):
                while not claimed:
                    await actor.park(loop.create_future(), again=again)
                    if actor.lost is not None:
                        raise SubscriptionLost(
                            actor.lost, backend="native", operation="consume", queue=actor.name
                        )
                    claimed = actor.claim(self._now(), 1, lease, consumer)
                    again = True
        except TimeoutError:  # perhaps one came at the very end
            claimed = actor.claim(self._now(), 1, lease, consumer)
        finally:
            actor.consumers -= 1
        return claimed

    # Dead letters

    def on_dead_letter(self, callback: Callable[[DeadLetter], None]) -> None:
        """Call ``callback`` for each dead letter, also one dropped for want of a queue."""
        self._callbacks.append(callback)

    def _route(self, actor: QueueActor, dead: builtins.list[Dead]) -> None:
        """Move messages that died to their queue's dead letters; no queue knows another."""
        at = self.clock.time()
        offset = at - self._now()
        for message, reason, error in dead:
            letter = DeadLetter.of(
                envelope_of(message, offset),
                channel=actor.name,
                group=actor.group,
                reason=reason,
                at=at,
                error=error,
            )
            if actor.config.dead_letter is None:
                actor.state.dropped += 1
            else:
                self._put_dead_letter(actor, letter)
                actor.state.dead_lettered += 1
            _tell(self._callbacks, letter)

    def on_dropped_letter(self, callback: Callable[[DeadLetter], None]) -> None:
        """Call ``callback`` for each dead letter that a full dead-letter queue pushed out."""
        self._drop_callbacks.append(callback)

    def _tell_dropped(self, envelopes: builtins.list[Envelope]) -> None:
        for envelope in envelopes:
            _tell(self._drop_callbacks, DeadLetter.from_envelope(envelope))

    def _put_dead_letter(self, actor: QueueActor, letter: DeadLetter) -> None:
        name = actor.config.dead_letter
        assert name is not None
        target = self._channels.get(name)
        if target is None:
            config = QueueConfig(
                max_depth=actor.config.dead_letter_max_depth,
                max_priority=actor.config.max_priority,
                max_deliveries=None,
                drop_oldest=True,
            )
            self.declare(name, config, insisted=())
            target = self._channels[name]
        if not target.config.drop_oldest:  # made by hand: yet no dead letter may find it full
            target.reconfigure(replace(target.config, drop_oldest=True))
        envelope = letter.to_envelope()
        target.put(self._now(), envelope.id, envelope.body, envelope.headers, envelope.key)

    async def dead_letters(self, name: str, limit: int = 10_000) -> builtins.list[DeadLetter]:
        """The dead letters of a queue, in their queue's order."""
        letters = self._letters(name)
        if letters is None:
            return []
        return [DeadLetter.from_envelope(item, channel=name) for item in letters.peek(limit)]

    async def retry_dead_letters(self, name: str, ids: Collection[str] | None = None) -> int:
        """Publish dead letters again, all unless ``ids`` names some; return how many.

        Each keeps its id and starts at its first attempt. If the queue fills up, the rest stays
        where it is and ``QueueFull`` is raised.
        """
        letters, channel = self._letters(name), self.channel(name, "retry")
        done: builtins.list[str] = []
        try:
            for letter in await self.dead_letters(name):
                if ids is None or letter.message_id in ids:
                    item = letter.to_replay()
                    channel.put(
                        self._now(), item.id, item.body, item.headers, item.key, item.priority
                    )
                    done.append(item.id)
        finally:
            if letters is not None and done:
                letters.state.remove(done)
        return len(done)

    async def purge_dead_letters(self, name: str) -> int:
        """Delete the dead letters of a queue; return how many."""
        letters = self._letters(name)
        return 0 if letters is None else letters.state.purge()

    def _letters(self, name: str) -> QueueActor | None:
        target = self.channel(name, "dead_letters").config.dead_letter
        channel = self._channels.get(target) if target is not None else None
        return channel if isinstance(channel, QueueActor) else None


def _tell(callbacks: builtins.list[Callable[[DeadLetter], None]], letter: DeadLetter) -> None:
    for callback in callbacks:
        try:
            callback(letter)
        except Exception:
            logger.exception("a dead-letter callback failed; nothing else did")


def _times(now: float, delay: float | None, ttl: float | None) -> tuple[float | None, float | None]:
    if delay is not None and not delay >= 0:
        raise ValueError(f"delay={delay!r}: zero or more seconds")
    if ttl is not None and not ttl > 0:
        raise ValueError(f"ttl={ttl!r}: more than zero seconds")
    if delay is not None and ttl is not None and delay >= ttl:
        raise ValueError(f"delay={delay!r} is not shorter than ttl={ttl!r}: it could only expire")
    return (now + delay if delay else None), (now + ttl if ttl is not None else None)
