"""The Redis list backend: queues with leases, priorities and delays in plain Redis lists."""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager

from qkit._internal.clock import Clock, SystemClock
from qkit._internal.tasks import run_to_completion
from qkit.backend import Capabilities, QueueSpec, QueueStats, SubscriptionSpec
from qkit.backends.capability_matrix import MATRIX
from qkit.backends.redis import codec
from qkit.backends.redis.at_most_once_subscription import AtMostOnceSubscription
from qkit.backends.redis.connection import ConnectionParameters, ReconnectingConnection
from qkit.backends.redis.errors import BACKEND, queue_not_found, translate_errors
from qkit.backends.redis.keys import QUEUES, QueueKeys
from qkit.backends.redis.list_admin import ListAdmin
from qkit.backends.redis.list_publisher import ListPublisher
from qkit.backends.redis.list_subscription import ListSubscription
from qkit.backends.redis.queue_scripts import QueueScripts
from qkit.backends.redis.scripts import lifecycle
from qkit.errors import ConfigError
from qkit.message import DeadLetter, Envelope, Sent
from qkit.settings.model import Settings

__all__ = ["RedisListBackend", "from_settings"]


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
        self.connection = ReconnectingConnection(
            parameters
            if isinstance(parameters, ConnectionParameters)
            else ConnectionParameters(parameters)
        )
        self._scripts = QueueScripts(self.connection)
        self._publisher = ListPublisher(
            self.connection, self._scripts, replicas=replicas, on_evicted=self._dropped
        )
        self._admin = ListAdmin(self.connection, self._scripts)
        self._drop_callbacks: list[Callable[[DeadLetter], None]] = []

    # Backend

    async def start(self) -> None:
        """Connect, or raise ``BackendUnavailable``; ``ConfigError`` if the replicas are missing."""
        self.connection.connect()
        try:
            await self.ping()
            if self._publisher.replicas > 1:
                await self._check_replicas(self._publisher.replicas)
        except BaseException:
            await self.connection.aclose()
            raise

    async def declare(self, spec: QueueSpec) -> None:
        """Make sure the queue exists, and set what the spec sets: the last declaration wins.

        Raises ``ConfigError`` when it exists as the other kind, and with ``passive``
        ``QueueNotFound`` when it does not exist.
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
                f"{spec.name!r} was declared as a {found.decode()} and now as a {kind}: declare "
                "it alike everywhere, or delete it first",
                backend=self.name,
                operation="declare",
                queue=spec.name,
            )

    async def publish(self, queue: str, envelopes: Sequence[Envelope]) -> list[Sent]:
        """Add messages in order, as many as can be; the others' errors are in ``PartialSend``."""
        return await self._publisher.publish(queue, envelopes)

    def subscribe(self, spec: SubscriptionSpec) -> AbstractAsyncContextManager[ListSubscription]:
        """Claim messages of a queue, or of a topic's group, which is declared by this."""
        return self._subscription(spec)

    @asynccontextmanager
    async def _subscription(self, spec: SubscriptionSpec) -> AsyncGenerator[ListSubscription, None]:
        with translate_errors("subscribe", spec.queue):
            keys = await self._join(spec)
            kind = ListSubscription if self._reliable else AtMostOnceSubscription
            subscription = kind(
                self.connection,
                self._scripts,
                keys,
                spec,
                lease=self._lease(spec),
                clock=self._clock,
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

    async def _join(self, spec: SubscriptionSpec) -> QueueKeys:
        """Where the subscription's messages lie; a topic's group begins to receive by this."""
        keys = QueueKeys.of(spec.queue)
        kind = await self._scripts.run_whole(lifecycle.JOIN, spec.queue, spec.group)
        if kind is None:
            raise queue_not_found(spec.queue, "subscribe")
        return keys.of_group(spec.group) if kind == b"topic" else keys

    async def ping(self) -> None:
        """Raise ``BackendUnavailable`` unless the server answers."""
        with translate_errors("ping"):
            await self.connection.command("PING")

    async def aclose(self) -> None:
        """Disconnect; idempotent."""
        await self.connection.aclose()

    async def _check_replicas(self, wanted: int) -> None:
        with translate_errors("start"):
            info: bytes = await self.connection.command("INFO", "replication")
        said = re.search(rb"^connected_slaves:(\d+)", info, re.MULTILINE)
        connected = int(said[1]) if said else 0
        if connected < wanted - 1:
            raise ConfigError(
                f"replicas={wanted} needs {wanted - 1} replicas beside the primary and this Redis "
                f"has {connected}: add some, or set replicas=1",
                backend=self.name,
                operation="start",
            )

    # Admin

    async def queues(self) -> list[str]:
        """The names of all queues and topics that were declared on this server."""
        return await self._admin.queues()

    async def stats(self, queue: str) -> QueueStats:
        """The queue's figures now; a topic's are the sums of its groups'."""
        return await self._admin.stats(queue)

    async def peek(self, queue: str, limit: int) -> list[Envelope]:
        """The next messages in order of delivery, delayed ones last."""
        return await self._admin.peek(queue, limit)

    async def purge(self, queue: str) -> int:
        """Delete every message that no consumer holds; return how many."""
        return await self._admin.purge(queue)

    async def remove(self, queue: str, ids: Sequence[str]) -> int:
        """Delete these messages unless a consumer holds them; return how many were there."""
        return await self._admin.remove(queue, ids)

    async def delete(self, queue: str) -> None:
        """Delete the queue with all that is in it."""
        await self._admin.delete(queue)

    # DroppedLetterSource; not DeadLetterSource: an expired message is delivered, and the service
    # writes the dead letter

    def on_dropped_letter(self, callback: Callable[[DeadLetter], None]) -> None:
        """Call ``callback`` for each dead letter that a full dead-letter queue pushed out."""
        self._drop_callbacks.append(callback)

    def _dropped(self, queue: str, content: bytes) -> None:
        letter = DeadLetter.from_envelope(codec.decode(content), channel=queue)
        for callback in self._drop_callbacks:
            callback(letter)


def from_settings(settings: Settings, clock: Clock) -> RedisListBackend:
    """Build the backend that the settings describe, not yet started.

    Args:
        settings: Settings with ``type="redis"`` and ``mode="list"``.
        clock: Time of the service.
    """
    return RedisListBackend(
        ConnectionParameters.from_settings(settings),
        clock=clock,
        ack_deadline=settings.ack_deadline,
        replicas=settings.replicas,
        reliable=settings.reliable,
    )


def _declaration(spec: QueueSpec) -> list[str | int]:
    """The default dead-letter queue, then the fields that are set, with their values.

    Only earlier versions read the name of the dead-letter queue. It is still written because they
    may consume the same queue while services are replaced one by one.
    """
    letters = spec.dead_letter or ""
    fields: dict[str, str | int | None] = {
        "max_depth": spec.max_depth,
        "max_priority": spec.max_priority,
        "dead_letter": letters if spec.consumed else None,
        "drop_oldest": 1 if spec.drop_oldest else None,
    }
    given = {name: value for name, value in fields.items() if value is not None}
    return [letters, *(word for field in given.items() for word in field)]
