"""``QueueService``: lifecycle, sends, health and administration."""

from __future__ import annotations

import asyncio
import inspect
import logging
import os
import threading
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any

import pytest
from pydantic import BaseModel

from qkit import (
    BackendUnavailable,
    Channel,
    CircuitOpen,
    ConfigError,
    InvalidBody,
    InvalidName,
    LifecycleError,
    Message,
    PartialSend,
    QueueError,
    QueueFull,
    QueueNotFound,
    QueueService,
    SendTimeout,
    Sent,
    Settings,
    ShutDown,
    StateChanged,
    SubscriptionLost,
    Unsupported,
    channel,
    consume,
)
from qkit.backend import Capabilities, QueueSpec, Support
from qkit.backends.native.backend import NativeBackend
from qkit.native import Engine
from qkit.observability.events import Event, Reconnected
from qkit.testing import TestService
from qkit.testing.clock import VirtualClock
from tests.support.faulty import BLACK_HOLE, FaultyBackend
from tests.support.waiting import eventually


class Order(BaseModel):
    id: int
    total: float = 0.0


class SlowHandler:
    """Handler of ``orders`` that takes a given number of seconds."""

    def __init__(self, seconds: float = 0.0) -> None:
        self.seconds = seconds
        self.begun: list[int] = []
        self.done: list[int] = []
        self.cancelled: list[int] = []

    @consume("orders", concurrency=5)
    async def handle(self, body: int) -> None:
        self.begun.append(body)
        try:
            await asyncio.sleep(self.seconds)
        except asyncio.CancelledError:
            self.cancelled.append(body)
            raise
        self.done.append(body)


def make(
    clock: VirtualClock,
    *handlers: object,
    backend: FaultyBackend | None = None,
    **settings: Any,
) -> QueueService:
    service = QueueService(
        Settings(type="native", **settings),
        backend=backend if backend is not None else FaultyBackend(clock),
        clock=clock,
    )
    for handler in handlers:
        service.register(handler)
    return service


def make_on(engine: Engine, clock: VirtualClock, *handlers: object) -> QueueService:
    service = QueueService(
        Settings(type="native"), backend=NativeBackend(engine=engine), clock=clock
    )
    for handler in handlers:
        service.register(handler)
    return service


def backend_of(service: QueueService) -> FaultyBackend:
    backend = service._backend
    assert isinstance(backend, FaultyBackend)
    return backend


def states(service: QueueService) -> list[str]:
    received: list[str] = []
    service.on("state_change", lambda event: received.append(event.new))
    return received


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


# -- starting --------------------------------------------------------------------------------


async def test_start_is_idempotent(virtual_clock: VirtualClock) -> None:
    service = make(virtual_clock, SlowHandler())
    await service.start()
    await service.start()
    await asyncio.gather(service.start(), service.start())
    assert backend_of(service).count("start") == 1
    assert backend_of(service).count("subscribe") == 1
    await service.shutdown()


async def test_concurrent_starts_start_once(virtual_clock: VirtualClock) -> None:
    service = make(virtual_clock, SlowHandler())
    gate = asyncio.Event()
    backend_of(service).script("start", gate)
    starts = [asyncio.create_task(service.start()) for _ in range(3)]
    await settle()
    gate.set()
    await asyncio.gather(*starts)
    assert backend_of(service).count("start") == 1
    await service.shutdown()


async def test_start_declares_dead_letters_first_and_subscribes_last(
    virtual_clock: VirtualClock,
) -> None:
    async with make(virtual_clock, SlowHandler()) as service:
        assert backend_of(service).calls[:4] == [
            ("start", ""),
            ("declare", "orders_dlq"),
            ("declare", "orders"),
            ("subscribe", "orders"),
        ]


async def test_a_failed_start_closes_the_backend_and_may_be_repeated(
    virtual_clock: VirtualClock,
) -> None:
    slow_handler = SlowHandler()
    service = make(virtual_clock, slow_handler)
    received = states(service)
    backend = backend_of(service)
    backend.script("start", BackendUnavailable("refused"))
    with pytest.raises(BackendUnavailable, match="refused"):
        await service.start()
    assert backend.names() == ["start", "aclose"]
    assert service.health_check().last_error == "BackendUnavailable: refused"
    service.declare(Channel("audit"))
    backend.script("declare", None, None, QueueError("access denied"))
    with pytest.raises(QueueError, match="access denied"):
        await service.start()
    backend.calls.clear()
    async with service:
        declared = [name for call, name in backend.calls[1:5] if call == "declare"]
        assert declared == ["orders_dlq", "orders", "audit_dlq", "audit"]
        await service.send("orders", 1)
        await virtual_clock.advance(1)
        assert service.ready
    assert slow_handler.done == [1]
    assert received == [
        "connecting", "disconnected", "connecting", "connected", "disconnected",
        "connecting", "connected", "closing", "closed",
    ]  # fmt: skip


async def test_an_error_while_closing_does_not_hide_the_error_of_start(
    virtual_clock: VirtualClock, caplog: pytest.LogCaptureFixture
) -> None:
    service = make(virtual_clock)
    backend_of(service).script("start", BackendUnavailable("refused"))
    backend_of(service).script("aclose", OSError("already gone"))
    with pytest.raises(BackendUnavailable, match="refused"):
        await service.start()
    assert "did not close cleanly: OSError: already gone" in caplog.text
    await service.start()
    await service.shutdown()


async def test_a_cancelled_start_closes_the_backend(virtual_clock: VirtualClock) -> None:
    service = make(virtual_clock, SlowHandler())
    backend_of(service).always("subscribe", BLACK_HOLE)
    start = asyncio.create_task(service.start())
    await settle()
    start.cancel()
    with pytest.raises(asyncio.CancelledError):
        await start
    assert backend_of(service).names()[-1] == "aclose"
    assert not [task for task in asyncio.all_tasks() if task.get_name().startswith("qkit")]


async def test_a_slow_subscription_delays_the_start_no_longer_than_the_timeout(
    virtual_clock: VirtualClock,
) -> None:
    service = make(virtual_clock, SlowHandler(), send_timeout=3)
    backend_of(service).script("subscribe", BLACK_HOLE)
    started = virtual_clock.monotonic()
    await service.start()
    assert virtual_clock.monotonic() - started == 3
    assert service.health_check().consumers[0].state == "starting"
    assert not service.ready
    await service.shutdown(timeout=0)


