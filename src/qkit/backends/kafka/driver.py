"""aiokafka as this backend uses it: its public names with types, and its private attributes.

This is the only module that touches private attributes of aiokafka. aiokafka has no public call to
request metadata without creating the topic, to close a client that cannot reach its broker, to
request a rebalance, or to read a batch whose header names are not UTF-8.

Tested with aiokafka 0.13.0 and 0.14.0. The request classes of 0.12 and older are lists.

Fallback: ``create_nothing``, which every client passes, raises ``ConfigError`` if the installed
version lacks an attribute, so that a service does not start and fail later in an outage. A missing
parser for batches costs less: such a batch is reported as ``CorruptRecordException``.
"""

# pyright: reportMissingTypeStubs=false
# The driver has none.

from __future__ import annotations

import asyncio
import contextlib
import copy
import itertools
import logging
import random
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import aiokafka
import aiokafka.admin
import aiokafka.consumer.fetcher
import aiokafka.coordinator.protocol
import aiokafka.partitioner
from aiokafka import errors
from aiokafka.consumer import group_coordinator
from aiokafka.protocol import admin, commit, group, metadata, offset
from aiokafka.record import default_records

from qkit.backends.kafka import lenient_decoding
from qkit.errors import ConfigError

__all__ = [
    "Admin",
    "Consumer",
    "Listener",
    "MemberAssignment",
    "MemberMetadata",
    "NewTopic",
    "OffsetAndMetadata",
    "Partition",
    "Producer",
    "RecordsToDelete",
    "close_admin",
    "close_consumer",
    "close_producer",
    "create_nothing",
    "errors",
    "partition_of",
    "rejoin",
    "send_batch",
]

# The driver ships no types: what comes from it is looked at where it is used.
_aiokafka: Any = aiokafka
_admin: Any = aiokafka.admin
_fetcher: Any = aiokafka.consumer.fetcher
_group_protocol: Any = aiokafka.coordinator.protocol
_admin_requests: Any = admin
_commit: Any = commit
_group: Any = group
_metadata: Any = metadata
_offset: Any = offset
_partitioner: Any = aiokafka.partitioner
_coordinator: Any = group_coordinator
_BatchParser: Any = getattr(default_records, "_DefaultRecordBatchPy", None)

Consumer: Final[Any] = _aiokafka.AIOKafkaConsumer
Producer: Final[Any] = _aiokafka.AIOKafkaProducer
Admin: Final[Any] = _admin.AIOKafkaAdminClient
NewTopic: Final[Any] = _admin.NewTopic
RecordsToDelete: Final[Any] = _admin.RecordsToDelete
OffsetAndMetadata: Final[Any] = _aiokafka.OffsetAndMetadata
MemberMetadata: Final[Any] = _group_protocol.ConsumerProtocolMemberMetadata
MemberAssignment: Final[Any] = _group_protocol.ConsumerProtocolMemberAssignment
Listener: Final[Any] = _aiokafka.ConsumerRebalanceListener

if TYPE_CHECKING:

    class Partition(NamedTuple):
        """A partition of a topic: aiokafka's ``TopicPartition``, with types."""

        topic: str
        partition: int

else:
    Partition = aiokafka.TopicPartition

EARLIEST: Final = -2
LATEST: Final = -1
CLOSE_TIMEOUT_SECONDS: Final = 5.0  # for a client to disconnect; then its tasks are cancelled
FORCED_CLOSE_SECONDS: Final = 1.0


def _holds_no_secret(record: logging.LogRecord) -> bool:
    """The driver logs every request at DEBUG, the one with the password too."""
    arguments = record.args if isinstance(record.args, tuple) else ()
    return not any(type(item).__name__.startswith("SaslAuthenticate") for item in arguments)


logging.getLogger("aiokafka.conn").addFilter(_holds_no_secret)


_MemoryRecords: Any = _fetcher.MemoryRecords
_DriverRecords: Any = _fetcher.PartitionRecords


class _Records(_MemoryRecords):  # type: ignore[misc,unused-ignore]  # it has no types
    """Batches as they were fetched; the bytes are kept for a batch that must be read again."""

    def __init__(self, data: bytes) -> None:
        _MemoryRecords.__init__(self, data)
        self.data = data


