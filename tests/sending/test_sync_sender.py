"""``service.sync``: blocking sends from other threads, such as those of synchronous handlers."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from qkit import (
    Channel,
    InvalidBody,
    LifecycleError,
    PartialSend,
    QueueService,
    SendTimeout,
    Sent,
    Settings,
    SyncSender,
    consume,
)
from tests.support.faulty import BLACK_HOLE, FaultyBackend
from tests.support.waiting import eventually


def make(*handlers: object, backend: FaultyBackend | None = None, **settings: Any) -> QueueService:
    service = QueueService(Settings(type="native", **settings), backend=backend)
    for handler in handlers:
        service.register(handler)
    return service


async def in_thread(work: Callable[[], object]) -> object:
    """Run a call in a thread without an event loop; return its result or raise its error."""
    return await asyncio.to_thread(work)


# -- sends ---------------------------------------------------------------------------------------


async def test_a_thread_sends_and_gets_the_confirmation() -> None:
    numbers: Channel[int] = Channel("numbers", int)
    async with make() as service:
        assert isinstance(service.sync, SyncSender)
        sent = await in_thread(lambda: service.sync.send(numbers, 1, priority=5))
        assert isinstance(sent, Sent)
        many = await in_thread(lambda: service.sync.send_many(numbers, iter([2, 3]), key="k"))
        assert isinstance(many, list)
        assert len(many) == 2
        await in_thread(lambda: service.sync.publish("prices", 1.5))
        peeked = await service.peek("numbers")
        assert [message.body for message in peeked] == [b"1", b"2", b"3"]
        assert peeked[0].id == sent.message_id
        assert peeked[0].priority == 5
        assert peeked[1].key == "k"
        assert service.metrics().messages_sent == 4


async def test_a_thread_gets_the_same_errors_as_a_caller_of_the_service() -> None:
    numbers: Channel[int] = Channel("numbers", int)
    backend = FaultyBackend()
    async with make(backend=backend, send_timeout=0.2) as service:
        with pytest.raises(InvalidBody):
            await in_thread(lambda: service.sync.send(numbers, "one"))  # type: ignore[misc]
        with pytest.raises(TypeError, match="did you mean 'priority'"):
            await in_thread(lambda: service.sync.send("n", 1, prioriti=1))  # type: ignore[call-overload]
        backend.script("publish", BLACK_HOLE)
        with pytest.raises(SendTimeout):
            await in_thread(lambda: service.sync.send("n", 1))


async def test_a_partial_send_names_the_confirmed_messages() -> None:
    small: Channel[int] = Channel("small", int, max_depth=2)
    async with make() as service:
        service.declare(small)
        with pytest.raises(PartialSend) as caught:
            await in_thread(lambda: service.sync.send_many(small, [1, 2, 3]))
        assert [isinstance(item, Sent) for item in caught.value.results] == [True, True, False]


async def test_an_iterator_is_read_in_the_thread_that_sends() -> None:
    readers: list[threading.Thread] = []

    def rows() -> Iterator[int]:
        for number in range(3):
            readers.append(threading.current_thread())
            yield number

    async with make() as service:
        await in_thread(lambda: service.sync.send_many("rows", rows()))
        assert (await service.stats("rows")).depth == 3
    assert threading.main_thread() not in readers


async def test_an_overridden_send_of_a_subclass_is_used() -> None:
    class Stamped(QueueService):
        async def send(self, channel: Channel[Any] | str, body: object, **options: Any) -> Sent:
            return await super().send(channel, body, headers={"stamp": "yes"}, **options)

    async with Stamped(Settings(type="native")) as service:
        await in_thread(lambda: service.sync.send("orders", 1))
        assert (await service.peek("orders"))[0].headers["stamp"] == "yes"


# -- in handlers ---------------------------------------------------------------------------------


async def test_a_synchronous_handler_sends_before_its_message_is_acked() -> None:
    order: list[str] = []
    got: list[int] = []

    @consume("orders")
    def place(number: int) -> None:
        sent = service.sync.send("invoices", number + 1)
        order.append(f"confirmed {len(sent.message_id) > 0}")

    @consume("invoices")
    async def bill(number: int) -> None:
        got.append(number)

    service = make(place, bill)
    async with service:
        await service.send("orders", 1)
        await eventually(lambda: got)
        await eventually(lambda: service.metrics().in_flight == 0)
        assert (await service.stats("orders")).depth == 0
    assert got == [2]
    assert order == ["confirmed True"]


async def test_a_batch_handler_and_many_threads_can_send_concurrently() -> None:
    got: list[int] = []

    @consume("orders", concurrency=8)
    def place(number: int) -> None:
        service.sync.send("invoices", number)

    @consume("rows", batch_size=10, batch_wait=0.05)
    def store(rows: list[int]) -> None:
        service.sync.send_many("invoices", rows)

    @consume("invoices")
    async def bill(number: int) -> None:
        got.append(number)

    service = make(place, store, bill)
    async with service:
        await service.send_many("orders", range(100))
        await service.send_many("rows", range(100, 120))
        await eventually(lambda: len(got) == 120)
    assert sorted(got) == list(range(120))


async def test_a_handler_sends_while_the_service_drains() -> None:
    begun, gate = threading.Event(), threading.Event()
    sent: list[object] = []

    @consume("orders")
    def place(number: int) -> None:
        begun.set()
        assert gate.wait(60)
        sent.append(service.sync.send("invoices", number))
        sent.append(service.sync.send_many("invoices", [1, 2]))
        sent.append(service.sync.publish("prices", 1.5))

    backend = FaultyBackend()
    service = make(place, backend=backend)
    await service.start()
    await service.send("orders", 1)
    assert await asyncio.to_thread(begun.wait, 60)
    ending = asyncio.create_task(service.shutdown())
    await eventually(lambda: service.stopping and not service.ready)
    await asyncio.sleep(0)
    gate.set()
    await ending
    assert len(sent) == 3
    assert backend.count("ack") == 1


async def test_a_send_from_an_abandoned_handler_raises_after_shutdown() -> None:
    begun, gate, ended = threading.Event(), threading.Event(), threading.Event()
    raised: list[Exception] = []

    @consume("orders")
    def place(number: int) -> None:
        begun.set()
        assert gate.wait(60)
        try:
            service.sync.send("invoices", number)
        except Exception as error:
            raised.append(error)
        ended.set()

    service = make(place)
    await service.start()
    await service.send("orders", 1)
    assert await asyncio.to_thread(begun.wait, 60)
    await service.shutdown(timeout=0)
    gate.set()
    assert await asyncio.to_thread(ended.wait, 60)
    assert isinstance(raised[0], LifecycleError)
    assert "create a new QueueService" in str(raised[0])


def test_a_thread_that_waits_when_the_program_ends_is_woken() -> None:
    """Without a shutdown, asyncio.run cancels the remaining tasks and closes the loop."""
    backend = FaultyBackend()
    service = make(backend=backend)
    outcome: list[BaseException] = []

    def send() -> None:
        try:
            service.sync.send("orders", 1)
        except BaseException as error:
            outcome.append(error)

    thread = threading.Thread(target=send, daemon=True)

    async def main() -> None:
        await service.start()
        backend.script("publish", BLACK_HOLE)
        thread.start()
        await eventually(lambda: backend.count("publish") == 1)

    asyncio.run(main())
    thread.join(60)
    assert not thread.is_alive()
    assert isinstance(outcome[0], LifecycleError)


# -- calls that raise ----------------------------------------------------------------------------


async def test_a_call_in_the_thread_of_the_loop_raises_instead_of_hanging() -> None:
    async with make() as service:
        for call, name in (
            (lambda: service.sync.send("orders", 1), "send"),
            (lambda: service.sync.publish("prices", 1), "publish"),
            (lambda: service.sync.send_many("orders", [1]), "send_many"),
        ):
            with pytest.raises(LifecycleError, match=f"`await service.{name}") as caught:
                call()
            assert caught.value.operation == name
        assert service.metrics().messages_sent == 0


async def test_a_call_before_start_or_after_shutdown_raises() -> None:
    service = make()
    with pytest.raises(LifecycleError, match=r"sync.send\(\) on a service that is new: start it"):
        await in_thread(lambda: service.sync.send("orders", 1))
    async with service:
        pass
    with pytest.raises(LifecycleError, match=r"is closed: .* create a new QueueService"):
        await in_thread(lambda: service.sync.send_many("orders", [1]))


async def test_a_call_after_a_failed_start_raises() -> None:
    backend = FaultyBackend()
    backend.script("start", ConnectionError("no"))
    service = make(backend=backend)
    with contextlib.suppress(Exception):
        await service.start()
    with pytest.raises(LifecycleError, match="start it first"):
        await in_thread(lambda: service.sync.send("orders", 1))


async def test_a_call_during_the_start_raises() -> None:
    backend = FaultyBackend()
    gate = asyncio.Event()
    backend.script("start", gate)
    service = make(backend=backend)
    starting = asyncio.create_task(service.start())
    await eventually(lambda: backend.count("start") == 1)
    with pytest.raises(LifecycleError, match=r"wait until start\(\) has returned"):
        await in_thread(lambda: service.sync.send("orders", 1))
    gate.set()
    await starting
    await service.shutdown()


async def test_a_thread_with_its_own_loop_can_send() -> None:
    async with make() as service:

        async def elsewhere() -> Sent:
            return service.sync.send("orders", 1)

        assert isinstance(await in_thread(lambda: asyncio.run(elsewhere())), Sent)
        assert (await service.stats("orders")).depth == 1


@pytest.mark.skipif(not hasattr(os, "fork"), reason="os.fork is not available")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
async def test_a_call_in_a_forked_process_raises_immediately() -> None:
    async with make() as service:
        child = os.fork()
        if child == 0:  # the child must not continue with pytest
            code = 3
            try:
                service.sync.send("orders", 1)
            except LifecycleError as error:
                code = 0 if "fork" in str(error) else 4
            finally:
                os._exit(code)
        _, status = await asyncio.to_thread(os.waitpid, child, 0)
        assert os.waitstatus_to_exitcode(status) == 0
        assert service.metrics().messages_sent == 0
