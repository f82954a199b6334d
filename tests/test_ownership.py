"""A started service belongs to one process and one event loop, on every backend."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import uuid
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from qkit import LifecycleError, QueueService, Settings, SyncQueueService
from qkit.native import Engine
from tests.support.everywhere import BACKENDS, NAMES

pytestmark = [
    pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork"),
    pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning"),
]

AsyncCall = Callable[[], Awaitable[object]]


@pytest.fixture(params=NAMES)
def settings(request: pytest.FixtureRequest) -> Settings:
    _, make = BACKENDS[request.param]
    return make(request.getfixturevalue)


@pytest.fixture
def channel() -> str:
    return f"orders-{uuid.uuid4().hex[:8]}"


def in_child(work: Callable[[], str]) -> str:
    """Return the text that ``work`` returns in a forked child process; ``hangs`` after 20 s."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:  # the child must not continue with pytest
        text = "the child failed"
        with suppress(BaseException):
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(20)
            text = work()
        os.write(writing, text.encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        text = pipe.read().decode()
    os.waitpid(child, 0)
    return text or "hangs"


def refused(calls: dict[str, Callable[[], object]]) -> str:
    """Call each function; return the names of those that do not raise ``LifecycleError``."""
    wrong: list[str] = []
    for name, call in calls.items():
        try:
            call()
        except LifecycleError as error:
            if "process" not in str(error):
                wrong.append(f"{name}: {error}")
        except BaseException as error:
            wrong.append(f"{name}: {error!r}")
        else:
            wrong.append(f"{name}: returned")
    return "; ".join(wrong) or "all refused"


def run_async(call: AsyncCall) -> Callable[[], object]:
    async def main() -> object:
        return await call()

    def run() -> object:
        asyncio.events._set_running_loop(None)  # Python 3.12+ does this after a fork
        return asyncio.run(main())

    return run


def calls_of(service: QueueService, channel: str) -> dict[str, AsyncCall]:
    """Return calls that reach the broker."""
    letters = service.dead_letters(channel)
    verb = service.send if service.capabilities.queues else service.publish
    return {
        "send": lambda: verb(channel, 1),
        "send_many": lambda: service.send_many(channel, [1]),
        "queues": service.queues,
        "stats": lambda: service.stats(channel),
        "peek": lambda: service.peek(channel),
        "purge": lambda: service.purge(channel),
        "delete": lambda: service.delete(channel),
        "list": letters.list,
        "replay": letters.replay,
        "purge letters": letters.purge,
        "start": service.start,
        "shutdown": service.shutdown,
        "run": service.run,
    }


def blocking_calls_of(service: SyncQueueService, channel: str) -> dict[str, Callable[[], object]]:
    verb = service.send if service.capabilities.queues else service.publish
    return {
        "send": lambda: verb(channel, 1),
        "stats": lambda: service.stats(channel),
        "replay": service.dead_letters(channel).replay,
        "run": service.run,
        "shutdown": service.shutdown,
        "start": service.start,
    }


def test_a_blocking_service_raises_at_once_in_a_forked_child(
    settings: Settings, channel: str
) -> None:
    with SyncQueueService(settings) as service:
        calls = blocking_calls_of(service, channel)
        calls["send"]()
        assert in_child(lambda: refused(calls)) == "all refused"
        calls["send"]()  # the parent is not affected
        assert service.metrics().messages_sent == 2


async def test_an_async_service_raises_at_once_in_a_forked_child(
    settings: Settings, channel: str
) -> None:
    async with QueueService(settings) as service:
        calls = calls_of(service, channel)
        await calls["send"]()

        def use() -> str:
            asyncio.events._set_running_loop(None)
            state = service.health_check().status
            wrong = refused({name: run_async(call) for name, call in calls.items()})
            return f"{state}, {wrong}"

        assert in_child(use) == "unhealthy, all refused"
        await calls["send"]()
        assert service.metrics().messages_sent == 2


async def test_a_client_of_a_native_directory_raises_at_once_in_a_forked_child(
    tmp_path: Path, channel: str
) -> None:
    settings = Settings(type="native", path=tmp_path / "data")
    async with QueueService(settings), QueueService(settings) as client:
        calls = {name: run_async(call) for name, call in calls_of(client, channel).items()}
        assert in_child(lambda: refused(calls)) == "all refused"
        await client.send(channel, 1)


def test_a_service_that_was_not_started_can_be_started_in_a_forked_child(channel: str) -> None:
    service = SyncQueueService(Settings(type="native"))

    def use() -> str:
        with service:
            service.send(channel, 1)
            return str(service.stats(channel).depth)

    assert in_child(use) == "1"


def test_a_start_in_a_forked_child_does_not_wait_for_a_start_in_the_parent() -> None:
    service = SyncQueueService(Settings(type="native"))
    held, release = threading.Event(), threading.Event()

    def hold() -> None:
        with service._lifecycle_lock:
            held.set()
            release.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait()

    def use() -> str:
        with service:
            return "started"

    try:
        assert in_child(use) == "started"
    finally:
        release.set()
        thread.join()


@pytest.fixture(params=["in memory", "on disk"])
def make_engine(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[], Awaitable[Engine]]:
    async def make() -> Engine:
        if request.param == "on disk":
            return await Engine.open(tmp_path / "data")
        return Engine()

    return make


async def test_an_engine_raises_at_once_in_a_forked_child(
    make_engine: Callable[[], Awaitable[Engine]],
) -> None:
    async with await make_engine() as engine:
        await engine.create("orders")
        await engine.publish("orders", b"one")
        delivery = await engine.consume("orders", timeout=1)
        assert delivery is not None
        calls: dict[str, AsyncCall] = {
            "publish": lambda: engine.publish("orders", b"two"),
            "consume": lambda: engine.consume("orders", timeout=1),
            "stats": lambda: engine.stats("orders"),
            "create": lambda: engine.create("others"),
            "ack": delivery.ack,
        }
        runs = {name: run_async(call) for name, call in calls.items()}
        assert in_child(lambda: refused(runs)) == "all refused"
        await delivery.ack()
        assert (await engine.stats("orders")).depth == 0


# -- a second event loop -----------------------------------------------------------------------


@pytest.fixture
def first_loop() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as runner:
        yield runner


async def _errors(calls: dict[str, AsyncCall]) -> dict[str, str]:
    found: dict[str, str] = {}
    for name, call in calls.items():
        try:
            async with asyncio.timeout(20):
                await call()
        except LifecycleError as error:
            if "event loop" not in str(error):
                found[name] = str(error)
        except BaseException as error:
            found[name] = repr(error)
        else:
            found[name] = "returned"
    return found


def test_calls_in_a_second_event_loop_raise_before_anything_is_sent(
    settings: Settings, channel: str, first_loop: asyncio.Runner
) -> None:
    service = QueueService(settings)
    first_loop.run(service.start())
    calls = calls_of(service, channel)

    async def use() -> None:
        await calls["send"]()
        if service.capabilities.depth:
            assert (await service.stats(channel)).depth == 1

    async def again() -> None:
        if service.capabilities.depth:
            assert (await service.stats(channel)).depth == 1  # nothing was sent or purged
        await service.shutdown()

    first_loop.run(use())
    assert asyncio.run(_errors(calls)) == {}
    first_loop.run(again())


def test_pause_and_resume_in_a_second_event_loop_raise(
    channel: str, first_loop: asyncio.Runner
) -> None:
    service = QueueService(Settings(type="native"))
    first_loop.run(service.start())

    async def pause() -> None:
        for call in (service.pause, service.resume):
            with pytest.raises(LifecycleError, match="event loop"):
                call(channel)

    asyncio.run(pause())
    first_loop.run(service.shutdown())
