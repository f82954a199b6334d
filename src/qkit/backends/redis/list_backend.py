"""The Redis list backend: queues with leases, priorities and delays in plain Redis lists."""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace
from typing import Any, Final

from qkit._internal.clock import Clock, SystemClock
from qkit._internal.tasks import run_to_completion
from qkit.backend import Capabilities, QueueSpec, QueueStats, SubscriptionSpec
from qkit.backends.capability_matrix import MATRIX
from qkit.backends.redis import codec
from qkit.backends.redis.at_most_once_subscription import UnreliableSubscription
from qkit.backends.redis.connection import Address, Link
from qkit.backends.redis.errors import BACKEND, translated
from qkit.backends.redis.keys import Place
from qkit.backends.redis.list_subscription import RedisSubscription
from qkit.backends.redis.scripts import admin, lifecycle
from qkit.backends.redis.scripts.script import Script
from qkit.errors import (
    ConfigError,
    PartialSend,
    QueueError,
    QueueFull,
    QueueNotFound,
    SendTimeout,
)
from qkit.message import GROUP, DeadLetter, Envelope, Sent

__all__ = ["RedisListBackend"]

QUEUES: Final = "qkit:queues"  # the names of all queues; no channel's name can hold a colon
BATCH: Final = 500  # ids in one call of a script
FULL: Final = -2
ASIDE: Final = -1  # not by the short way