class _PartitionRecords(_DriverRecords):  # type: ignore[misc,unused-ignore]  # the same
    """The records of a fetch, also where the driver's parser fails.

    The driver decodes the names of headers as UTF-8, and drops what it has read before an error.
    """

    def __init__(self, partition: Any, records: Any, aborted: Any, offset: int, *more: Any) -> None:
        _DriverRecords.__init__(self, partition, records, aborted, offset, *more)
        self._first = offset
        self._records_iterator: Iterator[Any] = self._records_iterator

    def __next__(self) -> Any:
        try:
            return next(self._records_iterator)
        except StopIteration:
            raise
        except Exception as error:
            self._records_iterator = iter(())  # the driver's generator ended with the error
            if _is_undecodable(error) and _BatchParser is not None:
                rest = lenient_decoding.records_from(
                    self._records.data, self.next_fetch_offset, _open_batch
                )
                self._records_iterator = itertools.chain(
                    self._read_leniently(rest), self._unpack_records()
                )
                return next(self._records_iterator)
            if self.next_fetch_offset > self._first:
                raise StopIteration from error  # deliver what came before; the next fetch raises
            if isinstance(error, errors.KafkaError):
                raise
            raise errors.CorruptRecordException(f"{self._tp}: {error!r}") from error

    def _read_leniently(self, batch: lenient_decoding.Batch) -> Iterator[Any]:
        for record in batch.records:
            self.next_fetch_offset = record.offset + 1
            yield self._consumer_record(self._tp, record)
        self.next_fetch_offset = batch.next_offset


def _is_undecodable(error: BaseException) -> bool:
    """Whether text was not UTF-8; of the driver's parsers only the one in C raises this error."""
    return isinstance(error, UnicodeDecodeError) or isinstance(error.__cause__, UnicodeDecodeError)


def _open_batch(data: bytes) -> lenient_decoding.EncodedBatch:
    batch = _BatchParser(data)

    def payload() -> bytes:
        batch._maybe_uncompress()
        return bytes(memoryview(batch._buffer)[batch._pos :])

    return lenient_decoding.EncodedBatch(
        base_offset=batch.base_offset,
        next_offset=batch.next_offset,
        record_count=batch._num_records,
        first_timestamp=batch.first_timestamp,
        max_timestamp=batch.max_timestamp,
        timestamp_type=batch.timestamp_type,
        payload=payload,
    )


_fetcher.MemoryRecords = _Records
_fetcher.PartitionRecords = _PartitionRecords


def partition_of(key: bytes, partitions: int) -> int:
    """The partition of a key, as every Kafka client computes it.

    >>> partition_of(b"customer-7", 12)
    7
    """
    number: int = _partitioner.murmur2(key)
    return (number & 0x7FFF_FFFF) % partitions


def client_of(user: Any) -> Any:
    """The connection pool of a consumer, producer or admin client."""
    return user.client if hasattr(user, "client") else user._client


def disconnect(client: Any, node: int) -> None:
    """Give up the connection to a broker; the next request makes another."""
    for (other, _), connection in list(client._conns.items()):
        if other == node:
            connection.close()


def create_nothing(user: Any) -> Any:
    """Let a client ask for metadata without creating the topics it asks about; returns it.

    Otherwise every client that still knows a deleted topic brings it back, with the broker's
    defaults instead of the declared ones.

    Raises:
        ConfigError: the installed aiokafka lacks an attribute that this module uses.
    """
    _check_internals(user)
    client = client_of(user)

    async def update(cluster: Any, topics: Any) -> bool:
        nodes = [broker.nodeId for broker in client.cluster.brokers()]
        nodes += [node for node, _ in client._conns if node == "bootstrap"]
        random.shuffle(nodes)
        for node in nodes:
            connection = await client._get_conn(node)
            if connection is None:
                continue
            try:
                found = await connection.send(metadata_request(list(topics) if topics else None))
            except (errors.KafkaError, TimeoutError):
                continue
            if not found.brokers:
                return False
            cluster.update_metadata(found)
            if ("bootstrap", 0) in client._conns and cluster.brokers():
                client._conns.pop(("bootstrap", 0)).close()
            return True
        cluster.failed_update(None)
        return False

    client._metadata_update = update
    return user


