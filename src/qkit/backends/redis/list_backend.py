"""Redis list backend: queues and topics with leases, priorities and delays."""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager

from redis import exceptions

from qkit._internal.clock import Clock, SystemClock
from qkit._internal.logging import logger
from qkit._internal.tasks import run_to_completion
from qkit.backend import Capabilities, QueueSpec, QueueStats, SubscriptionSpec
from qkit.backends.capability_matrix import MATRIX
from qkit.backends.redis import codec
from qkit.backends.redis.at_most_once_subscription import AtMostOnceSubscription
from qkit.backends.redis.connection import ConnectionParameters, ReconnectingConnection
from qkit.backends.redis.driver import PipelinedConnection
from qkit.backends.redis.errors import BACKEND, queue_not_found, translate_errors
from qkit.backends.redis.keys import QUEUES, QueueKeys
from qkit.backends.redis.list_admin import ListAdmin
from qkit.backends.redis.list_publisher import ListPublisher
from qkit.backends.redis.list_subscription import ListSubscription
from qkit.backends.redis.ordered_subscription import ORDERED_SUFFIX, OrderedSubscription
from qkit.backends.redis.queue_scripts import QueueScripts
from qkit.backends.redis.scripts import lifecycle
from qkit.errors import ConfigError
from qkit.message import DeadLetter, Envelope, Sent
from qkit.settings.model import Settings

__all__ = ["RedisListBackend", "from_settings"]


