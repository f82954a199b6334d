"""Tests that the current version can use the RabbitMQ queues of qkit d324538."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from qkit import Settings
from tests.upgrade import raw_rabbitmq
from tests.upgrade.raw import DATA, read
from tests.upgrade.takeover import Expected, Takeover, consume_two, unique_prefix

STATES = ["rabbitmq-classic", "rabbitmq-quorum"]
REPLICAS = {"rabbitmq-classic": 1, "rabbitmq-quorum": 3}
OLD_SETTINGS: dict[str, Any] = {"retry": {"initial_delay": 0.05, "jitter": 0}}


@pytest_asyncio.fixture
async def prefix(rabbitmq_url: str, state: str) -> AsyncIterator[str]:
    """Prefix of all names in the replayed state, except those of the delay cascade."""
    prefix = unique_prefix()
    commands = read(DATA / f"{state}.jsonl", prefix)
    try:
        await raw_rabbitmq.replay(rabbitmq_url, commands)
        yield prefix
    finally:
        await raw_rabbitmq.remove(rabbitmq_url, commands, prefix)


def settings(url: str, prefix: str, state: str, **values: Any) -> Settings:
    replicas = REPLICAS[state]
    return Settings(type="rabbitmq", url=url, prefix=prefix, replicas=replicas, **values)


@pytest.mark.slow
@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("values", [{}, OLD_SETTINGS], ids=["default", "as-before"])
async def test_every_message_of_the_old_version_arrives(
    rabbitmq_url: str, prefix: str, state: str, values: dict[str, Any]
) -> None:
    await Takeover(settings(rabbitmq_url, prefix, state, **values), Expected(state)).run()


@pytest.mark.parametrize(
    ("state", "channel"),
    [(state, channel) for state in STATES for channel in Expected(state).options],
)
async def test_a_channel_with_old_options_can_be_consumed(
    rabbitmq_url: str, prefix: str, state: str, channel: str
) -> None:
    await consume_two(settings(rabbitmq_url, prefix, state), Expected(state), channel)