class RedisListBackend:
    """The whole boundary on Redis 6.2 or later, or Valkey.

    ``replicas`` counts the server itself: with 2 a send returns once one replica has it too.
    Without ``reliable`` a message is gone from the server once a consumer has it: at most once.

    >>> backend = RedisListBackend("redis://localhost:6379/0")
    >>> backend.capabilities.supports("lease")
    True
    """

    name: str = BACKEND
    capabilities: Capabilities = MATRIX["redis-list"]

    def __init__(
        self,
        address: Address | str,
        *,
        clock: Clock | None = None,
        ack_deadline: float = 30.0,
        replicas: int = 1,
        reliable: bool = True,
    ) -> None:
        self._clock: Clock = clock if clock is not None else SystemClock()
        self._ack_deadline = ack_deadline
        self._reliable = reliable
        if not reliable:
            self.capabilities = MATRIX["redis-list-unreliable"]
        self._replicas = replicas
        self.link = Link(address if isinstance(address, Address) else Address(address))
        self._callbacks: list[Callable[[DeadLetter], None]] = []
        self._drop_callbacks: list[Callable[[DeadLetter], None]] = []

    # Backend

    async def start(self) -> None:
        """Connect, or raise ``BackendUnavailable``; ``ConfigError`` if the replicas are missing."""
        self.link.connect()
        try:
            await self.ping()
            if self._replicas > 1:
                await self._check_replicas(self._replicas)
        except BaseException:
            await self.link.aclose()
            raise

    async def declare(self, spec: QueueSpec) -> None:
        """Make sure the queue exists, and set what the spec sets: the last declaration wins.

        Raises ``ConfigError`` when it exists as the other kind, and with ``passive``
        ``QueueNotFound`` when it does not exist.
        """
        with translated("declare", spec.name):
            if spec.replicas > self._replicas:
                await self._check_replicas(spec.replicas)
                self._replicas = spec.replicas
            kind = "topic" if spec.broadcast else "queue"
            told = [] if spec.passive else [kind, int(spec.again), *_declaration(spec)]
            if not spec.passive:
                await self.link.command("SADD", QUEUES, spec.name)
            found = await self._run(lifecycle.DECLARE, Place.of(spec.name), *told)
        if found is None:
            raise _not_found(spec.name, "declare")
        if found.decode() != kind:
            raise ConfigError(
                f"{spec.name!r} was declared as a {found.decode()} and now as a {kind}: declare "
                "it alike everywhere, or delete it first",
                backend=self.name,
                operation="declare",
                queue=spec.name,
            )

    async def publish(self, queue: str, envelopes: Sequence[Envelope]) -> list[Sent]:
        """Add messages in order, as many as can be; the others' errors are in ``PartialSend``."""
        results: list[Sent | QueueError] = []
        for batch in codec.batches(envelopes):
            try:
                results += await self._send(queue, batch)
            except QueueError as error:
                if not results:
                    raise
                results += [error] * (len(envelopes) - len(results))
                break
        sent = [item for item in results if isinstance(item, Sent)]
        if len(sent) < len(results):
            raise PartialSend.of(results, backend=self.name, queue=queue)
        return sent

    async def _send(self, queue: str, envelopes: Sequence[Envelope]) -> list[Sent | QueueError]:
        with translated("publish", queue):
            first = ASIDE
            if all(map(_is_plain, envelopes)):
                frames = [codec.encode(item) for item in envelopes]
                first = await self._confirmed(lifecycle.PLAIN, queue, frames)
                if first is None:
                    raise _not_found(queue, "publish")
            if first != ASIDE:
                return [Sent(item.id, first + at) for at, item in enumerate(envelopes)]
            return await self._send_aside(queue, envelopes)

    async def _send_aside(
        self, queue: str, envelopes: Sequence[Envelope]
    ) -> list[Sent | QueueError]:
        arguments: list[str | int | bytes] = []
        # In a queue of dead letters the header is a fact like the others.
        topic = any(GROUP in item.headers for item in envelopes) and await self._is_topic(queue)
        for item in envelopes:
            group = item.headers.get(GROUP, "") if topic else ""
            if group:
                headers = {name: item.headers[name] for name in item.headers if name != GROUP}
                item = replace(item, headers=headers)
            priority = "" if item.priority is None else item.priority
            arguments += (group, priority, codec.milliseconds(item.not_before), codec.encode(item))
        answer = await self._confirmed(lifecycle.SEND, queue, arguments)
        if answer is None:
            raise _not_found(queue, "publish")
        positions, evicted = answer
        for content in evicted:
            self._dropped(queue, content)
        return [
            _full(queue, item)
            if position == FULL
            else Sent(item.id, position if position >= 0 else None)
            for item, position in zip(envelopes, positions, strict=True)
        ]

    async def _confirmed(self, script: Script, queue: str, arguments: Sequence[Any]) -> Any:
        place = Place.of(queue)
        if self._replicas == 1:
            return await self._run(script, place, *arguments)
        wait = self.link.address.timeout / 2
        answer, copies = await self.link.run_and_wait(
            script, place.keys, [place.base, *arguments], self._replicas - 1, wait
        )
        if answer not in (None, ASIDE) and copies < self._replicas - 1:
            raise SendTimeout(
                f"Redis has the messages, but only {copies} of {self._replicas - 1} replicas "
                f"confirmed them within {wait:g} s: they may be lost if it fails now",
                backend=self.name,
                operation="publish",
                queue=queue,
            )
        return answer

    def subscribe(self, spec: SubscriptionSpec) -> AbstractAsyncContextManager[RedisSubscription]:
        """Claim messages of a queue, or of a topic's group, which is declared by this."""
        return self._subscription(spec)

    @asynccontextmanager
    async def _subscription(
        self, spec: SubscriptionSpec
    ) -> AsyncGenerator[RedisSubscription, None]:
        with translated("subscribe", spec.queue):
            place, max_deliveries = await self._join(spec)
            kind = RedisSubscription if self._reliable else UnreliableSubscription
            subscription = kind(
                self.link,
                place,
                spec,
                lease=self._lease(spec),
                clock=self._clock,
                bury=self._bury,
                max_deliveries=max_deliveries,
            )
            try:
                await subscription.open()
            except BaseException:
                await subscription.leave()
                raise
        try:
            yield subscription
        finally:
            await run_to_completion(subscription.leave())  # what is held must go back

    def _lease(self, spec: SubscriptionSpec) -> float:
        if not self._reliable:
            return 0.0
        return self._ack_deadline if spec.ack_deadline is None else max(0.001, spec.ack_deadline)

    async def _join(self, spec: SubscriptionSpec) -> tuple[Place, int | None]:
        """Where the subscription's messages lie; a topic's group begins to receive by this."""
        place = Place.of(spec.queue)
        joined = await self._run(lifecycle.JOIN, place, spec.group)
        if joined is None:
            raise _not_found(spec.queue, "subscribe")
        kind, *most = joined
        return place.of_group(spec.group) if kind == b"topic" else place, most[0] if most else None

    async def ping(self) -> None:
        """Raise ``BackendUnavailable`` unless the server answers."""
        with translated("ping"):
            await self.link.command("PING")

    async def aclose(self) -> None:
        """Disconnect; idempotent."""
        await self.link.aclose()

    async def _check_replicas(self, wanted: int) -> None:
        with translated("start"):
            info: bytes = await self.link.command("INFO", "replication")
        said = re.search(rb"^connected_slaves:(\d+)", info, re.MULTILINE)
        connected = int(said[1]) if said else 0
        if connected < wanted - 1:
            raise ConfigError(
                f"replicas={wanted} needs {wanted - 1} replicas beside the primary and this Redis "
                f"has {connected}: add some, or set replicas=1",
                backend=self.name,
                operation="start",
            )

    async def _is_topic(self, queue: str) -> bool:
        with translated("publish", queue):
            kind: bytes | None = await self.link.command("HGET", Place.of(queue).keys[0], "kind")
        return kind == b"topic"

    # Admin

    async def queues(self) -> list[str]:
        """The names of all queues and topics that were declared on this server."""
        with translated("queues"):
            return sorted(name.decode() for name in await self.link.command("SMEMBERS", QUEUES))

    async def stats(self, queue: str) -> QueueStats:
        """The queue's figures now; a topic's are the sums of its groups'."""
        ready, held, scheduled = await self._ask(admin.STATS, queue, "stats")
        return QueueStats(
            queue=queue,
            depth=ready,
            in_flight=held,
            scheduled=scheduled,
            consumers=await self._consumers(queue),
        )

    async def _consumers(self, queue: str) -> int | None:
        """How many subscriptions the server has a connection of, by the names they gave it."""
        try:
            with translated("stats", queue):
                clients: bytes = await self.link.command("CLIENT", "LIST", "TYPE", "normal")
        except ConfigError:  # this user may not ask
            return None
        name = re.escape(Place.of(queue).client)
        return len(re.findall(rf" name={name}[: ]".encode(), clients))

    async def peek(self, queue: str, limit: int) -> list[Envelope]:
        """The next messages in order of delivery, delayed ones last."""
        found = await self._ask(admin.PEEK, queue, "peek", limit)
        envelopes: list[Envelope] = []
        for at in range(0, len(found), 2):
            envelope, _ = codec.decode(found[at + 1])
            if found[at]:
                envelope.headers[GROUP] = found[at].decode()
            envelopes.append(envelope)
        return envelopes

    async def purge(self, queue: str) -> int:
        """Delete every message that no consumer holds; return how many."""
        return int(await self._ask(admin.PURGE, queue, "purge"))

    async def remove(self, queue: str, ids: Sequence[str]) -> int:
        """Delete these messages unless a consumer holds them; return how many were there."""
        gone = 0
        for at in range(0, len(ids), BATCH):
            some = [codec.wire_id(id) for id in ids[at : at + BATCH]]
            gone += int(await self._ask(admin.REMOVE, queue, "remove", *some))
        return gone

    async def delete(self, queue: str) -> None:
        """Delete the queue with all that is in it."""
        await self._ask(admin.DELETE, queue, "delete")
        with translated("delete", queue):
            await self.link.command("SREM", QUEUES, queue)

    async def _ask(self, script: Script, queue: str, operation: str, *arguments: Any) -> Any:
        with translated(operation, queue):
            answer = await self._run(script, Place.of(queue), *arguments)
        if answer is None:
            raise _not_found(queue, operation)
        return answer

    async def _run(self, script: Script, place: Place, *arguments: Any) -> Any:
        return await self.link.run(script, place.keys, place.base, *arguments)

    # DeadLetterSource, DroppedLetterSource

    def on_dead_letter(self, callback: Callable[[DeadLetter], None]) -> None:
        """Call ``callback`` for each message whose lease or time to live ran out for good.

        Only in the process whose consumer found it dead; also for one that was dropped because
        its queue names no dead-letter queue.
        """
        self._callbacks.append(callback)

    def on_dropped_letter(self, callback: Callable[[DeadLetter], None]) -> None:
        """Call ``callback`` for each dead letter that a full dead-letter queue pushed out."""
        self._drop_callbacks.append(callback)

    async def _bury(self, place: Place, letter: DeadLetter) -> None:
        target = await self.link.command("HGET", place.keys[0], "dead_letter")
        if target:  # empty: the consumer wants none
            name = target.decode()
            try:
                await self.publish(name, [letter.to_envelope()])
            except QueueNotFound:  # somebody deleted it, and a dead letter must not wait for that
                await self.declare(QueueSpec(name=name, drop_oldest=True, max_depth=10_000))
                await self.publish(name, [letter.to_envelope()])
        for callback in self._callbacks:
            callback(letter)

    def _dropped(self, queue: str, content: bytes) -> None:
        letter = DeadLetter.from_envelope(codec.decode(content)[0], channel=queue)
        for callback in self._drop_callbacks:
            callback(letter)


