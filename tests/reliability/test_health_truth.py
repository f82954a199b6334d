"""Health is true: whatever keeps a service from its work, it is not ready within 5 s."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from qkit import QueueService, consume
from tests.support.carriers import Carrier, Site, behind_a_network, on, outlives_its_server
from tests.support.waiting import eventually, scaled

SOON = 5.0
BLOCKED = 8.0


@asynccontextmanager
async def serving(site: Site, *, proxied: bool = False) -> AsyncIterator[QueueService]:
    @consume(site.queue)
    async def handle(body: str) -> None:
        if body == "block":
            time.sleep(BLOCKED)  # noqa: ASYNC251  # blocking the loop is the point

    async with site.service(handle, proxied=proxied) as service:
        await eventually(lambda: service.ready)
        yield service


def everywhere(_: Carrier) -> bool:
    return True


def in_this_process(carrier: Carrier) -> bool:
    return not carrier.shared


@on(everywhere)
async def test_a_dead_consumer_is_noticed(site: Site) -> None:
    async with serving(site) as service:
        (task,) = [
            task for task in asyncio.all_tasks() if task.get_name().startswith("qkit consumer ")
        ]
        task.cancel()
        await eventually(lambda: not service.ready, scaled(SOON))
        assert service.health_check().status == "unhealthy"


@pytest.mark.slow
@on(in_this_process)  # whatever carries the messages, it is the same loop
async def test_a_blocked_loop_is_noticed_from_outside_and_so_is_its_end(site: Site) -> None:
    """Whoever asks lives in another thread: a probe that nobody answers has failed anyway."""
    seen: list[tuple[float, bool, str | None]] = []
    over = threading.Event()

    def ask() -> None:
        while not over.wait(0.05):
            health = service.health_check()
            seen.append((time.monotonic(), health.status == "healthy", health.last_error))

    async with serving(site) as service:
        asking = threading.Thread(target=ask)
        asking.start()
        try:
            began = time.monotonic()
            await service.send(site.queue, "block")
            await eventually(lambda: time.monotonic() - began > BLOCKED)
            await eventually(lambda: service.ready, 30)
        finally:
            over.set()
            asking.join()
    noticed, _, why = next(item for item in seen if not item[1])
    assert noticed - began <= scaled(SOON + 1), "a second for the message to reach its handler"
    assert "blocked" in (why or "")


@pytest.mark.slow
@on(outlives_its_server)
async def test_a_broker_that_does_not_answer_is_noticed(site: Site) -> None:
    async with serving(site) as service:
        site.freeze()
        try:
            await eventually(lambda: not service.ready, scaled(SOON))
        finally:
            site.thaw()
        await eventually(lambda: service.ready, 30)


@on(behind_a_network)
async def test_a_broker_that_is_gone_is_noticed(site: Site) -> None:
    assert site.proxy is not None
    async with serving(site, proxied=True) as service:
        site.proxy.refuse()
        await eventually(lambda: not service.ready, scaled(SOON))
        assert service.connection_state == "disconnected"
        site.proxy.heal()
        await eventually(lambda: service.ready, 30)


@on(everywhere)
async def test_a_service_that_comes_down_is_not_ready_before_it_stops_to_fetch(site: Site) -> None:
    holding, go_on = asyncio.Event(), asyncio.Event()

    @consume(site.queue)
    async def handle(body: str) -> None:
        holding.set()
        await go_on.wait()

    ready: list[bool] = []
    async with site.service(handle) as service:
        service.on("state_change", lambda event: ready.append(service.ready))
        await service.send(site.queue, "a")
        await holding.wait()
        coming_down = asyncio.create_task(service.shutdown())
        await eventually(lambda: ready)
        assert ready == [False], "and its handler still runs"
        go_on.set()
        await coming_down
