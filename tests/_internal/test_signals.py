"""Signals: the first drains, the second forces an exit. Most tests use separate processes."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from qkit import QueueService, Settings
from qkit._internal.signals import handle_signals
from tests.support.waiting import scaled

ROOT = Path(__file__).parents[2]


class Worker:
    """A process that runs ``tests.support.worker``, and its output."""

    def __init__(self, mode: str) -> None:
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115  # closed in end()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.worker", mode],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
        )
        assert self.process.stdout is not None
        self._output = self.process.stdout

    def lines_until(self, word: str, count: int = 1) -> list[str]:
        """Return the lines up to and including the ``count``-th that starts with ``word``."""
        found: list[str] = []
        for line in self._output:
            found.append(line.strip())
            count -= line.startswith(word)
            if count == 0:
                return found
        pytest.fail(f"the worker ended without printing {word!r}: {self.errors()}")

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def rest(self) -> tuple[list[str], float]:
        """Wait until the process ends; return the remaining lines and the seconds this took."""
        began = time.monotonic()
        lines = self._output.read().split("\n")
        self.process.wait()
        return lines, time.monotonic() - began

    def errors(self) -> str:
        self._errors.seek(0)
        return self._errors.read()

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        self._output.close()
        self._errors.close()


@contextmanager
def worker(mode: str) -> Iterator[Worker]:
    running = Worker(mode)
    try:
        yield running
    finally:
        running.end()


def values_of(lines: list[str], word: str) -> list[str]:
    return [line.removeprefix(f"{word} ") for line in lines if line.startswith(f"{word} ")]


def drain_under_load(mode: str, number: signal.Signals, seed: int) -> None:
    """Signal a busy worker; check that it ends in time and loses or repeats no message."""
    dice = random.Random(seed)
    print(f"{mode} {number.name} seed {seed}")
    with worker(mode) as running:
        lines = running.lines_until("end", dice.randrange(1, 200))
        time.sleep(dice.random() / 20)
        running.signal(number)
        rest, took = running.rest()
        code, errors = running.process.returncode, running.errors()
    lines += rest
    sent, begun, ended = (
        values_of(lines, "sent"),
        values_of(lines, "begin"),
        values_of(lines, "end"),
    )
    assert code == 0, errors
    assert errors == ""
    assert took < 20
    assert Counter(begun) == Counter(ended)
    assert max(Counter(ended).values()) == 1
    assert set(ended) <= set(sent)
    (left,) = values_of(lines, "left")
    assert len(sent) == len(ended) + int(left)


ROUNDS = [
    ("load:work", signal.SIGTERM),
    ("load:work_in_thread", signal.SIGTERM),
    ("load:work", signal.SIGINT),
]


@pytest.mark.proves("003-shutdown-1")
@pytest.mark.parametrize(("mode", "number"), ROUNDS)
def test_a_signal_under_load_drains(mode: str, number: signal.Signals) -> None:
    drain_under_load(mode, number, random.randrange(2**32))


@pytest.mark.torture
@pytest.mark.timeout(600)
def test_fifty_signals_under_load_all_drain() -> None:
    for index in range(50):
        mode, number = ROUNDS[index % len(ROUNDS)]
        drain_under_load(mode, number, random.randrange(2**32))


STUCK = {
    "one:stuck": 0,
    "one:stuck_in_thread": 0,
    "one:stuck_in_loop": -signal.SIGTERM,
    "one:stubborn": -signal.SIGTERM,
    "sync:stuck": 0,
    "sync:stuck_in_thread": 0,
    "sync:stuck_in_loop": -signal.SIGTERM,
}


@pytest.fixture(scope="module")
def blocked_workers() -> Iterator[dict[str, Worker]]:
    """Start all workers together, because starting is slow and they only wait for signals."""
    workers = {mode: Worker(mode) for mode in STUCK}
    yield workers
    for running in workers.values():
        running.end()


@pytest.mark.parametrize(("mode", "code"), STUCK.items())
def test_a_second_signal_ends_the_process_within_two_seconds(
    blocked_workers: dict[str, Worker], mode: str, code: int
) -> None:
    running = blocked_workers[mode]
    running.lines_until("begin")
    running.signal(signal.SIGTERM)
    with pytest.raises(subprocess.TimeoutExpired):  # the drain waits for the handler
        running.process.wait(0.3)
    running.signal(signal.SIGTERM)
    rest, took = running.rest()
    assert took <= scaled(2.0)
    assert running.process.returncode == code, running.errors()
    if code == 0:
        assert "abandoned 1" in rest
        assert any(line.startswith("ended") for line in rest)


def test_one_signal_ends_a_process_whose_handler_ignores_cancellation() -> None:
    with worker("short:stubborn") as running:
        running.lines_until("begin")
        running.signal(signal.SIGTERM)
        rest, took = running.rest()
        assert running.process.returncode == 0, running.errors()
        assert running.errors() == ""
    assert took <= scaled(10.0)
    assert "abandoned 1" in rest
    assert "ended" in rest


def test_a_sync_service_drains_after_the_first_signal() -> None:
    with worker("sync:work") as running:
        running.lines_until("begin")
        running.signal(signal.SIGTERM)
        rest, _ = running.rest()
        assert running.process.returncode == 0, running.errors()
    assert "abandoned 0" in rest
    assert "ended True" in rest  # the previous signal handler is restored


# -- in this process -------------------------------------------------------------------------


@pytest.fixture
def previous() -> Iterator[list[int]]:
    """Install signal handlers as an application would; restore the old ones afterwards."""
    caught: list[int] = []
    old = {
        number: signal.signal(number, lambda number, _: caught.append(number))
        for number in (signal.SIGTERM, signal.SIGINT)
    }
    yield caught
    for number, handler in old.items():
        signal.signal(number, handler)


async def test_handlers_are_restored_after_a_run(previous: list[int]) -> None:
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    service = QueueService(Settings(type="native"))
    running = asyncio.create_task(service.run())
    await asyncio.sleep(0)
    while signal.getsignal(signal.SIGTERM) == before[0]:  # noqa: ASYNC110  # no event to await
        await asyncio.sleep(0)
    os.kill(os.getpid(), signal.SIGTERM)
    await running
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before
    assert previous == []
    os.kill(os.getpid(), signal.SIGTERM)
    assert previous == [signal.SIGTERM]


async def test_the_first_and_second_signal_call_different_functions(
    previous: list[int],
) -> None:
    calls: list[str] = []
    with handle_signals(
        asyncio.get_running_loop(),
        lambda name: calls.append(f"first {name}"),
        lambda name: calls.append(f"second {name}"),
    ):
        os.kill(os.getpid(), signal.SIGINT)
        assert calls == []  # nothing runs inside the signal handler
        await asyncio.sleep(0)
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGINT)  # a third signal has no effect
        await asyncio.sleep(0)
        assert calls == ["first SIGINT", "second SIGTERM"]
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    os.kill(os.getpid(), signal.SIGTERM)
    assert previous == [signal.SIGTERM]


@pytest.mark.parametrize("in_time", [True, False])
async def test_after_the_second_signal_a_blocked_loop_has_a_grace_period(
    previous: list[int], monkeypatch: pytest.MonkeyPatch, in_time: bool
) -> None:
    killed: list[tuple[int, int]] = []
    real_kill = os.kill
    slept, go_on = threading.Event(), threading.Event()
    seconds: list[float] = []

    def sleep(grace: float) -> None:
        seconds.append(grace)
        slept.set()
        go_on.wait(60)

    done = threading.Event()

    def kill(pid: int, number: int) -> None:
        killed.append((pid, number))
        done.set()

    with handle_signals(asyncio.get_running_loop(), lambda _: None, lambda _: None):
        monkeypatch.setattr("qkit._internal.signals.time.sleep", sleep)
        real_kill(os.getpid(), signal.SIGTERM)
        real_kill(os.getpid(), signal.SIGTERM)
        assert slept.wait(60)
        monkeypatch.setattr("qkit._internal.signals.os.kill", kill)
        if not in_time:
            go_on.set()
            assert done.wait(60)
    go_on.set()
    assert seconds == [1.5]
    assert killed == ([] if in_time else [(os.getpid(), signal.SIGTERM)])


def test_a_signal_after_the_loop_closed_is_ignored(previous: list[int]) -> None:
    loop = asyncio.new_event_loop()
    loop.close()
    calls: list[str] = []
    with handle_signals(loop, calls.append, calls.append):
        os.kill(os.getpid(), signal.SIGTERM)
    assert calls == []


def test_a_handler_not_set_by_python_is_replaced_by_the_default(
    previous: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = signal.signal
    monkeypatch.setattr(
        "qkit._internal.signals.signal.signal",
        lambda number, handler: real(number, handler) and None,
    )
    loop = asyncio.new_event_loop()
    with handle_signals(loop, lambda _: None, lambda _: None):
        pass
    loop.close()
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_outside_the_main_thread_signal_handlers_are_unchanged(previous: list[int]) -> None:
    before = signal.getsignal(signal.SIGTERM)
    inside: list[object] = []
    loop = asyncio.new_event_loop()

    def run() -> None:
        with handle_signals(loop, lambda _: None, lambda _: None):
            inside.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    loop.close()
    assert inside == [before]
