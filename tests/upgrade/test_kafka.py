"""Tests that the current version can use the Kafka topics of qkit d324538."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from qkit import Settings
from tests.upgrade import raw_kafka
from tests.upgrade.raw import DATA, read
from tests.upgrade.takeover import Expected, Takeover, consume_two, unique_prefix

OLD_SETTINGS: dict[str, Any] = {"partitions": 2, "retry": {"initial_delay": 0.05, "jitter": 0}}


@pytest_asyncio.fixture
async def prefix(kafka_url: str) -> AsyncIterator[str]:
    """Prefix of all names in the replayed state."""
    prefix = unique_prefix()
    try:
        await raw_kafka.replay(kafka_url, read(DATA / "kafka.jsonl", prefix))
        yield prefix
    finally:
        await raw_kafka.remove(kafka_url, prefix)


def settings(url: str, prefix: str, **values: Any) -> Settings:
    return Settings(type="kafka", url=url, prefix=prefix, **values)


@pytest.mark.slow
@pytest.mark.parametrize("values", [{}, OLD_SETTINGS], ids=["default", "as-before"])
async def test_every_message_of_the_old_version_arrives(
    kafka_url: str, prefix: str, values: dict[str, Any]
) -> None:
    await Takeover(settings(kafka_url, prefix, **values), Expected("kafka")).run()


@pytest.mark.parametrize("channel", Expected("kafka").options)
async def test_a_channel_with_old_options_can_be_consumed(
    kafka_url: str, prefix: str, channel: str
) -> None:
    await consume_two(settings(kafka_url, prefix), Expected("kafka"), channel)
