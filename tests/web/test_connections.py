"""Connections of the embedded server: half-sent requests, their deadlines and the limit."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import threading
import time
from collections.abc import Iterator

import httpx
import pytest

from qkit.web import connections, serve
from tests.support.waiting import scaled
from tests.support.web import Orders, make_shop
from tests.web.test_probes import worker

HALF_SENT = b"GET /readyz HTTP/1.1\r\nHost: localhost\r\nX-Slow: "
DESCRIPTORS = 256


def address_of(url: str) -> tuple[str, int]:
    host, _, port = url.rstrip("/").removeprefix("http://").rpartition(":")
    return host, int(port)


@contextlib.contextmanager
def half_sent_requests(url: str, count: int) -> Iterator[None]:
    """Keep up to ``count`` half-sent requests open; reopen those that the server closes."""
    stop = threading.Event()
    held: list[socket.socket] = []

    def attack() -> None:
        while not stop.is_set():
            with contextlib.suppress(OSError):
                one = socket.create_connection(address_of(url), timeout=1)
                held.append(one)
                one.sendall(HALF_SENT)
            if len(held) > count:
                held.pop(0).close()
            if len(held) == count:
                time.sleep(0.002)

    thread = threading.Thread(target=attack, daemon=True)
    thread.start()
    try:
        while len(held) < count:
            assert thread.is_alive()
            time.sleep(0.01)
        yield
    finally:
        stop.set()
        thread.join()
        for one in held:
            one.close()


def test_half_sent_requests_starve_neither_probes_nor_consumers() -> None:
    with worker(descriptors=DESCRIPTORS) as one:
        one.until(lambda: one.probe("readyz") == 200)
        with half_sent_requests(one.address, DESCRIPTORS):
            for _ in range(20):
                assert one.probe("livez") == 200
                assert one.probe("readyz") == 200
            for _ in range(3):
                one.send("naps", 0.01)
                assert (one.line(), one.line()) == ("napping", "napped")
        one.process.terminate()
        _, errors = one.process.communicate(timeout=60)
        assert one.process.returncode == 0
        assert "Traceback" not in errors
        assert len(errors.splitlines()) < 10


@pytest.mark.parametrize(
    "half_sent",
    [
        b"",
        HALF_SENT,
        b"GET /readyz HTTP/1.1\r\nHost: localhost\r\n\r\nGET /readyz HT",
        b"POST /api/token HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n123",
    ],
    ids=["nothing", "head", "second head", "body"],
)
async def test_an_incomplete_request_is_aborted_at_its_deadline(
    half_sent: bytes, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(connections, "REQUEST_HEAD_SECONDS", 0.1)
    monkeypatch.setattr(connections, "REQUEST_BODY_SECONDS", 0.1)
    async with serve(make_shop(), port=0) as address:
        reader, writer = await asyncio.open_connection(*address_of(address))
        writer.write(half_sent)
        async with asyncio.timeout(scaled(10)):
            with contextlib.suppress(ConnectionResetError):
                await reader.read()
        writer.close()
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


async def test_a_request_in_parts_is_answered_before_its_deadline() -> None:
    async with serve(make_shop(), port=0) as address:
        reader, writer = await asyncio.open_connection(*address_of(address))
        for part in (HALF_SENT, b"a", b"bc\r\n", b"\r\n", HALF_SENT, b"\r\n\r\n"):
            writer.write(part)
            await asyncio.sleep(0.01)
        for _ in range(2):
            assert (await reader.readline()).startswith(b"HTTP/1.1 503")  # not started
            await reader.readuntil(b"}")
        writer.close()


async def test_a_client_that_does_not_read_is_disconnected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(connections, "WRITE_STALL_SECONDS", 0.1)
    service = make_shop(Orders())
    async with serve(service, port=0) as address, service:
        for number in range(100):
            await service.send(f"queue-{number}", 1)
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
            client.connect(address_of(address))
            client.setblocking(False)
            loop = asyncio.get_running_loop()
            request = b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n"

            async def send_requests() -> None:
                while True:
                    await loop.sock_sendall(client, request)
                    await asyncio.sleep(0.01)

            with pytest.raises(ConnectionError):
                await asyncio.wait_for(send_requests(), scaled(20))


async def test_connections_with_a_running_request_are_not_aborted_for_new_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(connections, "MIN_CONNECTIONS", 3)
    monkeypatch.setattr(connections, "MAX_CONNECTIONS", 3)
    service = make_shop(Orders())
    async with (
        serve(service, port=0) as address,
        service,
        httpx.AsyncClient(timeout=60) as client,
    ):
        async with (
            contextlib.AsyncExitStack() as stack,
            client.stream("GET", f"{address}api/events") as stream,
        ):
            lines = stream.aiter_lines()
            await anext(lines)
            for _ in range(10):
                _, writer = await asyncio.open_connection(*address_of(address))
                writer.write(HALF_SENT)
                stack.callback(writer.close)
                async with httpx.AsyncClient(timeout=60) as prober:
                    assert (await prober.get(f"{address}livez")).status_code == 200
            assert [await anext(lines) for _ in range(3)]


def test_the_limit_follows_the_file_descriptors(monkeypatch: pytest.MonkeyPatch) -> None:
    import resource

    for descriptors, expected in ((64, 60), (256, 64), (400, 100), (65_536, 200), (-1, 200)):
        monkeypatch.setattr(resource, "getrlimit", lambda _, soft=descriptors: (soft, soft))
        assert connections.max_connections() == expected
