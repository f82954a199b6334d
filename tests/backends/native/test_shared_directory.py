"""A directory shared between processes: roles, exchange, and what happens when the owner dies."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from qkit.backend import Admin, DeadLetterSource, DroppedLetterSource, QueueSpec, SubscriptionSpec
from qkit.backends.native.backend import NativeBackend
from qkit.backends.native.shared_directory import SharedDirectoryBackend
from qkit.errors import BackendUnavailable, ConfigError, LogLocked, SubscriptionLost
from qkit.message import DeadLetter, Envelope
from qkit.native import Engine
from tests.support.sharer import share

ROOT = Path(__file__).parents[3]
TAKEOVER = 3.0  # seconds, at most


@pytest.fixture
def directory() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


async def until(condition: Callable[[], object], within: float = 5.0) -> None:
    async with asyncio.timeout(within):
        while not condition():  # noqa: ASYNC110  # what is waited for tells nobody
            await asyncio.sleep(0.005)


def spec(**options: Any) -> SubscriptionSpec:
    return SubscriptionSpec(queue="q", group="g", consumer="c", prefetch=10, **options)


# In one process


async def test_the_first_owns_and_the_others_call(directory: Path) -> None:
    first, second = share(directory), share(directory)
    assert isinstance(first, Admin)
    assert isinstance(first, DeadLetterSource)
    assert isinstance(first, DroppedLetterSource)
    assert first.capabilities.lease, "known before the start"
    await first.start()
    await first.start()
    await second.start()
    assert (first.owner, second.owner) == (True, False)
    await second.declare(QueueSpec(name="q"))
    await second.publish("q", [Envelope("a", b"1")])
    await first.publish("q", [Envelope("b", b"2")])
    assert await first.queues() == await second.queues() == ["q"]
    assert [item.id for item in await second.peek("q", 5)] == ["a", "b"]
    async with first.subscribe(spec()) as one, second.subscribe(spec()) as two:
        (a,) = await one.receive(1)
        (b,) = await two.receive(1)
        await one.ack(a)
        await two.release(b, 0.0)
    assert await second.remove("q", ["b"]) == 1
    assert (await first.stats("q")).depth == 0
    assert await second.purge("q") == 0
    await second.ping()
    await second.delete("q")
    await second.aclose()
    await second.aclose()
    await first.aclose()
    assert not os.path.lexists(directory / "socket")  # noqa: ASYNC240  # a test may wait for it


async def test_when_the_owner_closes_a_client_takes_over_with_all_it_declared(
    directory: Path,
) -> None:
    first, second, third = share(directory), share(directory), share(directory)
    for backend in (first, second, third):
        await backend.start()
    died: list[DeadLetter] = []
    dropped: list[DeadLetter] = []
    second.on_dead_letter(died.append)
    second.on_dropped_letter(dropped.append)
    await second.declare(QueueSpec(name="d", max_depth=1, drop_oldest=True))
    await second.declare(QueueSpec(name="q", dead_letter="d", max_priority=3))
    await third.declare(QueueSpec(name="gone"))
    await third.delete("gone")
    async with second.subscribe(spec()) as subscription:
        parked = asyncio.create_task(subscription.receive(1))
        await asyncio.sleep(0.01)
        await first.aclose()
        with pytest.raises(SubscriptionLost):
            await parked
    queues = await third.queues()  # it waits until there is an owner
    assert second.owner != third.owner
    if second.owner:
        assert queues == ["d", "q"]
    await until(lambda: second._role is not None)
    assert await second.queues() == ["d", "q"]
    for id in ("x", "y"):
        await third.publish("q", [Envelope(id, b"", expires_at=time.time() + 0.02)])
    await until(lambda: len(died) == 2 and dropped)
    assert [letter.message_id for letter in dropped] == ["x"]
    await third.aclose()
    await second.aclose()


async def test_calls_wait_a_little_for_an_owner_and_then_say_so(directory: Path) -> None:
    first, second = share(directory), share(directory, patience=0.2)
    with pytest.raises(BackendUnavailable, match="start it first"):
        await second.ping()
    await first.start()
    await second.start()
    assert first._role is not None
    assert first._role.server is not None
    await first._role.server.aclose()  # it keeps the lock and serves nobody
    await until(lambda: second._role is None)
    began = time.monotonic()
    with pytest.raises(BackendUnavailable, match="no owner"):
        await second.publish("q", [Envelope("a", b"")])
    assert 0.15 < time.monotonic() - began < 10
    await first._role.server.start()
    await second.ping()
    await second.aclose()
    await first.aclose()


async def test_an_owner_that_never_answers_fails_the_start(directory: Path) -> None:
    engine = await Engine.open(directory)
    backend = share(directory, start_timeout=0.2)
    with pytest.raises(BackendUnavailable, match=r"did not answer within 0\.2 s"):
        await backend.start()
    await engine.aclose()
    await backend.start()
    assert backend.owner
    await backend.aclose()


async def test_what_cannot_be_opened_fails_the_start_and_lets_the_directory_go(
    directory: Path,
) -> None:
    (directory / "socket").symlink_to("elsewhere")
    backend = share(directory)
    with pytest.raises(ConfigError, match="symbolic link"):
        await backend.start()
    await (await Engine.open(directory)).aclose()  # the lock is free

    async def broken() -> tuple[NativeBackend, Engine]:
        raise OSError("the disk is on fire")

    with pytest.raises(OSError, match="fire"):
        await SharedDirectoryBackend(directory, broken, locked=LogLocked).start()


async def test_closing_while_it_opens_lets_the_directory_go(directory: Path) -> None:
    opening, opened = asyncio.Event(), asyncio.Event()

    async def own() -> tuple[NativeBackend, Engine]:
        engine = await Engine.open(directory)
        opening.set()
        await opened.wait()
        return NativeBackend(engine=engine), engine

    first = share(directory)
    await first.start()
    second = SharedDirectoryBackend(directory, own, locked=LogLocked)
    await second.start()
    await first.aclose()
    await asyncio.wait_for(opening.wait(), 60)
    closing = asyncio.create_task(second.aclose())
    await asyncio.sleep(0.01)
    opened.set()
    await closing
    await (await Engine.open(directory)).aclose()


async def test_a_fault_while_taking_over_is_logged_and_tried_again(
    directory: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("qkit.backends.native.shared_directory.RETRY_AFTER_ERROR_SECONDS", 0.01)
    faults = [OSError("no space"), OSError("no space")]

    async def own() -> tuple[NativeBackend, Engine]:
        engine = await Engine.open(directory)
        if faults:
            await engine.aclose()
            raise faults.pop()
        return NativeBackend(engine=engine), engine

    first = share(directory)
    await first.start()
    second = SharedDirectoryBackend(directory, own, locked=LogLocked)
    await second.start()
    await first.aclose()
    await until(lambda: second.owner)
    assert not faults
    assert "cannot be opened" in caplog.text
    await second.aclose()


async def test_a_takeover_leaves_what_another_process_declared_last(directory: Path) -> None:
    first, second, third = share(directory), share(directory), share(directory)
    for backend in (first, second, third):
        await backend.start()
    await second.declare(QueueSpec(name="q", max_priority=3))
    await third.delete("q")
    await third.declare(QueueSpec(name="q", max_priority=5))
    await first.aclose()
    await until(lambda: second._role is not None and third._role is not None)
    await second.ping()
    await third.ping()
    await second.publish("q", [Envelope("a", b"", priority=5)])
    await third.aclose()
    await second.aclose()


# In processes of their own


class Process:
    """A process of ``tests.support.sharer``, and what it said when."""

    def __init__(self, directory: Path, part: str, deadline: float = 30.0) -> None:
        self.said: list[tuple[str, float]] = []
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.sharer", str(directory), part, str(deadline)],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self._listening = threading.Thread(target=self._listen, daemon=True)
        self._listening.start()

    def _listen(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.said.append((line.strip(), time.monotonic()))

    def lines(self, word: str) -> list[str]:
        return [line for line, _ in self.said if line.startswith(word)]

    def wait(self, word: str, count: int = 1, within: float = 60.0) -> float:
        """When it said so for the ``count``th time."""
        deadline = time.monotonic() + within
        while time.monotonic() < deadline:
            found = [at for line, at in self.said if line.startswith(word)]
            if len(found) >= count:
                return found[count - 1]
            time.sleep(0.005)
        pytest.fail(f"{word!r} not {count} times within {within} s: {self.said[-5:]}")

    def kill(self) -> float:
        self.process.kill()
        return time.monotonic()

    def end(self) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self._listening.join(60)
        self.process.stdout.close()


@pytest.fixture
def run(directory: Path) -> Iterator[Callable[..., Process]]:
    processes: list[Process] = []

    def start(part: str, deadline: float = 30.0) -> Process:
        processes.append(Process(directory, part, deadline))
        return processes[-1]

    yield start
    for process in reversed(processes):
        process.end()


def numbers(lines: list[str]) -> list[int]:
    return [int(line.split()[1]) for line in lines]


def wait_for_all(sender: Process, consumer: Process) -> None:
    """Everything that was accepted arrives, once the sender is dead."""
    sender.process.wait()
    sent = set(numbers(sender.lines("sent")))
    deadline = time.monotonic() + 60
    while missing := sent - set(numbers(consumer.lines("got"))):
        assert time.monotonic() < deadline, f"accepted and lost: {sorted(missing)}"
        time.sleep(0.01)


@pytest.mark.slow
def test_processes_exchange_messages_through_the_owner(run: Callable[..., Process]) -> None:
    owner = run("idle")
    owner.wait("owner")
    consumer = run("consume")
    consumer.wait("client")
    sender = run("send")
    sender.wait("client")
    sender.wait("sent", 100)
    consumer.wait("got", 100)
    sender.kill()
    wait_for_all(sender, consumer)
    got = numbers(consumer.lines("got"))
    assert len(got) == len(set(got)), "each once"


@pytest.mark.slow
def test_a_client_takes_over_from_a_killed_owner_and_everyone_goes_on(
    run: Callable[..., Process],
) -> None:
    owner = run("idle")
    owner.wait("owner")
    sender, consumer = run("send"), run("consume")
    sender.wait("sent", 20)
    consumer.wait("got", 20)
    killed = owner.kill()
    deadline = killed + TAKEOVER
    while not (sender.lines("owner") or consumer.lines("owner")):
        assert time.monotonic() < deadline, "nobody took over in time"
        time.sleep(0.005)
    new = sender if sender.lines("owner") else consumer
    seconds = new.wait("owner") - killed
    print(f"taken over in {seconds * 1000:.0f} ms")
    assert seconds < TAKEOVER
    sender.wait("sent", len(sender.lines("sent")) + 50)
    assert not sender.lines("refused"), "its sends were retried until there was an owner"
    sender.kill()  # it may be the owner now, and then the consumer takes over
    wait_for_all(sender, consumer)


@pytest.mark.slow
def test_the_message_of_a_killed_client_goes_to_another(run: Callable[..., Process]) -> None:
    owner = run("idle", 1.0)
    owner.wait("owner")
    victim = run("keep", 1.0)
    victim.wait("client")
    sender = run("send", 1.0)
    victim.wait("begin")
    held = numbers(victim.lines("begin"))[0]
    sender.kill()
    survivor = run("consume", 1.0)
    survivor.wait("client")
    victim.kill()
    survivor.wait(f"got {held}", within=5)


@pytest.mark.slow
def test_a_handler_that_blocks_its_process_for_several_leases_runs_once(
    run: Callable[..., Process],
) -> None:
    owner = run("idle", 0.4)
    owner.wait("owner")
    blocked = run("block", 0.4)
    blocked.wait("client")
    sender = run("send", 0.4)
    sender.wait("sent", 1)
    sender.kill()
    blocked.wait("begin")
    rival = run("consume", 0.4)  # it would take whatever comes back
    assert blocked.wait("end") - blocked.wait("begin") > 1.2
    number = numbers(blocked.lines("end"))[0]
    time.sleep(0.5)
    assert number not in numbers(rival.lines("got"))
    assert numbers(blocked.lines("begin")).count(number) == 1
