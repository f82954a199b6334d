"""The executor: parameters, threads, timeouts, middleware, batches and outcomes."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import functools
import itertools
import threading
import types
from typing import Annotated

import pytest
from pydantic import BaseModel, Field

from qkit import (
    BatchError,
    Channel,
    Header,
    Message,
    Reject,
    Retry,
    RetrySettings,
    Unavailable,
    channel,
    consume,
)
from qkit.errors import HandlerError
from qkit.message import Envelope
from tests.support.backends import ScriptedBackend
from tests.support.services import failures, make_service, only_letter, until

ONCE = RetrySettings(max_attempts=1)


class Order(BaseModel):
    id: int


class Calls(list):
    """A handler that records the bodies of its calls, in order."""

    async def __call__(self, body: object) -> None:
        self.append(body)


# -- parameters --------------------------------------------------------------------------------


async def test_parameters_come_from_the_body_the_message_and_the_headers(clock):
    calls = Calls()

    @consume("orders")
    async def handle(
        order: Order,
        /,
        message: Message,
        tenant: Annotated[str, Header("x-tenant")],
        *,
        weight: Annotated[int, Header()],
        max_age: Annotated[float | None, Header()] = None,
    ) -> None:
        calls.append((order, message, tenant, weight, max_age))

    async with make_service(handle, clock=clock) as service:
        headers = {"x-tenant": "acme", "weight": "5"}
        sent = await service.send("orders", Order(id=1), key="k", priority=7, headers=headers)
        await service.send("orders", Order(id=2), headers={**headers, "max-age": "2.5"})
        await clock.advance(1)
    (order, message, tenant, weight, max_age), second = calls
    assert (order, tenant, weight, max_age) == (Order(id=1), "acme", 5, None)
    assert isinstance(message, Message)
    assert (message.id, message.channel, message.body) == (sent.message_id, "orders", b'{"id":1}')
    assert (message.key, message.priority, message.headers) == ("k", 7, headers)
    assert (message.attempt, message.max_attempts, message.retry_count) == (1, 3, 0)
    assert second[-1] == 2.5


@pytest.mark.parametrize(
    ("headers", "word"),
    [
        ({}, "header 'weight' is missing"),
        ({"weight": "heavy"}, "header 'weight': Input should be a valid integer"),
        ({"weight": "-1"}, "header 'weight': Input should be greater than 0"),
    ],
)
async def test_an_invalid_header_makes_the_message_undecodable(clock, headers, word):
    calls = Calls()

    @consume("orders")
    async def handle(order: dict, weight: Annotated[int, Field(gt=0), Header("weight")]) -> None:
        calls.append(order)

    async with make_service(handle, clock=clock) as service:
        await service.send("orders", {}, headers=headers)
        await clock.advance(1)
        letter = await only_letter(service, "orders")
        assert failures(service, "orders") == (0, 1, 1)
    assert (letter.reason, letter.attempts, letter.error_type) == ("Undecodable", 1, "DecodeError")
    assert letter.error is not None
    assert letter.error.startswith(word)
    assert calls == []


@pytest.mark.parametrize("body", [b"not json", b'{"id": "x"}', b"[]", b"\xff"])
async def test_an_undecodable_body_is_dead_lettered_without_a_retry(clock, body):
    calls = Calls()
    orders = Channel("orders", bytes)

    @consume("orders")
    async def handle(order: Order) -> None:
        calls.append(order)

    async with make_service(handle, clock=clock) as service:
        await service.send(orders, body)
        await clock.advance(1)
        letter = await only_letter(service, "orders")
    assert (letter.reason, letter.attempts, letter.body) == ("Undecodable", 1, body)
    assert calls == []


async def test_an_unsupported_header_type_is_rejected_at_start():
    class Opaque: ...

    def handle(body: dict, thing: Annotated[object, Header()]) -> None: ...

    handle.__annotations__["thing"] = Annotated[Opaque, Header()]
    service = make_service(consume("orders")(handle))
    with pytest.raises(HandlerError, match="parameter 'thing': a header cannot be converted"):
        await service.start()


async def test_a_handler_without_a_body_accepts_any_bytes(clock):
    calls = Calls()

    @consume("orders")
    async def handle(message: Message) -> None:
        calls.append(message.body)

    backend = ScriptedBackend()
    async with make_service(handle, clock=clock, backend=backend):
        backend.put("orders", Envelope("1", b"\xff not json"))
        await clock.advance(1)
    assert calls == [b"\xff not json"]
    assert backend.of("ack") == [("ack", "1")]


@pytest.mark.proves("003-speed-9")
async def test_a_compressed_body_is_decompressed_for_handler_and_message(clock):
    calls = Calls()

    @consume("orders")
    async def handle(order: dict, message: Message) -> None:
        calls.append((order, message.body, dict(message.headers)))

    async with make_service(handle, clock=clock, compression="gzip") as service:
        await service.send("orders", {"text": "x" * 5000})
        await clock.advance(1)
    ((order, body, headers),) = calls
    assert order == {"text": "x" * 5000}
    assert len(body) > 5000
    assert "content-encoding" not in headers


@pytest.mark.parametrize("batch_size", [None, 5])
async def test_a_body_that_does_not_match_its_encoding_is_undecodable(clock, batch_size):
    @consume("orders", batch_size=batch_size)
    async def handle(order: list[dict], messages: list[Message]) -> None: ...

    @consume("orders")
    async def single(order: dict, message: Message) -> None: ...

    backend = ScriptedBackend()
    target = handle if batch_size else single
    async with make_service(target, clock=clock, backend=backend):
        backend.put("orders", Envelope("1", b"plain", {"content-encoding": "gzip"}))
        await clock.advance(2)
        (letter,) = backend.queues["orders_dlq"]
    assert letter.headers["qkit-dead-reason"] == "Undecodable"


# -- synchronous handlers ----------------------------------------------------------------------


async def test_a_synchronous_handler_runs_in_a_thread_with_the_context_of_its_message():
    colour: contextvars.ContextVar[str] = contextvars.ContextVar("colour", default="none")
    seen: list[object] = []

    async def paint(message, call_next):
        colour.set(message.headers["colour"])
        return await call_next(message)

    @consume("orders")
    def handle(order: dict, *, message: Message) -> None:
        seen.append((order, message.attempt, colour.get(), threading.current_thread()))

    async with make_service(handle, middleware=[paint]) as service:
        await service.send("orders", {}, headers={"colour": "red"})
        await until(lambda: service.metrics().channels["orders"].in_flight == 0 and seen)
        await service.send("orders", {}, headers={"colour": "blue"})
        await until(lambda: len(seen) == 2)
    assert [item[:3] for item in seen] == [({}, 1, "red"), ({}, 1, "blue")]  # type: ignore[index]
    assert seen[0][3] is not threading.main_thread()  # type: ignore[index]


@pytest.mark.parametrize(
    ("failure", "error_type"), [(ValueError, "ValueError"), (StopIteration, "RuntimeError")]
)
async def test_an_error_in_a_synchronous_handler_is_a_failure(failure, error_type):
    @consume("orders", retry=ONCE)
    def handle(order: dict) -> None:
        raise failure("broken")

    async with make_service(handle) as service:
        await service.send("orders", {})
        await until(lambda: failures(service, "orders") == (0, 1, 1))
        letter = await only_letter(service, "orders")
    assert (letter.reason, letter.error_type) == ("MaxRetriesExceeded", error_type)


async def test_a_coroutine_returned_by_a_synchronous_handler_is_awaited():
    gate, began = asyncio.Event(), Calls()

    @consume("orders", retry=ONCE)
    def handle(order: int) -> object:
        async def work() -> None:
            began.append(order)
            await gate.wait()
            raise ValueError("late")

        return work()

    async with make_service(handle) as service:
        await service.send("orders", 1)
        await until(lambda: began)
        assert (await service.stats("orders")).in_flight == 1
        gate.set()
        await until(lambda: failures(service, "orders") == (0, 1, 1))


async def test_an_async_wrapper_around_a_synchronous_function_is_awaited(clock):
    calls = Calls()

    def slowly(function):
        @functools.wraps(function)
        async def wrapper(*args, **kwargs):
            await asyncio.sleep(5)
            return function(*args, **kwargs)

        return wrapper

    @consume("orders")
    @slowly
    def handle(order: dict) -> None:
        calls.append(order)

    async with make_service(handle, clock=clock) as service:
        await service.send("orders", {"id": 1})
        await clock.advance(6)
        assert calls == [{"id": 1}]


class Gate:
    """A synchronous handler that blocks its thread until ``open`` is set."""

    def __init__(self) -> None:
        self.open = threading.Event()
        self.began: list[object] = []
        self.most = 0
        self._running = 0

    def __call__(self, body: object) -> None:
        self._running += 1
        self.most = max(self.most, self._running)
        self.began.append(body)
        self.open.wait(60)
        self._running -= 1


async def test_a_timed_out_thread_keeps_its_slot_while_its_message_is_settled(clock):
    gate = Gate()
    # The timeout is short because real time passes while a thread runs.
    handle = consume("orders", timeout=0.05, retry=ONCE)(gate)
    async with make_service(handle, clock=clock) as service:
        await service.send_many("orders", ["first", "second"])
        await until(lambda: gate.began)
        await clock.advance(0.1)
        letter = await only_letter(service, "orders")  # settled at the timeout
        assert letter.error_type == "HandlerTimeout"
        await clock.advance(0.1)
        assert gate.began == ["first"]  # the slot is still occupied
        gate.open.set()
        await until(lambda: gate.began == ["first", "second"])
        await until(lambda: service.metrics().channels["orders"].in_flight == 0)
    assert gate.most == 1


async def test_an_inline_retry_waits_for_the_thread_of_the_previous_attempt(clock):
    gate = Gate()
    handle = consume(
        "orders",
        timeout=0.05,
        retry=RetrySettings(mode="inline", max_attempts=2, initial_delay=0.05, jitter=0),
    )(gate)
    async with make_service(handle, clock=clock) as service:
        await service.send("orders", "first")
        await until(lambda: gate.began)
        await clock.advance(0.2)
        assert gate.began == ["first"]
        gate.open.set()
        await until(lambda: gate.began == ["first", "first"])
        await until(lambda: service.metrics().channels["orders"].in_flight == 0)
    assert gate.most == 1


# -- timeouts and cancellation -----------------------------------------------------------------


async def letter_of(handler, clock, wait: float = 60.0):
    """Send one message to a handler of ``orders`` and return its dead letter."""
    async with make_service(handler, clock=clock) as service:
        await service.send("orders", {})
        await clock.advance(wait)
        return await only_letter(service, "orders")


async def test_a_handler_fails_at_its_timeout(clock):
    @consume("orders", timeout=5, retry=ONCE)
    async def handle(order: dict) -> None:
        await asyncio.sleep(100)

    began = clock.time()
    letter = await letter_of(handle, clock)
    assert (letter.reason, letter.error_type) == ("MaxRetriesExceeded", "HandlerTimeout")
    assert letter.last_failed_at - began == 5.0
    assert "ran longer than its timeout of 5 s" in (letter.error or "")


async def test_a_handler_that_ends_before_its_timeout_succeeds(clock):
    calls = Calls()

    @consume("orders", timeout=5)
    async def handle(order: dict) -> None:
        await asyncio.sleep(4.9)
        calls.append(order)

    async with make_service(handle, clock=clock) as service:
        await service.send("orders", {})
        await clock.advance(6)
        assert (await service.stats("orders")).acked_total == 1
    assert calls == [{}]


@pytest.mark.parametrize("timeout", [None, 5])
@pytest.mark.parametrize("batch_size", [None, 1])
async def test_a_timeout_error_raised_by_the_handler_is_not_reported_as_its_timeout(
    clock, timeout, batch_size
):
    @consume("orders", timeout=timeout, batch_size=batch_size, retry=ONCE)
    async def handle(order: list[object]) -> None:
        async with asyncio.timeout(1):
            await asyncio.sleep(100)

    backend = ScriptedBackend()
    async with make_service(handle, clock=clock, backend=backend):
        backend.put("orders", Envelope("1", b"[]"))
        await clock.advance(10)
        (letter,) = backend.queues["orders_dlq"]
    assert letter.headers["qkit-dead-error-type"] == "TimeoutError"


@pytest.mark.parametrize("batch_size", [None, 1])
async def test_a_handler_that_swallows_its_timeout_fails(clock, batch_size):
    @consume("orders", timeout=5, batch_size=batch_size, retry=ONCE)
    async def handle(order: list[object]) -> None:
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(100)

    backend = ScriptedBackend()
    async with make_service(handle, clock=clock, backend=backend):
        backend.put("orders", Envelope("1", b"[]"))
        await clock.advance(10)
        (letter,) = backend.queues["orders_dlq"]
    assert letter.headers["qkit-dead-error-type"] == "HandlerTimeout"


async def cancelled_inside(order: list[object]) -> None:
    task = asyncio.create_task(asyncio.sleep(100))
    asyncio.get_running_loop().call_soon(task.cancel)
    await task


async def cancels_itself(order: list[object]) -> None:
    task = asyncio.current_task()
    assert task is not None
    task.cancel()
    await asyncio.sleep(1)


@pytest.mark.parametrize("batch_size", [None, 1])
@pytest.mark.parametrize("timeout", [None, 5])
@pytest.mark.parametrize("handler", [cancelled_inside, cancels_itself])
async def test_a_cancellation_inside_the_handler_is_a_failure_and_does_not_end_the_worker(
    clock, handler, batch_size, timeout
):
    function = types.FunctionType(handler.__code__, handler.__globals__)  # decorated only here
    function.__annotations__ = handler.__annotations__
    handle = consume("orders", batch_size=batch_size, timeout=timeout, retry=ONCE)(function)
    backend = ScriptedBackend()
    async with make_service(handle, clock=clock, backend=backend) as service:
        for number in range(3):
            backend.put("orders", Envelope(str(number), b"[]"))
            await clock.advance(2)
        letters = backend.queues["orders_dlq"]
        assert [letter.id for letter in letters] == ["0", "1", "2"]
        assert "the handler raised CancelledError" in letters[0].headers["qkit-dead-error"]
        assert service.ready


async def test_a_handler_that_cancels_its_worker_does_not_affect_the_next_message(clock):
    async def fail() -> None:
        raise ValueError("child")

    @consume("orders", retry=ONCE)
    async def handle(body: str) -> None:
        if body == "first":
            await cancels_itself([])
        async with asyncio.TaskGroup() as tasks:  # depends on the cancellation count of its task
            tasks.create_task(fail())

    async with make_service(handle, clock=clock) as service:
        await service.send_many("orders", ["first", "second"])
        await clock.advance(5)
        letters = await service.dead_letters("orders").list()
    assert [letter.error_type for letter in letters] == ["QueueError", "ExceptionGroup"]


# -- middleware --------------------------------------------------------------------------------


async def test_middleware_of_the_service_is_outermost(clock):
    order: list[str] = []

    def named(name):
        async def middleware(message, call_next):
            order.append(f"{name} in")
            result = await call_next(message)
            order.append(f"{name} out")
            return result

        return middleware

    @consume("orders", middleware=[named("channel 1"), named("channel 2")])
    async def handle(body: dict) -> None:
        order.append("handler")

    async with make_service(
        handle, clock=clock, middleware=[named("service 1"), named("service 2")]
    ) as service:
        await service.send("orders", {})
        await clock.advance(1)
    names = ["service 1", "service 2", "channel 1", "channel 2"]
    assert order == [
        *(f"{name} in" for name in names),
        "handler",
        *(f"{name} out" for name in reversed(names)),
    ]


async def test_middleware_may_rewrite_the_body_and_see_the_result(clock):
    calls, results = Calls(), []

    async def upside_down(message, call_next):
        results.append(await call_next(message.replace(body=message.body[::-1])))

    @consume("orders", middleware=[upside_down])
    async def handle(body: int, message: Message) -> str:
        calls.append((body, message.body))
        return "handled"

    async with make_service(handle, clock=clock) as service:
        await service.send("orders", 123)
        await clock.advance(1)
    assert calls == [(321, b"321")]
    assert results == ["handled"]


async def test_an_invalid_body_from_middleware_is_dead_lettered_with_the_sent_body(clock):
    async def spoil(message, call_next):
        return await call_next(message.replace(body=b"{"))

    @consume("orders", middleware=[spoil])
    async def handle(body: int) -> None: ...

    async with make_service(handle, clock=clock) as service:
        await service.send("orders", 5)
        await clock.advance(1)
        letter = await only_letter(service, "orders")
    assert (letter.reason, letter.body) == ("Undecodable", b"5")


async def test_middleware_that_does_not_call_next_acks_the_message(clock):
    calls = Calls()

    async def seen_before(message, call_next):
        return None

    handle = consume("orders", middleware=[seen_before])(calls)
    async with make_service(handle, clock=clock) as service:
        await service.send("orders", {})
        await clock.advance(1)
        assert (await service.stats("orders")).acked_total == 1
    assert calls == []


async def test_an_error_in_middleware_is_treated_like_a_handler_error(clock):
    calls = Calls()

    async def reject(message, call_next):
        raise Reject("not today")

    handle = consume("orders", middleware=[reject])(calls)
    async with make_service(handle, clock=clock) as service:
        await service.send("orders", {})
        await clock.advance(1)
        letter = await only_letter(service, "orders")
    assert (letter.reason, letter.error) == ("ExplicitNack", "not today")
    assert calls == []


async def test_the_timeout_includes_middleware(clock):
    async def slow(message, call_next):
        await asyncio.sleep(100)

    handle = consume("orders", timeout=5, retry=ONCE, middleware=[slow])(Calls())
    assert (await letter_of(handle, clock)).error_type == "HandlerTimeout"


# -- outcomes ----------------------------------------------------------------------------------


class Failing:
    """A handler that raises the given errors in turn and records its attempts."""

    def __init__(self, clock, *errors: BaseException | None) -> None:
        self.clock = clock
        self.errors = list(errors)
        self.times: list[float] = []
        self.attempts: list[int] = []

    async def __call__(self, body: object, message: Message) -> None:
        self.times.append(self.clock.time())
        self.attempts.append(message.attempt)
        error = self.errors[min(len(self.times), len(self.errors)) - 1]
        if error is not None:
            raise error

    def waits(self) -> list[float]:
        return [later - earlier for earlier, later in itertools.pairwise(self.times)]


@pytest.mark.proves("003-retry-1", "003-retry-5")
@pytest.mark.parametrize("mode", ["release", "inline"])
async def test_a_failing_message_is_retried_with_exact_backoff_and_then_dead_lettered(clock, mode):
    failing = Failing(clock, ValueError("one"), ValueError("two"), KeyError("three"))
    retry = RetrySettings(
        max_attempts=5, initial_delay=1, multiplier=3, max_delay=10, jitter=0, mode=mode
    )
    handle = consume("orders", retry=retry)(failing)
    retries: list[tuple[int, float]] = []
    async with make_service(handle, clock=clock) as service:
        service.on("retry", lambda event: retries.append((event.attempt, event.delay)))
        await service.send("orders", {"id": 1})
        await clock.advance(100)
        letter = await only_letter(service, "orders")
        assert failures(service, "orders") == (4, 1, 1)
        assert (await service.stats("orders")).acked_total == 1
    assert failing.attempts == [1, 2, 3, 4, 5]
    assert failing.waits() == [1, 3, 9, 10]
    assert retries == [(1, 1), (2, 3), (3, 9), (4, 10)]
    assert (letter.reason, letter.error_type) == ("MaxRetriesExceeded", "KeyError")
    assert letter.attempts == 5
    assert letter.first_failed_at == failing.times[0]
    assert letter.last_failed_at == failing.times[-1]
    assert letter.body == b'{"id":1}'
    assert letter.headers == {}


@pytest.mark.parametrize("mode", ["release", "inline"])
async def test_a_message_that_succeeds_after_a_retry_is_acked(clock, mode):
    failing = Failing(clock, ValueError(), ValueError(), None)
    handle = consume("orders", retry=RetrySettings(mode=mode, jitter=0))(failing)
    async with make_service(handle, clock=clock) as service:
        await service.send("orders", {})
        await clock.advance(100)
        assert failures(service, "orders") == (2, 0, 0)
        assert await service.dead_letters("orders").list() == []
    assert failing.waits() == [1, 2]


async def test_jitter_only_adds_to_the_delay(clock):
    failing = Failing(clock, ValueError())
    retry = RetrySettings(max_attempts=20, initial_delay=10, multiplier=1, jitter=0.1)
    async with make_service(consume("orders", retry=retry)(failing), clock=clock) as service:
        await service.send("orders", {})
        await clock.advance(1000)
    assert len(failing.waits()) == 19
    assert all(10 <= wait <= 11 for wait in failing.waits())
    assert len(set(failing.waits())) > 1


@pytest.mark.parametrize(
    ("options", "error", "attempts"),
    [
        ({}, Reject("no"), 1),
        ({"retry_on": [OSError]}, ValueError(), 1),
        ({"retry_on": [OSError]}, ConnectionError(), 3),
        ({"retry_on": [OSError]}, Retry("please"), 3),
        ({"dead_on": [LookupError]}, KeyError(), 1),
        ({"dead_on": [LookupError]}, ValueError(), 3),
        ({"retry_on": [LookupError], "dead_on": [KeyError]}, KeyError(), 1),
        ({"retry_on": [LookupError], "dead_on": [KeyError]}, IndexError(), 3),
        ({"retry": RetrySettings(enabled=False)}, ValueError(), 1),
        ({"retry": RetrySettings(enabled=False)}, Retry(), 1),
        ({}, BatchError({}), 3),
    ],
)
async def test_retry_on_and_dead_on_select_the_retried_failures(clock, options, error, attempts):
    failing = Failing(clock, error)
    async with make_service(consume("orders", **options)(failing), clock=clock) as service:
        await service.send("orders", {})
        await clock.advance(100)
        letter = await only_letter(service, "orders")
    assert len(failing.times) == attempts == letter.attempts
    reason = "Rejected" if isinstance(error, tuple(options.get("dead_on", ()))) else None
    reason = "ExplicitNack" if isinstance(error, Reject) else reason
    assert letter.reason == (reason or "MaxRetriesExceeded")


async def test_a_handler_may_choose_the_delay_of_its_retry(clock):
    failing = Failing(clock, Retry(delay=17), Retry(delay=0), None)
    async with make_service(consume("orders")(failing), clock=clock) as service:
        await service.send("orders", {})
        await clock.advance(100)
        assert failures(service, "orders") == (2, 0, 0)
    assert failing.waits() == [17, 0]


@pytest.mark.parametrize("batch_size", [None, 1])
async def test_an_expired_message_is_not_handled(clock, batch_size):
    calls = Calls()

    @consume("orders", batch_size=batch_size)
    async def handle(body: list[object]) -> None:
        calls.append(body)

    backend = ScriptedBackend()  # a backend that does not check expiry itself
    async with make_service(handle, clock=clock, backend=backend) as service:
        late = Envelope("late", b"[]", expires_at=clock.time())
        backend.put("orders", late, Envelope("in time", b"[]", expires_at=clock.time() + 1))
        await clock.advance(10)
        (letter,) = backend.queues["orders_dlq"]
        assert failures(service, "orders") == (0, 1, 1)
    assert letter.id == "late"
    assert letter.headers["qkit-dead-reason"] == "TTLExpired"
    assert letter.headers["qkit-dead-error-type"] == "TimeToLiveExpired"
    assert letter.headers["qkit-dead-attempts"] == "0", "counted an attempt without a handler call"
    assert len(calls) == 1


async def test_a_message_delivered_too_often_is_dead_lettered_without_calling_the_handler(clock):
    calls = Calls()
    backend = ScriptedBackend()
    async with make_service(consume("orders")(calls), clock=clock, backend=backend):
        backend.put("orders", Envelope("killer", b"{}", attempt=4), Envelope("x", b"{}", attempt=3))
        await clock.advance(1)
        (letter,) = backend.queues["orders_dlq"]
    assert letter.id == "killer"
    assert letter.headers["qkit-dead-reason"] == "MaxRetriesExceeded"
    assert "was never settled" in letter.headers["qkit-dead-error"]
    assert letter.headers["qkit-dead-attempts"] == "3"
    assert letter.headers["qkit-dead-error-type"] == "LeaseExpired"
    assert calls == [{}]


async def test_expired_messages_do_not_delay_the_messages_behind_them(clock):
    calls = Calls()
    backend = ScriptedBackend()
    handler = consume("orders", concurrency=1)(calls)
    stuck = asyncio.Event()
    backend.script("publish", *[stuck] * 5)
    async with make_service(handler, clock=clock, backend=backend, prefetch=10):
        expired = [Envelope(f"expired{n}", b"{}", expires_at=clock.time()) for n in range(5)]
        backend.put("orders", *expired, Envelope("live", b"{}"))
        await clock.advance(1)
        assert calls == [{}], "waited for the dead letters"
        assert "orders_dlq" not in backend.queues or not backend.queues["orders_dlq"]
        stuck.set()
        await clock.advance(1)
        assert sorted(item.id for item in backend.queues["orders_dlq"]) == [e.id for e in expired]
        assert len(backend.of("ack")) == 6


async def test_shutdown_waits_for_the_dead_letters_of_expired_messages(clock):
    backend = ScriptedBackend()
    backend.script("publish", 2.0)
    service = make_service(consume("orders")(Calls()), clock=clock, backend=backend)
    async with service:
        backend.put("orders", Envelope("expired", b"{}", expires_at=clock.time()))
        await clock.advance(1)
        stopping = asyncio.create_task(service.shutdown())
        await clock.advance(5)
        await stopping
    assert [item.id for item in backend.queues["orders_dlq"]] == ["expired"]
    assert backend.of("ack") == [("ack", "expired")]


# -- batches -----------------------------------------------------------------------------------


class Batches:
    """A batch handler that records its batches and their times."""

    def __init__(self, clock, error: object = None) -> None:
        self.clock = clock
        self.error = error
        self.batches: list[list[object]] = []
        self.attempts: list[list[int]] = []
        self.times: list[float] = []

    async def __call__(self, bodies: list[int], messages: list[Message]) -> None:
        self.batches.append(list(bodies))
        self.attempts.append([message.attempt for message in messages])
        self.times.append(self.clock.time())
        error = self.error(bodies, messages) if callable(self.error) else self.error
        if isinstance(error, BaseException):
            raise error


async def test_a_batch_starts_when_it_is_full_or_batch_wait_has_passed(clock):
    batches = Batches(clock)
    handle = consume("orders", batch_size=3, batch_wait=2)(batches)
    async with make_service(handle, clock=clock) as service:
        began = clock.time()
        await service.send_many("orders", [1, 2, 3, 4, 5])
        await clock.advance(1)
        assert batches.batches == [[1, 2, 3]]
        await service.send("orders", 6)
        await clock.advance(0)
        assert batches.batches == [[1, 2, 3], [4, 5, 6]]
        await service.send("orders", 7)
        await clock.advance(10)
        assert batches.batches == [[1, 2, 3], [4, 5, 6], [7]]
        assert (await service.stats("orders")).acked_total == 7
    assert [time - began for time in batches.times] == [0, 1, 3]


async def test_a_waiting_batch_takes_new_messages(clock):
    batches = Batches(clock)
    handle = consume("orders", batch_size=10, batch_wait=2)(batches)
    async with make_service(handle, clock=clock) as service:
        await service.send_many("orders", range(6))
        await clock.advance(1)
        await service.send_many("orders", range(6, 10))
        await clock.advance(0)
        assert batches.batches == [list(range(10))]


async def test_undecodable_messages_are_excluded_from_the_batch(clock):
    batches = Batches(clock)
    handle = consume("orders", batch_size=3, batch_wait=1)(batches)
    raw = Channel("orders", bytes)
    async with make_service(handle, clock=clock) as service:
        await service.send_many(raw, [b"1", b"nonsense", b"3"])
        await clock.advance(2)
        letter = await only_letter(service, "orders")
        assert (await service.stats("orders")).acked_total == 3
    assert batches.batches == [[1, 3]]
    assert (letter.reason, letter.body) == ("Undecodable", b"nonsense")


async def test_a_batch_of_only_undecodable_messages_is_not_handled(clock):
    batches = Batches(clock)
    handle = consume("orders", batch_size=2, batch_wait=1)(batches)
    async with make_service(handle, clock=clock) as service:
        await service.send_many(Channel("orders", bytes), [b"x", b"y"])
        await clock.advance(2)
        assert len(await service.dead_letters("orders").list()) == 2
    assert batches.batches == []


@pytest.mark.parametrize("mode", ["release", "inline"])
async def test_a_failed_batch_is_retried_and_counts_an_attempt_of_every_message(clock, mode):
    batches = Batches(clock, ValueError("all"))
    retry = RetrySettings(max_attempts=2, initial_delay=5, jitter=0, mode=mode)
    handle = consume("orders", batch_size=3, batch_wait=1, retry=retry)(batches)
    async with make_service(handle, clock=clock) as service:
        await service.send_many("orders", [1, 2, 3])
        await clock.advance(20)
        letters = await service.dead_letters("orders").list()
        assert failures(service, "orders") == (3, 3, 3)
    assert batches.batches == [[1, 2, 3], [1, 2, 3]]
    assert batches.attempts == [[1, 1, 1], [2, 2, 2]]
    assert batches.times[1] - batches.times[0] == 5
    assert [(letter.attempts, letter.error) for letter in letters] == [(2, "all")] * 3


@pytest.mark.parametrize("mode", ["release", "inline"])
async def test_a_batch_error_settles_each_message_separately(clock, mode):
    def fail(bodies: list[int], messages: list[Message]) -> Exception | None:
        errors: dict[str, Exception] = {"unknown": ValueError("ignored")}
        for body, message in zip(bodies, messages, strict=True):
            if body == 2:
                errors[message.id] = Reject("two")
            if body == 3 and message.attempt == 1:
                errors[message.id] = ValueError("three")
        return BatchError(errors)

    batches = Batches(clock, fail)
    retry = RetrySettings(initial_delay=5, jitter=0, mode=mode)
    handle = consume("orders", batch_size=4, batch_wait=1, retry=retry)(batches)
    async with make_service(handle, clock=clock) as service:
        await service.send_many("orders", [1, 2, 3, 4])
        await clock.advance(20)
        letter = await only_letter(service, "orders")
        assert failures(service, "orders") == (1, 1, 1)
        assert (await service.stats("orders")).acked_total == 4
    assert batches.batches == [[1, 2, 3, 4], [3]]
    assert (letter.reason, letter.body) == ("ExplicitNack", b"2")


async def test_a_batch_fails_at_its_timeout(clock):
    @consume("orders", batch_size=2, timeout=5, retry=ONCE)
    async def handle(bodies: list[int]) -> None:
        await asyncio.sleep(100)

    async with make_service(handle, clock=clock) as service:
        await service.send_many("orders", [1, 2])
        await clock.advance(20)
        letters = await service.dead_letters("orders").list()
    assert [letter.error_type for letter in letters] == ["HandlerTimeout"] * 2


async def test_a_synchronous_batch_handler_runs_in_a_thread():
    seen: list[object] = []

    @consume("orders", batch_size=2)
    def handle(bodies: list[int]) -> None:
        seen.append((bodies, threading.current_thread() is threading.main_thread()))

    async with make_service(handle) as service:
        await service.send_many("orders", [1, 2])
        await until(lambda: seen)
    assert seen == [([1, 2], False)]


async def test_a_batch_with_an_unavailable_dependency_counts_no_attempt(clock):
    failed: list[object] = []

    def fail(bodies: list[int], messages: list[Message]) -> Exception | None:
        if not failed:
            failed.append(bodies)
            return Unavailable(retry_after=5)
        return None

    batches = Batches(clock, fail)
    handle = consume("orders", batch_size=2, batch_wait=1)(batches)
    async with make_service(handle, clock=clock) as service:
        await service.send_many("orders", [1, 2])
        await clock.advance(20)
        assert failures(service, "orders") == (0, 0, 0)
        assert (await service.stats("orders")).acked_total == 2
    assert batches.batches == [[1, 2], [1], [2]]  # the consumer probes with one message
    assert batches.attempts == [[1, 1], [1], [1]]


async def test_handlers_of_a_class_share_their_instance(clock):
    @channel("orders")
    class Orders:
        def __init__(self) -> None:
            self.total = 0

        @consume
        async def place(self, amount: int) -> None:
            self.total += amount

    orders = Orders()
    async with make_service(orders, clock=clock) as service:
        await service.send_many("orders", [1, 2, 3])
        await clock.advance(1)
    assert orders.total == 6


async def test_handlers_run_inside_a_span_when_tracing_is_on(clock, monkeypatch):
    from opentelemetry import trace
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    spans = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(spans))
    monkeypatch.setattr(trace, "get_tracer_provider", lambda: provider)
    monkeypatch.setattr(trace, "get_tracer", lambda name, *_, **__: provider.get_tracer(name))
    failing = Failing(clock, ValueError("x"), None)
    async with make_service(consume("orders")(failing), clock=clock) as service:
        await service.send("orders", {})
        await clock.advance(10)
    names = [span.name for span in spans.get_finished_spans()]
    assert names == ["send orders", "process orders", "process orders"]
