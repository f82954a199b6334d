"""Probes: responses with a dead consumer, a blocked loop, a lost broker, and during shutdown."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from qkit import BackendUnavailable, QueueService, Settings, consume
from qkit.web import serve
from tests.support.faulty import FaultyBackend
from tests.support.waiting import scaled
from tests.support.web import AUTHORIZED, Orders, client_of, eventually, make_shop

ROOT = Path(__file__).parents[2]


class Worker:
    """Worker process that serves the web app."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.address = self.line()

    def line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def probe(self, path: str) -> int:
        """Return the HTTP status of a probe, or 0 if there is no response."""
        try:
            return httpx.get(f"{self.address}{path}", timeout=10.0).status_code
        except httpx.TransportError:
            return 0

    def send(self, channel: str, seconds: float) -> None:
        path = f"{self.address}api/queues/{channel}/messages"
        httpx.post(
            path, json={"body": seconds}, headers=AUTHORIZED, timeout=30.0
        ).raise_for_status()

    def until(self, condition: Callable[[], bool]) -> float:
        """Wait until the condition holds and return how many seconds it took."""
        began = time.monotonic()
        while not condition():
            assert time.monotonic() - began < 60, "the condition did not hold within 60 s"
            assert self.process.poll() is None, "the worker exited early"
            time.sleep(0.05)
        return time.monotonic() - began


