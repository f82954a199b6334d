"""Access to aiokafka: aliases of its public names, and all uses of its private attributes.

This is the only module that uses private attributes of aiokafka. aiokafka has no public call to
request metadata without creating the topic, to close a client that cannot reach its broker, to
request a rebalance, or to read a batch whose header names are not UTF-8.

Tested with aiokafka 0.13.0 and 0.14.0. In 0.12 and older, ``MetadataRequest`` is a list of classes.

Fallback: ``disable_topic_creation``, which is called for every client, raises ``ConfigError`` if
the installed version lacks an attribute. Otherwise the service would start, and fail only in an
outage. Only the batch parser may be missing: a batch whose header names are not UTF-8 then raises
``CorruptRecordException``.
"""

# pyright: reportMissingTypeStubs=false
# aiokafka has no type stubs.

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
    "disable_topic_creation",
    "errors",
    "partition_of",
    "rejoin",
    "send_batch",
]

# aiokafka has no types.
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
        """Partition of a topic; a typed version of aiokafka's ``TopicPartition``."""

        topic: str
        partition: int

else:
    Partition = aiokafka.TopicPartition

EARLIEST: Final = -2
LATEST: Final = -1
CLOSE_TIMEOUT_SECONDS: Final = 5.0  # for a client to disconnect; after that it is closed forcibly
FORCED_CLOSE_SECONDS: Final = 1.0


def _has_no_credentials(record: logging.LogRecord) -> bool:
    """Return whether a log record has no credentials; aiokafka logs login requests at DEBUG."""
    arguments = record.args if isinstance(record.args, tuple) else ()
    return not any(type(item).__name__.startswith("SaslAuthenticate") for item in arguments)


def _shorten_traceback(record: logging.LogRecord) -> bool:
    """Replace the traceback of a broker error with its text, unless the logger logs DEBUG."""
    error = record.exc_info[1] if record.exc_info else None
    if isinstance(error, (errors.KafkaError, OSError)) and not _debugs(record.name):
        record.msg = f"{record.getMessage()}: {error!r}".replace("\n", " ")
        record.args, record.exc_info, record.exc_text = (), None, None
    return True


def _debugs(name: str) -> bool:
    return logging.getLogger(name).isEnabledFor(logging.DEBUG)


logging.getLogger("aiokafka.conn").addFilter(_has_no_credentials)
for _name in ("conn", "consumer.fetcher", "consumer.group_coordinator", "producer.sender"):
    logging.getLogger(f"aiokafka.{_name}").addFilter(_shorten_traceback)


_MemoryRecords: Any = _fetcher.MemoryRecords
_DriverRecords: Any = _fetcher.PartitionRecords


class _Records(_MemoryRecords):  # type: ignore[misc,unused-ignore]  # aiokafka has no types
    """Fetched batches that keep their bytes, so that a batch can be parsed again."""

    def __init__(self, data: bytes) -> None:
        _MemoryRecords.__init__(self, data)
        self.data = data


class _PartitionRecords(_DriverRecords):  # type: ignore[misc,unused-ignore]  # aiokafka: no types
    """Records of a fetch, including those that the driver's parser cannot read.

    The driver's parser fails on a header name that is not UTF-8. After an error, the driver drops
    the records that it has already read.
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
            self._records_iterator = iter(())  # the error ended the driver's generator
            if _is_undecodable(error) and _BatchParser is not None:
                remaining = lenient_decoding.records_from(
                    self._records.data, self.next_fetch_offset, _open_batch
                )
                self._records_iterator = itertools.chain(
                    self._read_leniently(remaining), self._unpack_records()
                )
                return next(self._records_iterator)
            if self.next_fetch_offset > self._first:
                # Deliver the earlier records first; the next fetch raises the error.
                raise StopIteration from error
            if isinstance(error, errors.KafkaError):
                raise
            raise errors.CorruptRecordException(f"{self._tp}: {error!r}") from error

    def _read_leniently(self, batch: lenient_decoding.Batch) -> Iterator[Any]:
        for record in batch.records:
            self.next_fetch_offset = record.offset + 1
            yield self._consumer_record(self._tp, record)
        self.next_fetch_offset = batch.next_offset


def _is_undecodable(error: BaseException) -> bool:
    """Return whether an error was caused by bytes that are not UTF-8.

    The driver's C parser raises ``UnicodeDecodeError``. Its Python parser raises another error,
    with ``UnicodeDecodeError`` as the cause.
    """
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
    """Return the partition of a key, computed as in Kafka's Java client.

    >>> partition_of(b"customer-7", 12)
    7
    """
    number: int = _partitioner.murmur2(key)
    return (number & 0x7FFF_FFFF) % partitions


def client_of(user: Any) -> Any:
    """Return the low-level client of a consumer, producer or admin client."""
    return user.client if hasattr(user, "client") else user._client


def disconnect(client: Any, node: int) -> None:
    """Close the connection to a broker; the next request opens a new one."""
    for (other, _), connection in list(client._conns.items()):
        if other == node:
            connection.close()


def disable_topic_creation(user: Any) -> Any:
    """Make a client request metadata without creating missing topics; return the client.

    Otherwise every client that still refers to a deleted topic would create it again, with the
    broker's defaults instead of the declared configuration.

    Raises:
        ConfigError: The installed version of aiokafka lacks an attribute that this module uses.
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
    """Raise ``ConfigError`` if aiokafka lacks an attribute that this module uses."""
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
            "install version 0.13 or 0.14",
            backend="kafka",
            operation="start",
        )