def _check_internals(user: Any) -> None:
    """Raise ``ConfigError`` if this version of aiokafka lacks what this module uses."""
    missing = [
        f"{(owner if isinstance(owner, type) else type(owner)).__name__}.{name}"
        for owner, names in _internals(user)
        for name in names
        if not hasattr(owner, name)
    ]
    if not callable(_metadata.MetadataRequest):
        missing.append("MetadataRequest()")
    if missing:
        raise ConfigError(
            f"aiokafka {_aiokafka.__version__} is not supported: it has no {', '.join(missing)}; "
            "install a version that qkit is tested with: 0.13 or 0.14",
            backend="kafka",
            operation="start",
        )


def _internals(user: Any) -> Iterator[tuple[Any, tuple[str, ...]]]:
    """Objects of the driver with the private attributes that this module uses of them."""
    yield user, () if hasattr(user, "client") else ("_client",)
    if hasattr(user, "client") or hasattr(user, "_client"):
        yield client_of(user), ("_conns", "_get_conn", "_metadata_update")
    if isinstance(user, Consumer):
        yield user, ("_closed", "_coordinator", "_fetcher", "_group_id")
        yield (
            _coordinator.GroupCoordinator,
            ("request_rejoin", "_stop_heartbeat_task", "_stop_commit_offsets_refresh_task"),
        )
    elif isinstance(user, Producer):
        yield user, ("_closed", "_message_accumulator", "_sender")
        if hasattr(user, "_message_accumulator"):
            names = ("_append_batch", "_batches", "_closed", "_exception", "_pending_batches")
            yield user._message_accumulator, names


def metadata_request(topics: list[str] | None) -> Any:
    """About these topics, or all of them; none is created."""
    return _metadata.MetadataRequest(topics, allow_auto_topic_creation=False)


def offsets_request(topics: list[tuple[str, list[tuple[int, int]]]]) -> Any:
    """The first or the next offset of partitions."""
    return _offset.OffsetRequest(-1, 0, topics)


def commit_request(group: str, topic: str, partitions: list[tuple[int, int, str]]) -> Any:
    """A commit for a group without members."""
    return _commit.OffsetCommitRequest(group, -1, "", -1, [(topic, partitions)])


def delete_groups_request(groups: list[str]) -> Any:
    """Forget groups that have no members."""
    return _admin_requests.DeleteGroupsRequest(groups)


def rejoin(consumer: Any) -> None:
    """Ask for another round of the group, to say something new to its leader."""
    coordinator = consumer._coordinator
    if coordinator is not None:
        coordinator.request_rejoin()


def generation_of(consumer: Any) -> int:
    """The round of the group in which this consumer takes part."""
    coordinator = consumer._coordinator
    return -1 if coordinator is None else int(coordinator.generation)


async def close_consumer(consumer: Any) -> None:
    """Leave the group at once and disconnect; a broker that does not answer is not waited for.

    The driver's own way would wait for a rebalance that is under way, and not leave at all if that
    takes too long: then the group waits a whole session for a member that is gone.
    """
    consumer._closed = True
    coordinator, fetcher = consumer._coordinator, consumer._fetcher
    if coordinator is not None and consumer._group_id is not None:
        if not coordinator._closing.done():
            coordinator._closing.set_result(None)
        coordinator._coordination_task.cancel()
        await _within(FORCED_CLOSE_SECONDS, asyncio.wait({coordinator._coordination_task}))
        await _within(FORCED_CLOSE_SECONDS, coordinator._stop_heartbeat_task())
        await _within(FORCED_CLOSE_SECONDS, coordinator._stop_commit_offsets_refresh_task())
        await _leave_group(consumer._client, coordinator)
    elif coordinator is not None:
        await _within(FORCED_CLOSE_SECONDS, coordinator.close())
    if fetcher is not None:
        await _within(FORCED_CLOSE_SECONDS, fetcher.close())
    await _within(FORCED_CLOSE_SECONDS, consumer._client.close())


