"""Driver internals: those that are used exist, and only ``driver.py`` uses them."""

from __future__ import annotations

import ast
import asyncio
import logging
import uuid
from pathlib import Path
from typing import Any

import pytest
from aiokafka.consumer.group_coordinator import GroupCoordinator
from aiokafka.protocol.admin import SaslAuthenticateRequest

from qkit.backends.kafka import driver
from qkit.errors import ConfigError, SendTimeout

NAMED_TUPLE = {"_replace", "_asdict", "_fields"}  # public despite their names


def test_the_log_of_the_driver_contains_no_password(caplog: pytest.LogCaptureFixture) -> None:
    """At DEBUG the driver logs every request, including the one with the password."""
    request = SaslAuthenticateRequest(b"\x00me\x00canary").prepare({36: (0, 1)})
    assert "canary" in str(request)
    logger = logging.getLogger("aiokafka.conn")
    with caplog.at_level(logging.DEBUG, logger="aiokafka.conn"):
        logger.debug("Request to %s:%d %d: %s", "localhost", 9092, 3, request)
        logger.debug("Request to %s:%d %d: %s", "localhost", 9092, 4, "metadata")
    assert "canary" not in caplog.text
    assert "metadata" in caplog.text


@pytest.mark.parametrize("level", [logging.INFO, logging.DEBUG])
def test_the_driver_logs_a_broker_error_in_one_line_and_its_traceback_only_at_debug(
    caplog: pytest.LogCaptureFixture, level: int
) -> None:
    logger = logging.getLogger("aiokafka.producer.sender")
    with caplog.at_level(level, logger=logger.name):
        for error in (driver.errors.KafkaConnectionError("down"), ValueError("a bug")):
            try:
                raise error
            except Exception:
                logger.exception("Unexpected error in sender %s", "routine")
    outage, bug = caplog.records
    debug = level == logging.DEBUG
    assert bool(outage.exc_info) is debug
    assert ("down" in outage.getMessage()) is not debug
    assert outage.getMessage().startswith("Unexpected error in sender routine")
    assert bug.exc_info


async def test_a_batch_that_awaits_a_retry_can_fail_after_its_producer_is_closed() -> None:
    """The driver's callback would otherwise not find the batch among the pending ones."""
    loop = asyncio.get_running_loop()
    unhandled: list[dict[str, Any]] = []
    loop.set_exception_handler(lambda loop, context: unhandled.append(context))
    producer = driver.Producer(bootstrap_servers="127.0.0.1:1")
    accumulator = producer._message_accumulator
    partition = driver.Partition("q", 0)
    batch = accumulator._append_batch(producer.create_batch(), partition)
    assert accumulator._pop_batch(partition) is batch
    accumulator.reenqueue(batch)
    await driver.close_producer(producer, flush=0.0)
    batch.future.set_exception(SendTimeout("not confirmed"))
    await asyncio.sleep(0)  # let the callbacks run
    assert isinstance(batch.future.exception(), SendTimeout)
    assert unhandled == []


async def test_each_of_ten_waiting_batches_gets_the_whole_timeout() -> None:
    """The driver's own wait subtracts the time of all earlier iterations in each iteration."""
    producer = driver.Producer(bootstrap_servers="127.0.0.1:1", request_timeout_ms=10_000)
    accumulator = producer._message_accumulator
    partition = driver.Partition("q", 0)
    producer.client.cluster.partitions_for_topic = lambda topic: {0}
    sends = []
    for _ in range(10):
        batch = producer.create_batch()
        first = batch.append(key=None, value=b"x", timestamp=None, headers=[])
        sends.append(asyncio.create_task(driver.send_batch(producer, batch, first, partition)))
    for send in sends:
        future, _ = await send
        await asyncio.sleep(0.3)  # with the driver's own wait, the eighth send would fail
        accumulator._pop_batch(partition)
        future.cancel()
    await driver.close_producer(producer, flush=0.0)