def _internals(user: Any) -> Iterator[tuple[Any, tuple[str, ...]]]:
    """Yield driver objects and classes, each with the attributes that this module uses."""
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
    """Return a metadata request for ``topics``, or for all if ``None``, that creates no topic."""
    return _metadata.MetadataRequest(topics, allow_auto_topic_creation=False)


def offsets_request(topics: list[tuple[str, list[tuple[int, int]]]]) -> Any:
    """Return a request for an offset of each partition.

    Args:
        topics: For each topic, pairs of a partition and ``EARLIEST`` or ``LATEST``.
    """
    return _offset.OffsetRequest(-1, 0, topics)


def commit_request(group: str, topic: str, partitions: list[tuple[int, int, str]]) -> Any:
    """Return a request to commit offsets for a group without members."""
    return _commit.OffsetCommitRequest(group, -1, "", -1, [(topic, partitions)])


def delete_groups_request(groups: list[str]) -> Any:
    """Return a request to delete groups that have no members."""
    return _admin_requests.DeleteGroupsRequest(groups)


def rejoin(consumer: Any) -> None:
    """Request a rebalance, in which this member reports its current state to the leader."""
    coordinator = consumer._coordinator
    if coordinator is not None:
        coordinator.request_rejoin()


def generation_of(consumer: Any) -> int:
    """Return the generation of the group that a consumer has joined; -1 before it joins."""
    coordinator = consumer._coordinator
    return -1 if coordinator is None else int(coordinator.generation)


async def close_consumer(consumer: Any) -> None:
    """Leave the group immediately and disconnect; wait only briefly for an unresponsive broker.

    The driver's ``stop`` waits for a rebalance in progress. If the rebalance takes too long, it
    does not leave the group. The other members then wait until the session of this member expires.
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
        # Do not use the group's connection, where a pending join would delay the request.
        await _within(FORCED_CLOSE_SECONDS, client.send(coordinator.coordinator_id, request))


async def send_batch(
    producer: Any, batch: Any, first: Any, target: Partition
) -> tuple[asyncio.Future[Any], asyncio.Future[Any]]:
    """Queue a batch for sending.

    The driver's own ``send_batch`` does the same, but returns only a shielded future, which is done
    a few iterations of the event loop after the future of the batch.

    Args:
        producer: The driver's producer.
        batch: Closed batch builder of the driver.
        first: The driver's metadata of the first record in the batch.
        target: Partition to send to.

    Returns:
        The future of the batch, which must not be cancelled, and the future of its first record,
        which may be cancelled.
    """
    accumulator = producer._message_accumulator
    if target.partition not in (producer.client.cluster.partitions_for_topic(target.topic) or ()):
        await _load_metadata(producer, target)
    if accumulator._batches.get(target):
        await _wait_until_drained(accumulator, target, producer._request_timeout_ms / 1000)
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
    """Wait until the producer has the metadata of a partition.

    Raises:
        UnknownTopicOrPartitionError: The partition does not exist.
    """
    if target.partition in await producer.partitions_for(target.topic):
        return
    await producer.client.force_metadata_update()
    if target.partition not in (producer.client.cluster.partitions_for_topic(target.topic) or ()):
        raise errors.UnknownTopicOrPartitionError(target)


async def _wait_until_drained(accumulator: Any, target: Partition, timeout: float) -> None:
    """Wait until the driver has sent all earlier batches of a partition.

    The driver's own wait does not keep its timeout: at each iteration it subtracts the whole time
    since the start again. With ten waiting batches it ends after a fifth of the timeout.

    Raises:
        KafkaTimeoutError: The batches were not sent within ``timeout`` seconds.
    """
    loop = asyncio.get_running_loop()
    deadline = loop.time() + timeout
    while pending := accumulator._batches.get(target):
        left = deadline - loop.time()
        if left <= 0:
            raise errors.KafkaTimeoutError
        await pending[-1].wait_drain(timeout=left)


def has_ended(producer: Any) -> bool:
    """Return whether the send task of a producer has ended, so that it sends nothing more."""
    sender_task = producer._sender.sender_task
    return sender_task is not None and bool(sender_task.done())


async def close_producer(producer: Any, *, flush: float = CLOSE_TIMEOUT_SECONDS) -> None:
    """Disconnect a producer.

    Args:
        producer: The producer.
        flush: Seconds to wait for unconfirmed batches before they are dropped; 5 by default.
    """
    if flush > 0 and await _within(flush, producer.stop()):
        return
    producer._closed = True
    producer._message_accumulator._closed = True  # reject further batches
    sender_task = producer._sender.sender_task
    if sender_task is not None:
        for _ in range(3):  # each request that the task awaits may consume a cancellation
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
    """Add batches that wait for a retry to the driver's set of pending batches.

    Otherwise a callback of the driver raises an error when such a batch fails.
    """
    for batches in accumulator._batches.values():
        accumulator._pending_batches.update(batches)


async def close_admin(admin: Any) -> None:
    """Disconnect an admin client."""
    await _within(CLOSE_TIMEOUT_SECONDS, admin.close())


async def _within(seconds: float, work: Any) -> bool:
    """Await ``work``, ignoring errors of the driver; return false if it timed out."""
    try:
        async with asyncio.timeout(seconds):
            with contextlib.suppress(errors.KafkaError, OSError):
                await work
    except TimeoutError:
        return False
    return True
