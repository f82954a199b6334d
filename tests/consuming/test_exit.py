"""Handlers that end the process: the attempt is counted before the error is raised."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from qkit import consume
from qkit.backend import Support
from qkit.service.runtime import ServiceRuntime
from qkit.testing.clock import VirtualClock
from tests.support.backends import ScriptedBackend, can
from tests.support.services import make_service, until


@pytest.fixture
def exits(monkeypatch: pytest.MonkeyPatch) -> list[BaseException]:
    """Errors that would end the process, in place of raising them."""
    found: list[BaseException] = []
    monkeypatch.setattr(ServiceRuntime, "_exit", lambda _, error: found.append(error))
    return found


async def in_task(body: int) -> None:
    sys.exit(3)


async def in_ordered_task(body: int) -> None:
    sys.exit(3)


def in_thread(body: int) -> None:
    sys.exit(3)


async def in_batch(bodies: list[int]) -> None:
    raise KeyboardInterrupt


HANDLERS: dict[str, Callable[[Callable[..., object]], object]] = {
    "task": lambda _: consume("orders")(in_task),
    "thread": lambda _: consume("orders")(in_thread),
    "batch": lambda _: consume("orders", batch_size=2, batch_wait=0.1)(in_batch),
    "ordered": lambda _: consume("orders", ordered=True)(in_ordered_task),
}


@pytest.mark.parametrize("shape", HANDLERS)
async def test_a_handler_that_exits_uses_an_attempt_and_no_other_handler_starts(
    clock: VirtualClock, exits: list[BaseException], shape: str
) -> None:
    backend = ScriptedBackend()
    handler = HANDLERS[shape](in_task)
    async with make_service(handler, clock=clock, backend=backend, prefetch=5) as service:
        sent = await service.send("orders", 1, key="a")
        await clock.advance(1)
        await until(lambda: exits)
        await service.send("orders", 2, key="a")
        await clock.advance(10)
    assert isinstance(exits[0], KeyboardInterrupt if shape == "batch" else SystemExit)
    assert len(exits) == 1
    delay = 0.0 if shape == "ordered" else 1.0
    assert [call for call in backend.calls if call[0] in ("ack", "release")] == [
        ("release", sent.message_id, delay, True)
    ]


@pytest.mark.parametrize("reason", ["last attempt", "no redelivery"])
async def test_the_message_of_a_handler_that_exits_is_dead_lettered_if_it_cannot_be_retried(
    clock: VirtualClock, exits: list[BaseException], reason: str
) -> None:
    redelivery = Support.UNSUPPORTED if reason == "no redelivery" else Support.NATIVE
    backend = ScriptedBackend(can(redelivery=redelivery))
    retry = {"max_attempts": 1 if reason == "last attempt" else 3}
    handler = consume("orders")(in_task)
    async with make_service(handler, clock=clock, backend=backend, retry=retry) as service:
        sent = await service.send("orders", 1)
        await clock.advance(1)
        assert len(exits) == 1
    operations = [call[0] for call in backend.calls if sent.message_id in call]
    assert operations == ["publish", "publish", "ack"], "the second is the dead letter"


PROGRAM = """
import asyncio, sys
from qkit import Message, QueueService, Settings, consume

@consume("orders", concurrency=2)
async def place(order: int, message: Message) -> None:
    print("begin", order, message.attempt, flush=True)
    if order == 1:
        await asyncio.sleep(0.3)
        sys.exit(7)
    await asyncio.sleep(0.6)
    print("end", order, flush=True)

service = QueueService(Settings(type="native", path=sys.argv[1]))
service.register(place)
service.on("shutdown", lambda event: print("shutdown", flush=True))

async def main():
    async with service:
        if sys.argv[2:]:
            await service.send("orders", 1)
            await service.send("orders", 2)
        await service.run()

asyncio.run(main())
"""


def test_the_process_ends_with_the_code_of_the_handler_after_a_shutdown(tmp_path: Path) -> None:
    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", PROGRAM, str(tmp_path), *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)

    done = run("send")
    assert done.returncode == 7, done.stderr
    assert done.stdout.split("\n")[-3:] == ["end 2", "shutdown", ""]
    again = run()
    assert again.returncode == 7, again.stderr
    assert again.stdout.startswith("begin 1 2\n")
