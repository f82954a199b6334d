"""An idle worker keeps neither the last message nor its error alive."""

from __future__ import annotations

import asyncio
import gc
import weakref

import pytest

from qkit import RetrySettings, Unavailable, consume
from qkit._internal.logging import logger
from qkit.testing.clock import VirtualClock
from tests.support.services import make_service, until


class Failure(Exception):
    pass


class Local:
    """Object in a local variable of a handler."""


class FailingHandler:
    """A handler that fails, and weak references to its errors and its local variables."""

    def __init__(self, kind: type[Exception]) -> None:
        self.kind = kind
        self.calls = 0
        self.alive: list[weakref.ref[object]] = []

    def fail(self) -> None:
        local = Local()
        self.calls += 1
        error = self.kind("failed")
        self.alive += [weakref.ref(local), weakref.ref(error)]
        raise error

    def left(self) -> list[object]:
        gc.collect()
        return [ref() for ref in self.alive if ref() is not None]


RETRIES = {
    "final": RetrySettings(enabled=False),
    "release": RetrySettings(max_attempts=2),
    "inline": RetrySettings(max_attempts=2, mode="inline"),
}


@pytest.fixture(autouse=True)
def _no_log_records(monkeypatch: pytest.MonkeyPatch) -> None:
    """Disable the log, because pytest keeps its records, and these their exceptions."""
    monkeypatch.setattr(logger, "disabled", True)


@pytest.mark.parametrize("retry", RETRIES)
@pytest.mark.parametrize("shape", ["async", "thread", "batch", "timeout"])
async def test_an_idle_worker_keeps_no_error_alive(
    clock: VirtualClock, retry: str, shape: str
) -> None:
    failing = FailingHandler(Failure)

    async def handle(body: object) -> None:
        if shape == "timeout":
            local = Local()
            failing.alive.append(weakref.ref(local))
            failing.calls += 1
            await asyncio.sleep(60)
        failing.fail()

    def in_thread(body: object) -> None:
        failing.fail()

    async def batch(bodies: list[object]) -> None:
        failing.fail()

    options = {"retry": RETRIES[retry], "timeout": 5.0 if shape == "timeout" else None}
    handler = {"thread": in_thread, "batch": batch}.get(shape, handle)
    if shape == "batch":
        consumed = consume("orders", batch_size=2, batch_wait=1, **options)(handler)  # type: ignore[call-overload]
    else:
        consumed = consume("orders", **options)(handler)  # type: ignore[call-overload]
    async with make_service(consumed, clock=clock) as service:
        await service.send("orders", {"id": 1})
        await clock.advance(100)
        await until(lambda: failing.calls == (1 if retry == "final" else 2))
        await clock.advance(100)
        assert service.metrics().messages_failed == 1
        await until(lambda: not failing.left())  # a thread takes a moment to become idle


@pytest.mark.parametrize("ordered", [False, True])
async def test_a_worker_keeps_no_error_alive_while_a_dependency_is_unavailable(
    clock: VirtualClock, ordered: bool
) -> None:
    failing = FailingHandler(Unavailable)

    @consume("orders", ordered=ordered)
    async def handle(body: object) -> None:
        failing.fail()

    async with make_service(handle, clock=clock) as service:
        await service.send("orders", {"id": 1}, key="a")
        await clock.advance(0.5)
        assert failing.calls == 1
        assert failing.left() == []
