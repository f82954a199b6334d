"""Conformance scenarios for outages: failed batches, unavailable dependencies, crashes."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from qkit.backend import Backend, Delivery, Subscription
from qkit.conformance.fault_injection import FaultInjectingBackend
from qkit.conformance.harness import Harness, NewBackend, Serve, requires
from qkit.errors import (
    BackendUnavailable,
    BatchError,
    QueueFull,
    Reject,
    SubscriptionLost,
    Unavailable,
)
from qkit.handlers.decorators import consume
from qkit.message import Envelope, Message, Sent

__all__ = ["Outages"]

QUICK: dict[str, float] = {"max_attempts": 3, "initial_delay": 0.05, "jitter": 0.0}
ONCE = {"enabled": False}


class Outages(Harness):
    """Scenarios for failures of a batch, a dependency, the broker or a consumer process."""

    @requires("batch", "dead_letters")
    async def test_a_failed_batch_counts_an_attempt_for_each_message(
        self, serve: Serve, name: str
    ) -> None:
        calls: list[list[tuple[str, int]]] = []

        @consume(name, batch_size=3, batch_wait=0.2)
        async def fail(bodies: list[str], messages: list[Message]) -> None:
            numbers = [message.attempt for message in messages]
            calls.append(sorted(zip(bodies, numbers, strict=True)))
            raise ValueError("no")

        service = await serve(fail, retry={**QUICK, "max_attempts": 2})
        await service.send_many(name, ["a", "b", "c"])
        letters = await self.letters(service, name, 3)
        assert sorted(pair for call in calls for pair in call) == [
            (body, attempt) for body in "abc" for attempt in (1, 2)
        ]
        assert [letter.attempts for letter in letters] == [2, 2, 2]
        assert service.metrics().messages_retried == 3

    @requires("batch", "dead_letters")
    async def test_a_batch_error_settles_each_message_separately(
        self, serve: Serve, name: str
    ) -> None:
        done: list[str] = []

        @consume(name, batch_size=3, batch_wait=0.2)
        async def some(bodies: list[str], messages: list[Message]) -> None:
            failures: dict[str, Exception] = {}
            for body, message in zip(bodies, messages, strict=True):
                if body == "reject":
                    failures[message.id] = Reject("bad")
                elif body == "retry" and message.attempt == 1:
                    failures[message.id] = ValueError("later")
                else:
                    done.append(body)
            raise BatchError(failures)

        service = await serve(some, retry=QUICK)
        await service.send_many(name, ["fine", "reject", "retry"])
        await self.until(lambda: sorted(done) == ["fine", "retry"])
        (letter,) = await self.letters(service, name)
        assert (letter.reason, letter.body) == ("ExplicitNack", b'"reject"')
        await self.elapse(0.3)
        assert sorted(done) == ["fine", "retry"], "a handled message was delivered again"

    @requires("batch", "dead_letters")
    async def test_undecodable_messages_are_removed_from_a_batch(
        self, serve: Serve, backend: Backend, name: str
    ) -> None:
        handled: list[int] = []

        @consume(name, batch_size=3, batch_wait=0.2)
        async def sum_up(bodies: list[int]) -> None:
            handled.extend(bodies)

        service = await serve(sum_up, retry=QUICK)
        await self.put(backend, name, "1", "nonsense", "3")
        (letter,) = await self.letters(service, name)
        assert (letter.reason, letter.body) == ("Undecodable", b"nonsense")
        await self.until(lambda: sorted(handled) == [1, 3])

    @requires("redelivery")
    async def test_an_unavailable_dependency_does_not_count_an_attempt(
        self, serve: Serve, name: str
    ) -> None:
        attempts: list[int] = []

        @consume(name)
        async def handle(body: str, message: Message) -> None:
            attempts.append(message.attempt)
            if len(attempts) < 5:
                raise Unavailable("the database is down", retry_after=0.1)

        service = await serve(handle, retry=QUICK)
        await service.send(name, "a")
        await self.until(lambda: len(attempts) == 5, within=30)
        assert attempts == [1, 1, 1, 1, 1]
        metrics = service.metrics()
        assert (metrics.messages_retried, metrics.messages_failed) == (0, 0)

    @requires("redelivery")
    async def test_an_unavailable_dependency_pauses_the_channel_until_one_message_succeeds(
        self, serve: Serve, name: str
    ) -> None:
        loop = asyncio.get_running_loop()
        down = True
        started: list[float] = []
        done: list[str] = []
        running = peak = 0

        @consume(name, concurrency=4)
        async def handle(body: str) -> None:
            nonlocal running, peak
            started.append(loop.time())
            if down:
                raise Unavailable(retry_after=1.0)
            running += 1
            peak = max(peak, running if len(done) == 0 else 0)
            await asyncio.sleep(0.05)
            running -= 1
            done.append(body)

        service = await serve(handle)
        await service.send(name, "first")
        await self.until(lambda: len(started) == 1)
        await self.until(lambda: service.health_check().consumers[0].state == "paused")
        assert service.health_check().status == "healthy", "the service must stay healthy"
        await service.send_many(name, [str(number) for number in range(7)])
        await self.elapse(0.5)
        assert len(started) == 1, "a handler was started while the channel was paused"
        down = False
        await self.until(lambda: len(done) == 8)
        assert self.on_time(started[1] - started[0], 1.0)
        assert peak == 1, "the others must wait until the first message has succeeded"
        assert service.health_check().consumers[0].state == "consuming"

    @requires("redelivery")
    async def test_resume_ends_a_pause_caused_by_an_unavailable_dependency(
        self, serve: Serve, name: str
    ) -> None:
        down = True
        done: list[str] = []

        @consume(name)
        async def handle(body: str) -> None:
            if down:
                raise Unavailable(retry_after=60)
            done.append(body)

        service = await serve(handle)
        await service.send(name, "during the outage")
        await self.until(lambda: service.health_check().consumers[0].state == "paused")
        down = False
        await service.send(name, "after it")
        service.resume(name)
        await self.until(lambda: "after it" in done, within=30)

    @requires("dead_letters")
    async def test_a_dead_letter_is_confirmed_before_its_message_is_acknowledged(
        self, new_backend: NewBackend, serve: Serve, name: str
    ) -> None:
        steps: list[str] = []

        class Recording(FaultInjectingBackend):
            async def publish(self, queue: str, envelopes: Sequence[Envelope]) -> list[Sent]:
                await asyncio.sleep(0.1)  # an ack that does not wait would overtake the write
                sent = await super().publish(queue, envelopes)
                steps.append(f"confirmed {queue}")
                return sent

            async def ack(self, subscription: Subscription, delivery: Delivery) -> None:
                steps.append("acknowledged")
                await super().ack(subscription, delivery)

        @consume(name)
        async def reject(body: str) -> None:
            raise Reject

        service = await serve(reject, backend=Recording(new_backend()))
        letters = service.settings.broker_name(service.settings.dead_letter_name(name))
        await service.send(name, "a")
        await self.until(lambda: "acknowledged" in steps)
        assert steps == [
            f"confirmed {service.settings.broker_name(name)}",
            f"confirmed {letters}",
            "acknowledged",
        ]

    @requires("dead_letters", "redelivery")
    async def test_a_crash_between_dead_letter_and_ack_causes_a_duplicate_but_no_loss(
        self, new_backend: NewBackend, serve: Serve, name: str
    ) -> None:
        called: list[str] = []

        class CrashesOnce(FaultInjectingBackend):
            crashed = False

            async def ack(self, subscription: Subscription, delivery: Delivery) -> None:
                if not self.crashed:
                    self.crashed = True
                    self.sever()
                    raise SubscriptionLost("connection lost before the ack (injected fault)")
                await super().ack(subscription, delivery)

        @consume(name)
        async def reject(body: str, message: Message) -> None:
            called.append(message.id)
            raise Reject

        service = await serve(reject, backend=CrashesOnce(new_backend()))
        sent = await service.send(name, "a")
        await self.until(lambda: len(called) == 2, within=30)
        assert called == [sent.message_id] * 2
        letters = await self.letters(service, name, 2)
        assert {letter.message_id for letter in letters} == {sent.message_id}
        await self.elapse(0.5)
        assert len(called) == 2, "the message must be acknowledged after the second call"

    @requires("dead_letters", "redelivery")
    async def test_a_failed_dead_letter_write_is_retried_without_calling_the_handler(
        self, new_backend: NewBackend, serve: Serve, name: str
    ) -> None:
        called: list[int] = []

        class FailingDeadLetters(FaultInjectingBackend):
            failures = 2

            async def publish(self, queue: str, envelopes: Sequence[Envelope]) -> list[Sent]:
                if not queue.endswith(name) and self.failures:
                    self.failures -= 1
                    raise QueueFull("dead-letter queue is full (injected fault)")
                return await super().publish(queue, envelopes)

        @consume(name)
        async def fail(body: str, message: Message) -> None:
            called.append(message.attempt)
            raise ValueError("no")

        service = await serve(fail, backend=FailingDeadLetters(new_backend()), retry=ONCE)
        sent = await service.send(name, "a")
        (letter,) = await self.letters(service, name, within=30)
        assert (letter.message_id, letter.body) == (sent.message_id, b'"a"')
        assert called == [1], "the handler must not be called again"
        assert service.metrics().messages_dead_lettered == 1

    @requires("dead_letters", "redelivery")
    async def test_a_dead_letter_write_is_retried_while_the_connection_fails(
        self, new_backend: NewBackend, serve: Serve, name: str
    ) -> None:
        called: list[str] = []

        class Unreachable(FaultInjectingBackend):
            failures = 2

            async def publish(self, queue: str, envelopes: Sequence[Envelope]) -> list[Sent]:
                if not queue.endswith(name) and self.failures:
                    self.failures -= 1
                    raise BackendUnavailable("no connection (injected fault)")
                return await super().publish(queue, envelopes)

        @consume(name)
        async def reject(body: str) -> None:
            called.append(body)
            raise Reject

        service = await serve(reject, backend=Unreachable(new_backend()))
        await service.send(name, "a")
        await self.letters(service, name)
        assert called == ["a"], "only the dead-letter write is retried, not the handler"

    @requires("redelivery")
    async def test_unsettled_messages_go_to_another_consumer(
        self, serve: Serve, backend: Backend, name: str
    ) -> None:
        handled: list[str] = []

        @consume(name)
        async def handle(body: str, message: Message) -> None:
            handled.append(message.id)

        producer = await serve()
        sent = await producer.send(name, "a")
        async with self.subscribe(backend, name) as subscription:
            await self.take(subscription)
        await serve(handle)
        await self.until(lambda: handled)
        await self.elapse(0.3)
        assert handled == [sent.message_id]

    @requires("lease", "counts_crashes")
    async def test_a_delivery_to_a_crashed_consumer_counts_as_an_attempt(
        self, serve: Serve, backend: Backend, name: str
    ) -> None:
        attempts: list[int] = []

        @consume(name)
        async def handle(body: str, message: Message) -> None:
            attempts.append(message.attempt)

        producer = await serve(ack_deadline=0.5)
        await producer.send(name, "a")
        async with self.subscribe(backend, name, ack_deadline=0.5) as dead:
            await self.take(dead)  # never settled, as if the consumer had crashed
            await serve(handle, ack_deadline=0.5)
            await self.until(lambda: attempts)
            assert attempts == [2]

    @requires("lease", "counts_crashes", "dead_letters")
    async def test_a_message_that_crashes_its_consumers_is_dead_lettered(
        self, serve: Serve, backend: Backend, name: str
    ) -> None:
        called: list[str] = []

        @consume(name)
        async def handle(body: str) -> None:
            called.append(body)

        options = {"ack_deadline": 0.5, "retry": {**QUICK, "max_attempts": 2}}
        producer = await serve(**options)
        sent = await producer.send(name, "a")
        async with self.subscribe(backend, name, ack_deadline=0.5) as dead:
            for attempt in (1, 2):
                (delivery,) = await self.take(dead)
                assert delivery.envelope.attempt == attempt
            service = await serve(handle, **options)
            (letter,) = await self.letters(service, name)
        assert (letter.message_id, letter.body) == (sent.message_id, b'"a"')
        assert (letter.reason, letter.attempts) == ("MaxRetriesExceeded", 2)
        assert letter.error_type == "LeaseExpired"
        assert called == []
