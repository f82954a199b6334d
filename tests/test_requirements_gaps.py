"""Tests for requirements in docs/requirements.md that no other test covers explicitly."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Callable, Iterator

import pytest
import pytest_asyncio

import qkit
from qkit.errors import MessageNotFound
from qkit.message import Reason
from qkit.native import Engine
from qkit.native.config import QueueConfig
from qkit.testing.clock import VirtualClock


@pytest_asyncio.fixture
async def engine(clock: VirtualClock) -> AsyncIterator[Engine]:
    async with Engine(clock=clock) as engine:
        yield engine


@pytest.mark.proves("001-overview-7", "001-reaper-4", "001-reaper-5")
async def test_a_message_that_fails_five_times_is_moved_to_the_dead_letter_queue(
    engine: Engine, clock: VirtualClock
) -> None:
    """``max_retries=4`` allows five deliveries."""
    await engine.create("tasks", max_retries=4, ack_deadline=1)
    await engine.publish("tasks", b"poison")
    for retries in range(5):
        assert await engine.dead_letters("tasks") == []
        delivery = await engine.consume("tasks")
        assert delivery is not None
        assert delivery.retry_count == retries
        await clock.advance(1)
    assert await engine.consume("tasks") is None
    (letter,) = await engine.dead_letters("tasks")
    assert (letter.reason, letter.attempts) == (Reason.MAX_RETRIES_EXCEEDED, 5)
    assert (await engine.stats("tasks_dlq")).depth == 1


@pytest.mark.proves("000-consume-4", "000-config-1")
async def test_a_lease_lasts_thirty_seconds_by_default(engine: Engine, clock: VirtualClock) -> None:
    await engine.create("tasks")
    await engine.publish("tasks", b"x")
    assert await engine.consume("tasks") is not None
    await clock.advance(29.9)
    assert await engine.consume("tasks") is None
    await clock.advance(0.1)
    assert await engine.consume("tasks") is not None


@pytest.mark.proves("000-config-2", "000-config-4", "000-config-6")
def test_the_engine_has_its_documented_defaults() -> None:
    config = QueueConfig()
    assert (config.ack_deadline, config.max_depth, config.max_priority) == (30.0, 100_000, 9)
    assert config.dead_letter_max_depth == 10_000
    create = inspect.signature(Engine.create).parameters
    assert create["max_retries"].default == 3
    assert create["dead_letter"].default is True


@pytest.mark.proves("002-testing-13", "002-pitfalls-3", "004-actors-7")
async def test_only_one_of_several_concurrent_acks_succeeds(engine: Engine) -> None:
    await engine.create("tasks")
    await engine.publish("tasks", b"x")
    delivery = await engine.consume("tasks")
    assert delivery is not None
    answers = await asyncio.gather(*(delivery.ack() for _ in range(10)), return_exceptions=True)
    assert answers.count(None) == 1
    assert sum(isinstance(answer, MessageNotFound) for answer in answers) == 9
    stats = await engine.stats("tasks")
    assert (stats.acked_total, stats.in_flight, stats.depth) == (1, 0, 0)


@pytest.mark.proves("000-figures-6", "001-concurrency-2")
async def test_ten_thousand_queues_work_at_the_same_time(engine: Engine) -> None:
    names = [f"q{number:05}" for number in range(10_000)]
    for name in names:
        await engine.create(name)
        await engine.publish(name, name.encode())
    assert await engine.list() == names
    for name in reversed(names):
        delivery = await engine.consume(name)
        assert delivery is not None
        assert delivery.body == name.encode()
        await delivery.ack()


def public_methods() -> Iterator[tuple[str, object, Callable[..., object]]]:
    for export in qkit.__all__:
        owner = getattr(qkit, export)
        if not inspect.isclass(owner) or not owner.__module__.startswith("qkit"):
            continue
        for name, member in list(vars(owner).items()):
            function = member.fget if isinstance(member, property) else member
            function = getattr(function, "__func__", function)
            if not name.startswith("_") and inspect.isfunction(function):
                yield f"{export}.{name}", getattr(owner, name), function


@pytest.mark.proves("003-types-3", "003-docs-1", "003-docs-2", "003-docs-3", "003-docs-4")
@pytest.mark.parametrize(
    ("member", "function"),
    [row[1:] for row in public_methods()],
    ids=[row[0] for row in public_methods()],
)
def test_every_public_method_is_documented_and_typed(
    member: object, function: Callable[..., object]
) -> None:
    assert inspect.getdoc(member)
    signature = inspect.signature(function)
    assert signature.return_annotation is not signature.empty
    own = [name for name in signature.parameters if name not in {"self", "cls"}]
    bare = [name for name in own if signature.parameters[name].annotation is signature.empty]
    assert not bare
