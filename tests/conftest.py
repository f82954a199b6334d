"""Fixtures for the whole suite."""

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

collect_ignore = ["typing/proofs.py"]  # for type checkers; most of it would fail if it ran

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
POLICY = (  # scenarios that wait ten seconds and more
    "test_a_dead_letter_that_cannot_be_written_for_ten_seconds_is_unhealthy",
    "test_acks_that_fail_for_ten_seconds_are_unhealthy_until_one_succeeds",
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
    """A Redis that the tests of one module may kill and freeze."""
    with private_broker("redis") as broker:
        yield broker


@pytest.fixture(scope="module")
def private_rabbitmq() -> Iterator[PrivateBroker]:
    """A RabbitMQ that the tests of one module may kill and freeze."""
    with private_broker("rabbitmq") as broker:
        yield broker


@pytest.fixture(scope="module")
def private_kafka() -> Iterator[PrivateBroker]:
    """A Kafka that the tests of one module may kill and freeze."""
    with private_broker("kafka") as broker:
        yield broker


@pytest_asyncio.fixture
async def clock() -> AsyncIterator[VirtualClock]:
    """Virtual time in the loop of the test: waits are skipped, and take as long as they say."""
    with VirtualClock() as clock:
        yield clock


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> object | None:
    """Run the longest scopes first, and split those whose tests need no common order."""
    if config.getvalue("dist") != "loadscope":
        return None
    from xdist.scheduler import LoadScopeScheduling  # type: ignore[import-untyped]  # it has none

    class Scheduling(LoadScopeScheduling):  # type: ignore[misc]  # so it is anything
        def _split_scope(self, nodeid: str) -> str:
            return scope_of(nodeid, super()._split_scope(nodeid))

        def _assign_work_unit(self, node: object) -> None:
            longest = min(self.workqueue, key=start_order)  # the first of equals: most tests
            self.workqueue.move_to_end(longest, last=False)
            super()._assign_work_unit(node)

    return Scheduling(config, log)


def pytest_configure(config: pytest.Config) -> None:
    # A shell that starts the suite in the background has it ignore Ctrl-C, and so would every
    # process that a test starts and interrupts.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    # A busy machine may be slow, which is no failure of an example.
    hypothesis.settings.register_profile(
        "qkit", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
    )
    hypothesis.settings.load_profile("qkit")
    config.pluginmanager.register(SkippedProofs(), "qkit-skipped-proofs")


def pytest_collection_finish() -> None:
    """Spare the garbage collector what the collection made: it stays until the end."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What a test asks for it is a test of, also when its author forgot to say so."""
    for item in items:
        if BROKER_FIXTURES.intersection(getattr(item, "fixturenames", ())):
            item.add_marker(pytest.mark.broker)
        if item.path.is_relative_to(SPARK):
            item.add_marker(pytest.mark.spark)
        if repeats_policy(item):
            item.add_marker(pytest.mark.full)


def repeats_policy(item: pytest.Item) -> bool:
    """Whether a scenario about a service's own decisions runs on one broker more than needed.

    They run on the native engine and on Redis lists in the ordinary suite.
    """
    if not isinstance(item, pytest.Function) or item.cls is None:
        return False
    group, _, scenario = item.function.__qualname__.partition(".")
    policy = group == "SendFaults" or scenario.endswith(POLICY)
    return policy and item.cls.__name__ in OTHER_BROKERS
