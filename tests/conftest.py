"""Fixtures for the whole suite."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.brokers import broker_url

BROKER_FIXTURES = frozenset({"redis_url", "rabbitmq_url", "kafka_url"})


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


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A test that asks for a broker is a broker test, also when its author forgot to say so."""
    for item in items:
        if BROKER_FIXTURES.intersection(getattr(item, "fixturenames", ())):
            item.add_marker(pytest.mark.broker)
