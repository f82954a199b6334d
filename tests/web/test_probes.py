"""Health tells the truth: a dead consumer, a blocked loop, a broker that is gone, a shutdown."""

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
SOON = 5.0  # what is asked for; the machine may be slow, so the tests wait longer and measure


class Worker:
    """A worker process with pages."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.address = self.line()

    def line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def probe(self, path: str) -> int:
        """The status of a probe; 0 for no answer, as a kubelet counts it."""
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
        """How many seconds it took; far more than expected only bounds a test that fails."""
        began = time.monotonic()
        while not condition():
            assert time.monotonic() - began < 60, "it never happened"
            assert self.process.poll() is None, "the worker ended"
            time.sleep(0.05)
        return time.monotonic() - began


@contextmanager
def worker() -> Iterator[Worker]:
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.support.web_worker"],
        cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        yield Worker(process)
    finally:
        process.kill()
        process.communicate()


async def test_a_service_is_alive_before_it_is_ready() -> None:
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


async def test_a_dead_consumer_makes_it_unready_and_not_dead(
    service: QueueService, client: httpx.AsyncClient
) -> None:
    for task in service._runtime.consumers._tasks.values():
        task.cancel()

    async def unready() -> bool:
        return (await client.get("/readyz")).status_code == 503

    await eventually(unready)
    assert "consumers do not consume" in (await client.get("/readyz")).json()["reason"]
    assert (await client.get("/livez")).status_code == 200


async def test_a_broker_that_is_gone_makes_it_unready_and_not_dead() -> None:
    backend = FaultyBackend()
    service = QueueService(Settings(type="native"), backend=backend)
    async with service, client_of(service) as client:
        assert (await client.get("/readyz")).status_code == 200
        backend.always("ping", BackendUnavailable("gone"))
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
async def test_a_redis_that_is_killed_makes_it_unready_and_not_dead(tmp_path: Path) -> None:
    program = shutil.which("redis-server") or shutil.which("valkey-server")
    if program is None:
        pytest.skip("no redis-server on this machine")
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
            # The page itself stands, and says what is wrong.
            overview = (await client.get("/api/overview")).json()
            assert overview["ready"] is False
    finally:
        if server.returncode is None:
            server.kill()
        await server.wait()


def test_a_blocked_loop_is_neither_alive_nor_ready_and_then_both_again() -> None:
    with worker() as one:
        one.until(lambda: one.probe("readyz") == 200)
        one.send("blocks", scaled(9))
        assert one.line() == "blocking"
        # Not silence, which a probe could take for a slow network: a plain no, from a thread.
        seconds = one.until(lambda: one.probe("livez") == 503)
        print(f"not alive after {seconds:.1f} s")
        answer = httpx.get(f"{one.address}readyz", timeout=30.0)
        assert answer.status_code == 503
        assert answer.json()["status"] == "blocked"
        assert one.line() == "blocked"
        one.until(lambda: one.probe("livez") == 200 and one.probe("readyz") == 200)
        one.process.send_signal(signal.SIGTERM)
        _, errors = one.process.communicate(timeout=60)
        assert one.process.returncode == 0, errors


def test_on_sigterm_it_is_unready_while_it_still_drains() -> None:
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


async def test_it_is_unready_before_the_last_fetch(monkeypatch: pytest.MonkeyPatch) -> None:
    """From the signal on; fetching ends a turn of the loop later."""
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
        while service.ready:  # noqa: ASYNC110  # the very first turn after the signal counts
            await asyncio.sleep(0)
        assert (await client.get("/readyz")).status_code == 503
        await running
    calls = [call for call, _ in log]
    assert calls[-1] == "aclose"
    assert not any(ready for call, ready in log if call in ("stop", "aclose"))


async def test_an_address_that_is_taken_is_a_plain_error() -> None:
    from qkit import ConfigError

    async with serve(make_shop(), port=0) as address:
        port = int(address.rstrip("/").rpartition(":")[2])
        with pytest.raises(ConfigError, match="cannot listen"):
            async with serve(make_shop(), port=port):
                raise AssertionError("it served")


async def test_it_binds_loopback_unless_told_otherwise() -> None:
    async with serve(make_shop(), port=0) as address:
        assert address.startswith("http://127.0.0.1:")
    async with serve(make_shop(), host="::1", port=0) as address:
        assert address.startswith("http://[::1]:")
        async with httpx.AsyncClient() as client:
            assert (await client.get(f"{address}livez")).status_code == 200


async def test_an_open_page_does_not_hold_up_the_end() -> None:
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
