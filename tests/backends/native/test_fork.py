"""Use of an engine or a client in a forked child process."""

from __future__ import annotations

import asyncio
import os
import warnings
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest

from qkit.backend import QueueSpec
from qkit.backends.native.backend import NativeBackend
from qkit.backends.native.socket.client.backend import SocketBackend
from qkit.backends.native.socket.server.server import SocketServer
from qkit.errors import LifecycleError
from qkit.message import Envelope
from qkit.native import Engine


def in_child(*calls: Coroutine[Any, Any, object]) -> list[str]:
    """Run each coroutine in one forked child, in a new loop; return the names of their errors."""
    reader, writer = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # the fork of a process with threads
        pid = os.fork()
    if pid == 0:
        found = []
        for call in calls:
            try:
                loop = asyncio.new_event_loop()
                loop.run_until_complete(asyncio.wait_for(call, 20))
                found.append("none")
            except BaseException as error:
                found.append(type(error).__name__)
        os.write(writer, " ".join(found).encode())
        os._exit(0)
    os.close(writer)
    for call in calls:
        call.close()
    os.waitpid(pid, 0)
    with os.fdopen(reader) as answer:
        return answer.read().split()


@pytest.mark.parametrize("durable", [False, True])
async def test_an_engine_raises_lifecycle_error_at_once(tmp_path: Path, durable: bool) -> None:
    engine = await Engine.open(tmp_path) if durable else Engine()
    async with engine:
        backend = NativeBackend(engine=engine)
        await backend.declare(QueueSpec(name="q"))
        found = in_child(
            engine.publish("q", b""),
            engine.consume("q"),
            engine.stats("q"),
            backend.publish("q", [Envelope("1", b"")]),
            backend.ping(),
            engine.aclose(),
        )
        assert found == ["LifecycleError"] * 5 + ["none"]
        await engine.publish("q", b"still open")
        assert (await engine.stats("q")).depth == 1
    with pytest.raises(LifecycleError):
        await engine.publish("q", b"")


async def test_a_client_raises_lifecycle_error_at_once(tmp_path: Path) -> None:
    async with Engine() as engine:
        server = SocketServer(NativeBackend(engine=engine), engine, tmp_path / "socket")
        await server.start()
        client = SocketBackend(tmp_path / "socket")
        await client.start()
        await client.declare(QueueSpec(name="q"))
        found = in_child(
            client.publish("q", [Envelope("1", b"")]),
            client.ping(),
            client.stats("q"),
            client.aclose(),
        )
        assert found == ["LifecycleError"] * 3 + ["none"]
        await client.publish("q", [Envelope("1", b"")])
        assert (await client.stats("q")).depth == 1
        await client.aclose()
        await server.aclose()


async def test_an_engine_that_was_not_open_at_the_fork_can_be_opened_in_the_child() -> None:
    engine = Engine()

    async def use() -> None:
        async with engine:
            await engine.create("q")
            await engine.publish("q", b"")

    assert in_child(use()) == ["none"]