@pytest.mark.proves("003-config-1")
async def test_invalid_options_are_rejected_before_connecting(virtual_clock: VirtualClock) -> None:
    backend = FaultyBackend(virtual_clock, capabilities=Capabilities())
    service = make(virtual_clock, backend=backend)
    service.declare(Channel("orders", ordered=True))
    with pytest.raises(Unsupported, match="ordered"):
        await service.start()
    assert backend.calls == []
    greedy = make(virtual_clock, SlowHandler(), prefetch=2)
    with pytest.raises(ConfigError, match="prefetch is 2"):
        await greedy.start()
    assert backend_of(greedy).calls == []


async def test_a_backend_that_is_not_durable_is_logged(
    virtual_clock: VirtualClock, caplog: pytest.LogCaptureFixture
) -> None:
    async with make(virtual_clock) as service:
        assert "faulty is not durable" in caplog.text
        assert service.health_check().durable is False
    caplog.clear()
    durable = FaultyBackend(virtual_clock, capabilities=Capabilities(durable=Support.NATIVE))
    async with make(virtual_clock, backend=durable, dead_letter={"enabled": False}) as service:
        assert "durable" not in caplog.text
        assert service.health_check().durable is True


async def test_settings_come_from_the_environment_unless_given(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("QKIT_PREFIX", "staging.")
    async with QueueService() as service:
        await service.send("orders", 1)
        assert service.settings.prefix == "staging."
        assert await service._backend.queues() == [  # type: ignore[attr-defined]
            "staging.orders", "staging.orders_dlq",
        ]  # fmt: skip


# -- calls in the wrong state ----------------------------------------------------------------


async def test_calls_before_start_raise(virtual_clock: VirtualClock) -> None:
    service = make(virtual_clock)
    for call in (
        lambda: service.send("orders", 1),
        lambda: service.publish("prices", 1),
        lambda: service.send_many("orders", [1]),
        service.queues,
        lambda: service.stats("orders"),
        lambda: service.peek("orders"),
        lambda: service.purge("orders"),
        lambda: service.delete("orders"),
    ):
        with pytest.raises(LifecycleError, match=r"a service that is new: start it first"):
            await call()
    for steer in (service.pause, service.resume, service.dead_letters):
        with pytest.raises(LifecycleError, match="start it first"):
            steer("orders")


async def test_register_after_start_raises(virtual_clock: VirtualClock) -> None:
    async with make(virtual_clock) as service:
        with pytest.raises(LifecycleError, match="register all handlers before start"):
            service.register(SlowHandler())
        assert service.handlers == []


async def test_a_service_cannot_start_after_its_shutdown(virtual_clock: VirtualClock) -> None:
    service = make(virtual_clock)
    async with service:
        pass
    for call in (service.start, service.run, lambda: service.send("orders", 1)):
        with pytest.raises(LifecycleError, match="create a new QueueService"):
            await call()
    with pytest.raises(LifecycleError):
        service.register(SlowHandler())


async def test_a_service_that_was_shut_down_before_its_start_cannot_start(
    virtual_clock: VirtualClock,
) -> None:
    service = make(virtual_clock)
    await service.shutdown()
    with pytest.raises(LifecycleError):
        await service.start()
    assert backend_of(service).calls == []


async def test_a_call_during_the_start_raises(virtual_clock: VirtualClock) -> None:
    service = make(virtual_clock)
    gate = asyncio.Event()
    backend_of(service).script("start", gate)
    start = asyncio.create_task(service.start())
    await settle()
    with pytest.raises(LifecycleError, match=r"wait until start\(\) has returned"):
        await service.send("orders", 1)
    gate.set()
    await start
    await service.shutdown()


# -- sends outside the event loop ------------------------------------------------------------

SENDS = ("send", "publish", "send_many")


def call_of(service: QueueService, name: str) -> Coroutine[Any, Any, object]:
    """Call the send method with this name and return its coroutine without awaiting it."""
    if name == "send":
        return service.send("orders", 1)
    return service.publish("prices", 1) if name == "publish" else service.send_many("orders", [1])


@pytest.mark.parametrize("name", SENDS)
async def test_a_send_in_another_thread_raises_at_the_call(
    virtual_clock: VirtualClock, name: str
) -> None:
    service = make(virtual_clock)
    async with service:
        with pytest.raises(LifecycleError) as caught:
            _ = await asyncio.to_thread(call_of, service, name)
        assert f"service.sync.{name}(" in str(caught.value)
        assert "no event loop runs" in str(caught.value)
        assert caught.value.operation == name
        await asyncio.to_thread(
            check_threadsafe_call_raises, service, name, asyncio.get_running_loop()
        )
    assert backend_of(service).count("publish") == 0


def check_threadsafe_call_raises(
    service: QueueService, name: str, loop: asyncio.AbstractEventLoop
) -> None:
    with pytest.raises(LifecycleError, match=f"service.sync.{name}"):
        asyncio.run_coroutine_threadsafe(call_of(service, name), loop)


@pytest.mark.parametrize("name", SENDS)
async def test_a_send_from_a_second_loop_raises_at_the_call(
    virtual_clock: VirtualClock, name: str
) -> None:
    service = make(virtual_clock)

    async def elsewhere() -> None:
        with pytest.raises(LifecycleError, match="another event loop runs"):
            _ = call_of(service, name)

    async with service:
        await asyncio.to_thread(asyncio.run, elsewhere())
    assert backend_of(service).count("publish") == 0


def test_a_send_from_a_later_loop_of_the_same_thread_raises() -> None:
    service = QueueService(Settings(type="native"))

    async def later() -> None:
        with pytest.raises(LifecycleError, match="another event loop runs"):
            _ = service.send("orders", 1)

    asyncio.run(service.start())
    asyncio.run(later())


@pytest.mark.parametrize("name", SENDS)
def test_before_start_a_send_without_a_loop_raises_at_the_call(name: str) -> None:
    with pytest.raises(LifecycleError, match="no event loop runs"):
        _ = call_of(QueueService(Settings(type="native")), name)


@pytest.mark.parametrize("name", SENDS)
async def test_before_start_and_after_shutdown_awaiting_a_send_raises(
    virtual_clock: VirtualClock, name: str
) -> None:
    service = make(virtual_clock)
    early = call_of(service, name)
    with pytest.raises(LifecycleError, match="start it first"):
        await early
    async with service:
        during = call_of(service, name)
        await during
    late = call_of(service, name)
    with pytest.raises(LifecycleError, match="create a new QueueService"):
        await late


async def test_all_other_errors_are_raised_on_await(virtual_clock: VirtualClock) -> None:
    numbers: Channel[int] = Channel("numbers", int)
    async with make(virtual_clock) as service:
        for later in (
            service.send(numbers, "one"),  # type: ignore[misc]
            service.send("orders", 1, prioriti=1),  # type: ignore[call-overload]
            service.publish(numbers, 1),
            service.send_many("orders", 5),  # type: ignore[call-overload]
        ):
            with pytest.raises((QueueError, TypeError)):
                await later


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
async def test_a_send_in_a_forked_process_raises_at_the_call(virtual_clock: VirtualClock) -> None:
    async def elsewhere(service: QueueService) -> None:
        _ = service.send("orders", 1)

    def refused(service: QueueService, *, in_loop: bool) -> bool:
        try:
            if in_loop:
                asyncio.events._set_running_loop(None)  # Python 3.12+ does this after a fork
                asyncio.run(elsewhere(service))
            else:
                _ = service.send("orders", 1)
        except LifecycleError:
            return True
        return False

    async with make(virtual_clock) as service:
        for in_loop in (False, True):
            child = os.fork()
            if child == 0:  # the child must not continue with pytest
                code = 3
                try:
                    code = 0 if refused(service, in_loop=in_loop) else 4
                finally:
                    os._exit(code)
            _, status = await asyncio.to_thread(os.waitpid, child, 0)
            assert os.waitstatus_to_exitcode(status) == 0
    assert backend_of(service).count("publish") == 0


@pytest.mark.parametrize("returned", [False, True])
async def test_a_send_in_a_synchronous_handler_fails_the_attempt(
    virtual_clock: VirtualClock, returned: bool
) -> None:
    @consume("orders")
    def place(number: int) -> object:
        sending = service.send("invoices", number)
        return sending if returned else None

    service = make(virtual_clock, place, retry={"max_attempts": 2})
    async with service:
        await service.send("orders", 1)
        await eventually(service.dead_letters("orders").list)
        letters = await service.dead_letters("orders").list()
        assert letters[0].error_type == "LifecycleError"
        assert "service.sync.send(" in (letters[0].error or "")
        assert letters[0].attempts == 2
        assert service.metrics().messages_sent == 1


async def test_a_coroutine_returned_by_a_synchronous_handler_is_awaited(
    virtual_clock: VirtualClock,
) -> None:
    done: list[int] = []

    async def work(number: int) -> None:
        await service.send("invoices", number)
        done.append(number)

    @consume("orders")
    def place(number: int) -> object:
        return work(number)

    service = make(virtual_clock, place)
    async with service:
        await service.send("orders", 1)
        await eventually(lambda: done)
        assert (await service.stats("invoices")).depth == 1


@pytest.mark.parametrize("owner", [QueueService, TestService])
@pytest.mark.parametrize("name", SENDS)
async def test_inspect_reports_send_as_a_coroutine_function(
    virtual_clock: VirtualClock, owner: type, name: str
) -> None:
    function = getattr(owner, name)
    service = make(virtual_clock)
    bound = getattr(service if owner is QueueService else TestService(service), name)
    for item in (function, bound):
        assert inspect.iscoroutinefunction(item)
        assert asyncio.iscoroutinefunction(item)
        assert item.__doc__
        assert item.__name__ == name
    names = list(inspect.signature(bound).parameters)
    assert names == ["channel", "bodies" if name == "send_many" else "body", "options"]
    coroutine = bound("orders", [1])
    assert inspect.iscoroutine(coroutine)
    assert coroutine.__qualname__ == f"QueueService.{name}"
    coroutine.close()


async def test_a_send_may_become_a_task_or_be_gathered(virtual_clock: VirtualClock) -> None:
    async with make(virtual_clock) as service:
        task = asyncio.create_task(service.send("orders", 1), name="later")
        await asyncio.gather(service.send("orders", 2), asyncio.wait_for(service.send("q", 3), 5))
        assert isinstance(await task, Sent)
        assert (await service.stats("orders")).depth == 2


# -- sending ---------------------------------------------------------------------------------


@pytest.mark.proves("002-performance-7")
async def test_a_hundred_concurrent_sends_take_a_few_round_trips(
    virtual_clock: VirtualClock,
) -> None:
    async with make(virtual_clock) as service:
        await service.send("orders", 0)
        backend_of(service).calls.clear()
        gate = asyncio.Event()
        backend_of(service).script("publish", gate)
        sends = [asyncio.create_task(service.send("orders", n)) for n in range(100)]
        await settle()
        gate.set()
        sent = await asyncio.gather(*sends)
        assert backend_of(service).count("publish") <= 3
        assert [item.position for item in sent] == list(range(1, 101))


async def test_a_send_to_an_unknown_channel_declares_it_once(virtual_clock: VirtualClock) -> None:
    async with make(virtual_clock) as service:
        await asyncio.gather(*(service.send("new", n) for n in range(5)))
        assert backend_of(service).calls.count(("declare", "new")) == 1
        assert sorted(await service.queues()) == ["new", "new_dlq"]


async def test_passive_declaration_checks_and_creates_nothing(virtual_clock: VirtualClock) -> None:
    service = make(virtual_clock, declare="passive")
    async with service:
        with pytest.raises(QueueNotFound, match="new"):
            await service.send("new", 1)
        assert await service.queues() == []
        assert all(spec.passive for spec in backend_of(service).specs)
    strict = make(virtual_clock, SlowHandler(), declare="passive")
    with pytest.raises(QueueNotFound):
        await strict.start()


@pytest.mark.parametrize("name", ["../x", "a b", "orders\r\n", "о", "x" * 300, ""])
async def test_every_method_rejects_an_invalid_name(virtual_clock: VirtualClock, name: str) -> None:
    async with make(virtual_clock) as service:
        for call in (service.stats, service.peek, service.purge, service.delete):
            with pytest.raises(InvalidName):
                await call(name)
        for send in (service.send, service.publish):
            with pytest.raises(InvalidName):
                await send(name, 1)
        with pytest.raises(InvalidName):
            service.dead_letters(name)
        assert await service.queues() == []
        assert service.metrics().channels == {}


async def test_sending_to_a_topic_or_publishing_to_a_queue_raises_before_anything_is_sent(
    virtual_clock: VirtualClock,
) -> None:
    async with make(virtual_clock) as service:
        service.declare(Channel("prices", broadcast=True))
        service.declare(Channel("orders"))
        backend_of(service).calls.clear()
        with pytest.raises(Unsupported, match=r"'prices' is a topic: use service.publish"):
            await service.send("prices", 1)
        with pytest.raises(Unsupported, match=r"'prices' is a topic: use service.publish"):
            await service.send_many("prices", [1])
        with pytest.raises(Unsupported, match=r"'orders' is a queue: use service.send"):
            await service.publish("orders", 1)
        with pytest.raises(Unsupported, match=r"'other' is a topic"):
            await service.send(Channel("other", broadcast=True), 1)
        assert backend_of(service).count("publish") == 0
        assert backend_of(service).count("declare") == 0


async def test_the_body_is_checked_against_the_type_of_the_handler(
    virtual_clock: VirtualClock,
) -> None:
    @consume("orders")
    async def handle(order: Order) -> None: ...

    async with make(virtual_clock, handle) as service:
        with pytest.raises(InvalidBody, match="Order") as caught:
            await service.send("orders", {"id": "x"})
        assert caught.value.context == {
            "backend": "faulty", "operation": "send", "queue": "orders",
        }  # fmt: skip
        await service.send("orders", Order(id=1))
        await service.send("orders", {"id": 2})
        assert backend_of(service).count("publish") == 2


async def test_the_body_is_checked_against_the_type_of_the_channel(
    virtual_clock: VirtualClock,
) -> None:
    orders: Channel[Order] = Channel("orders", Order)
    async with make(virtual_clock) as service:
        with pytest.raises(InvalidBody):
            await service.send(orders, "nonsense")  # type: ignore[misc]
        await service.send(orders, Order(id=1))
        with pytest.raises(InvalidBody):
            await service.send("orders", "nonsense")


async def test_a_queue_deleted_by_another_process_is_declared_again(
    virtual_clock: VirtualClock,
) -> None:
    async with make(virtual_clock) as service:
        await service.send("orders", 1)
        await backend_of(service).native.delete("orders")
        await service.send("orders", 2)
        assert [message.body for message in await service.peek("orders")] == [b"2"]


async def test_the_send_timeout_covers_a_declaration_without_a_reply(
    virtual_clock: VirtualClock,
) -> None:
    async with make(virtual_clock, send_timeout=5) as service:
        backend_of(service).always("declare", BLACK_HOLE)
        started = virtual_clock.monotonic()
        results = await asyncio.gather(
            service.send("a", 1), service.send("b", 1), return_exceptions=True
        )
        assert [type(result) for result in results] == [SendTimeout] * 2
        assert virtual_clock.monotonic() - started == 5
        backend_of(service).heal("declare")
        await service.send("a", 1)


async def test_an_open_circuit_is_visible_in_health(virtual_clock: VirtualClock) -> None:
    settings: dict[str, Any] = {"breaker": {"failure_threshold": 2, "recovery_timeout": 10}}
    async with make(virtual_clock, **settings) as service:
        await service.send("orders", 1)
        backend_of(service).always("publish", BackendUnavailable("refused"))
        with pytest.raises(CircuitOpen):
            await service.send("orders", 2)
        assert service.health_check().breaker == "open"
        backend_of(service).heal("publish")
        await virtual_clock.advance(10)
        assert service.health_check().breaker == "half_open"
        await service.send("orders", 3)
        assert service.health_check().breaker == "closed"
        assert service.metrics().messages_sent == 2


async def test_send_many_checks_all_bodies_before_the_first_is_sent(
    virtual_clock: VirtualClock,
) -> None:
    numbers: Channel[int] = Channel("numbers", int)
    async with make(virtual_clock) as service:
        with pytest.raises(InvalidBody):
            await service.send_many(numbers, [*range(1_200), "x"])
        assert backend_of(service).count("publish") == 0


async def test_send_many_needs_few_round_trips_and_keeps_the_order(
    virtual_clock: VirtualClock,
) -> None:
    async with make(virtual_clock) as service:
        sent = await service.send_many("orders", range(1_200), headers={"tenant": "acme"})
        assert backend_of(service).count("publish") == 3
        assert [item.position for item in sent] == list(range(1_200))
        messages = await service.peek("orders", 2_000)
        assert [message.body for message in messages] == [b"%d" % n for n in range(1_200)]
        assert messages[-1].headers == {"tenant": "acme"}
        assert await service.send_many("orders", []) == []
        assert service.metrics().messages_sent == 1_200


async def test_send_many_to_a_full_queue_raises_partial_send(virtual_clock: VirtualClock) -> None:
    backend = FaultyBackend(virtual_clock, max_depth=700)
    async with make(virtual_clock, backend=backend) as service:
        with pytest.raises(PartialSend, match="700 of 1000 messages were confirmed") as caught:
            await service.send_many("orders", range(1_000))
        kinds = [type(result) for result in caught.value.results]
        assert kinds == [Sent] * 700 + [QueueFull] * 300
        assert caught.value.context == {
            "backend": "faulty", "operation": "send_many", "queue": "orders",
        }  # fmt: skip
        with pytest.raises(QueueFull):
            await service.send_many("orders", range(10))
        assert service.metrics().messages_sent == 700


async def test_send_many_during_an_outage_raises_partial_send(
    virtual_clock: VirtualClock,
) -> None:
    async with make(virtual_clock, send_timeout=1) as service:
        backend_of(service).script("publish", None, BLACK_HOLE)
        with pytest.raises(PartialSend) as caught:
            await service.send_many("orders", range(1_600))
        kinds = [type(result) for result in caught.value.results]
        assert kinds == [Sent] * 500 + [SendTimeout] * 1_100


# -- running and shutting down ---------------------------------------------------------------


async def test_run_starts_consumes_until_stop_and_shuts_down(virtual_clock: VirtualClock) -> None:
    done: list[int] = []

    @consume("orders")
    async def handle(body: int) -> None:
        done.append(body)
        if body == 3:
            service.stop()

    service = make(virtual_clock, handle)
    running = asyncio.create_task(service.run())
    await settle()
    for number in range(4):
        await service.send("orders", number)
    await running
    assert done == [0, 1, 2, 3]
    assert service.connection_state == "closed"


async def test_a_cancelled_run_still_shuts_down(virtual_clock: VirtualClock) -> None:
    slow_handler = SlowHandler(seconds=5)
    service = make(virtual_clock, slow_handler)
    running = asyncio.create_task(service.run())
    await settle()
    await service.send("orders", 1)
    await settle()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert slow_handler.done == [1]
    assert service.connection_state == "closed"


def test_run_works_outside_the_main_thread() -> None:
    done: list[int] = []

    @consume("orders")
    async def handle(body: int) -> None:
        done.append(body)
        service.stop()

    service = QueueService(Settings(type="native"))
    service.register(handle)

    async def main() -> None:
        await service.start()
        await service.send("orders", 1)
        await service.run()

    thread = threading.Thread(target=lambda: asyncio.run(main()))
    thread.start()
    thread.join(60)
    assert not thread.is_alive()
    assert done == [1]


@pytest.mark.proves("003-shutdown-5")
async def test_shutdown_runs_its_steps_in_order(virtual_clock: VirtualClock) -> None:
    """Not ready, stop fetching, finish handlers, flush sends, close the backend, emit the event."""
    story: list[str] = []
    begun = asyncio.Event()

    @consume("orders")
    async def handle(body: int) -> None:
        begun.set()
        await asyncio.sleep(5)
        story.append(f"handler done, ready: {service.ready}")
        await service.send("audit", body)
        story.append("sent during the drain")

    service = make(virtual_clock, handle)
    backend = backend_of(service)
    service.on("state_change", lambda event: story.append(f"{event.new}, ready: {service.ready}"))
    service.on("shutdown", lambda event: story.append(f"shutdown {event.abandoned}"))
    backend.script("stop", lambda: story.append("stopped fetching"))
    backend.script("ack", lambda: story.append("ack"))
    backend.script("aclose", lambda: story.append("backend closed"))
    await service.start()
    await service.send("orders", 1)
    await service.send("orders", 2)
    await begun.wait()
    story.clear()
    received = service.metrics().messages_received
    await service.shutdown()
    assert story == [
        "closing, ready: False",
        "stopped fetching",
        "handler done, ready: False",
        "sent during the drain",
        "ack",
        "backend closed",
        "closed, ready: False",
        "shutdown 0",
    ]
    assert service.metrics().messages_received == received
    assert service.metrics().channels["audit"].messages_sent == 1


@pytest.mark.proves("003-shutdown-2")
async def test_shutdown_lets_handlers_finish(virtual_clock: VirtualClock) -> None:
    slow_handler = SlowHandler(seconds=20)
    received: list[Event] = []
    service = make(virtual_clock, slow_handler, prefetch=5)
    service.on("shutdown", received.append)
    await service.start()
    await service.send_many("orders", range(8))
    await virtual_clock.advance(1)
    started = virtual_clock.monotonic()
    await service.shutdown()
    assert virtual_clock.monotonic() - started == pytest.approx(19)
    assert sorted(slow_handler.done) == [0, 1, 2, 3, 4]
    assert received == [ShutDown(0)]


async def test_shutdown_releases_buffered_messages_immediately_without_counting_an_attempt(
    virtual_clock: VirtualClock,
) -> None:
    slow_handler = SlowHandler(seconds=20)
    service = make(virtual_clock, slow_handler, prefetch=8)
    backend = backend_of(service)
    await service.start()
    await service.send_many("orders", range(8))
    await virtual_clock.advance(1)
    shutdown = asyncio.create_task(service.shutdown())
    await virtual_clock.advance(1)
    left = await backend.native.peek("orders", 10)
    assert [(item.body, item.attempt) for item in left] == [(b"5", 0), (b"6", 0), (b"7", 0)]
    assert backend.count("release uncounted") == 3
    await shutdown
    assert len(slow_handler.begun) == 5


@pytest.mark.proves("003-shutdown-3", "003-shutdown-4")
async def test_the_deadline_cancels_handlers_and_releases_their_messages_without_an_attempt(
    virtual_clock: VirtualClock, caplog: pytest.LogCaptureFixture
) -> None:
    slow_handler = SlowHandler(seconds=1_000)
    received: list[Event] = []
    service = make(virtual_clock, slow_handler, shutdown={"timeout": 7})
    service.on("shutdown", received.append)
    backend = backend_of(service)
    gate = asyncio.Event()
    backend.script("aclose", gate)
    await service.start()
    await service.send_many("orders", range(3))
    await virtual_clock.advance(1)
    shutdown = asyncio.create_task(service.shutdown())
    await virtual_clock.advance(6.9)
    assert slow_handler.cancelled == []
    await virtual_clock.advance(0.2)
    assert backend.count("aclose") == 1
    left = [item.attempt for item in await backend.native.peek("orders", 10)]
    gate.set()
    await shutdown
    assert sorted(slow_handler.cancelled) == [0, 1, 2]
    assert left == [0, 0, 0]
    assert backend.count("release uncounted") == 3
    assert backend.count("ack") == 0
    assert received == [ShutDown(3)]
    assert "cancelled 3 handlers that did not finish in time" in caplog.text


async def test_the_timeout_of_shutdown_overrides_the_settings(virtual_clock: VirtualClock) -> None:
    slow_handler = SlowHandler(seconds=1_000)
    service = make(virtual_clock, slow_handler)
    await service.start()
    await service.send("orders", 1)
    await virtual_clock.advance(1)
    started = virtual_clock.monotonic()
    await service.shutdown(timeout=0)
    assert virtual_clock.monotonic() - started < 0.1
    assert slow_handler.cancelled == [1]


async def test_force_ends_the_wait_for_handlers(virtual_clock: VirtualClock) -> None:
    slow_handler = SlowHandler(seconds=1_000)
    service = make(virtual_clock, slow_handler)
    await service.start()
    await service.send("orders", 1)
    await virtual_clock.advance(1)
    shutdown = asyncio.create_task(service.shutdown())
    await virtual_clock.advance(3)
    assert not shutdown.done()
    service.force()
    await virtual_clock.advance(0.1)
    assert shutdown.done()
    assert slow_handler.cancelled == [1]


async def test_shutdown_is_idempotent_and_concurrent_shutdowns_end_together(
    virtual_clock: VirtualClock,
) -> None:
    slow_handler = SlowHandler(seconds=5)
    received: list[Event] = []
    service = make(virtual_clock, slow_handler)
    service.on("shutdown", received.append)
    await service.start()
    await service.send("orders", 1)
    await virtual_clock.advance(1)
    await asyncio.gather(*(service.shutdown() for _ in range(3)))
    await service.shutdown()
    assert slow_handler.done == [1]
    assert received == [ShutDown(0)]
    assert backend_of(service).count("aclose") == 1


async def test_a_cancelled_caller_waits_for_the_end_of_the_shutdown(
    virtual_clock: VirtualClock,
) -> None:
    slow_handler = SlowHandler(seconds=5)
    service = make(virtual_clock, slow_handler)
    await service.start()
    await service.send("orders", 1)
    await virtual_clock.advance(1)
    shutdown = asyncio.create_task(service.shutdown())
    for _ in range(3):
        await virtual_clock.advance(0.5)
        shutdown.cancel()
    with pytest.raises(asyncio.CancelledError):
        await shutdown
    assert slow_handler.done == [1]
    assert service.connection_state == "closed"
    assert backend_of(service).count("aclose") == 1


async def test_a_shutdown_during_the_start_waits_for_it(virtual_clock: VirtualClock) -> None:
    service = make(virtual_clock, SlowHandler())
    gate = asyncio.Event()
    backend_of(service).script("start", gate)
    start = asyncio.create_task(service.start())
    await settle()
    shutdown = asyncio.create_task(service.shutdown())
    await settle()
    gate.set()
    await asyncio.gather(start, shutdown)
    assert service.connection_state == "closed"
    assert backend_of(service).names()[-1] == "aclose"


async def test_a_send_in_progress_is_confirmed_before_the_backend_closes(
    virtual_clock: VirtualClock,
) -> None:
    service = make(virtual_clock)
    await service.start()
    await service.send("orders", 1)
    gate = asyncio.Event()
    backend_of(service).script("publish", gate)
    send = asyncio.create_task(service.send("orders", 2))
    await settle()
    shutdown = asyncio.create_task(service.shutdown())
    await virtual_clock.advance(1)
    assert backend_of(service).count("aclose") == 0
    gate.set()
    await asyncio.gather(send, shutdown)
    assert len(backend_of(service).published) == 2


@pytest.mark.proves("003-shutdown-4")
@pytest.mark.parametrize("fault", [OSError("reset"), QueueError("no"), BLACK_HOLE])
async def test_a_backend_that_does_not_close_cleanly_does_not_delay_the_shutdown(
    virtual_clock: VirtualClock, fault: Any, caplog: pytest.LogCaptureFixture
) -> None:
    received: list[Event] = []
    service = make(virtual_clock)
    service.on("shutdown", received.append)
    await service.start()
    backend_of(service).script("aclose", fault)
    started = virtual_clock.monotonic()
    await service.shutdown()
    assert virtual_clock.monotonic() - started <= 5
    assert received == [ShutDown(0)]
    assert service.connection_state == "closed"
    assert "did not close cleanly" in caplog.text


async def test_shutdown_logs_a_handler_that_ignores_cancellation(
    virtual_clock: VirtualClock, caplog: pytest.LogCaptureFixture
) -> None:
    release = asyncio.Event()
    ended = asyncio.Event()

    @consume("orders")
    async def stubborn(body: int) -> None:
        while not release.is_set():
            try:
                await release.wait()
            except asyncio.CancelledError:
                continue
        ended.set()

    service = make(virtual_clock, stubborn)
    await service.start()
    await service.send("orders", 1)
    await settle()
    started = virtual_clock.monotonic()
    await service.shutdown(timeout=1)
    assert virtual_clock.monotonic() - started <= 10
    assert "1 handlers of group" in caplog.text
    assert "ignored their cancellation and still run" in caplog.text
    release.set()
    await ended.wait()
    await settle()
    assert "could not be settled" not in caplog.text


async def test_the_message_of_a_handler_that_ignores_cancellation_is_released(
    virtual_clock: VirtualClock,
) -> None:
    release, handled = asyncio.Event(), list[int]()

    @consume("orders")
    async def stubborn(body: int) -> None:
        while not release.is_set():
            with suppress(asyncio.CancelledError):
                await release.wait()

    @consume("orders")
    async def handle(body: int, message: Message) -> None:
        handled.append(message.attempt)

    async with Engine(clock=virtual_clock) as engine:
        service = make_on(engine, virtual_clock, stubborn)
        await service.start()
        await service.send("orders", 1)
        await settle()
        before = asyncio.all_tasks()
        await service.shutdown(timeout=1)
        async with make_on(engine, virtual_clock, handle):
            await settle()
            assert handled == [1]
        assert not {task for task in before & asyncio.all_tasks() if "orders" in task.get_name()}
        release.set()
        await settle()


async def test_a_handler_that_shuts_its_service_down_is_told_to_stop_it(
    virtual_clock: VirtualClock,
) -> None:
    raised: list[LifecycleError] = []

    @consume("orders")
    async def handle(body: int) -> None:
        with pytest.raises(LifecycleError, match=r"call service\.stop\(\)") as caught:
            await service.shutdown()
        raised.append(caught.value)
        assert service.ready
        service.stop()

    service = make(virtual_clock, handle)
    await service.start()
    await service.send("orders", 1)
    began = virtual_clock.monotonic()
    await service.run()
    assert virtual_clock.monotonic() - began < 1
    assert [error.operation for error in raised] == ["shutdown"]


async def test_a_service_may_be_shut_down_in_a_handler_of_another_service(
    virtual_clock: VirtualClock,
) -> None:
    other = make(virtual_clock)
    await other.start()

    @consume("orders")
    async def handle(body: int) -> None:
        await other.shutdown()

    async with make(virtual_clock, handle) as service:
        await service.send("orders", 1)
        await settle()
        assert other.connection_state == "closed"


async def test_async_with_shuts_down_after_an_error(virtual_clock: VirtualClock) -> None:
    service = make(virtual_clock)

    async def use() -> None:
        async with service as entered:
            assert entered is service
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await use()
    assert service.connection_state == "closed"


async def test_no_task_remains_after_the_shutdown(virtual_clock: VirtualClock) -> None:
    before = asyncio.all_tasks()
    async with make(virtual_clock, SlowHandler()) as service:
        await service.send_many("orders", range(50))
        await asyncio.gather(*(service.send("orders", n) for n in range(50)))
        await virtual_clock.advance(10)
    await settle()
    assert asyncio.all_tasks() == before


# -- pause and resume ------------------------------------------------------------------------


async def test_pause_and_resume(virtual_clock: VirtualClock) -> None:
    slow_handler = SlowHandler()
    async with make(virtual_clock, slow_handler) as service:
        service.pause("orders")
        await service.send("orders", 1)
        await virtual_clock.advance(60)
        assert slow_handler.begun == []
        assert service.health_check().consumers[0].state == "paused"
        assert service.ready  # a paused consumer is healthy
        service.resume("orders")
        await virtual_clock.advance(1)
        assert slow_handler.done == [1]


async def test_pausing_a_channel_that_is_not_consumed_raises(
    virtual_clock: VirtualClock,
) -> None:
    async with make(virtual_clock, SlowHandler()) as service:
        with pytest.raises(QueueNotFound, match="does not consume 'audit'; it consumes orders"):
            service.pause("audit")
    async with make(virtual_clock) as service:
        with pytest.raises(QueueNotFound, match="it consumes nothing"):
            service.resume("audit")


# -- health and metrics ----------------------------------------------------------------------


@pytest.mark.proves("003-health-1", "003-health-2")
async def test_a_running_service_is_healthy(virtual_clock: VirtualClock) -> None:
    service = make(virtual_clock, SlowHandler())
    assert service.health_check().status == "unhealthy"
    assert service.connection_state == "disconnected"
    async with service:
        await virtual_clock.advance(100)
        sent_at = virtual_clock.time()
        await service.send("orders", 1)
        await virtual_clock.advance(1)
        health = service.health_check()
        assert (health.status, health.connection_state, health.breaker) == (
            "healthy", "connected", "closed",
        )  # fmt: skip
        assert health.last_success_at == sent_at
        assert health.last_error is None
        assert health.disconnected_at is None
        (consumer,) = health.consumers
        assert (consumer.channel, consumer.state, consumer.in_flight) == ("orders", "consuming", 0)
        assert consumer.last_poll_at == consumer.last_settle_at == sent_at
        assert service.capabilities is service._backend.capabilities
    assert service.health_check().status == "unhealthy"
    assert service.connection_state == "closed"


@pytest.mark.proves("003-health-5")
@pytest.mark.parametrize(
    ("fault", "error"),
    [
        (BackendUnavailable("refused"), "BackendUnavailable: refused"),
        (OSError("driver error"), "OSError: driver error"),
        (BLACK_HOLE, "TimeoutError: "),
    ],
)
async def test_a_lost_broker_is_reported_within_five_seconds(
    virtual_clock: VirtualClock, fault: Any, error: str, caplog: pytest.LogCaptureFixture
) -> None:
    service = make(virtual_clock, SlowHandler())
    received: list[Event] = []
    service.on("state_change", received.append)
    service.on("reconnected", received.append)
    async with service:
        received.clear()
        backend_of(service).always("ping", fault)
        gone = virtual_clock.time()
        await virtual_clock.advance(5)
        health = service.health_check()
        assert (health.status, health.connection_state) == ("unhealthy", "disconnected")
        assert health.last_error == error
        assert health.disconnected_at is not None
        assert gone <= health.disconnected_at <= gone + 5
        assert not service.ready
        backend_of(service).heal("ping")
        await virtual_clock.advance(5)
        assert service.ready
        assert service.health_check().disconnected_at is None
    changes = [event for event in received if isinstance(event, StateChanged)]
    assert [change.new for change in changes[:2]] == ["disconnected", "connected"]
    assert changes[0].error == error
    (reconnected,) = [event for event in received if isinstance(event, Reconnected)]
    assert 0 < reconnected.seconds <= 7
    assert "connected -> disconnected" in caplog.text


async def test_a_lost_subscription_is_unhealthy_until_it_is_reopened(
    virtual_clock: VirtualClock,
) -> None:
    slow_handler = SlowHandler()
    service = make(virtual_clock, slow_handler)
    received: list[Event] = []
    service.on("reconnected", received.append)
    backend = backend_of(service)
    backend.script("receive", None, SubscriptionLost("the channel was closed"))
    async with service:
        backend.always("subscribe", BackendUnavailable("refused"))
        await service.send("orders", 1)
        await virtual_clock.advance(1)
        health = service.health_check()
        assert health.status == "unhealthy"
        assert health.consumers[0].state == "reconnecting"
        backend.heal("subscribe")
        await virtual_clock.advance(10)
        assert service.ready
        await service.send("orders", 2)
        await virtual_clock.advance(1)
    assert 2 in slow_handler.done
    assert received


async def test_a_dead_consumer_is_unhealthy(virtual_clock: VirtualClock) -> None:
    service = make(virtual_clock, SlowHandler())
    async with service:
        (task,) = service._runtime.consumers._tasks.values()
        task.cancel()
        await settle()
        assert service.connection_state == "connected"
        assert not service.ready


async def test_another_thread_sees_a_blocked_loop_as_unhealthy(
    virtual_clock: VirtualClock,
) -> None:
    service = make(virtual_clock, SlowHandler())
    async with service:
        await virtual_clock.advance(60)
        assert service.ready
        virtual_clock.jump(4.1)  # nothing runs during the jump
        health = service.health_check()
        assert health.status == "unhealthy"
        assert "the event loop has been blocked" in (health.last_error or "")
        await virtual_clock.advance(0.1)
        health = service.health_check()
        assert (health.status, health.last_error) == ("healthy", None)
    virtual_clock.jump(60)
    assert service.health_check().last_error is None, "a closed service reports no blocked loop"


@pytest.mark.proves("003-health-12", "003-health-13")
async def test_metrics_count_per_channel_and_in_total(virtual_clock: VirtualClock) -> None:
    @channel("orders")
    class Orders:
        @consume
        async def handle(self, body: int) -> None:
            await asyncio.sleep(5)
            if body < 0:
                raise ValueError("negative")

    service = make(virtual_clock, Orders(), retry={"max_attempts": 2, "jitter": 0})
    async with service:
        await service.send_many("orders", [1, -1])
        await service.send("audit", 1)
        await virtual_clock.advance(1)
        assert service.metrics().in_flight == 1
        await virtual_clock.advance(60)
        metrics = service.metrics()
    orders = metrics.channels["orders"]
    assert (orders.messages_sent, orders.messages_received) == (2, 3)
    assert (orders.messages_retried, orders.messages_failed) == (1, 1)
    assert (orders.messages_dead_lettered, orders.in_flight) == (1, 0)
    assert metrics.channels["audit"].messages_sent == 1
    assert metrics.messages_sent == 3
    assert metrics.messages_received == 3


async def test_shutdown_waits_for_coroutine_listeners(
    virtual_clock: VirtualClock,
) -> None:
    received: list[Event] = []

    async def listener(event: ShutDown) -> None:
        await asyncio.sleep(2)
        received.append(event)

    service = make(virtual_clock)
    service.on("shutdown", listener)
    async with service:
        pass
    assert received == [ShutDown(0)]


async def test_a_listener_that_fails_changes_nothing(
    virtual_clock: VirtualClock, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(event: object) -> None:
        raise ValueError("no")

    @consume("orders")
    async def fail(body: int) -> None:
        raise KeyError(body)

    service = make(virtual_clock, fail, retry={"max_attempts": 2})
    for name in ("state_change", "retry", "dead_letter", "shutdown", "reconnected"):
        service.on(name, broken)
    async with service:
        await service.send("orders", 1)
        await virtual_clock.advance(10)
        assert len(await service.dead_letters("orders").list()) == 1
    messages = {record.getMessage() for record in caplog.records}
    for kind in ("StateChanged", "Retried", "DeadLettered", "ShutDown"):
        assert f"a listener of {kind} failed" in messages


async def test_health_logs_and_errors_contain_no_secrets(
    virtual_clock: VirtualClock, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    canary = "canary-7f3a"
    settings = Settings(type="rabbitmq", url=f"amqp://guest:{canary}@localhost:5672/")
    backend = FaultyBackend(virtual_clock)
    service = QueueService(settings, backend=backend, clock=virtual_clock)
    async with service:
        backend.always("publish", BackendUnavailable("refused"))
        with pytest.raises(CircuitOpen) as caught:
            await service.send("orders", 1)
        shown = [repr(service.settings), repr(service.health_check()), repr(service.metrics())]
    assert canary not in "".join([*shown, caplog.text, str(caught.value), repr(caught.value)])


# -- administration --------------------------------------------------------------------------


async def test_queues_are_listed_without_the_prefix_and_without_other_prefixes(
    virtual_clock: VirtualClock,
) -> None:
    async with make(virtual_clock, prefix="staging.") as service:
        await service.send("orders", 1)
        await backend_of(service).declare(QueueSpec(name="production.orders"))
        assert await service.queues() == ["orders", "orders_dlq"]
        assert (await service.stats("orders")).queue == "orders"
        assert [message.channel for message in await service.peek("orders")] == ["orders"]
        assert await service.purge("orders") == 1
        await service.delete("orders")
        assert await service.queues() == ["orders_dlq"]
        assert await backend_of(service).native.queues() == [
            "production.orders",
            "staging.orders_dlq",
        ]


async def test_stats_contain_depth_scheduled_and_in_flight(virtual_clock: VirtualClock) -> None:
    slow_handler = SlowHandler(seconds=100)
    async with make(virtual_clock, slow_handler, prefetch=5) as service:
        await service.send_many("orders", range(7))
        await service.send("orders", 9, delay=1_000)
        await virtual_clock.advance(1)
        stats = await service.stats("orders")
        assert (stats.depth, stats.in_flight, stats.scheduled) == (2, 5, 1)
        assert stats.consumers == 1
        await service.shutdown(timeout=0)


async def test_peek_does_not_consume_messages(virtual_clock: VirtualClock) -> None:
    async with make(virtual_clock) as service:
        sent = [await service.send("orders", n, priority=n, key=f"k{n}", ttl=60) for n in range(3)]
        (top, second) = await service.peek("orders", 2)
        assert (top.id, top.priority, top.key) == (sent[2].message_id, 2, "k2")
        assert top.expires_at is not None
        assert (top.attempt, top.retry_count) == (1, 0)
        assert second.id == sent[1].message_id
        assert (await service.stats("orders")).depth == 3


async def test_purge_deletes_messages_that_are_not_in_flight(virtual_clock: VirtualClock) -> None:
    slow_handler = SlowHandler(seconds=50)
    async with make(virtual_clock, slow_handler, prefetch=5) as service:
        await service.send_many("orders", range(8))
        await virtual_clock.advance(1)
        assert await service.purge("orders") == 3
        await virtual_clock.advance(60)
        assert sorted(slow_handler.done) == [0, 1, 2, 3, 4]


async def test_administration_of_a_missing_queue_raises(virtual_clock: VirtualClock) -> None:
    async with make(virtual_clock) as service:
        for call in (service.stats, service.peek, service.purge, service.delete):
            with pytest.raises(QueueNotFound):
                await call("nothing")
        assert await service.queues() == []


async def test_a_deleted_queue_is_declared_and_consumed_again(
    virtual_clock: VirtualClock,
) -> None:
    slow_handler = SlowHandler()
    async with make(virtual_clock, slow_handler) as service:
        await service.send("orders", 1)
        await virtual_clock.advance(1)
        await service.delete("orders")
        await service.send("orders", 2)
        await virtual_clock.advance(10)
        assert slow_handler.done == [1, 2]
        assert service.ready


async def test_a_backend_without_administration_raises_unsupported(
    virtual_clock: VirtualClock,
) -> None:
    backend = FaultyBackend(virtual_clock, capabilities=Capabilities(depth=Support.NATIVE))
    async with make(virtual_clock, backend=backend) as service:
        await service.send("orders", 1)
        assert (await service.stats("orders")).depth == 1
        for operation in (service.peek, service.purge, service.delete):
            with pytest.raises(Unsupported, match=f"faulty does not support {operation.__name__}"):
                await operation("orders")
        with pytest.raises(Unsupported, match="faulty does not support dead_letters"):
            service.dead_letters("orders")


async def test_a_consumer_that_resubscribes_declares_only_missing_queues(
    virtual_clock: VirtualClock,
) -> None:
    declared: list[QueueSpec] = []

    class Losing(NativeBackend):
        async def declare(self, spec: QueueSpec) -> None:
            declared.append(spec)
            await super().declare(spec)

    @consume("orders")
    async def handle(body: int) -> None: ...

    backend = Losing(clock=virtual_clock)
    service = QueueService(Settings(type="native"), backend=backend, clock=virtual_clock)
    service.register(handle)
    async with service:
        assert [(spec.name, spec.again) for spec in declared] == [
            ("orders_dlq", False),
            ("orders", False),
        ]
        declared.clear()
        await backend.delete("orders")
        await virtual_clock.advance(5)
        assert [(spec.name, spec.again) for spec in declared] == [
            ("orders_dlq", True),
            ("orders", True),
        ]
        assert declared[-1].max_deliveries == 3
        assert await service.queues() == ["orders", "orders_dlq"]
