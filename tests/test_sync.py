"""``SyncQueueService``: the blocking interface for programs without an event loop."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from qkit import (
    BackendUnavailable,
    Channel,
    ConfigError,
    LifecycleError,
    Message,
    QueueError,
    QueueNotFound,
    Settings,
    SyncQueueService,
    consume,
)
from tests.support.faulty import BLACK_HOLE, FaultyBackend


class RecordingHandlers:
    """Synchronous and asynchronous handlers that record their calls."""

    def __init__(self) -> None:
        self.done: list[tuple[int, str]] = []
        self.failing = False
        self.reached = threading.Condition()

    def _record(self, body: int) -> None:
        with self.reached:
            self.done.append((body, threading.current_thread().name))
            self.reached.notify_all()
        if self.failing:
            raise ValueError("no")

    def wait_for(self, count: int) -> None:
        with self.reached:
            assert self.reached.wait_for(lambda: len(self.done) >= count, timeout=60)

    @consume("orders")
    async def order(self, body: int) -> None:
        self._record(body)

    @consume("audit")
    def audit(self, body: int) -> None:
        self._record(body)


def make(*handlers: object, backend: FaultyBackend | None = None) -> SyncQueueService:
    service = SyncQueueService(
        Settings(type="native", retry={"enabled": False}, send_timeout=5), backend=backend
    )
    for handler in handlers:
        service.register(handler)
    return service


def loop_threads() -> int:
    return sum(thread.name == "qkit-loop" for thread in threading.enumerate())


def eventually(condition: Callable[[], bool]) -> None:
    """Wait until a condition that another thread changes is true; fail after 10 seconds."""
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline, "the condition is still false after 10 seconds"
        time.sleep(0.001)


def test_handlers_of_both_kinds_run() -> None:
    handlers = RecordingHandlers()
    with make(handlers) as service:
        service.send("orders", 1)
        service.send("audit", 2)
        handlers.wait_for(2)
        assert {handler.channel for handler in service.handlers} == {"orders", "audit"}
    assert sorted(body for body, _ in handlers.done) == [1, 2]
    threads = dict(handlers.done)
    assert threads[1] == "qkit-loop"
    assert threads[2].startswith("qkit-handler")
    assert loop_threads() == 0


def test_the_methods_of_the_service_are_available() -> None:
    orders: Channel[int] = Channel("numbers", int)
    received: list[object] = []
    service = make()
    service.declare(orders)
    service.declare(Channel("prices", broadcast=True))
    service.on("shutdown", received.append)
    assert service.connection_state == "disconnected"
    with service:
        assert service.ready
        assert service.connection_state == "connected"
        assert service.settings.type == "native"
        assert service.capabilities.priority
        assert service.send(orders, 1, priority=9).position == 0
        assert [sent.position for sent in service.send_many(orders, [2, 3])] == [1, 2]
        service.publish("prices", 1.5)
        assert "numbers" in service.queues()
        assert service.stats("numbers").depth == 3
        assert [message.body for message in service.peek("numbers", 2)] == [b"1", b"2"]
        assert isinstance(service.peek("numbers")[0], Message)
        assert service.metrics().messages_sent == 4
        assert service.health_check().status == "healthy"
        assert service.purge("numbers") == 3
        service.delete("numbers")
        with pytest.raises(QueueNotFound):
            service.stats("numbers")
    assert not service.ready
    assert len(received) == 1


def test_dead_letters() -> None:
    handlers = RecordingHandlers()
    handlers.failing = True
    with make(handlers) as service:
        sent = [service.send("orders", number) for number in range(3)]
        handlers.wait_for(3)
        letters = service.dead_letters("orders")
        eventually(lambda: len(letters.list()) == 3)
        assert letters.list(1, reason="MaxRetriesExceeded", error="ValueError")[0].body == b"0"
        assert letters.list(ids=[sent[1].message_id])[0].body == b"1"
        handlers.failing = False
        assert letters.replay(sent[0].message_id) == 1
        assert letters.replay([sent[1].message_id], error="no") == 1
        handlers.wait_for(5)
        assert letters.purge() == 1
        assert letters.list() == []


def test_pause_and_resume() -> None:
    handlers = RecordingHandlers()
    with make(handlers) as service:
        service.pause("orders")
        service.send("orders", 1)
        assert service.health_check().consumers[0].state == "paused"
        assert handlers.done == []
        service.resume("orders")
        handlers.wait_for(1)


def test_many_threads_may_call_the_service() -> None:
    handlers = RecordingHandlers()
    failures: list[BaseException] = []
    with make(handlers) as service:

        def send(first: int) -> None:
            try:
                for number in range(50):
                    service.send("orders", first + number)
                    service.metrics()
                    service.health_check()
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=send, args=(1_000 * n,)) for n in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        handlers.wait_for(300)
    assert failures == []
    assert len({body for body, _ in handlers.done}) == 300


def test_concurrent_starts_start_the_service_once() -> None:
    backend = FaultyBackend()
    service = make(backend=backend)
    together = threading.Barrier(5)
    failures: list[BaseException] = []

    def start() -> None:
        together.wait()
        try:
            service.start()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=start) for _ in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert backend.count("start") == 1
    assert loop_threads() == 1
    service.shutdown()


def test_concurrent_shutdowns_all_return() -> None:
    backend = FaultyBackend()
    service = make(backend=backend)
    service.start()
    threads = [threading.Thread(target=service.shutdown) for _ in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    assert backend.count("aclose") == 1
    service.shutdown()
    assert loop_threads() == 0


async def test_a_call_inside_a_running_loop_raises() -> None:
    service = make()
    for call in (service.start, service.shutdown, service.run, service.queues):
        with pytest.raises(LifecycleError, match="would block the running event loop"):
            call()
    with pytest.raises(LifecycleError, match="use QueueService there"):
        service.send("orders", 1)
    assert loop_threads() == 0


def test_a_call_in_an_async_handler_raises_instead_of_hanging() -> None:
    refused: list[Exception] = []
    tried = threading.Event()

    @consume("orders")
    async def handle(body: int) -> None:
        for call in (service.queues, service.shutdown):
            try:
                call()
            except LifecycleError as error:
                refused.append(error)
        tried.set()

    with make(handle) as service:
        service.send("orders", 1)
        assert tried.wait(60)
        assert service.ready
    assert len(refused) == 2


def test_a_synchronous_handler_may_call_the_service() -> None:
    seen: list[int] = []
    done = threading.Event()

    @consume("orders")
    def forward(body: int) -> None:
        service.send("audit", body + 1)

    @consume("audit")
    def audit(body: int) -> None:
        seen.append(body)
        done.set()

    with make(forward, audit) as service:
        service.send("orders", 1)
        assert done.wait(60)
    assert seen == [2]


def test_a_call_before_start_or_after_shutdown_raises() -> None:
    service = make()
    with pytest.raises(LifecycleError, match=r"use `with service:` or service.start\(\)"):
        service.send("orders", 1)
    with pytest.raises(LifecycleError, match="start it first"):
        service.dead_letters("orders")
    with service:
        pass
    with pytest.raises(LifecycleError, match="after a shutdown create a new SyncQueueService"):
        service.send("orders", 1)
    for call in (service.start, service.run):
        with pytest.raises(LifecycleError, match="create a new SyncQueueService"):
            call()
    service.shutdown()


def test_shutdown_without_a_start_works() -> None:
    service = make()
    service.shutdown()
    with pytest.raises(LifecycleError):
        service.start()


def test_invalid_settings_leave_nothing_open(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("qkit.backends.kafka")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "aiokafka", None)
    with pytest.raises(ConfigError, match="install the extra 'kafka'"):
        SyncQueueService(Settings(type="kafka", url="localhost:9092"))
    assert loop_threads() == 0


def test_a_failed_start_may_be_repeated() -> None:
    backend = FaultyBackend()
    backend.script("start", BackendUnavailable("refused"), BackendUnavailable("refused"))
    handlers = RecordingHandlers()
    service = make(handlers, backend=backend)
    with pytest.raises(BackendUnavailable):
        service.start()
    with pytest.raises(BackendUnavailable), service:
        pytest.fail("the service started")
    assert loop_threads() == 0
    with service:
        service.send("orders", 1)
        handlers.wait_for(1)


def test_errors_reach_the_caller() -> None:
    with make() as service, pytest.raises(QueueNotFound, match="nothing"):
        service.stats("nothing")


def test_run_starts_consumes_until_stop_and_shuts_down() -> None:
    done: list[int] = []

    @consume("orders")
    def handle(body: int) -> None:
        done.append(body)
        service.stop()

    service = make(handle)

    def send() -> None:
        eventually(lambda: service.ready)
        service.send("orders", 1)

    sender = threading.Thread(target=send)
    sender.start()
    service.run()
    sender.join()
    assert done == [1]
    assert service.connection_state == "closed"
    assert loop_threads() == 0


def test_shutdown_ends_a_run_in_another_thread() -> None:
    service = make(RecordingHandlers())
    running = threading.Thread(target=service.run)
    running.start()
    eventually(lambda: service.ready)
    service.shutdown()
    running.join(60)
    assert not running.is_alive()


def test_run_returns_if_another_thread_has_already_shut_down(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    service = make()
    start = service.start

    def start_and_shut_down() -> None:
        start()
        service.shutdown()

    monkeypatch.setattr(service, "start", start_and_shut_down)
    service.run()
    assert service.connection_state == "closed"


def test_a_call_during_a_shutdown_raises() -> None:
    backend = FaultyBackend()
    service = make(backend=backend)
    service.start()
    backend.script("remove", BLACK_HOLE)
    outcome: list[BaseException] = []

    def replay() -> None:
        try:
            service.dead_letters("orders").replay()
        except BaseException as error:
            outcome.append(error)

    service.send("orders", 1, ttl=0.01)
    eventually(lambda: len(service.dead_letters("orders").list()) == 1)
    caller = threading.Thread(target=replay)
    caller.start()
    eventually(lambda: backend.count("remove") == 1)
    service.shutdown()
    caller.join(60)
    assert not caller.is_alive()
    assert isinstance(outcome[0], LifecycleError)
    assert "shut down before this call ended" in str(outcome[0])


def test_shutdown_does_not_wait_for_a_task_that_ignores_cancellation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("qkit._internal.loop_thread.LOOP_DRAIN_SECONDS", 0.01)
    backend = FaultyBackend()
    service = make(backend=backend)
    service.start()
    release = threading.Event()

    async def stubborn() -> None:
        while not release.is_set():
            try:
                await asyncio.sleep(0.05)
            except asyncio.CancelledError:
                release.set()
                await asyncio.sleep(0)

    assert service._caller is not None
    asyncio.run_coroutine_threadsafe(stubborn(), service._caller.loop)
    service.shutdown()
    assert loop_threads() == 0


def test_an_interrupt_cancels_the_call() -> None:
    backend = FaultyBackend()
    with make(backend=backend) as service:
        backend.script("declare", BLACK_HOLE)

        class Interrupted(BaseException):
            pass

        def result(self: object, timeout: float | None = None) -> object:
            eventually(lambda: backend.count("declare") == 1)
            raise Interrupted

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("concurrent.futures.Future.result", result)
            with pytest.raises(Interrupted):
                service.send("orders", 1)
        service.send("orders", 2)
        assert [message.body for message in service.peek("orders")] == [b"2"]


def test_an_error_of_a_listener_or_handler_does_not_end_the_service() -> None:
    handlers = RecordingHandlers()
    handlers.failing = True

    def broken(event: object) -> None:
        raise QueueError("no")

    service = make(handlers)
    service.on("dead_letter", broken)
    with service:
        service.send("orders", 1)
        handlers.wait_for(1)
        service.send("orders", 2)
        handlers.wait_for(2)
        assert service.ready


def test_a_synchronous_handler_sends_while_the_service_drains() -> None:
    begun, gate = threading.Event(), threading.Event()
    sent: list[object] = []

    @consume("orders")
    def forward(body: int) -> None:
        begun.set()
        assert gate.wait(60)
        sent.append(service.send("audit", body))
        sent.append(service.send_many("audit", [1, 2]))

    backend = FaultyBackend()
    service = make(forward, backend=backend)
    service.start()
    service.send("orders", 1)
    assert begun.wait(60)
    ending = threading.Thread(target=service.shutdown)
    ending.start()
    eventually(lambda: service.connection_state == "closing")
    gate.set()
    ending.join(60)
    assert not ending.is_alive()
    assert len(sent) == 2
    assert backend.count("ack") == 1


def test_an_iterator_is_read_in_the_thread_that_sends() -> None:
    readers: list[str] = []

    def rows() -> Iterator[int]:
        readers.append(threading.current_thread().name)
        yield 1

    with make() as service:
        service.send_many("rows", rows())
    assert readers == [threading.current_thread().name]


def test_channels_and_body_types_are_available() -> None:
    service = make(RecordingHandlers())
    assert {channel.name for channel in service.channels} == {"orders", "audit"}
    assert service.body_type("orders") is int


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_call_in_a_forked_process_raises_instead_of_hanging() -> None:
    with make() as service:
        child = os.fork()
        if child == 0:  # the child must not continue with pytest
            code = 3
            try:
                service.send("orders", 1)
            except LifecycleError as error:
                code = 0 if "fork" in str(error) else 4
            finally:
                os._exit(code)
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == 0
        assert service.metrics().messages_sent == 0


# -- hosted in a running event loop --------------------------------------------------------------


async def test_a_hosted_service_runs_in_the_running_loop() -> None:
    handlers = RecordingHandlers()
    loops: list[asyncio.AbstractEventLoop] = []

    @consume("forward")
    def forward(body: int) -> None:
        service.send("orders", body)
        assert [message.body for message in service.peek("orders")] in ([], [b"1"])

    @consume("where")
    async def where(body: int) -> None:
        loops.append(asyncio.get_running_loop())

    service = make(handlers, forward, where)
    with service.hosted() as inner:
        async with inner:
            await inner.send("forward", 1)
            await inner.send("where", 1)
            await asyncio.to_thread(handlers.wait_for, 1)
            assert await asyncio.to_thread(service.queues) == sorted(await inner.queues())
            await asyncio.to_thread(service.start)  # already running
            with pytest.raises(LifecycleError, match="would block the running event loop"):
                service.send("orders", 1)
            assert loop_threads() == 0
    assert loops == [asyncio.get_running_loop()]
    with pytest.raises(LifecycleError, match="not running"):
        await asyncio.to_thread(service.send, "orders", 1)


@pytest.mark.parametrize("end", ["stop", "shutdown"])
async def test_another_thread_can_end_a_hosted_service(end: str) -> None:
    service = make(RecordingHandlers())
    with service.hosted() as inner:
        running = asyncio.create_task(inner.run())
        async with asyncio.timeout(60):
            await asyncio.to_thread(eventually, lambda: service.ready)
            await asyncio.to_thread(getattr(service, end))
            await running
    assert service.connection_state == "closed"
    service.stop()  # raises no error after the shutdown


async def test_a_service_that_was_started_cannot_be_hosted() -> None:
    service = make()
    await asyncio.to_thread(service.start)
    with pytest.raises(LifecycleError, match="already started"), service.hosted():
        pytest.fail("the service was hosted")
    await asyncio.to_thread(service.shutdown)
    with pytest.raises(LifecycleError, match="already started"), service.hosted():
        pytest.fail("the service was hosted")


def test_run_raises_the_exit_of_a_handler_after_the_shutdown() -> None:
    @consume("orders")
    def handle(body: int) -> None:
        sys.exit(7)

    service = SyncQueueService(Settings(type="native"))
    service.register(handle)
    service.start()
    service.send("orders", 1)
    with pytest.raises(SystemExit) as caught:
        service.run()
    assert caught.value.code == 7
    assert service.connection_state == "closed"
    service.shutdown()  # idempotent
    with pytest.raises(LifecycleError):
        service.send("orders", 2)
