"""Directory shared by several processes: roles, message exchange, and takeover from an owner."""

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
TAKEOVER_SECONDS = 3.0  # upper limit


@pytest.fixture
def directory() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


async def until(condition: Callable[[], object], within: float = 5.0) -> None:
    async with asyncio.timeout(within):
        while not condition():  # noqa: ASYNC110  # there is no event to wait for
            await asyncio.sleep(0.005)


def spec(**options: Any) -> SubscriptionSpec:
    return SubscriptionSpec(queue="q", group="g", consumer="c", prefetch=10, **options)


# In one process


async def test_the_first_process_is_the_owner_and_others_are_clients(directory: Path) -> None:
    first, second = share(directory), share(directory)
    assert isinstance(first, Admin)
    assert isinstance(first, DeadLetterSource)
    assert isinstance(first, DroppedLetterSource)
    assert first.capabilities.lease, "capabilities must be known before the start"
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
    assert not os.path.lexists(directory / "socket")  # noqa: ASYNC240  # a test may block


async def test_a_client_takes_over_with_its_declarations_when_the_owner_closes(
    directory: Path,
) -> None:
    first, second, third = share(directory), share(directory), share(directory)
    for backend in (first, second, third):
        await backend.start()
    letters: list[DeadLetter] = []
    dropped: list[DeadLetter] = []
    second.on_dead_letter(letters.append)
    second.on_dropped_letter(dropped.append)
    await second.declare(QueueSpec(name="d", max_depth=1, drop_oldest=True))
    await second.declare(QueueSpec(name="q", dead_letter="d", max_priority=3))
    await third.declare(QueueSpec(name="deleted"))
    await third.delete("deleted")
    async with second.subscribe(spec()) as subscription:
        receiving = asyncio.create_task(subscription.receive(1))
        await asyncio.sleep(0.01)
        await first.aclose()
        with pytest.raises(SubscriptionLost):
            await receiving
    queues = await third.queues()  # waits for an owner
    assert second.owner != third.owner
    if second.owner:
        assert queues == ["d", "q"]
    await until(lambda: second._role is not None)
    assert await second.queues() == ["d", "q"]
    for id in ("x", "y"):
        await third.publish("q", [Envelope(id, b"", expires_at=time.time() + 0.02)])
    await until(lambda: len(letters) == 2 and dropped)
    assert [letter.message_id for letter in dropped] == ["x"]
    await third.aclose()
    await second.aclose()


async def test_calls_wait_for_an_owner_and_then_raise_backend_unavailable(directory: Path) -> None:
    first, second = share(directory), share(directory, call_timeout=0.2)
    with pytest.raises(BackendUnavailable, match="start it first"):
        await second.ping()
    await first.start()
    await second.start()
    assert first._role is not None
    assert first._role.server is not None
    await first._role.server.aclose()  # the owner keeps the lock but serves no clients
    await until(lambda: second._role is None)
    began = time.monotonic()
    with pytest.raises(BackendUnavailable, match="could not reach the owner"):
        await second.publish("q", [Envelope("a", b"")])
    assert 0.15 < time.monotonic() - began < 10
    await first._role.server.start()
    await second.ping()
    await second.aclose()
    await first.aclose()


async def test_the_start_fails_if_the_owner_does_not_respond(directory: Path) -> None:
    engine = await Engine.open(directory)
    backend = share(directory, start_timeout=0.2)
    with pytest.raises(BackendUnavailable, match=r"did not respond within 0\.2 s"):
        await backend.start()
    await engine.aclose()
    await backend.start()
    assert backend.owner
    await backend.aclose()


async def test_a_failed_start_releases_the_directory(
    directory: Path,
) -> None:
    (directory / "socket").symlink_to("elsewhere")
    backend = share(directory)
    with pytest.raises(ConfigError, match="symbolic link"):
        await backend.start()
    await (await Engine.open(directory)).aclose()  # the lock is free

    async def own() -> tuple[NativeBackend, Engine]:
        raise OSError("disk failure")

    with pytest.raises(OSError, match="disk failure"):
        await SharedDirectoryBackend(directory, own, locked=LogLocked).start()


