"""Conformance scenarios for reconnection: lost subscriptions, outages, deleted queues."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence

from qkit._internal.clock import Clock
from qkit.backend import Backend, Delivery, Subscription, SubscriptionSpec
from qkit.conformance.fault_injection import FaultInjectingBackend
from qkit.conformance.harness import Harness, NewBackend, Serve, requires
from qkit.errors import BackendUnavailable, QueueNotFound
from qkit.handlers.decorators import consume
from qkit.message import Envelope, Message, Sent
from qkit.observability.events import Reconnected, StateChanged
from qkit.service import QueueService

__all__ = ["Reconnect"]


class Unreachable(FaultInjectingBackend):
    """Backend that cannot subscribe while ``down`` is true or ``failures`` is above 0."""

    def __init__(self, inner: Backend) -> None:
        super().__init__(inner)
        self.down = False
        self.failures: int = 0
        self.attempts: list[float] = []

    async def subscribing(self, spec: SubscriptionSpec) -> None:
        self.attempts.append(asyncio.get_running_loop().time())
        if self.down or self.failures:
            self.failures = max(0, self.failures - 1)
            raise BackendUnavailable("no response (injected fault)")


class Reconnect(Harness):
    """Scenarios for consumers and producers that recover from a lost connection."""

    async def _exists(self, service: QueueService, name: str) -> bool:
        """Return whether the queue exists on the broker."""
        try:
            await service.stats(name)
        except QueueNotFound:
            return False
        return True

    async def test_a_broken_subscription_is_reopened(
        self, new_backend: NewBackend, serve: Serve, name: str
    ) -> None:
        backend = Unreachable(new_backend())
        handled: list[str] = []

        @consume(name)
        async def handle(body: str) -> None:
            handled.append(body)

        service = await serve(handle, backend=backend)
        await service.send(name, "before")
        await self.until(lambda: handled == ["before"])
        backend.sever()
        await self.until(lambda: len(backend.attempts) == 2)
        await self.until(lambda: service.ready)
        await service.send(name, "after")
        await self.until(lambda: handled == ["before", "after"])

    async def test_a_reconnection_emits_state_changes(
        self, new_backend: NewBackend, serve: Serve, name: str
    ) -> None:
        backend = Unreachable(new_backend())
        changes: list[StateChanged] = []
        returns: list[Reconnected] = []

        @consume(name)
        async def handle(body: str) -> None: ...

        service = await serve(handle, backend=backend)
        service.on("state_change", changes.append)
        service.on("reconnected", returns.append)
        backend.sever()
        await self.until(lambda: returns)
        assert [(change.old, change.new) for change in changes] == [
            ("connected", "disconnected"),
            ("disconnected", "connected"),
        ]
        assert "SubscriptionLost" in (changes[0].error or "")
        assert changes[1].error is None
        (event,) = returns
        assert 0 < event.seconds < 10

    @requires("redelivery", "prefetch")
    async def test_a_broken_subscription_cancels_its_handlers_and_redelivers_their_messages(
        self, new_backend: NewBackend, serve: Serve, name: str
    ) -> None:
        backend = Unreachable(new_backend())
        called: list[str] = []
        cancelled: list[str] = []

        @consume(name, concurrency=2, prefetch=5)  # prefetch above concurrency: a receive waits
        async def handle(body: str) -> None:
            called.append(body)
            if len(called) > 2:
                return
            try:
                await asyncio.sleep(3600)
            except asyncio.CancelledError:
                cancelled.append(body)
                raise

        service = await serve(handle, backend=backend)
        await service.send_many(name, ["a", "b"])
        await self.until(lambda: len(called) == 2)
        backend.sever()
        await self.until(lambda: len(called) == 4)
        assert sorted(cancelled) == ["a", "b"], "handlers that can no longer ack must be cancelled"
        assert sorted(called[2:]) == ["a", "b"]
        await self.elapse(0.3)
        assert len(called) == 4
        assert service.metrics().messages_failed == 0

    async def test_a_consumer_resubscribes_with_backoff(
        self, new_backend: NewBackend, serve: Serve, name: str
    ) -> None:
        backend = Unreachable(new_backend())
        handled: list[str] = []

        @consume(name)
        async def handle(body: str) -> None:
            handled.append(body)

        service = await serve(handle, backend=backend)
        backend.failures = 3
        backend.sever()
        await self.until(lambda: len(backend.attempts) == 5)
        waits = [later - earlier for earlier, later in itertools.pairwise(backend.attempts[1:])]
        assert 0.05 < waits[0] < waits[1] < waits[2] < 10
        await self.until(lambda: service.ready)
        await service.send(name, "a")
        await self.until(lambda: handled == ["a"])

    async def test_a_service_starts_while_a_consumer_cannot_subscribe_yet(
        self, new_backend: NewBackend, serve: Serve, name: str
    ) -> None:
        backend = Unreachable(new_backend())
        backend.failures = 2
        handled: list[str] = []

        @consume(name)
        async def handle(body: str) -> None:
            handled.append(body)

        service = await serve(handle, backend=backend)
        await self.until(lambda: service.ready)
        await service.send(name, "a")
        await self.until(lambda: handled == ["a"])

    async def test_health_is_accurate_during_and_after_an_outage(
        self, new_backend: NewBackend, serve: Serve, name: str
    ) -> None:
        backend = Unreachable(new_backend())

        @consume(name)
        async def handle(body: str) -> None: ...

        service = await serve(handle, backend=backend)
        assert service.health_check().status == "healthy"
        backend.down = True
        backend.sever()
        await self.until(lambda: not service.ready)
        await self.until(lambda: len(backend.attempts) >= 3)
        health = service.health_check()
        assert (health.status, health.consumers[0].state) == ("unhealthy", "reconnecting")
        assert "BackendUnavailable" in (health.last_error or "")
        backend.down = False
        await self.until(lambda: service.ready)
        health = service.health_check()
        assert (health.connection_state, health.disconnected_at) == ("connected", None)
        assert health.consumers[0].state == "consuming"

    @requires("redelivery")
    async def test_messages_sent_during_an_outage_are_handled_after_it(
        self, new_backend: NewBackend, serve: Serve, name: str
    ) -> None:
        backend = Unreachable(new_backend())
        handled: list[str] = []

        @consume(name)
        async def handle(body: str) -> None:
            handled.append(body)

        service = await serve(handle, backend=backend)
        producer = await serve()
        backend.down = True
        backend.sever()
        await self.until(lambda: not service.ready)
        await producer.send_many(name, ["a", "b"])
        await self.elapse(0.3)
        assert handled == []
        backend.down = False
        await self.until(lambda: sorted(handled) == ["a", "b"])

    async def test_a_send_on_a_broken_connection_is_retried(
        self, new_backend: NewBackend, serve: Serve, name: str
    ) -> None:
        attempts: list[list[str]] = []
        handled: list[str] = []

        class Flaky(FaultInjectingBackend):
            async def publish(self, queue: str, envelopes: Sequence[Envelope]) -> list[Sent]:
                attempts.append([envelope.id for envelope in envelopes])
                if len(attempts) < 3:
                    raise BackendUnavailable("connection reset (injected fault)")
                return await super().publish(queue, envelopes)

        @consume(name)
        async def handle(body: str, message: Message) -> None:
            handled.append(message.id)

        service = await serve(handle, backend=Flaky(new_backend()))
        sent = await service.send(name, "a")
        assert attempts == [[sent.message_id]] * 3, "each attempt must have the same id"
        await self.until(lambda: handled)
        assert handled == [sent.message_id]
        assert service.metrics().messages_sent == 1

    @requires("lease")
    async def test_a_message_whose_ack_failed_is_redelivered_when_its_lease_expires(
        self, new_backend: NewBackend, serve: Serve, name: str
    ) -> None:
        handled: list[int] = []

        class AckFails(FaultInjectingBackend):
            failures = 1

            async def ack(self, subscription: Subscription, delivery: Delivery) -> None:
                if self.failures:
                    self.failures -= 1
                    raise BackendUnavailable("no response (injected fault)")
                await super().ack(subscription, delivery)

        @consume(name)
        async def handle(body: str, message: Message) -> None:
            handled.append(message.attempt)

        service = await serve(handle, backend=AckFails(new_backend()), ack_deadline=0.5)
        await service.send(name, "a")
        await self.until(lambda: len(handled) == 2)
        await self.elapse(1.0)
        assert len(handled) == 2

    @requires("delete", "depth")
    async def test_a_queue_deleted_while_it_is_consumed_is_declared_again(
        self, serve: Serve, name: str
    ) -> None:
        handled: list[str] = []

        @consume(name)
        async def handle(body: str) -> None:
            handled.append(body)

        service = await serve(handle)
        await service.send(name, "before")
        await self.until(lambda: handled == ["before"])
        other = await serve()
        await other.delete(name)
        async with asyncio.timeout(30):
            # The consumer declares the queue again without a send.
            while not await self._exists(other, name):  # noqa: ASYNC110  # there is no event to wait for
                await asyncio.sleep(0.05)
        await self.until(lambda: service.ready, within=30)
        await service.send(name, "after")
        await self.until(lambda: handled == ["before", "after"], within=30)

    async def test_shutdown_does_not_wait_for_the_end_of_an_outage(
        self, new_backend: NewBackend, clock: Clock, name: str
    ) -> None:
        backend = Unreachable(new_backend())

        @consume(name)
        async def handle(body: str) -> None: ...

        service = self.make_service(new_backend, clock, handle, backend=backend)
        await service.start()
        backend.down = True
        backend.sever()
        await self.until(lambda: len(backend.attempts) >= 3)
        loop = asyncio.get_running_loop()
        started_at = loop.time()
        await service.shutdown()
        assert loop.time() - started_at < 5 + self.late(0.0)
        assert service.connection_state == "closed"