def _declaration(spec: QueueSpec) -> list[str | int]:
    """The default dead-letter queue, then the fields that are set, with their values."""
    letters = spec.dead_letter or ""
    fields: dict[str, str | int | None] = {
        "max_depth": spec.max_depth,
        "max_priority": spec.max_priority,
        "max_deliveries": spec.max_deliveries,
        "dead_letter": letters if spec.consumed else None,
        "drop_oldest": 1 if spec.drop_oldest else None,
    }
    given = {name: value for name, value in fields.items() if value is not None}
    return [letters, *(word for field in given.items() for word in field)]


def _is_plain(envelope: Envelope) -> bool:
    return (
        envelope.priority in (None, 5)
        and envelope.not_before is None
        and GROUP not in envelope.headers
    )


def _not_found(queue: str, operation: str) -> QueueNotFound:
    return QueueNotFound(
        f"there is no queue {queue!r} on this Redis: declare it, or send to it first",
        backend=BACKEND,
        operation=operation,
        queue=queue,
    )


def _full(queue: str, envelope: Envelope) -> QueueFull:
    return QueueFull(
        "the queue holds as many messages as it may: consume or purge some, or raise max_depth",
        backend=BACKEND,
        operation="publish",
        queue=queue,
        message_id=envelope.id,
    )