@contextmanager
def worker(*, descriptors: int | None = None) -> Iterator[Worker]:
    """Start a worker, with a limit of file descriptors if one is given."""
    limit = [] if descriptors is None else ["prlimit", f"--nofile={descriptors}"]
    process = subprocess.Popen(
        [*limit, sys.executable, "-m", "tests.support.web_worker"],
        cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        yield Worker(process)
    finally:
        process.kill()
        process.communicate()


async def test_a_service_is_live_before_it_is_ready() -> None:
    service = make_shop(Orders())
    async with client_of(service) as client:
        assert (await client.get("/livez")).status_code == 200
        before = await client.get("/readyz")
        assert before.status_code == 503
        assert before.json() == {"status": "not ready", "reason": "connection disconnected"}
        async with service:
            assert (await client.get("/readyz")).json() == {"status": "ready", "reason": None}
            assert (await client.get("/health")).json()["status"] == "healthy"
        after = await client.get("/readyz")
        assert after.json()["reason"] == "shutting down"
        assert (await client.get("/health")).status_code == 503
        assert (await client.get("/livez")).status_code == 200


async def test_with_a_dead_consumer_a_service_is_live_and_not_ready(
    service: QueueService, client: httpx.AsyncClient
) -> None:
    for task in service._runtime.consumers._tasks.values():
        task.cancel()

    async def unready() -> bool:
        return (await client.get("/readyz")).status_code == 503

    await eventually(unready)
    assert "consumers are not consuming" in (await client.get("/readyz")).json()["reason"]
    assert (await client.get("/livez")).status_code == 200


async def test_without_a_broker_a_service_is_live_and_not_ready() -> None:
    backend = FaultyBackend()
    service = QueueService(Settings(type="native"), backend=backend)
    async with service, client_of(service) as client:
        assert (await client.get("/readyz")).status_code == 200
        backend.always("ping", BackendUnavailable("unreachable"))
        began = time.monotonic()

        async def unready() -> bool:
            return (await client.get("/readyz")).status_code == 503

        await eventually(unready)
        print(f"unready after {time.monotonic() - began:.1f} s")
        assert (await client.get("/readyz")).json()["reason"] == "connection disconnected"
        assert (await client.get("/livez")).status_code == 200
        backend.heal("ping")

        async def ready_again() -> bool:
            return (await client.get("/readyz")).status_code == 200

        await eventually(ready_again)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


@pytest.mark.broker
async def test_with_a_killed_redis_a_service_is_live_and_not_ready(tmp_path: Path) -> None:
    program = shutil.which("redis-server") or shutil.which("valkey-server")
    if program is None:
        pytest.skip("redis-server is not installed")
    port = free_port()
    server = await asyncio.create_subprocess_exec(
        program, "--port", str(port), "--bind", "127.0.0.1", "--dir", str(tmp_path), "--save", "",
        stdout=asyncio.subprocess.DEVNULL,
    )  # fmt: skip
    try:

        async def listening() -> bool:
            try:
                _, writer = await asyncio.open_connection("127.0.0.1", port)
            except OSError:
                return False
            writer.close()
            return True

        await eventually(listening)
        url = f"redis://127.0.0.1:{port}/0"
        service = QueueService(Settings(type="redis", mode="list", url=url, send_timeout=2))
        service.register(Orders())
        async with service, client_of(service) as client:
            assert (await client.get("/readyz")).status_code == 200
            server.kill()
            began = time.monotonic()

            async def unready() -> bool:
                return (await client.get("/readyz")).status_code == 503

            await eventually(unready)
            print(f"unready after {time.monotonic() - began:.1f} s")
            assert (await client.get("/livez")).status_code == 200
            # The overview is still served.
            overview = (await client.get("/api/overview")).json()
            assert overview["ready"] is False
    finally:
        if server.returncode is None:
            server.kill()
        await server.wait()


def test_a_blocked_loop_is_neither_live_nor_ready_until_it_runs_again() -> None:
    with worker() as one:
        one.until(lambda: one.probe("readyz") == 200)
        one.send("blocks", scaled(9))
        assert one.line() == "blocking"
        # The watchdog responds with 503, so the probe does not time out.
        seconds = one.until(lambda: one.probe("livez") == 503)
        print(f"not live after {seconds:.1f} s")
        answer = httpx.get(f"{one.address}readyz", timeout=30.0)
        assert answer.status_code == 503
        assert answer.json()["status"] == "blocked"
        assert one.line() == "blocked"
        one.until(lambda: one.probe("livez") == 200 and one.probe("readyz") == 200)
        one.process.send_signal(signal.SIGTERM)
        _, errors = one.process.communicate(timeout=60)
        assert one.process.returncode == 0, errors


def test_on_sigterm_a_service_is_not_ready_while_it_drains() -> None:
    with worker() as one:
        one.until(lambda: one.probe("readyz") == 200)
        one.send("naps", scaled(3))
        assert one.line() == "napping"
        one.process.send_signal(signal.SIGTERM)
        one.until(lambda: one.probe("readyz") == 503)
        assert one.probe("livez") == 200
        assert httpx.get(f"{one.address}readyz", timeout=30.0).json()["reason"] == "shutting down"
        assert [one.line() for _ in range(3)] == ["napped", "ran", "ended"]
        assert one.process.wait(60) == 0


async def test_a_service_is_not_ready_when_it_stops_fetching(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Readiness ends with the signal, before the subscription is stopped."""
    log: list[tuple[str, bool]] = []
    backend = FaultyBackend()
    service = QueueService(Settings(type="native"), backend=backend)

    @consume("orders")
    async def handle(body: int) -> None: ...

    service.register(handle)
    meet = backend.meet

    async def watch(call: str, subject: str = "") -> None:
        log.append((call, service.ready))
        await meet(call, subject)

    monkeypatch.setattr(backend, "meet", watch)
    running = asyncio.create_task(service.run())
    async with client_of(service) as client:

        async def ready() -> bool:
            return (await client.get("/readyz")).status_code == 200

        await eventually(ready)
        os.kill(os.getpid(), signal.SIGTERM)
        while service.ready:  # noqa: ASYNC110  # yields to the loop until the signal is handled
            await asyncio.sleep(0)
        assert (await client.get("/readyz")).status_code == 503
        await running
    calls = [call for call, _ in log]
    assert calls[-1] == "aclose"
    assert not any(ready for call, ready in log if call in ("stop", "aclose"))


async def test_an_address_in_use_is_a_config_error() -> None:
    from qkit import ConfigError

    async with serve(make_shop(), port=0) as address:
        port = int(address.rstrip("/").rpartition(":")[2])
        with pytest.raises(ConfigError, match="cannot listen"):
            async with serve(make_shop(), port=port):
                raise AssertionError("two apps serve on the same port")


async def test_serve_binds_loopback_by_default() -> None:
    async with serve(make_shop(), port=0) as address:
        assert address.startswith("http://127.0.0.1:")
    async with serve(make_shop(), host="::1", port=0) as address:
        assert address.startswith("http://[::1]:")
        async with httpx.AsyncClient() as client:
            assert (await client.get(f"{address}livez")).status_code == 200


async def test_an_open_event_stream_does_not_delay_the_shutdown() -> None:
    service = make_shop(Orders())
    async with httpx.AsyncClient() as client:
        async with serve(service, port=0) as address:
            await service.start()
            async with client.stream("GET", f"{address}api/events") as stream:
                lines = stream.aiter_lines()
                assert await anext(lines) == "retry: 1000"
                await service.shutdown()
                async with asyncio.timeout(60):
                    rest = [line async for line in lines]
        assert any('"stopping":true' in line for line in rest)
