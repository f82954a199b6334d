"""Administrative requests to the cluster for topics, offsets and groups."""

from __future__ import annotations

import asyncio
import functools
from collections import defaultdict
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from typing import Any, Final, TypeVar, TypeVarTuple

from qkit.backends.common.errors import other_loop
from qkit.backends.kafka import driver
from qkit.backends.kafka.connection import ConnectionParameters
from qkit.backends.kafka.driver import Admin, NewTopic, Partition, RecordsToDelete, errors
from qkit.backends.kafka.errors import BACKEND, translate_errors
from qkit.backends.kafka.offsets import CommittedOffset
from qkit.errors import BackendUnavailable, ConfigError, QueueNotFound

__all__ = ["Cluster", "not_found"]

# Temporary errors, for example while a new topic does not have a leader.
_NOT_READY_ERRORS: Final = (
    errors.NotLeaderForPartitionError,
    errors.LeaderNotAvailableError,
    errors.UnknownTopicOrPartitionError,
    errors.GroupCoordinatorNotAvailableError,
    errors.NotCoordinatorForGroupError,
    errors.GroupLoadInProgressError,
    errors.KafkaConnectionError,
    errors.NodeNotReadyError,
    errors.RequestTimedOutError,
    errors.KafkaStorageError,
)
R = TypeVar("R")
Arguments = TypeVarTuple("Arguments")
POLL_INTERVAL_SECONDS: Final = 0.02
PING_TIMEOUT_SECONDS: Final = 1.5  # shorter than the 2 s between health checks
DEAD_CONNECTION_SECONDS: Final = 1.0  # cancelling a request after this time closes its connection


