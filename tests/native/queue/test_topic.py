"""Topics of the native engine: every group receives a copy of each message."""

from __future__ import annotations

import asyncio

import pytest

from qkit.errors import ConfigError, InvalidName, InvalidPriority, QueueFull, Unsupported
from qkit.message import GROUP, Reason
from qkit.native import Engine
from qkit.testing.clock import VirtualClock


async def join(engine: Engine, *groups: str) -> None:
    for group in groups:
        assert await engine.consume("prices", group=group) is None


async def bodies(engine: Engine, group: str) -> list[bytes]:
    found = []
    while (delivery := await engine.consume("prices", group=group)) is not None:
        found.append(delivery.body)
        await delivery.ack()
    return found


@pytest.fixture(autouse=True)
async def prices(engine: Engine) -> None:
    await engine.create("prices", broadcast=True, max_depth=3)


@pytest.mark.proves("002-improvements-3")
async def test_a_group_receives_the_messages_sent_after_its_declaration(engine: Engine) -> None:
    await engine.publish("prices", b"before any group")
    await join(engine, "a")
    await engine.publish("prices", b"1")
    await join(engine, "b")
    sent = await engine.publish("prices", b"2")
    assert sent.position is None
    assert await bodies(engine, "a") == [b"1", b"2"]
    assert await bodies(engine, "b") == [b"2"]


async def test_groups_share_the_body_of_a_message(engine: Engine) -> None:
    await join(engine, "a", "b")
    await engine.publish("prices", b"tick", headers={"x": "1"})
    one = await engine.consume("prices", group="a")
    two = await engine.consume("prices", group="b")
    assert one is not None
    assert two is not None
    assert one.body is two.body
    assert one.message_id == two.message_id
    await one.nack()
    await two.ack()
    assert await bodies(engine, "a") == [b"tick"]


async def test_a_group_header_sends_to_one_group(engine: Engine) -> None:
    await join(engine, "a", "b")
    await engine.publish("prices", b"x", headers={GROUP: "b", "other": "kept"})
    await engine.publish("prices", b"y", headers={GROUP: "new"})
    assert await bodies(engine, "a") == []
    delivery = await engine.consume("prices", group="b")
    assert delivery is not None
    assert delivery.headers == {"other": "kept"}
    assert await bodies(engine, "new") == [b"y"]


async def test_dead_letters_are_replayed_to_their_group(
    engine: Engine, clock: VirtualClock
) -> None:
    await join(engine, "a", "b")
    await engine.publish("prices", b"x", ttl=5)
    assert await bodies(engine, "a") == [b"x"]
    await clock.advance(5)
    (letter,) = await engine.dead_letters("prices")
    assert (letter.channel, letter.group, letter.reason) == ("prices", "b", Reason.TTL_EXPIRED)
    assert await engine.retry_dead_letters("prices") == 1
    assert await bodies(engine, "a") == []
    assert await bodies(engine, "b") == [b"x"]


async def test_a_message_is_accepted_by_all_groups_or_none(engine: Engine) -> None:
    await join(engine, "quick", "slow")
    for n in range(3):
        await engine.publish("prices", str(n).encode())
    await bodies(engine, "quick")
    with pytest.raises(QueueFull):
        await engine.publish("prices", b"more")
    with pytest.raises(InvalidPriority):
        await engine.publish("prices", b"more", 99)
    assert await bodies(engine, "quick") == []


async def test_figures_of_a_topic_are_sums_over_its_groups(
    engine: Engine, clock: VirtualClock
) -> None:
    empty = await engine.stats("prices")
    assert (empty.depth, empty.consumers, empty.avg_wait_time_ms) == (0, 0, None)
    await join(engine, "a", "b")
    await engine.publish("prices", b"x")
    await clock.advance(2)
    await bodies(engine, "a")
    stats = await engine.stats("prices")
    assert (stats.queue, stats.depth, stats.published_total, stats.acked_total) == (
        "prices",
        1,
        2,
        1,
    )
    assert (stats.avg_wait_time_ms, stats.oldest_message_age_secs) == (2000, 2)
    (envelope,) = await engine.peek("prices", 5)
    assert envelope.headers == {GROUP: "b"}
    assert await engine.peek("prices", 0) == []
    assert await engine.remove("prices", [envelope.id]) == 1
    await engine.publish("prices", b"y")
    assert await engine.purge("prices") == 2


async def test_a_topic_requires_a_group_and_cannot_become_a_queue(engine: Engine) -> None:
    with pytest.raises(Unsupported, match="group"):
        await engine.consume("prices")
    with pytest.raises(InvalidName):
        await engine.consume("prices", group="no group")
    with pytest.raises(ConfigError, match="broadcast"):
        await engine.create("prices", max_depth=3)


async def test_new_limits_apply_to_every_group(engine: Engine) -> None:
    await join(engine, "a")
    topic = engine.catalogue.find("prices", "test")
    topic.reconfigure(topic.config.__class__(broadcast=True, max_depth=1))
    await engine.publish("prices", b"x")
    with pytest.raises(QueueFull):
        await engine.publish("prices", b"x")


async def test_deleting_a_topic_ends_the_waits_of_every_group(engine: Engine) -> None:
    task = asyncio.create_task(engine.consume("prices", None, group="a"))
    await asyncio.sleep(0)
    await engine.delete("prices")
    with pytest.raises(Exception, match="deleted"):
        await task