async def test_closing_a_backend_while_it_opens_releases_the_directory(directory: Path) -> None:
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


async def test_an_error_during_a_takeover_is_logged_and_retried(
    directory: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("qkit.backends.native.shared_directory.RETRY_AFTER_ERROR_SECONDS", 0.01)
    errors = [OSError("no space"), OSError("no space")]

    async def own() -> tuple[NativeBackend, Engine]:
        engine = await Engine.open(directory)
        if errors:
            await engine.aclose()
            raise errors.pop()
        return NativeBackend(engine=engine), engine

    first = share(directory)
    await first.start()
    second = SharedDirectoryBackend(directory, own, locked=LogLocked)
    await second.start()
    await first.aclose()
    await until(lambda: second.owner)
    assert not errors
    assert "could not open" in caplog.text
    await second.aclose()


async def test_a_takeover_keeps_later_declarations_of_other_processes(directory: Path) -> None:
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


# In separate processes


class Process:
    """Process that runs ``tests.support.sharer``, and its output lines with their times."""

    def __init__(self, directory: Path, part: str, deadline: float = 30.0) -> None:
        self.output: list[tuple[str, float]] = []
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.sharer", str(directory), part, str(deadline)],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.output.append((line.strip(), time.monotonic()))

    def lines(self, word: str) -> list[str]:
        return [line for line, _ in self.output if line.startswith(word)]

    def wait(self, word: str, count: int = 1, within: float = 60.0) -> float:
        """Wait until ``count`` lines start with ``word``, and return the time of the last one."""
        deadline = time.monotonic() + within
        while time.monotonic() < deadline:
            found = [at for line, at in self.output if line.startswith(word)]
            if len(found) >= count:
                return found[count - 1]
            time.sleep(0.005)
        pytest.fail(f"fewer than {count} {word!r} lines in {within:g} s; last: {self.output[-5:]}")

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
        self._reader.join(60)
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
    """Wait until the sender has exited and the consumer has all of its confirmed messages."""
    sender.process.wait()
    sent = set(numbers(sender.lines("sent")))
    deadline = time.monotonic() + 60
    while missing := sent - set(numbers(consumer.lines("got"))):
        assert time.monotonic() < deadline, f"confirmed but lost: {sorted(missing)}"
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
    assert len(got) == len(set(got)), "a message was delivered twice"


@pytest.mark.slow
def test_a_client_takes_over_from_a_killed_owner(
    run: Callable[..., Process],
) -> None:
    owner = run("idle")
    owner.wait("owner")
    sender, consumer = run("send"), run("consume")
    sender.wait("sent", 20)
    consumer.wait("got", 20)
    killed = owner.kill()
    deadline = killed + TAKEOVER_SECONDS
    while not (sender.lines("owner") or consumer.lines("owner")):
        assert time.monotonic() < deadline, "no process took over in time"
        time.sleep(0.005)
    new = sender if sender.lines("owner") else consumer
    seconds = new.wait("owner") - killed
    print(f"taken over in {seconds * 1000:.0f} ms")
    assert seconds < TAKEOVER_SECONDS
    sender.wait("sent", len(sender.lines("sent")) + 50)
    assert not sender.lines("refused"), "a send failed instead of waiting for an owner"
    sender.kill()  # if the sender is the owner now, the consumer takes over
    wait_for_all(sender, consumer)


@pytest.mark.slow
def test_the_message_of_a_killed_client_is_delivered_to_another_client(
    run: Callable[..., Process],
) -> None:
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
def test_a_handler_that_blocks_the_loop_for_several_leases_runs_once(
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
    rival = run("consume", 0.4)  # would get the message if the lease expired
    assert blocked.wait("end") - blocked.wait("begin") > 1.2
    number = numbers(blocked.lines("end"))[0]
    time.sleep(0.5)
    assert number not in numbers(rival.lines("got"))
    assert numbers(blocked.lines("begin")).count(number) == 1