async def test_all_internals_of_the_driver_that_are_used_exist() -> None:
    """A driver version that lacks one of them fails here, not during an outage."""
    consumer = driver.Consumer(group_id="g", bootstrap_servers="127.0.0.1:1")
    producer = driver.Producer(bootstrap_servers="127.0.0.1:1", enable_idempotence=True)
    admin = driver.Admin(bootstrap_servers="127.0.0.1:1")
    for user in (consumer, producer, admin):
        client = driver.client_of(user)
        assert callable(client._metadata_update)
        assert callable(client._get_conn)
        assert client._conns == {}
        assert driver.disable_topic_creation(user) is user
    for name in ("_coordinator", "_fetcher", "_client", "_group_id", "_closed"):
        assert hasattr(consumer, name)
    assert producer._sender.sender_task is None
    accumulator = producer._message_accumulator
    assert accumulator._closed is False
    assert accumulator._exception is None
    assert not accumulator._batches
    assert producer.client.cluster.partitions_for_topic("t") is None
    assert driver.generation_of(consumer) == -1
    assert not driver.has_ended(producer)
    for name in (
        "request_rejoin",
        "_stop_heartbeat_task",
        "_stop_commit_offsets_refresh_task",
        "_maybe_leave_group",
    ):
        assert callable(getattr(GroupCoordinator, name))
    await driver.close_consumer(consumer)
    await driver.close_producer(producer, flush=0.0)
    await driver.close_admin(admin)


async def test_a_driver_without_an_internal_is_rejected_before_it_connects(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delattr(GroupCoordinator, "_stop_heartbeat_task")
    consumer = driver.Consumer(group_id="g", bootstrap_servers="127.0.0.1:1")
    with pytest.raises(ConfigError, match=r"no GroupCoordinator._stop_heartbeat_task; install"):
        driver.disable_topic_creation(consumer)
    await driver.close_consumer(consumer)
    producer = driver.Producer(bootstrap_servers="127.0.0.1:1")
    monkeypatch.delattr(type(producer._message_accumulator), "_append_batch")
    with pytest.raises(ConfigError, match=r"no MessageAccumulator._append_batch; install"):
        driver.disable_topic_creation(producer)
    await driver.close_producer(producer, flush=0.0)


async def test_a_driver_whose_request_classes_are_lists_is_rejected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In aiokafka 0.12 they are lists of classes, one for each version."""
    admin = driver.Admin(bootstrap_servers="127.0.0.1:1")
    monkeypatch.setattr(driver._metadata, "MetadataRequest", [])
    with pytest.raises(ConfigError, match=r"no MetadataRequest\(\)"):
        driver.disable_topic_creation(admin)
    await driver.close_admin(admin)


def test_no_other_module_uses_a_private_attribute_of_the_driver() -> None:
    package = Path(driver.__file__).parent
    for path in sorted(package.glob("*.py")):
        if path.name != "driver.py":
            assert foreign_private_attributes(ast.parse(path.read_text())) == [], path.name


def test_a_private_attribute_of_another_object_is_found() -> None:
    source = """
from aiokafka.record import default_records
from aiokafka.record.default_records import _DefaultRecordBatchPy
class Example:
    def of_this_object(self): return self._consumer
    def of_the_driver(self): return self._consumer._client, default_records._Parser
    def by_name(self): return getattr(self._consumer, "_fetcher"), type(self).__name__
    def of_a_tuple(self, record): return record._replace(offset=1)
"""
    assert foreign_private_attributes(ast.parse(source)) == [
        "_DefaultRecordBatchPy",
        "default_records._Parser",
        "getattr(self._consumer, '_fetcher')",
        "self._consumer._client",
    ]


def foreign_private_attributes(tree: ast.Module) -> list[str]:
    """Return uses of private names, except those of ``self``, ``cls`` and named tuples."""
    found: list[str] = []
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(value=ast.Name(id="self" | "cls")):
                pass
            case ast.Attribute(attr=name) if is_private(name):
                found.append(ast.unparse(node))
            case ast.Call(
                func=ast.Name(id="getattr" | "setattr" | "hasattr" | "delattr"),
                args=[_, ast.Constant(value=str(name)), *_],
            ) if is_private(name):
                found.append(ast.unparse(node))
            case ast.ImportFrom(names=names):
                found += [alias.name for alias in names if is_private(alias.name)]
            case _:
                pass
    return sorted(found)


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name not in NAMED_TUPLE


async def test_cancelling_the_future_of_a_message_does_not_cancel_that_of_its_batch(
    kafka_url: str,
) -> None:
    producer = driver.Producer(bootstrap_servers=kafka_url.removeprefix("kafka://"))
    await producer.start()
    try:
        topic = f"k-{uuid.uuid4().hex[:10]}"
        for number in range(3):  # only the first send requests metadata
            batch = producer.create_batch()
            first = batch.append(key=None, value=b"a", timestamp=None)
            batch.append(key=None, value=b"b", timestamp=None)
            batch.close()
            future, answer = await driver.send_batch(
                producer, batch, first, driver.Partition(topic, 0)
            )
            if number == 1:
                answer.cancel()
            else:
                assert (await answer).offset == 2 * number
            assert (await future).offset == 2 * number
    finally:
        await driver.close_producer(producer)
