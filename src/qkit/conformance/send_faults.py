"""Conformance scenarios for failing sends: timeouts, retries, lost confirmations, breaker."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

import pytest

from qkit.backend import Backend
from qkit.conformance.fault_injection import FaultInjectingBackend
from qkit.conformance.harness import Harness, NewBackend, Serve
from qkit.errors import BackendUnavailable, CircuitOpen, QueueFull, SendTimeout
from qkit.handlers.decorators import consume
from qkit.message import Envelope, Message, Sent
from qkit.service import QueueService

__all__ = ["SendFaults"]


class Flaky(FaultInjectingBackend):
    """Backend that runs the next function in ``faults``, if any, before each publish."""

    def __init__(self, inner: Backend) -> None:
        super().__init__(inner)
        self.attempts: list[list[str]] = []
        self.faults: list[Callable[[], Awaitable[None]]] = []
        self.unconfirmed: int = 0  # number of upcoming publishes that succeed but raise an error
        self.broken = False

    async def publish(self, queue: str, envelopes: Sequence[Envelope]) -> list[Sent]:
        self.attempts.append([envelope.id for envelope in envelopes])
        if self.broken:
            await cut()
        if self.faults:
            await self.faults.pop(0)()
        sent = await super().publish(queue, envelopes)
        if self.unconfirmed:
            self.unconfirmed -= 1
            raise BackendUnavailable("the confirmation was lost")
        return sent


async def cut() -> None:
    """Fail like a broken connection."""
    raise BackendUnavailable("the connection was cut")


async def full() -> None:
    """Fail like a full queue."""
    raise QueueFull("the queue is full")


async def never_answer() -> None:
    """Block forever, like a broker that does not respond."""
    await asyncio.Event().wait()


class SendFaults(Harness):
    """Scenarios for failing sends.

    A send never hangs, returns only when the message is confirmed, and keeps the message id when
    it is retried.
    """

    @pytest.fixture
    def flaky(self, new_backend: NewBackend) -> Flaky:
        """Backend of the service under test, with no faults yet."""
        return Flaky(new_backend())

    async def test_a_send_to_an_unresponsive_broker_times_out(
        self, serve: Serve, flaky: Flaky, name: str
    ) -> None:
        got: list[str] = []

        @consume(name)
        async def handle(text: str) -> None:
            got.append(text)

        service = await serve(handle, backend=flaky, send_timeout=3.0)
        flaky.faults = [never_answer]
        loop = asyncio.get_running_loop()
        started_at = loop.time()
        with pytest.raises(SendTimeout) as caught:
            await service.send(name, "unanswered")
        assert 3.0 - 0.002 <= loop.time() - started_at <= 3.0 + self.late(1.0)
        assert isinstance(caught.value, TimeoutError)
        assert caught.value.queue == name
        assert caught.value.message_id == flaky.attempts[0][0]
        assert service.metrics().messages_sent == 0
        await service.send(name, "answered")
        await self.until(lambda: got)
        assert got == ["answered"]
        assert service.metrics().messages_sent == 1

    async def test_queued_sends_to_an_unresponsive_broker_time_out(
        self, serve: Serve, flaky: Flaky, name: str
    ) -> None:
        service = await serve(backend=flaky, send_timeout=1.0)
        flaky.faults = [never_answer] * 30
        loop = asyncio.get_running_loop()
        started_at = loop.time()
        results = await asyncio.gather(
            *(service.send(name, number) for number in range(20)), return_exceptions=True
        )
        assert loop.time() - started_at <= 1.0 + self.late(1.0)
        assert {type(result) for result in results} == {SendTimeout}
        assert service.metrics().messages_sent == 0

    async def test_a_batch_sent_to_an_unresponsive_broker_times_out(
        self, serve: Serve, flaky: Flaky, name: str
    ) -> None:
        service = await serve(backend=flaky, send_timeout=1.0)
        flaky.faults = [never_answer]
        loop = asyncio.get_running_loop()
        started_at = loop.time()
        with pytest.raises(SendTimeout):
            await service.send_many(name, range(10))
        assert 1.0 - 0.002 <= loop.time() - started_at <= 1.0 + self.late(1.0)
        assert service.metrics().messages_sent == 0

    async def test_a_send_timeout_names_the_connection_error(
        self, serve: Serve, flaky: Flaky, name: str
    ) -> None:
        service = await serve(backend=flaky, send_timeout=1.0, breaker={"failure_threshold": 1_000})
        flaky.broken = True
        with pytest.raises(SendTimeout, match="cut") as caught:
            await service.send(name, "a")
        assert isinstance(caught.value.cause, BackendUnavailable)
        assert len(flaky.attempts) > 1
        assert service.metrics().messages_sent == 0

    async def test_a_send_is_retried_with_the_same_id(
        self, serve: Serve, flaky: Flaky, name: str
    ) -> None:
        got: list[str] = []

        @consume(name)
        async def handle(text: str, message: Message) -> None:
            got.append(message.id)

        service = await serve(handle, backend=flaky)
        flaky.faults = [cut, cut]
        sent = await service.send(name, "a")
        assert flaky.attempts == [[sent.message_id]] * 3
        assert service.metrics().messages_sent == 1
        await self.until(lambda: got)
        await self.elapse(0.2)
        assert got == [sent.message_id]

    async def test_a_message_whose_confirmation_was_lost_is_delivered_twice_with_one_id(
        self, serve: Serve, flaky: Flaky, name: str
    ) -> None:
        got: list[tuple[str, int]] = []

        @consume(name)
        async def handle(text: str, message: Message) -> None:
            got.append((message.id, message.attempt))

        service = await serve(handle, backend=flaky)
        flaky.unconfirmed = 1
        sent = await service.send(name, "a")
        await self.until(lambda: len(got) >= 2)
        await self.elapse(0.2)
        assert got == [(sent.message_id, 1)] * 2
        assert service.metrics().messages_sent == 1

    async def test_a_send_rejected_by_the_broker_is_not_retried(
        self, serve: Serve, flaky: Flaky, name: str
    ) -> None:
        service = await serve(backend=flaky, breaker={"failure_threshold": 2})
        flaky.faults = [full] * 5
        for _ in range(5):
            with pytest.raises(QueueFull):
                await service.send(name, "a")
        assert len(flaky.attempts) == 5
        assert service.health_check().breaker == "closed"

    async def test_the_circuit_opens_after_too_many_failures_and_recovers(
        self, serve: Serve, flaky: Flaky, name: str
    ) -> None:
        service = await serve(
            backend=flaky, breaker={"failure_threshold": 3, "recovery_timeout": 2.0}
        )
        await service.send(name, "a")
        await self._break(service, flaky, name)
        attempts = len(flaky.attempts)
        assert attempts == 1 + 3
        loop = asyncio.get_running_loop()
        started_at = loop.time()
        for _ in range(10):
            with pytest.raises(CircuitOpen):
                await service.send(name, "a")
        assert loop.time() - started_at < self.late(0.5)
        assert len(flaky.attempts) == attempts
        flaky.broken = False
        await self.until(lambda: service.health_check().breaker == "half_open")
        await service.send(name, "a")
        assert service.health_check().breaker == "closed"
        assert service.metrics().messages_sent == 2

    async def test_a_failed_trial_call_reopens_the_circuit(
        self, serve: Serve, flaky: Flaky, name: str
    ) -> None:
        service = await serve(
            backend=flaky, breaker={"failure_threshold": 3, "recovery_timeout": 2.0}
        )
        await self._break(service, flaky, name)
        await self.until(lambda: service.health_check().breaker == "half_open")
        attempts = len(flaky.attempts)
        with pytest.raises(CircuitOpen):
            await service.send(name, "a")
        assert len(flaky.attempts) == attempts + 1
        assert service.health_check().breaker == "open"

    async def test_a_success_between_failures_keeps_the_circuit_closed(
        self, serve: Serve, flaky: Flaky, name: str
    ) -> None:
        service = await serve(backend=flaky, breaker={"failure_threshold": 3})
        for _ in range(4):
            flaky.faults = [cut, cut]
            await service.send(name, "a")
        assert service.health_check().breaker == "closed"
        assert service.metrics().messages_sent == 4

    async def test_a_cancelled_send_does_not_cancel_other_sends(
        self, serve: Serve, flaky: Flaky, name: str
    ) -> None:
        got: list[int] = []
        gate = asyncio.Event()

        @consume(name)
        async def handle(number: int) -> None:
            got.append(number)

        async def hold() -> None:
            await gate.wait()

        service = await serve(handle, backend=flaky)
        flaky.faults = [hold]
        sends = [asyncio.ensure_future(service.send(name, number)) for number in range(4)]
        await self.until(lambda: flaky.attempts)
        sends[2].cancel()
        gate.set()
        results = await asyncio.gather(*sends, return_exceptions=True)
        assert isinstance(results[2], asyncio.CancelledError)
        await self.until(lambda: {0, 1, 3} <= set(got))
        # The cancelled message may or may not arrive; no message arrives twice.
        assert sorted(got) in ([0, 1, 3], [0, 1, 2, 3])
        assert all(isinstance(results[number], Sent) for number in (0, 1, 3))

    async def test_sends_that_failed_together_are_all_retried(
        self, serve: Serve, flaky: Flaky, name: str
    ) -> None:
        got: list[int] = []

        @consume(name)
        async def handle(number: int) -> None:
            got.append(number)

        service = await serve(handle, backend=flaky)
        flaky.faults = [cut, cut]
        await asyncio.gather(*(service.send(name, number) for number in range(50)))
        await self.until(lambda: len(got) >= 50)
        await self.elapse(0.2)
        assert sorted(got) == list(range(50))

    async def _break(self, service: QueueService, flaky: Flaky, name: str) -> None:
        flaky.broken = True
        with pytest.raises(CircuitOpen):
            await service.send(name, "a")
        assert service.health_check().breaker == "open"
