"""Conformance scenarios for health checks and metrics."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

import pytest

from qkit._internal.clock import Clock
from qkit.backend import Backend, Delivery, DurabilityReporting, Subscription
from qkit.conformance.fault_injection import FaultInjectingBackend
from qkit.conformance.harness import Harness, NewBackend, Serve, requires
from qkit.errors import BackendUnavailable, QueueError, Reject
from qkit.handlers.decorators import consume
from qkit.message import Envelope, Message, Sent

__all__ = ["HealthAndMetrics"]

QUICK: dict[str, float] = {"max_attempts": 3, "initial_delay": 0.05, "jitter": 0.0}


class UnresponsiveBackend(FaultInjectingBackend):
    """Backend whose start and ping fail while ``error`` is set."""

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


class FailingSettlement(FaultInjectingBackend):
    """Backend whose dead-letter writes or acks fail while the matching error attribute is set."""

    def __init__(self, inner: Backend) -> None:
        super().__init__(inner)
        self.letter_error: QueueError | None = None
        self.ack_error: QueueError | None = None
        self.failed_calls: int = 0

    async def publish(self, queue: str, envelopes: Sequence[Envelope]) -> list[Sent]:
        dead = any("qkit-dead-reason" in envelope.headers for envelope in envelopes)
        if dead and self.letter_error is not None:
            self.failed_calls += 1
            raise self.letter_error
        return await super().publish(queue, envelopes)

    async def ack(self, subscription: Subscription, delivery: Delivery) -> None:
        if self.ack_error is not None:
            self.failed_calls += 1
            raise self.ack_error
        await super().ack(subscription, delivery)


class HealthAndMetrics(Harness):
    """Scenarios for health checks, connection states and metrics."""

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
        # Not compared with ``sent``: a broker may deliver a message before it confirms the send.
        assert (health.last_success_at or 0) >= before + 0.3 - 0.002

    async def test_health_reports_an_unresponsive_broker_and_its_recovery(
        self, new_backend: NewBackend, serve: Serve, clock: Clock, name: str
    ) -> None:
        backend = UnresponsiveBackend(new_backend())
        service = await serve(backend=backend)
        before = clock.time()
        backend.error = BackendUnavailable("connection refused")
        await self.until(lambda: not service.ready, within=5 + self.late(0.0))
        health = service.health_check()
        assert (health.status, health.connection_state) == ("unhealthy", "disconnected")
        assert "connection refused" in (health.last_error or "")
        assert health.disconnected_at is not None
        assert before <= health.disconnected_at <= clock.time()
        backend.error = None
        await self.until(lambda: service.ready, within=5 + self.late(0.0))
        health = service.health_check()
        assert (health.connection_state, health.disconnected_at) == ("connected", None)

    async def test_start_fails_if_the_broker_is_unreachable_and_can_be_retried(
        self, new_backend: NewBackend, clock: Clock, name: str
    ) -> None:
        backend = UnresponsiveBackend(new_backend())
        service = self.make_service(new_backend, clock, backend=backend)
        backend.error = BackendUnavailable("connection refused")
        with pytest.raises(BackendUnavailable, match="connection refused"):
            await service.start()
        health = service.health_check()
        assert (health.status, health.connection_state) == ("unhealthy", "disconnected")
        assert "connection refused" in (health.last_error or "")
        backend.error = None
        async with service:
            assert service.ready
            await service.send(name, "a")

    @requires("dead_letters")
    async def test_a_dead_letter_write_failing_for_ten_seconds_makes_the_service_unhealthy(
        self, new_backend: NewBackend, serve: Serve, name: str
    ) -> None:
        """Messages that are settled in the meantime do not hide the failure."""
        backend = FailingSettlement(new_backend())
        backend.letter_error = QueueError("dead-letter queue is full")
        got: list[str] = []

        @consume(name, concurrency=2)
        async def handle(body: str) -> None:
            if body == "bad":
                raise Reject
            got.append(body)

        service = await serve(handle, backend=backend)
        await service.send(name, "bad")
        await self.until(lambda: backend.failed_calls)
        assert service.ready, "one failed write does not make the service unhealthy"
        await self.elapse(6)
        await service.send(name, "good")
        await self.until(lambda: got == ["good"])
        await self.until(lambda: not service.ready, within=8 + self.late(0.0))
        health = service.health_check()
        (consumer,) = health.consumers
        assert (health.status, consumer.state) == ("unhealthy", "consuming")
        assert "dead-letter queue is full" in (consumer.failing or "")
        assert name in (health.last_error or "")
        assert "dead-letter queue is full" in (health.last_error or "")
        backend.letter_error = None
        await self.until(lambda: service.ready)
        assert service.health_check().consumers[0].failing is None
        await self.letters(service, name)

    async def test_acks_failing_for_ten_seconds_make_the_service_unhealthy_until_one_succeeds(
        self, new_backend: NewBackend, serve: Serve, name: str
    ) -> None:
        backend = FailingSettlement(new_backend())
        backend.ack_error = QueueError("ack was rejected")
        got: list[str] = []

        @consume(name, concurrency=2)
        async def handle(body: str) -> None:
            got.append(body)

        service = await serve(handle, backend=backend)
        await service.send(name, "a")
        await self.until(lambda: backend.failed_calls)
        assert service.ready
        await self.until(lambda: not service.ready, within=20)
        (consumer,) = service.health_check().consumers
        assert "ack was rejected" in (consumer.failing or "")
        backend.ack_error = None
        await service.send(name, "b")
        await self.until(lambda: service.ready)
        assert service.health_check().consumers[0].failing is None

    async def test_connection_states_follow_start_and_shutdown(
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

    async def test_health_reports_durability(
        self, serve: Serve, backend: Backend, caplog: pytest.LogCaptureFixture
    ) -> None:
        with caplog.at_level(logging.WARNING):
            service = await serve()
        reported = service.health_check().durable
        if self.column.supports("durable"):
            # A broker can be configured not to store messages, and need not tell.
            assert isinstance(backend, DurabilityReporting) or reported is True
        else:
            assert reported is False
        warned = any("not durable" in item.getMessage() for item in caplog.records)
        assert warned is (reported is False)

    async def test_sends_and_deliveries_are_counted(self, serve: Serve, name: str) -> None:
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
        channel = metrics.channels[name]
        assert (channel.messages_sent, channel.messages_received) == (2, 2)
        theirs = metrics.channels[f"{name}-2"]
        assert (theirs.messages_sent, theirs.messages_received, theirs.in_flight) == (1, 1, 0)
        release.set()
        await self.until(lambda: service.metrics().in_flight == 0)
        assert service.metrics().messages_failed == 0

    @requires("dead_letters")
    async def test_failures_are_counted_by_kind(self, serve: Serve, name: str) -> None:
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

    async def test_a_rejected_send_is_not_counted(self, serve: Serve, name: str) -> None:
        service = await serve()
        with pytest.raises(QueueError):
            await service.send(name, object())
        assert service.metrics().messages_sent == 0

    async def test_consumer_health_reports_messages_in_flight(
        self, serve: Serve, name: str
    ) -> None:
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