class RedisListBackend:
    """``Backend`` and ``Admin`` on the lists of Redis 6.2 or later, or Valkey.

    Args:
        parameters: Connection parameters, or a URL.
        clock: Clock of the service; the system clock by default.
        ack_deadline: Length of a lease in seconds, for subscriptions that do not set their own.
        replicas: Number of servers, including the primary, that must store a message before
            ``publish`` returns.
        reliable: Whether to deliver with leases. If false, delivery removes a message from the
            server, so it is delivered at most once.

    >>> backend = RedisListBackend("redis://localhost:6379/0")
    >>> backend.capabilities.supports("lease")
    True
    """

    name: str = BACKEND
    capabilities: Capabilities = MATRIX["redis-list"]

    def __init__(
        self,
        parameters: ConnectionParameters | str,
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
        self.connection: ReconnectingConnection = ReconnectingConnection(
            parameters
            if isinstance(parameters, ConnectionParameters)
            else ConnectionParameters(parameters)
        )
        self._scripts = QueueScripts(self.connection)
        self._publisher = ListPublisher(
            self.connection, self._scripts, replicas=replicas, on_evicted=self._dropped
        )
        self._admin = ListAdmin(self.connection, self._scripts)
        self._durable: bool | None = None
        self._asked: PipelinedConnection | None = None  # connection that reported the durability
        self._drop_callbacks: list[Callable[[DeadLetter], None]] = []

    # Backend

    async def start(self) -> None:
        """Connect to the server.

        Raises:
            BackendUnavailable: The server does not respond.
            ConfigError: The server has fewer replicas than ``replicas`` requires.
        """
        self.connection.connect()
        try:
            await self.ping()
            if self._publisher.replicas > 1:
                await self._check_replicas(self._publisher.replicas)
        except BaseException:
            await self.connection.aclose()
            raise

    async def declare(self, spec: QueueSpec) -> None:
        """Create the queue or topic if needed and set the fields given in the spec.

        If several declarations set the same field, the last one wins. If ``spec.again`` is set, an
        existing queue is left unchanged.

        Raises:
            ConfigError: The queue exists with a different ``broadcast``, or the server has fewer
                replicas than ``spec.replicas`` requires.
            QueueNotFound: ``spec.passive`` is set and the queue does not exist.
        """
        with translate_errors("declare", spec.name):
            if spec.replicas > self._publisher.replicas:
                await self._check_replicas(spec.replicas)
                self._publisher.replicas = spec.replicas
            kind = "topic" if spec.broadcast else "queue"
            arguments = [] if spec.passive else [kind, int(spec.again), *_declaration(spec)]
            if not spec.passive:
                await self.connection.command("SADD", QUEUES, spec.name)
            keys = QueueKeys.of(spec.name).declaration_keys
            found = await self.connection.run(lifecycle.DECLARE, keys, *arguments)
        if found is None:
            raise queue_not_found(spec.name, "declare")
        if found.decode() != kind:
            raise ConfigError(
                f"{spec.name!r} already exists as a {found.decode()} and cannot be declared as a "
                f"{kind}: use the same kind everywhere, or delete it first",
                backend=self.name,
                operation="declare",
                queue=spec.name,
            )

    async def publish(self, queue: str, envelopes: Sequence[Envelope]) -> list[Sent]:
        """Add messages in order.

        Raises:
            PartialSend: Some messages were not added; ``results`` has the outcome of each message.
        """
        return await self._publisher.publish(queue, envelopes)

    def subscribe(self, spec: SubscriptionSpec) -> AbstractAsyncContextManager[ListSubscription]:
        """Subscribe to a queue or to a group of a topic; create the group if it does not exist."""
        return self._subscription(spec)

    @asynccontextmanager
    async def _subscription(self, spec: SubscriptionSpec) -> AsyncGenerator[ListSubscription, None]:
        with translate_errors("subscribe", spec.queue):
            keys, has_ordered = await self._join(spec)
            subscription = self._subscription_type(spec)(
                self.connection,
                self._scripts,
                keys,
                spec,
                lease=self._lease(spec),
                clock=self._clock,
            )
            try:
                await subscription.open()
                if has_ordered:
                    await self._warn_if_mixed(keys, spec)
            except BaseException:
                await subscription.leave()
                raise
        try:
            yield subscription
        finally:
            await run_to_completion(subscription.leave())  # even if cancelled: release deliveries

    def _lease(self, spec: SubscriptionSpec) -> float:
        if not self._reliable:
            return 0.0
        return self._ack_deadline if spec.ack_deadline is None else max(0.001, spec.ack_deadline)

    def _subscription_type(self, spec: SubscriptionSpec) -> type[ListSubscription]:
        if not self._reliable:
            return AtMostOnceSubscription
        return OrderedSubscription if spec.ordered else ListSubscription

    async def _join(self, spec: SubscriptionSpec) -> tuple[QueueKeys, bool]:
        """Return the keys to consume from, and whether the queue has or had ordered consumers.

        For a topic, create the group if needed.
        """
        keys = QueueKeys.of(spec.queue)
        ordered = spec.ordered and self._reliable
        reply = await self._scripts.run_whole(lifecycle.JOIN, spec.queue, spec.group, int(ordered))
        if reply is None:
            raise queue_not_found(spec.queue, "subscribe")
        kind, has_ordered = reply
        return keys.of_group(spec.group) if kind == b"topic" else keys, ordered or bool(has_ordered)

    async def _warn_if_mixed(self, keys: QueueKeys, spec: SubscriptionSpec) -> None:
        """Log a warning if ordered and unordered consumers share the queue, as far as is known."""
        try:
            clients: bytes = await self.connection.command("CLIENT", "LIST", "TYPE", "normal")
        except exceptions.ResponseError:  # the user lacks the permission client|list
            return
        names = re.findall(rb" name=(\S+) ", clients)
        unordered = names.count(keys.client.encode())
        ordered = names.count((keys.client + ORDERED_SUFFIX).encode())
        if unordered and ordered:
            logger.warning(
                "%s: the messages of a key may be handled out of order, because %d of %d consumers "
                "are not ordered: set ordered=True for all consumers of this queue",
                spec.queue,
                unordered,
                unordered + ordered,
                extra={"queue": spec.queue, "consumer": spec.group},
            )

    async def ping(self) -> None:
        """Check that the server responds; raise ``BackendUnavailable`` otherwise."""
        with translate_errors("ping"):
            await self.connection.command("PING")
            connection = await self.connection.current()
            if connection is not self._asked:  # the server may have been restarted
                self._durable = await _reported_durability(connection)
                self._asked = connection

    @property
    def durable(self) -> bool | None:
        """Whether the server writes each message to disk; ``None`` if it does not report it.

        ``None`` also means that it writes only snapshots, from time to time.
        """
        return self._durable

    async def aclose(self) -> None:
        """Disconnect; idempotent."""
        await self.connection.aclose()

    async def _check_replicas(self, wanted: int) -> None:
        with translate_errors("start"):
            info: bytes = await self.connection.command("INFO", "replication")
        match = re.search(rb"^connected_slaves:(\d+)", info, re.MULTILINE)
        connected = int(match[1]) if match else 0
        if connected < wanted - 1:
            raise ConfigError(
                f"replicas={wanted} requires {wanted - 1} replicas in addition to the primary, but "
                f"this Redis server has {connected}: add replicas, or lower replicas",
                backend=self.name,
                operation="start",
            )

    # Admin

    async def queues(self) -> list[str]:
        """Return the names of all queues and topics declared on this server, sorted."""
        return await self._admin.queues()

    async def stats(self, queue: str) -> QueueStats:
        """Return the queue's statistics; for a topic, the sums over its groups."""
        return await self._admin.stats(queue)

    async def peek(self, queue: str, limit: int) -> list[Envelope]:
        """Return up to ``limit`` messages in delivery order, scheduled messages last."""
        return await self._admin.peek(queue, limit)

    async def purge(self, queue: str) -> int:
        """Delete every message that is not in flight; return the number deleted."""
        return await self._admin.purge(queue)

    async def remove(self, queue: str, ids: Sequence[str]) -> int:
        """Delete the messages with these ids that are not in flight; return the number deleted."""
        return await self._admin.remove(queue, ids)

    async def delete(self, queue: str) -> None:
        """Delete the queue and all its messages."""
        await self._admin.delete(queue)

    # DroppedLetterSource, but not DeadLetterSource: this backend delivers expired messages, and the
    # service dead-letters them.

    def on_dropped_letter(self, callback: Callable[[DeadLetter], None]) -> None:
        """Call ``callback`` for each dead letter dropped because its queue was full."""
        self._drop_callbacks.append(callback)

    def _dropped(self, queue: str, content: bytes) -> None:
        letter = DeadLetter.from_envelope(codec.decode(content), channel=queue)
        for callback in self._drop_callbacks:
            callback(letter)


async def _reported_durability(connection: PipelinedConnection) -> bool | None:
    """Return whether the server has an append-only file; ``None`` if that is unknown.

    Without one the server may write snapshots, which ``INFO`` does not show. The user may lack the
    permission for either command.
    """
    info, save = await connection.call_all([("INFO", "persistence"), ("CONFIG", "GET", "save")])
    found = re.search(rb"^aof_enabled:(\d)", info, re.MULTILINE) if type(info) is bytes else None
    if found is None:
        return None
    if found[1] == b"1":
        return True
    return False if save == [b"save", b""] else None


def from_settings(settings: Settings, clock: Clock) -> RedisListBackend:
    """Create the backend that the settings describe; the caller starts it.

    Args:
        settings: Settings with ``type="redis"`` and ``mode="list"``.
        clock: Clock of the service.
    """
    return RedisListBackend(
        ConnectionParameters.from_settings(settings),
        clock=clock,
        ack_deadline=settings.ack_deadline,
        replicas=settings.replicas,
        reliable=settings.reliable,
    )


def _declaration(spec: QueueSpec) -> list[str | int]:
    """Return the default dead-letter queue, then the name and value of each field that is set.

    Only earlier versions of qkit read the name of the dead-letter queue. It is still written
    because such a version may consume from the same queue during a rolling upgrade.
    """
    dead_letter = spec.dead_letter or ""
    fields: dict[str, str | int | None] = {
        "max_depth": spec.max_depth,
        "max_priority": spec.max_priority,
        "dead_letter": dead_letter if spec.consumed else None,
        "drop_oldest": 1 if spec.drop_oldest else None,
    }
    given = {name: value for name, value in fields.items() if value is not None}
    return [dead_letter, *(word for field in given.items() for word in field)]
