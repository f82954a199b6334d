"""Limits on the number of qkit function calls per message.

Measured with the native engine in memory, an async handler that takes only the body, and no
tracing. A durable publish includes the calls in the writer thread. Each call of a function defined
in ``qkit`` counts; resuming a coroutine does not.
"""

from __future__ import annotations

import asyncio
import dis
import statistics
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import pytest

import qkit
from qkit import QueueService, Settings, consume
from qkit._internal.clock import SystemClock
from qkit.backend import QueueSpec
from qkit.backends.native.factory import from_settings
from qkit.message import Envelope

PACKAGE = str(Path(qkit.__file__).parent)
MESSAGES = 100
RESUME = dis.opmap["RESUME"]

MAX_SEND = 12  # from QueueService.send to the backend (excluded)
MAX_RECEIVE = 16  # from the return of receive to the ack
MAX_WHOLE = 70  # from QueueService.send until the worker waits for the next message
MAX_DURABLE_PUBLISH = 32  # from Backend.publish until it returns, including the writer thread


class Recorder:
    """Profile function that records the calls of qkit functions, in order."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def __call__(self, frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if event != "call" or not code.co_filename.startswith(PACKAGE):
            return
        at = code.co_code[frame.f_lasti : frame.f_lasti + 2]
        if at[0] == RESUME and at[1] % 4:
            return  # a coroutine or generator is resumed
        self.calls.append(code.co_qualname)

    def between(self, first: str, last: str) -> int:
        """Count the calls from ``first`` to ``last``, excluding ``last``."""
        start = self.calls.index(first)
        return self.calls.index(last, start) - start


async def _record() -> list[Recorder]:
    """Send messages one by one to an idle consumer and return a recorder for each."""
    handled = asyncio.Event()

    @consume("orders")
    async def handle(body: int) -> None:
        handled.set()

    service = QueueService(Settings(type="native"))
    service.register(handle)
    recorders: list[Recorder] = []
    async with service:
        for number in range(MESSAGES + 10):
            handled.clear()
            recorder = Recorder()
            sys.setprofile(recorder)
            try:
                await service.send("orders", number)
                await handled.wait()
                for _ in range(5):
                    await asyncio.sleep(0)  # until the worker waits again
            finally:
                sys.setprofile(None)
            recorders.append(recorder)
    return recorders[10:]


async def _record_durable(path: Path) -> list[Recorder]:
    """Publish durable messages one by one and return a recorder for each."""
    recorders: list[Recorder] = []
    recorder = Recorder()
    backend = from_settings(Settings(type="native", path=path), SystemClock())
    threading.setprofile(lambda frame, event, arg: recorder(frame, event, arg))
    try:
        await backend.start()  # starts the writer thread
    finally:
        threading.setprofile(None)
    try:
        await backend.declare(QueueSpec(name="orders"))
        for number in range(MESSAGES + 10):
            envelope = Envelope(f"{number}", b"{}")
            await asyncio.sleep(0.002)  # until the thread waits for the next message
            recorder = Recorder()
            sys.setprofile(recorder)
            try:
                await backend.publish("orders", [envelope])
            finally:
                sys.setprofile(None)
            await asyncio.sleep(0.002)
            recorders.append(recorder)
    finally:
        await backend.aclose()
    return recorders[10:]


@pytest.fixture(scope="module")
def recorders() -> list[Recorder]:
    return asyncio.run(_record())


def _median(recorders: list[Recorder], count: Callable[[Recorder], int]) -> float:
    return statistics.median(count(recorder) for recorder in recorders)


def test_a_send_reaches_the_backend_in_few_calls(recorders: list[Recorder]) -> None:
    first, last = "QueueService.send", "NativeBackend.publish_now"
    found = _median(recorders, lambda recorder: recorder.between(first, last))
    assert found <= MAX_SEND, recorders[-1].calls


def test_a_delivery_is_acknowledged_in_few_calls(recorders: list[Recorder]) -> None:
    first, last = "DeliveryBuffer.add", "NativeSubscription.ack"
    found = _median(recorders, lambda recorder: recorder.between(first, last))
    assert found <= MAX_RECEIVE, recorders[-1].calls


def test_sending_and_handling_a_message_takes_few_calls(recorders: list[Recorder]) -> None:
    found = _median(recorders, lambda recorder: len(recorder.calls))
    assert found <= MAX_WHOLE, recorders[-1].calls


def test_a_durable_publish_takes_few_calls_in_both_threads(tmp_path: Path) -> None:
    recorders = asyncio.run(_record_durable(tmp_path))
    found = _median(recorders, lambda recorder: len(recorder.calls))
    assert "Disk.sync" in recorders[-1].calls, "the calls in the writer thread were not recorded"
    assert found <= MAX_DURABLE_PUBLISH, recorders[-1].calls