async def _leave_group(client: Any, coordinator: Any) -> None:
    if coordinator.member_id and coordinator.coordinator_id is not None:
        request = _group.LeaveGroupRequest(coordinator.group_id, coordinator.member_id)
        # Not on the group's own connection: there it would stand behind a join that waits.
        await _within(FORCED_CLOSE_SECONDS, client.send(coordinator.coordinator_id, request))


async def send_batch(
    producer: Any, batch: Any, first: Any, target: Partition
) -> tuple[asyncio.Future[Any], asyncio.Future[Any]]:
    """Add a batch to those that the driver sends; ``first`` is its metadata of the first record.

    The driver's own ``send_batch`` does the same, but returns only a shield around the batch's
    future, whose result arrives a few turns of the loop later.

    Returns:
        The future of the batch, which must not be cancelled, and a future of its first record,
        which may be cancelled.
    """
    accumulator = producer._message_accumulator
    if target.partition not in (producer.client.cluster.partitions_for_topic(target.topic) or ()):
        await _load_metadata(producer, target)
    if accumulator._batches.get(target):
        await _wait_for_turn(accumulator, target, producer._request_timeout_ms / 1000)
    if accumulator._closed:
        raise errors.ProducerClosed
    if accumulator._exception is not None:
        raise copy.copy(accumulator._exception)
    waiting = accumulator._append_batch(batch, target)
    future: asyncio.Future[Any] = waiting.future
    answer = future.get_loop().create_future()
    waiting._msg_futures.append((answer, first))
    return future, answer


async def _load_metadata(producer: Any, target: Partition) -> None:
    """Wait until the producer knows a partition: its topic is new to it, or has grown."""
    if target.partition in await producer.partitions_for(target.topic):
        return
    await producer.client.force_metadata_update()
    if target.partition not in (producer.client.cluster.partitions_for_topic(target.topic) or ()):
        raise errors.UnknownTopicOrPartitionError(target)


async def _wait_for_turn(accumulator: Any, target: Partition, timeout: float) -> None:
    """Wait until the driver holds no batch for a partition that it has not sent yet.

    The driver's own wait subtracts all the time since its start at each turn. With ten batches
    in line it times out after a fifth of the time it was given.
    """
    loop = asyncio.get_running_loop()
    deadline = loop.time() + timeout
    while pending := accumulator._batches.get(target):
        left = deadline - loop.time()
        if left <= 0:
            raise errors.KafkaTimeoutError
        await pending[-1].wait_drain(timeout=left)


def has_ended(producer: Any) -> bool:
    """Whether a producer met an error after which it sends nothing more."""
    sender_task = producer._sender.sender_task
    return sender_task is not None and bool(sender_task.done())


async def close_producer(producer: Any, *, flush: float = CLOSE_TIMEOUT_SECONDS) -> None:
    """Wait so long for what is on its way, then give it up and disconnect."""
    if flush > 0 and await _within(flush, producer.stop()):
        return
    producer._closed = True
    producer._message_accumulator._closed = True  # what comes now is refused
    sender_task = producer._sender.sender_task
    if sender_task is not None:
        for _ in range(3):  # it waits for its requests, and each takes a cancellation
            sender_task.cancel()
            await asyncio.wait({sender_task}, timeout=0.05)
            if sender_task.done():
                break
    await _within(FORCED_CLOSE_SECONDS, producer.client.close())
    if sender_task is not None and not sender_task.done():
        sender_task.cancel()
        await asyncio.wait({sender_task}, timeout=FORCED_CLOSE_SECONDS)
    _count_as_pending(producer._message_accumulator)


def _count_as_pending(accumulator: Any) -> None:
    """What waited to be tried again; else the driver stumbles, in a callback, when it is failed."""
    for batches in accumulator._batches.values():
        accumulator._pending_batches.update(batches)


async def close_admin(admin: Any) -> None:
    """Disconnect."""
    await _within(CLOSE_TIMEOUT_SECONDS, admin.close())


async def _within(seconds: float, work: Any) -> bool:
    """Whether it came to its end, well or not, in time."""
    try:
        async with asyncio.timeout(seconds):
            with contextlib.suppress(errors.KafkaError, OSError):
                await work
    except TimeoutError:
        return False
    return True
