"""Conformance scenarios for failing handlers: retries, backoff and final failures."""

from __future__ import annotations

import asyncio
import itertools
import logging
import threading

import pytest

from qkit.backend import Backend
from qkit.conformance.harness import Harness, Serve, requires
from qkit.errors import Reject, Retry
from qkit.handlers.decorators import consume
from qkit.message import Message
from qkit.observability.events import DeadLettered, Retried

__all__ = ["Failure"]

QUICK: dict[str, float] = {"max_attempts": 3, "initial_delay": 0.05, "jitter": 0.0}
ONCE = {"enabled": False}


class Failure(Harness):
    """Scenarios for messages whose handler fails."""

    async def test_a_failing_handler_is_called_exactly_max_attempts_times(
        self, serve: Serve, name: str
    ) -> None:
        attempts: list[int] = []
        limits: set[int] = set()

        @consume(name)
        async def fail(body: str, message: Message) -> None:
            attempts.append(message.attempt)
            limits.add(message.max_attempts)
            raise ValueError("no")

        service = await serve(fail, retry=QUICK)
        await service.send(name, "a")
        await self.until(lambda: service.metrics().messages_failed == 1)
        await self.elapse(0.3)
        assert attempts == [1, 2, 3]
        assert limits == {3}

    async def test_backoff_grows_up_to_its_limit_and_no_retry_is_early(
        self, serve: Serve, name: str
    ) -> None:
        loop = asyncio.get_running_loop()
        called: list[float] = []
        events: list[Retried] = []

        @consume(name)
        async def fail(body: str) -> None:
            called.append(loop.time())
            raise ValueError("no")

        backoff = {"initial_delay": 0.4, "multiplier": 2.0, "max_delay": 1.0, "jitter": 0.0}
        service = await serve(fail, retry={"max_attempts": 4, **backoff})
        service.on("retry", events.append)
        await service.send(name, "a")
        await self.until(lambda: len(called) == 4)
        waits = [later - earlier for earlier, later in itertools.pairwise(called)]
        assert [event.delay for event in events] == [0.4, 0.8, 1.0]
        for waited, wanted in zip(waits, (0.4, 0.8, 1.0), strict=True):
            assert self.on_time(waited, wanted), f"expected to wait {wanted} s, got {waited:.3f} s"

    async def test_a_message_that_succeeds_after_retries_is_acknowledged(
        self, serve: Serve, name: str
    ) -> None:
        attempts: list[int] = []

        @consume(name)
        async def recover(body: str, message: Message) -> None:
            attempts.append(message.attempt)
            if message.attempt < 3:
                raise ValueError("not yet")

        service = await serve(recover, retry=QUICK)
        await service.send(name, "a")
        await self.until(lambda: len(attempts) == 3)
        await self.elapse(0.3)
        assert attempts == [1, 2, 3]
        metrics = service.metrics()
        assert (metrics.messages_retried, metrics.messages_failed) == (2, 0)
        assert metrics.messages_dead_lettered == 0

    @requires("dead_letters")
    async def test_without_retry_the_first_failure_is_final(self, serve: Serve, name: str) -> None:
        attempts: list[int] = []

        @consume(name)
        async def fail(body: str, message: Message) -> None:
            attempts.append(message.attempt)
            raise ValueError("no")

        service = await serve(fail, retry=ONCE)
        await service.send(name, "a")
        (letter,) = await self.letters(service, name)
        assert (letter.reason, letter.attempts) == ("MaxRetriesExceeded", 1)
        assert attempts == [1]
        assert service.metrics().messages_retried == 0

    async def test_a_handler_can_choose_the_retry_delay(self, serve: Serve, name: str) -> None:
        loop = asyncio.get_running_loop()
        called: list[float] = []

        @consume(name)
        async def later(body: str) -> None:
            called.append(loop.time())
            if len(called) == 1:
                raise Retry("busy", delay=1.2)

        service = await serve(later, retry=QUICK)
        await service.send(name, "a")
        await self.until(lambda: len(called) == 2)
        assert self.on_time(called[1] - called[0], 1.2)

    @requires("dead_letters")
    async def test_a_requested_retry_counts_as_a_failed_attempt(
        self, serve: Serve, name: str
    ) -> None:
        @consume(name)
        async def never(body: str) -> None:
            raise Retry("busy", delay=0.01)

        service = await serve(never, retry=QUICK)
        await service.send(name, "a")
        (letter,) = await self.letters(service, name)
        assert (letter.reason, letter.error_type) == ("MaxRetriesExceeded", "Retry")
        assert (letter.error, letter.attempts) == ("busy", 3)

    @requires("dead_letters")
    async def test_a_rejected_message_is_dead_lettered_without_a_retry(
        self, serve: Serve, name: str
    ) -> None:
        attempts: list[int] = []

        @consume(name)
        async def reject(body: str, message: Message) -> None:
            attempts.append(message.attempt)
            raise Reject("negative total")

        service = await serve(reject, retry=QUICK)
        await service.send(name, "a")
        (letter,) = await self.letters(service, name)
        assert (letter.reason, letter.error) == ("ExplicitNack", "negative total")
        assert (letter.attempts, attempts) == (1, [1])

    @requires("dead_letters")
    async def test_an_undecodable_body_is_dead_lettered_without_a_retry(
        self, serve: Serve, backend: Backend, name: str
    ) -> None:
        handled: list[dict[str, int]] = []

        @consume(name)
        async def handle(body: dict[str, int]) -> None:
            handled.append(body)

        service = await serve(handle, retry=QUICK)
        (bad,) = await self.put(backend, name, "{broken")
        await service.send(name, {"good": 1})
        (letter,) = await self.letters(service, name)
        assert (letter.message_id, letter.body) == (bad, b"{broken")
        assert (letter.reason, letter.attempts) == ("Undecodable", 1)
        await self.until(lambda: handled)
        assert handled == [{"good": 1}], "the next message is handled"
        assert service.metrics().messages_retried == 0

    @requires("dead_letters")
    async def test_a_body_of_the_wrong_type_is_dead_lettered_as_undecodable(
        self, serve: Serve, name: str
    ) -> None:
        called: list[object] = []

        @consume(name)
        async def count(body: int) -> None:
            called.append(body)

        service = await serve(count, retry=QUICK)
        untyped_sender = await serve()  # declares no type for the channel
        await untyped_sender.send(name, {"not": "a number"})
        (letter,) = await self.letters(service, name)
        assert letter.reason == "Undecodable"
        assert called == []

    @requires("dead_letters")
    async def test_only_errors_listed_in_retry_on_are_retried(
        self, serve: Serve, name: str
    ) -> None:
        attempts: dict[str, int] = {}

        @consume(name, retry_on=[ConnectionError])
        async def fail(body: str, message: Message) -> None:
            attempts[body] = message.attempt
            raise ConnectionResetError("connection reset") if body == "again" else KeyError("final")

        service = await serve(fail, retry=QUICK)
        await service.send(name, "again")
        await service.send(name, "final")
        letters = await self.letters(service, name, 2)
        assert attempts == {"again": 3, "final": 1}
        assert {letter.reason for letter in letters} == {"MaxRetriesExceeded"}

    @requires("dead_letters")
    async def test_errors_listed_in_dead_on_are_not_retried(self, serve: Serve, name: str) -> None:
        attempts: dict[str, int] = {}

        @consume(name, dead_on=[LookupError])
        async def fail(body: str, message: Message) -> None:
            attempts[body] = message.attempt
            raise ValueError("again") if body == "again" else KeyError("final")

        service = await serve(fail, retry=QUICK)
        await service.send(name, "again")
        await service.send(name, "final")
        letters = await self.letters(service, name, 2)
        assert attempts == {"again": 3, "final": 1}
        reasons = {letter.error: letter.reason for letter in letters}
        assert reasons == {"again": "MaxRetriesExceeded", "'final'": "Rejected"}

    @requires("dead_letters")
    async def test_a_handler_that_times_out_fails(self, serve: Serve, name: str) -> None:
        attempts: list[int] = []
        cancelled: list[int] = []

        @consume(name, timeout=0.3)
        async def hang(body: str, message: Message) -> None:
            attempts.append(message.attempt)
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                cancelled.append(message.attempt)
                raise

        service = await serve(hang, retry={**QUICK, "max_attempts": 2})
        await service.send(name, "a")
        (letter,) = await self.letters(service, name)
        assert (letter.reason, letter.error_type) == ("MaxRetriesExceeded", "HandlerTimeout")
        assert attempts == cancelled == [1, 2]

    @requires("dead_letters")
    async def test_a_synchronous_handler_that_times_out_fails_and_keeps_its_slot(
        self, serve: Serve, name: str
    ) -> None:
        called: list[str] = []
        release = threading.Event()

        @consume(name, timeout=0.3)
        def hang(body: str) -> None:
            called.append(body)
            if body == "first":
                release.wait(30)

        service = await serve(hang, retry=ONCE)
        try:
            await service.send(name, "first")
            await self.until_threads(lambda: called)
            (letter,) = await self.letters(service, name)
            assert letter.error_type == "HandlerTimeout"
            await service.send(name, "second")
            await self.elapse(0.3)
            assert called == ["first"], "the thread still runs, so its slot is in use"
        finally:
            release.set()
        await self.until_threads(lambda: called == ["first", "second"])
        await self.elapse(0.1)
        await self.letters(service, name, 1)

    @requires("dead_letters")
    async def test_a_timeout_error_raised_by_the_handler_is_an_ordinary_error(
        self, serve: Serve, name: str
    ) -> None:
        @consume(name, timeout=30)
        async def fail(body: str) -> None:
            raise TimeoutError("the database did not respond")

        service = await serve(fail, retry=ONCE)
        await service.send(name, "a")
        (letter,) = await self.letters(service, name)
        assert letter.error_type == "TimeoutError"
        assert letter.error == "the database did not respond"

    async def test_a_retried_message_is_unchanged(self, serve: Serve, name: str) -> None:
        seen: list[tuple[object, ...]] = []

        @consume(name)
        async def fail(body: dict[str, int], message: Message) -> None:
            tenant = message.headers.get("tenant")
            metadata = (body, message.id, message.body, tenant, message.key, message.priority)
            seen.append((*metadata, message.expires_at))
            raise ValueError("no")

        service = await serve(fail, retry=QUICK)
        sent = await service.send(
            name,
            {"a": 1},
            headers={"tenant": "acme"},
            key="k",
            priority=7 if self.column.priority else None,
            ttl=600 if self.column.ttl else None,
        )
        await self.until(lambda: len(seen) == 3)
        first = seen[0]
        assert first[:2] == ({"a": 1}, sent.message_id)
        assert first[3:5] == ("acme", "k")
        assert first[5] == (7 if self.column.priority else first[5])
        assert (first[6] is not None) == self.column.supports("ttl")
        for later in seen[1:]:
            assert later[:6] == first[:6]
            # Brokers store times in milliseconds.
            assert later[6] == (first[6] and pytest.approx(first[6], abs=0.002))

    @requires("delay", "redelivery")
    async def test_a_message_waiting_for_its_retry_takes_no_slot(
        self, serve: Serve, name: str
    ) -> None:
        called: list[str] = []

        @consume(name)
        async def handle(body: str, message: Message) -> None:
            called.append(f"{body}{message.attempt}")
            if body == "bad" and message.attempt == 1:
                raise Retry(delay=1.0)

        service = await serve(handle)
        await service.send(name, "bad")
        await service.send(name, "good")
        await self.until(lambda: len(called) == 3)
        assert called == ["bad1", "good1", "bad2"]

    @requires("dead_letters", "ttl")
    async def test_no_inline_retry_begins_after_the_message_has_expired(
        self, serve: Serve, name: str
    ) -> None:
        attempts: list[int] = []

        @consume(name)
        async def fail(body: str, message: Message) -> None:
            attempts.append(message.attempt)
            raise ValueError("not yet")

        retry = {"mode": "inline", "max_attempts": 50, "initial_delay": 0.4, "multiplier": 1.0}
        service = await serve(fail, retry={**retry, "jitter": 0})
        await service.send(name, "a", ttl=1.0)
        (letter,) = await self.letters(service, name)
        assert (letter.reason, letter.attempts) == ("TTLExpired", len(attempts))
        assert 1 <= len(attempts) <= 3
        assert letter.last_failed_at - letter.first_failed_at <= 1.0 + self.late(0.05)

    @requires("dead_letters")
    async def test_a_shutdown_begins_no_inline_retry_and_does_not_wait_for_one(
        self, serve: Serve, name: str
    ) -> None:
        attempts: list[int] = []

        @consume(name)
        async def fail(body: str, message: Message) -> None:
            attempts.append(message.attempt)
            raise ValueError("not yet")

        retry = {"mode": "inline", "max_attempts": 9, "initial_delay": 300, "max_delay": 300}
        service = await serve(fail, retry=retry, shutdown={"timeout": 200})
        await service.send(name, "a")
        await self.until(lambda: attempts)
        async with asyncio.timeout(20):
            await service.shutdown()
        assert attempts == [1]
        other = await serve(fail, retry=retry)
        if self.column.redelivery:
            await self.until(lambda: len(attempts) == 2)
            assert attempts == [1, 1], "the message goes back, and no attempt is counted"
        else:  # it cannot go back, and must not be lost
            (letter,) = await self.letters(other, name)
            assert letter.error == "not yet"

    async def test_inline_retries_keep_the_order_and_are_counted(
        self, serve: Serve, name: str
    ) -> None:
        called: list[str] = []

        @consume(name)
        async def handle(body: str, message: Message) -> None:
            called.append(f"{body}{message.attempt}")
            if body == "a":
                raise ValueError("no")

        service = await serve(handle, retry={**QUICK, "mode": "inline"})
        for body in "ab":
            await service.send(name, body)
        await self.until(lambda: len(called) == 4)
        assert called == ["a1", "a2", "a3", "b1"]
        metrics = service.metrics()
        assert (metrics.messages_retried, metrics.messages_failed) == (2, 1)

    async def test_without_dead_letters_a_final_failure_is_logged_acknowledged_and_counted(
        self, serve: Serve, name: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        called: list[str] = []
        dead_lettered: list[DeadLettered] = []

        @consume(name, dead_letter=False)
        async def fail(body: str) -> None:
            called.append(body)
            raise ValueError("no")

        service = await serve(fail, retry=ONCE)
        service.on("dead_letter", dead_lettered.append)
        sent = await service.send(name, "a")
        await self.until(lambda: dead_lettered)
        await self.elapse(0.3)
        assert called == ["a"]
        assert [(event.letter.message_id, event.kept) for event in dead_lettered] == [
            (sent.message_id, False)
        ]
        metrics = service.metrics()
        assert (metrics.messages_failed, metrics.messages_dead_lettered) == (1, 0)
        errors = [item for item in caplog.records if item.levelno >= logging.ERROR]
        assert any(sent.message_id in item.getMessage() for item in errors)

    @requires("dead_letters")
    async def test_each_failure_emits_an_event_and_is_counted(
        self, serve: Serve, name: str
    ) -> None:
        retries: list[Retried] = []
        dead_lettered: list[DeadLettered] = []

        @consume(name)
        async def fail(body: str) -> None:
            raise ValueError("no")

        service = await serve(fail, retry=QUICK)
        service.on("retry", retries.append)
        service.on("dead_letter", dead_lettered.append)
        sent = await service.send(name, "a")
        await self.letters(service, name)
        await self.until(lambda: dead_lettered)
        assert [(event.channel, event.message_id, event.attempt) for event in retries] == [
            (name, sent.message_id, 1),
            (name, sent.message_id, 2),
        ]
        assert all(isinstance(event.error, ValueError) for event in retries)
        (event,) = dead_lettered
        assert (event.kept, event.letter.message_id) == (True, sent.message_id)
        metrics = service.metrics().channels[name]
        assert (metrics.messages_retried, metrics.messages_failed) == (2, 1)
        assert (metrics.messages_dead_lettered, metrics.in_flight) == (1, 0)
