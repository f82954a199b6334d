"""Sending while the broker misbehaves: time-outs, retries, lost confirmations, the breaker."""

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
    """A backend whose publishing goes through ``faults`` one by one, then works."""

    def __init__(self, inner: Backend) -> None:
        super().__init__(inner)
        self.tries: list[list[str]] = []
        self.faults: list[Callable[[], Awaitable[None]]] = []
        self.unconfirmed = 0  # so many more arrive without anybody hearing of it
        self.broken = False

    async def publish(self, queue: str, envelopes: Sequence[Envelope]) -> list[Sent]:
        self.tries.append([envelope.id for envelope in envelopes])
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
    """What a broken connection does."""
    raise BackendUnavailable("the connection was cut")


async def full() -> None:
    """What a broker says that has no room."""
    raise QueueFull("no room")


async def silence() -> None:
    """What a black hole does."""
    await asyncio.Event().wait()


class SendFaults(Harness):
    """No send hangs, none is reported that was not confirmed, and the id never changes."""

    @pytest.fixture
    def flaky(self, new_backend: NewBackend) -> Flaky:
        """A backend that can be told to fail."""
        return Flaky(new_backend())

    async def test_a_send_into_a_black_hole_times_out_in_time(
        self, serve: Serve, flaky: Flaky, name: str
    ) -> None:
        got: list[str] = []

        @consume(name)
        async def handle(text: str) -> None:
            got.append(text)

        service = await serve(handle, backend=flaky, send_timeout=3.0)
        flaky.faults = [silence]
        loop = asyncio.get_running_loop()
        begun = loop.time()
        with pytest.raises(SendTimeout) as caught:
            await service.send(name, "swallowed")
        assert 3.0 - 0.002 <= loop.time() - begun <= 3.0 + self.late(1.0)
        assert isinstance(caught.value, TimeoutError)
        assert caught.value.queue == name
        assert caught.value.message_id == flaky.tries[0][0]
        assert service.metrics().messages_sent == 0
        await service.send(name, "heard")
        await self.until(lambda: got)
        assert got == ["heard"]
        assert service.metrics().messages_sent == 1

    async def test_sends_behind_a_black_hole_time_out_in_time_too(
        self, serve: Serve, flaky: Flaky, name: str
    ) -> None:
        service = await serve(backend=flaky, send_timeout=1.0)
        flaky.faults = [silence] * 30
        loop = asyncio.get_running_loop()
        begun = loop.time()
        results = await asyncio.gather(
            *(service.send(name, number) for number in range(20)), return_exceptions=True
        )
        assert loop.time() - begun <= 1.0 + self.late(1.0)
        assert {type(result) for result in results} == {SendTimeout}
        assert service.metrics().messages_sent == 0

    async def test_a_batch_into_a_black_hole_times_out_in_time(
        self, serve: Serve, flaky: Flaky, name: str
    ) -> None:
        service = await serve(backend=flaky, send_timeout=1.0)
        flaky.faults = [silence]
        loop = asyncio.get_running_loop()
        begun = loop.time()
        with pytest.raises(SendTimeout):
            await service.send_many(name, range(10))
        assert 1.0 - 0.002 <= loop.time() - begun <= 1.0 + self.late(1.0)
        assert service.metrics().messages_sent == 0

    async def test_a_connection_that_stays_broken_ends_in_a_time_out_that_says_why(
        self, serve: Serve, flaky: Flaky, name: str
    ) -> None:
        service = await serve(backend=flaky, send_timeout=1.0, breaker={"failure_threshold": 1_000})
        flaky.broken = True
        with pytest.raises(SendTimeout, match="cut") as caught:
            await service.send(name, "a")
        assert isinstance(caught.value.cause, BackendUnavailable)
        assert len(flaky.tries) > 1
        assert service.metrics().messages_sent == 0

    async def test_a_send_is_tried_again_under_the_same_id(
        self, serve: Serve, flaky: Flaky, name: str
    ) -> None:
        got: list[str] = []

        @consume(name)
        async def handle(text: str, message: Message) -> None:
            got.append(message.id)

        service = await serve(handle, backend=flaky)
        flaky.faults = [cut, cut]
        sent = await service.send(name, "a")
        assert flaky.tries == [[sent.message_id]] * 3
        assert service.metrics().messages_sent == 1
        await self.until(lambda: got)
        await self.elapse(0.2)
        assert got == [sent.message_id]

    async def test_a_message_whose_confirmation_was_lost_comes_twice_under_one_id(
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

    async def test_an_answer_that_is_no_is_not_tried_again(
        self, serve: Serve, flaky: Flaky, name: str
    ) -> None:
        service = await serve(backend=flaky, breaker={"failure_threshold": 2})
        flaky.faults = [full] * 5
        for _ in range(5):
            with pytest.raises(QueueFull):
                await service.send(name, "a")
        assert len(flaky.tries) == 5
        assert service.health_check().breaker == "closed"

    async def test_the_circuit_opens_after_too_many_failures_and_recovers(
        self, serve: Serve, flaky: Flaky, name: str
    ) -> None:
        service = await serve(
            backend=flaky, breaker={"failure_threshold": 3, "recovery_timeout": 2.0}
        )
        await service.send(name, "a")
        await self._break(service, flaky, name)
        tries = len(flaky.tries)
        assert tries == 1 + 3
        loop = asyncio.get_running_loop()
        begun = loop.time()
        for _ in range(10):
            with pytest.raises(CircuitOpen):
                await service.send(name, "a")
        assert loop.time() - begun < self.late(0.5)
        assert len(flaky.tries) == tries
        flaky.broken = False
        await self.until(lambda: service.health_check().breaker == "half_open")
        await service.send(name, "a")
        assert service.health_check().breaker == "closed"
        assert service.metrics().messages_sent == 2

    async def test_a_failed_probe_opens_the_circuit_again(
        self, serve: Serve, flaky: Flaky, name: str
    ) -> None:
        service = await serve(
            backend=flaky, breaker={"failure_threshold": 3, "recovery_timeout": 2.0}
        )
        await self._break(service, flaky, name)
        await self.until(lambda: service.health_check().breaker == "half_open")
        tries = len(flaky.tries)
        with pytest.raises(CircuitOpen):
            await service.send(name, "a")
        assert len(flaky.tries) == tries + 1
        assert service.health_check().breaker == "open"

    async def test_a_success_in_between_keeps_the_circuit_closed(
        self, serve: Serve, flaky: Flaky, name: str
    ) -> None:
        service = await serve(backend=flaky, breaker={"failure_threshold": 3})
        for _ in range(4):
            flaky.faults = [cut, cut]
            await service.send(name, "a")
        assert service.health_check().breaker == "closed"
        assert service.metrics().messages_sent == 4

    async def test_a_cancelled_send_takes_no_other_with_it(
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
        await self.until(lambda: flaky.tries)
        sends[2].cancel()
        gate.set()
        results = await asyncio.gather(*sends, return_exceptions=True)
        assert isinstance(results[2], asyncio.CancelledError)
        await self.until(lambda: {0, 1, 3} <= set(got))
        assert sorted(got) in ([0, 1, 3], [0, 1, 2, 3])  # it may have left, none may come twice
        assert all(isinstance(results[number], Sent) for number in (0, 1, 3))

    async def test_sends_that_shared_a_failure_are_all_tried_again(
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
