"""Fixtures and pytest hooks shared by the whole test suite."""

from __future__ import annotations

import gc
import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import pytest_asyncio

from qkit.testing import VirtualClock
from tests.support.brokers import broker_url
from tests.support.private_brokers import PrivateBroker, private_broker
from tests.support.requirements import SkippedProofs
from tests.support.scheduling import scope_of, start_order

collect_ignore = ["typing/proofs.py"]  # for type checkers; most of it would fail at run time

SPARK = Path(__file__).parent / "spark"
BROKER_FIXTURES = frozenset(
    {
        *("redis_url", "rabbitmq_url", "kafka_url"),
        *("private_redis", "private_rabbitmq", "private_kafka"),
    }
)
OTHER_BROKERS = frozenset(
    {
        *("TestKafka", "TestRabbitMQClassic", "TestRabbitMQQuorum"),
        *("TestRedisListUnreliable", "TestRedisPubSub"),
    }
)
POLICY = (  # scenarios that wait ten seconds or more
    "test_a_dead_letter_write_failing_for_ten_seconds_makes_the_service_unhealthy",
    "test_acks_failing_for_ten_seconds_make_the_service_unhealthy_until_one_succeeds",
)


@pytest.fixture(scope="session")
def redis_url() -> Iterator[str]:
    with broker_url("redis") as url:
        yield url


@pytest.fixture(scope="session")
def rabbitmq_url() -> Iterator[str]:
    with broker_url("rabbitmq") as url:
        yield url


@pytest.fixture(scope="session")
def kafka_url() -> Iterator[str]:
    with broker_url("kafka") as url:
        yield url


@pytest.fixture(scope="module")
def private_redis() -> Iterator[PrivateBroker]:
    """Redis server that the tests of one module may kill and freeze."""
    with private_broker("redis") as broker:
        yield broker


@pytest.fixture(scope="module")
def private_rabbitmq() -> Iterator[PrivateBroker]:
    """RabbitMQ server that the tests of one module may kill and freeze."""
    with private_broker("rabbitmq") as broker:
        yield broker


@pytest.fixture(scope="module")
def private_kafka() -> Iterator[PrivateBroker]:
    """Kafka server that the tests of one module may kill and freeze."""
    with private_broker("kafka") as broker:
        yield broker


@pytest_asyncio.fixture
async def clock() -> AsyncIterator[VirtualClock]:
    """Virtual clock of the test's event loop: waits advance it without real waiting."""
    with VirtualClock() as clock:
        yield clock


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> object | None:
    """Start the longest groups first, and split groups of independent tests."""
    if config.getvalue("dist") != "loadscope":
        return None
    from xdist.scheduler import LoadScopeScheduling  # type: ignore[import-untyped]  # has no types

    class Scheduling(LoadScopeScheduling):  # type: ignore[misc]  # the base class is Any
        def _split_scope(self, nodeid: str) -> str:
            return scope_of(nodeid, super()._split_scope(nodeid))

        def _assign_work_unit(self, node: object) -> None:
            # On a tie, `min` returns the first group, which has the most tests.
            longest = min(self.workqueue, key=start_order)
            self.workqueue.move_to_end(longest, last=False)
            super()._assign_work_unit(node)

    return Scheduling(config, log)


def pytest_configure(config: pytest.Config) -> None:
    # A shell that starts the suite in the background makes it ignore SIGINT. Child processes that a
    # test interrupts would inherit that.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    # No deadline for examples, because the machine may be busy.
    hypothesis.settings.register_profile(
        "qkit", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
    )
    hypothesis.settings.load_profile("qkit")
    config.pluginmanager.register(SkippedProofs(), "qkit-skipped-proofs")


def pytest_collection_finish() -> None:
    """Exclude the collected items from garbage collection, because they live until the end."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark each test according to its fixtures, its directory and its scenario."""
    for item in items:
        if BROKER_FIXTURES.intersection(getattr(item, "fixturenames", ())):
            item.add_marker(pytest.mark.broker)
        if item.path.is_relative_to(SPARK):
            item.add_marker(pytest.mark.spark)
        if repeats_policy(item):
            item.add_marker(pytest.mark.full)


def repeats_policy(item: pytest.Item) -> bool:
    """Return whether a test repeats a policy scenario that already runs on another backend.

    The policies do not depend on the backend, so the ordinary suite runs these scenarios only on
    the native engine and on Redis lists.
    """
    if not isinstance(item, pytest.Function) or item.cls is None:
        return False
    group, _, scenario = item.function.__qualname__.partition(".")
    policy = group == "SendFaults" or scenario.endswith(POLICY)
    return policy and item.cls.__name__ in OTHER_BROKERS
