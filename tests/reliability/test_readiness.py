"""Readiness: a service that cannot work becomes not ready within 5 seconds."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from qkit import QueueService, consume
from tests.support.deployments import Deployment, Site, behind_a_network, has_a_server_process, on
from tests.support.waiting import eventually, scaled

DETECTION_SECONDS = 5.0
BLOCKED_SECONDS = 8.0


@asynccontextmanager
async def serving(site: Site, *, proxied: bool = False) -> AsyncIterator[QueueService]:
    @consume(site.queue)
    async def handle(body: str) -> None:
        if body == "block":
            time.sleep(BLOCKED_SECONDS)  # noqa: ASYNC251  # the loop is blocked on purpose

    async with site.service(handle, proxied=proxied) as service:
        await eventually(lambda: service.ready)
        yield service


def everywhere(_: Deployment) -> bool:
    return True


def in_this_process(deployment: Deployment) -> bool:
    return not deployment.shared


@on(everywhere)
async def test_a_service_with_a_dead_consumer_is_not_ready(site: Site) -> None:
    async with serving(site) as service:
        (task,) = [
            task for task in asyncio.all_tasks() if task.get_name().startswith("qkit consumer ")
        ]
        task.cancel()
        await eventually(lambda: not service.ready, scaled(DETECTION_SECONDS))
        assert service.health_check().status == "unhealthy"


@pytest.mark.slow
@on(in_this_process)  # the event loop does not depend on the backend
async def test_a_service_with_a_blocked_loop_is_not_ready_until_it_recovers(site: Site) -> None:
    """A thread calls ``health_check``, because the loop is blocked."""
    seen: list[tuple[float, bool, str | None]] = []
    finished = threading.Event()

    def poll() -> None:
        while not finished.wait(0.05):
            health = service.health_check()
            seen.append((time.monotonic(), health.status == "healthy", health.last_error))

    async with serving(site) as service:
        polling = threading.Thread(target=poll)
        polling.start()
        try:
            started_at = time.monotonic()
            await service.send(site.queue, "block")
            await eventually(lambda: time.monotonic() - started_at > BLOCKED_SECONDS)
            await eventually(lambda: service.ready, 30)
        finally:
            finished.set()
            polling.join()
    detected_at, _, reason = next(item for item in seen if not item[1])
    # One more second, because the handler does not start immediately.
    assert detected_at - started_at <= scaled(DETECTION_SECONDS + 1), (
        "the blocked loop was detected too late"
    )
    assert "blocked" in (reason or "")


@pytest.mark.slow
@on(has_a_server_process)
async def test_a_service_is_not_ready_while_the_broker_does_not_respond(site: Site) -> None:
    async with serving(site) as service:
        site.freeze()
        try:
            await eventually(lambda: not service.ready, scaled(DETECTION_SECONDS))
        finally:
            site.thaw()
        await eventually(lambda: service.ready, 30)


@on(behind_a_network)
async def test_a_service_is_not_ready_while_the_broker_is_down(site: Site) -> None:
    assert site.proxy is not None
    async with serving(site, proxied=True) as service:
        site.proxy.refuse()
        await eventually(lambda: not service.ready, scaled(DETECTION_SECONDS))
        assert service.connection_state == "disconnected"
        site.proxy.heal()
        await eventually(lambda: service.ready, 30)


@on(everywhere)
async def test_a_service_is_not_ready_as_soon_as_its_shutdown_starts(site: Site) -> None:
    started, release = asyncio.Event(), asyncio.Event()

    @consume(site.queue)
    async def handle(body: str) -> None:
        started.set()
        await release.wait()

    ready: list[bool] = []
    async with site.service(handle) as service:
        service.on("state_change", lambda event: ready.append(service.ready))
        await service.send(site.queue, "a")
        await started.wait()
        shutting_down = asyncio.create_task(service.shutdown())
        await eventually(lambda: ready)
        assert ready == [False]  # the handler is still running
        release.set()
        await shutting_down
