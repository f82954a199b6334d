"""Health and metrics: what a service says of itself is true."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

import pytest

from qkit._internal.clock import Clock
from qkit.backend import Backend, Delivery, Subscription
from qkit.conformance.fault_injection import FaultInjectingBackend
from qkit.conformance.harness import Harness, NewBackend, Serve, requires
from qkit.errors import BackendUnavailable, QueueError, Reject
from qkit.handlers.decorators import consume
from qkit.message import Envelope, Message, Sent

__all__ = ["HealthAndMetrics"]

QUICK = {"max_attempts": 3, "initial_delay": 0.05, "jitter": 0.0}


class Silent(FaultInjectingBackend):
    """A backend that does not answer a ping, or cannot start, while ``error`` is set."""

    def __init__(self, inner: Backend) -> None:
        super().__init__(inner)
        self.error: Exception | None = None

    async def start(self) -> None:
        if self.error is not None:
            raise self.error
        await super().start()

    async def ping(self) -> None:
        if self.error is not None:
            raise self.error
        await super().ping()


class Unsettled(FaultInjectingBackend):
    """A backend that refuses dead letters, or acks, while an error is set for them."""

    def __init__(self, inner: Backend) -> None:
        super().__init__(inner)
        self.letter_error: QueueError | None = None
        self.ack_error: QueueError | None = None
        self.refused = 0

    async def publish(self, queue: str, envelopes: Sequence[Envelope]) -> list[Sent]:
        dead = any("qkit-dead-reason" in envelope.headers for envelope in envelopes)
        if dead and self.letter_error is not None:
            self.refused += 1
            raise self.letter_error
        return await super().publish(queue, envelopes)

    async def ack(self, subscription: Subscription, delivery: Delivery) -> None:
        if self.ack_error is not None:
            self.refused += 1
            raise self.ack_error
        await super().ack(subscription, delivery)


class HealthAndMetrics(Harness):
    """Health checks, connection states and counters."""

    async def test_a_healthy_service_lists_its_consumers(
        self, serve: Serve, clock: Clock, name: str
    ) -> None:
        @consume(name, group="first")
        async def one(body: str) -> None: ...

        @consume(f"{name}-2", group="second")
        async def two(body: str) -> None: ...

        before = clock.time()
        service = await serve(one, two)
        await self.until(
            lambda: all(item.last_poll_at for item in service.health_check().consumers)
        )
        health = service.health_check()
        assert (health.status, health.connection_state) == ("healthy", "connected")
        assert (health.breaker, health.last_error, health.disconnected_at) == ("closed", None, None)
        assert [(item.channel, item.group, item.state) for item in health.consumers] == [
            (name, "first", "consuming"),
            (f"{name}-2", "second", "consuming"),
        ]
        for item in health.consumers:
            assert (item.in_flight, item.last_settle_at) == (0, None)
            assert item.last_poll_at is not None
            assert before <= item.last_poll_at <= clock.time()
        assert service.ready

    async def test_the_last_success_is_the_last_message_sent_or_settled(
        self, serve: Serve, clock: Clock, name: str
    ) -> None:
        handled = asyncio.Event()

        @consume(name)
        async def handle(body: str) -> None:
            await asyncio.sleep(0.3)
            handled.set()

        service = await serve(handle)
        assert service.health_check().last_success_at is None
        before = clock.time()
        await service.send(name, "a")
        sent = service.health_check().last_success_at
        assert sent is not None
        assert before <= sent <= clock.time()
        await handled.wait()
        await self.until(lambda: service.health_check().consumers[0].last_settle_at)
        health = service.health_check()
        assert health.last_success_at == health.consumers[0].last_settle_at
        # A broker may deliver a message before it confirms it, so not counted from ``sent``.
        assert (health.last_success_at or 0) >= before + 0.3 - 0.002

    async def test_a_broker_that_does_not_answer_is_noticed_and_its_return_too(
        self, new_backend: NewBackend, serve: Serve, clock: Clock, name: str
    ) -> None:
        backend = Silent(new_backend())
        service = await serve(backend=backend)
        before = clock.time()
        backend.error = BackendUnavailable("nobody is there")
        await self.until(lambda: not service.ready, within=5 + self.late(0.0))
        health = service.health_check()
        assert (health.status, health.connection_state) == ("unhealthy", "disconnected")
        assert "nobody is there" in (health.last_error or "")
        assert health.disconnected_at is not None
        assert before <= health.disconnected_at <= clock.time()
        backend.error = None
        await self.until(lambda: service.ready, within=5 + self.late(0.0))
        health = service.health_check()
        assert (health.connection_state, health.disconnected_at) == ("connected", None)

    async def test_a_broker_that_cannot_be_reached_refuses_the_start_and_may_be_tried_again(
        self, new_backend: NewBackend, clock: Clock, name: str
    ) -> None:
        backend = Silent(new_backend())
        service = self.make_service(new_backend, clock, backend=backend)
        backend.error = BackendUnavailable("nobody is there")
        with pytest.raises(BackendUnavailable, match="nobody is there"):
            await service.start()
        health = service.health_check()
        assert (health.status, health.connection_state) == ("unhealthy", "disconnected")
        assert "nobody is there" in (health.last_error or "")
        backend.error = None
        async with service:
            assert service.ready
            await service.send(name, "a")

    @requires("dead_letters")
    async def test_a_dead_letter_that_cannot_be_written_for_ten_seconds_is_unhealthy(
        self, new_backend: NewBackend, serve: Serve, name: str
    ) -> None:
        """Also while other messages are settled: the letter takes a slot and is not written."""
        backend = Unsettled(new_backend())
        backend.letter_error = QueueError("no room for letters")
        got: list[str] = []

        @consume(name, concurrency=2)
        async def handle(body: str) -> None:
            if body == "bad":
                raise Reject
            got.append(body)

        service = await serve(handle, backend=backend)
        await service.send(name, "bad")
        await self.until(lambda: backend.refused)
        assert service.ready, "one failure is none yet"
        await self.elapse(6)
        await service.send(name, "good")
        await self.until(lambda: got == ["good"])
        await self.until(lambda: not service.ready, within=8 + self.late(0.0))
        health = service.health_check()
        (consumer,) = health.consumers
        assert (health.status, consumer.state) == ("unhealthy", "consuming")
        assert "no room for letters" in (consumer.failing or "")
        assert name in (health.last_error or "")
        assert "no room for letters" in (health.last_error or "")
        backend.letter_error = None
        await self.until(lambda: service.ready)
        assert service.health_check().consumers[0].failing is None
        await self.letters(service, name)

    async def test_acks_that_fail_for_ten_seconds_are_unhealthy_until_one_succeeds(
        self, new_backend: NewBackend, serve: Serve, name: str
    ) -> None:
        backend = Unsettled(new_backend())
        backend.ack_error = QueueError("acks are refused")
        got: list[str] = []

        @consume(name, concurrency=2)
        async def handle(body: str) -> None:
            got.append(body)

        service = await serve(handle, backend=backend)
        await service.send(name, "a")
        await self.until(lambda: backend.refused)
        assert service.ready
        await self.until(lambda: not service.ready, within=20)
        (consumer,) = service.health_check().consumers
        assert "acks are refused" in (consumer.failing or "")
        backend.ack_error = None
        await service.send(name, "b")
        await self.until(lambda: service.ready)
        assert service.health_check().consumers[0].failing is None

    async def test_the_connection_goes_through_its_states(
        self, new_backend: NewBackend, clock: Clock
    ) -> None:
        service = self.make_service(new_backend, clock)
        states: list[tuple[str, str]] = []
        service.on("state_change", lambda event: states.append((event.old, event.new)))
        assert service.connection_state == "disconnected"
        assert not service.ready
        await service.start()
        assert service.connection_state == "connected"
        await service.shutdown()
        assert service.connection_state == "closed"
        assert not service.ready
        assert states == [
            ("disconnected", "connecting"),
            ("connecting", "connected"),
            ("connected", "closing"),
            ("closing", "closed"),
        ]

    async def test_durability_is_told(self, serve: Serve, caplog: pytest.LogCaptureFixture) -> None:
        with caplog.at_level(logging.WARNING):
            service = await serve()
        durable = self.column.supports("durable")
        assert service.health_check().durable is durable
        warned = any("not durable" in item.getMessage() for item in caplog.records)
        assert warned is not durable

    async def test_what_is_sent_and_received_is_counted(self, serve: Serve, name: str) -> None:
        release = asyncio.Event()

        @consume(name, concurrency=2)
        async def handle(body: str) -> None:
            await release.wait()

        @consume(f"{name}-2")
        async def other(body: str) -> None: ...

        service = await serve(handle, other)
        await service.send_many(name, ["a", "b"])
        await service.send(f"{name}-2", "c")
        await self.until(lambda: service.metrics().channels[name].in_flight == 2)
        await self.until(lambda: service.metrics().channels[f"{name}-2"].messages_received == 1)
        await self.until(lambda: service.metrics().in_flight == 2)
        metrics = service.metrics()
        assert (metrics.messages_sent, metrics.messages_received) == (3, 3)
        mine = metrics.channels[name]
        assert (mine.messages_sent, mine.messages_received) == (2, 2)
        theirs = metrics.channels[f"{name}-2"]
        assert (theirs.messages_sent, theirs.messages_received, theirs.in_flight) == (1, 1, 0)
        release.set()
        await self.until(lambda: service.metrics().in_flight == 0)
        assert service.metrics().messages_failed == 0

    @requires("dead_letters")
    async def test_failures_are_counted_by_their_kind(self, serve: Serve, name: str) -> None:
        @consume(name)
        async def handle(body: str, message: Message) -> None:
            if body == "reject":
                raise Reject
            if body == "fail" or message.attempt == 1:
                raise ValueError("no")

        service = await serve(handle, retry=QUICK)
        await service.send_many(name, ["reject", "fail", "recovers"])
        await self.letters(service, name, 2)
        await self.until(lambda: service.metrics().messages_retried == 3)
        await self.until(lambda: service.metrics().messages_failed == 2)
        metrics = service.metrics()
        assert metrics.messages_dead_lettered == 2
        assert metrics.messages_sent == 3, "dead letters are not counted as sends"
        if self.column.delay and self.column.redelivery:
            await self.until(lambda: service.metrics().messages_received == 6)
        assert metrics.channels[name].messages_failed == 2
        assert metrics.channels[name].messages_retried == 3

    async def test_a_send_that_was_refused_is_not_counted(self, serve: Serve, name: str) -> None:
        service = await serve()
        with pytest.raises(QueueError):
            await service.send(name, object())
        assert service.metrics().messages_sent == 0

    async def test_a_consumer_that_holds_a_message_says_so(self, serve: Serve, name: str) -> None:
        release = asyncio.Event()

        @consume(name)
        async def handle(body: str) -> None:
            await release.wait()

        service = await serve(handle)
        await service.send(name, "a")
        await self.until(lambda: service.health_check().consumers[0].in_flight == 1)
        assert service.health_check().consumers[0].last_settle_at is None
        release.set()
        await self.until(lambda: service.health_check().consumers[0].in_flight == 0)
        assert service.health_check().consumers[0].last_settle_at is not None
