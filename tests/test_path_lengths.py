"""Short paths: how many functions of qkit one message enters on the plain path.

The plain path is in memory, an async handler of the body alone, tracing off. Counted are the
functions defined in ``qkit`` that are entered; a coroutine that is resumed does not count again.
"""

from __future__ import annotations

import asyncio
import dis
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import pytest

import qkit
from qkit import QueueService, Settings, consume

PACKAGE = str(Path(qkit.__file__).parent)
MESSAGES = 100
RESUME = dis.opmap["RESUME"]

MAX_SEND = 12  # from QueueService.send to Backend.publish, which does not count
MAX_RECEIVE = 16  # from a receive that returned to the ack
MAX_WHOLE = 80  # from the send until the worker waits for the next message


class Recorder:
    """Records which functions of qkit are entered in this thread, in order."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def __call__(self, frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if event != "call" or not code.co_filename.startswith(PACKAGE):
            return
        at = code.co_code[frame.f_lasti : frame.f_lasti + 2]
        if at[0] == RESUME and at[1] % 4:
            return  # a coroutine or generator goes on
        self.calls.append(code.co_qualname)

    def between(self, first: str, last: str) -> int:
        """Count from the call of ``first`` to that of ``last``, which does not count itself."""
        start = self.calls.index(first)
        return self.calls.index(last, start) - start


async def _record() -> list[Recorder]:
    """Send messages one by one to an idle consumer; one recorder for each."""
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


@pytest.fixture(scope="module")
def recorders() -> list[Recorder]:
    return asyncio.run(_record())


def _median(recorders: list[Recorder], count: Callable[[Recorder], int]) -> float:
    return statistics.median(count(recorder) for recorder in recorders)


def test_a_send_reaches_the_backend_in_few_calls(recorders: list[Recorder]) -> None:
    first, last = "QueueService.send", "NativeBackend.publish"
    found = _median(recorders, lambda recorder: recorder.between(first, last))
    assert found <= MAX_SEND, recorders[-1].calls


def test_a_delivery_is_acknowledged_in_few_calls(recorders: list[Recorder]) -> None:
    first, last = "DeliveryBuffer.add", "NativeSubscription.ack"
    found = _median(recorders, lambda recorder: recorder.between(first, last))
    assert found <= MAX_RECEIVE, recorders[-1].calls


def test_a_whole_message_takes_few_calls(recorders: list[Recorder]) -> None:
    found = _median(recorders, lambda recorder: len(recorder.calls))
    assert found <= MAX_WHOLE, recorders[-1].calls
