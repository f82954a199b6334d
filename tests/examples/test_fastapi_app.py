"""Example ``fastapi_app.py``: dashboard, readiness and shutdown under load."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from qkit import QueueService, Settings

EXAMPLE = Path(__file__).parents[2] / "examples" / "fastapi_app.py"


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


@contextmanager
def running(directory: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    port = free_port()
    environment = {"QKIT_PATH": str(directory / "data"), "PORT": str(port), "QKIT_TOKEN": "a-token"}
    with (directory / "log").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, str(EXAMPLE)],
            env=os.environ | environment, stdout=log, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
    address = f"http://127.0.0.1:{port}"
    deadline = time.monotonic() + 40
    try:
        while not answers(f"{address}/readyz"):
            assert process.poll() is None, (directory / "log").read_text()
            assert time.monotonic() < deadline
            time.sleep(0.1)
        yield process, address
    finally:
        process.kill()
        process.wait()


def answers(url: str) -> bool:
    try:
        return httpx.get(url, timeout=2).status_code == 200
    except httpx.TransportError:
        return False


async def remaining_ids(path: Path) -> set[str]:
    async with QueueService(Settings(type="native", path=path)) as service:
        return {message.id for message in await service.peek("orders", 100_000)}


@pytest.mark.slow
def test_a_shutdown_under_load_loses_no_accepted_order(tmp_path: Path) -> None:
    with running(tmp_path) as (process, address):
        page = httpx.get(f"{address}/queues/")
        assert "qkit" in page.text
        # The static files are served below the mount path.
        assert httpx.get(f"{address}/queues/static/app.js").status_code == 200
        accepted = asyncio.run(load(address, process))
        code = process.wait(60)
    log = (tmp_path / "log").read_text()
    # After a clean shutdown, uvicorn raises the signal again, so either exit code is correct.
    assert code in (0, -signal.SIGTERM), log
    assert "Application shutdown complete" in log
    assert "Traceback" not in log
    booked = re.findall(r"^booked (\w+)$", log, re.MULTILINE)
    assert len(booked) == len(set(booked)), "an order was handled twice"
    assert len(accepted) > 20
    remaining = asyncio.run(remaining_ids(tmp_path / "data"))
    assert accepted - set(booked) == remaining & accepted


async def load(address: str, process: subprocess.Popen[str]) -> set[str]:
    """Send orders from 8 clients, send SIGTERM meanwhile, and return the ids of accepted orders."""
    accepted: set[str] = set()

    async def customer(client: httpx.AsyncClient, first: int) -> None:
        for number in range(first, first + 10_000):
            try:
                answer = await client.post(f"{address}/orders", json={"id": number, "total": 9.5})
            except httpx.TransportError:
                return
            if answer.status_code == 202:
                accepted.add(answer.json()["message_id"])

    async with httpx.AsyncClient(timeout=30) as client, asyncio.TaskGroup() as tasks:
        tasks.create_task(watch(client, address))
        for number in range(8):
            tasks.create_task(customer(client, number * 10_000))
        while len(accepted) < 40:  # noqa: ASYNC110  # no event signals this
            await asyncio.sleep(0.01)
        process.send_signal(signal.SIGTERM)
    return accepted


async def watch(client: httpx.AsyncClient, address: str) -> None:
    """Read the dashboard's event stream until the server ends it."""
    try:
        async with client.stream("GET", f"{address}/queues/api/events") as stream:
            async for _ in stream.aiter_lines():
                pass
    except httpx.TransportError:
        pass