class Cluster:
    """Client for administrative requests, each with a timeout."""

    def __init__(self, parameters: ConnectionParameters) -> None:
        self._parameters = parameters
        self._admin: Any = None
        #: Event loop in which ``connect`` was called; ``None`` before and after ``aclose``.
        self.loop: asyncio.AbstractEventLoop | None = None
        #: Number of partitions of each topic, as of the last request for it.
        self.last_known_partitions: dict[str, int] = {}
        self._outdated: set[str] = set()  # topics whose number of partitions may have changed

    async def connect(self) -> None:
        """Connect to a broker.

        Raises:
            BackendUnavailable: No broker responds in time.
        """
        if self._admin is not None:
            return
        # The driver closes an unresponsive connection only when its own timeout expires, so its
        # timeout must be shorter than the timeout of a request here.
        admin = driver.disable_topic_creation(
            Admin(**self._parameters.options(self._parameters.timeout * 0.8))
        )
        try:
            async with self._request("start"):
                await admin.start()
        except BaseException:
            await driver.close_admin(admin)
            raise
        self._admin = admin
        self.loop = asyncio.get_running_loop()

    async def aclose(self) -> None:
        """Disconnect; idempotent."""
        admin, self._admin = self._admin, None
        self.loop = None
        self.last_known_partitions.clear()
        self._outdated.clear()
        if admin is not None:
            await driver.close_admin(admin)

    @property
    def _client(self) -> Any:
        return driver.client_of(self._connected)

    @property
    def _connected(self) -> Any:
        if self._admin is None:
            raise BackendUnavailable(
                "not connected: start the backend first", backend=BACKEND, operation="connect"
            )
        return self._admin

    async def ping(self) -> None:
        """Check that a broker responds.

        Raises:
            BackendUnavailable: No broker responds within ``PING_TIMEOUT_SECONDS``.
        """
        async with self._request("ping", timeout=PING_TIMEOUT_SECONDS):
            await self._exchange(driver.metadata_request([]))

    def check_loop(self, operation: str) -> None:
        """Raise ``LifecycleError`` in another event loop, whose tasks cannot use the connection."""
        if self.loop is not None and asyncio.get_running_loop() is not self.loop:
            raise other_loop(BACKEND, operation)

    @asynccontextmanager
    async def _request(
        self, operation: str, topic: str | None = None, timeout: float | None = None
    ) -> AsyncGenerator[None, None]:
        self.check_loop(operation)
        with translate_errors(operation, topic):
            async with asyncio.timeout(timeout or self._parameters.timeout):
                yield

    # Topics

    async def topics(self) -> list[str]:
        """Return the names of all topics except Kafka's internal topics."""
        return [name for name, topic in (await self._describe(None)).items() if not topic.internal]

    async def partitions(self, topic: str, operation: str) -> int:
        """Return the number of partitions of a topic, from the cache unless it is outdated.

        Raises:
            QueueNotFound: The topic does not exist.
        """
        known = await self._current_partitions(topic)
        if not known:
            raise not_found(topic, operation)
        return known

    async def _current_partitions(self, topic: str) -> int:
        known = self.last_known_partitions.get(topic)
        return (
            await self.count_partitions(topic)
            if known is None or topic in self._outdated
            else known
        )

    async def count_partitions(self, topic: str) -> int:
        """Request the number of partitions of a topic; return 0 if it does not exist."""
        found = (await self._describe([topic])).get(topic)
        self._outdated.discard(topic)
        if found is None or not found.leaders:
            self.last_known_partitions.pop(topic, None)
            return 0
        self.last_known_partitions[topic] = len(found.leaders)
        return len(found.leaders)

    def invalidate(self, topic: str) -> None:
        """Mark the cached number of partitions of a topic as outdated."""
        self._outdated.add(topic)

    async def create(
        self, topic: str, partitions: int, replicas: int, config: Mapping[str, str]
    ) -> None:
        """Create a topic unless it exists; return when its partitions have leaders.

        Raises:
            ConfigError: Kafka does not accept the name, the replicas or the configuration.
        """
        if await self.count_partitions(topic):
            return
        async with self._request("declare", topic):
            new = NewTopic(topic, partitions, replicas, topic_configs=dict(config))
            answer = await self._connected.create_topics([new])
            for _, code, text in answer.topic_errors:
                error = errors.for_code(code)
                if error is errors.InvalidTopicError and "collides" in (text or ""):
                    raise ConfigError(
                        f"{text} (Kafka's metrics do not distinguish '.' and '_'): rename one of "
                        "the channels, or set a prefix",
                        backend=BACKEND,
                        operation="declare",
                        queue=topic,
                    )
                if error not in (errors.NoError, errors.TopicAlreadyExistsError):
                    raise error(text)
            # Poll, because Kafka sends no notification.
            while not await self.count_partitions(topic):  # noqa: ASYNC110
                await asyncio.sleep(POLL_INTERVAL_SECONDS)
            await self.offsets(topic, driver.LATEST)

    async def delete(self, topics: list[str]) -> None:
        """Delete topics; return when they no longer exist."""
        async with self._request("delete", topics[0]):
            answer = await self._connected.delete_topics(topics)
            for _, code in answer.topic_error_codes:
                error = errors.for_code(code)
                if error not in (errors.NoError, errors.UnknownTopicOrPartitionError):
                    raise error
            for topic in topics:
                # Poll, because Kafka sends no notification.
                while await self.count_partitions(topic):  # noqa: ASYNC110
                    await asyncio.sleep(POLL_INTERVAL_SECONDS)

    async def _describe(self, topics: list[str] | None) -> dict[str, _Topic]:
        async with self._request("describe"):
            answer = await self._exchange(driver.metadata_request(topics))
        found: dict[str, _Topic] = {}
        for code, name, internal, partitions in answer.topics:
            error = errors.for_code(code)
            if error is errors.TopicAuthorizationFailedError:
                with translate_errors("describe", name):
                    raise error(name)
            leaders = {partition[1]: partition[2] for partition in partitions}
            if error is errors.NoError:
                found[name] = _Topic(bool(internal), leaders)
        return found

    # Offsets

    async def offsets(self, topic: str, which: int) -> dict[int, int]:
        """Return an offset of each partition.

        Args:
            topic: Name of the topic.
            which: ``EARLIEST`` for the first offset, ``LATEST`` for the offset after the last
                record.

        Raises:
            QueueNotFound: The topic does not exist.
        """
        async with self._request("offsets", topic):
            return await _retry_until_ready(self._offsets, topic, which)

    async def _offsets(self, topic: str, which: int) -> dict[int, int]:
        described = (await self._describe([topic])).get(topic)
        if described is None:
            self.invalidate(topic)
            raise not_found(topic, "offsets")
        by_leader: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)
        for partition, leader in described.leaders.items():
            if leader < 0:  # no leader is elected yet, or all replicas are down
                raise errors.LeaderNotAvailableError
            by_leader[leader].append((partition, which))
        found: dict[int, int] = {}
        for leader, partitions in by_leader.items():
            answer = await self._exchange(driver.offsets_request([(topic, partitions)]), leader)
            for _, items in answer.topics:
                for partition, code, _, offset in items:
                    if code:
                        raise errors.for_code(code)
                    found[partition] = offset
        return found

    async def delete_records(self, before: Mapping[Partition, int]) -> None:
        """Delete the records before the given offset in each partition."""
        if not before:
            return
        async with self._request("purge"):
            records = {tp: RecordsToDelete(before_offset=offset) for tp, offset in before.items()}
            await self._connected.delete_records(records)

    # Groups

    async def groups(self) -> list[str]:
        """Return the ids of all consumer groups, sorted."""
        async with self._request("groups"):
            found = await _retry_until_ready(self._connected.list_consumer_groups)
        return sorted(str(group[0]) for group in found)

    async def members(self, group: str) -> int:
        """Return the number of members of a group."""
        async with self._request("groups"):
            describe = self._connected.describe_consumer_groups
            for answer in await _retry_until_ready(describe, [group]):
                for item in answer.groups:
                    return len(item[5])
        return 0

    async def committed(
        self, group: str, topics: Iterable[str]
    ) -> dict[Partition, CommittedOffset]:
        """Return the offsets that a group has committed for all partitions of these topics."""
        return await self.committed_of(
            group,
            [
                Partition(topic, partition)
                for topic in topics
                for partition in range(await self._current_partitions(topic))
            ],
        )

    async def committed_of(
        self, group: str, wanted: list[Partition]
    ) -> dict[Partition, CommittedOffset]:
        """Return the offsets that a group has committed for these partitions."""
        if not wanted:
            return {}
        async with self._request("offsets"):
            list_offsets = functools.partial(
                self._connected.list_consumer_group_offsets, partitions=wanted
            )
            found = await _retry_until_ready(list_offsets, group)
        return {
            tp: CommittedOffset(saved.offset, saved.metadata or "")
            for tp, saved in found.items()
            if saved.offset >= 0
        }

    async def commit(self, group: str, topic: str, offsets: Mapping[int, int]) -> None:
        """Commit offsets of a topic for a group without members.

        Raises:
            AckDeadlineExceeded: The group has members, and only they may commit.
        """
        async with self._request("commit", topic):
            await _retry_until_ready(self._commit, group, topic, offsets)

    async def _commit(self, group: str, topic: str, offsets: Mapping[int, int]) -> None:
        partitions = [(partition, offset, "") for partition, offset in offsets.items()]
        node = await self._connected.find_coordinator(group)
        answer = await self._exchange(driver.commit_request(group, topic, partitions), node)
        for _, items in answer.topics:
            for _, code in items:
                if code:
                    raise errors.for_code(code)

    async def delete_groups(self, groups: list[str]) -> None:
        """Delete groups with their commits; a group with members is not deleted."""
        async with self._request("delete"):
            for group in groups:
                await _retry_until_ready(self._delete_group, group)

    async def _delete_group(self, group: str) -> None:
        node = await self._connected.find_coordinator(group)
        await self._exchange(driver.delete_groups_request([group]), node)

    async def _exchange(self, request: Any, node: int | None = None) -> Any:
        """Send a request to a broker, by default the first reachable one; return the response."""
        if node is not None:
            return await self._send(node, request)
        failure: BaseException | None = None
        for broker in list(self._client.cluster.brokers()):
            try:
                return await self._send(broker.nodeId, request)
            except (errors.KafkaConnectionError, errors.NodeNotReadyError) as error:
                failure = error
        raise failure or errors.NoBrokersAvailable

    async def _send(self, node: int, request: Any) -> Any:
        began = asyncio.get_running_loop().time()
        client = self._client
        try:
            return await client.send(node, request)
        except asyncio.CancelledError:
            # The connection may be dead without an error, so use a new one for the next request.
            if asyncio.get_running_loop().time() - began >= DEAD_CONNECTION_SECONDS:
                driver.disconnect(client, node)
            raise


async def _retry_until_ready(
    call: Callable[[*Arguments], Awaitable[R]], *arguments: *Arguments
) -> R:
    """Repeat a call until it raises no temporary error; the caller must set a timeout."""
    while True:
        try:
            return await call(*arguments)
        except _NOT_READY_ERRORS:
            await asyncio.sleep(POLL_INTERVAL_SECONDS)


class _Topic:
    __slots__ = ("internal", "leaders")

    def __init__(self, internal: bool, leaders: dict[int, int]) -> None:
        self.internal = internal
        self.leaders = leaders


def not_found(topic: str, operation: str) -> QueueNotFound:
    """Return the error for a topic that does not exist."""
    return QueueNotFound(
        f"the topic {topic!r} does not exist on the Kafka cluster: declare it, or send to it first",
        backend=BACKEND,
        operation=operation,
        queue=topic,
    )
