"""Conformance scenarios for order per key: whatever sends a message back, it keeps its place."""

from __future__ import annotations

import asyncio
from collections.abc import Generator
from contextlib import contextmanager

from qkit.backend import Backend, Delivery, Subscription
from qkit.conformance.fault_injection import FaultInjectingBackend
from qkit.conformance.harness import Harness, NewBackend, Serve, bodies, requires
from qkit.errors import AckDeadlineExceeded, Reject, Unavailable
from qkit.handlers.decorators import consume
from qkit.message import Message

__all__ = ["KeyOrder"]

TEN = list(range(10))
#: The retry delay in scenarios that must not wait for it: a scenario that did would fail.
NEVER_SECONDS = 3_600.0


class Handled:
    """Record of handler calls.

    Attributes:
        begun: Key and number of each call, in order.
        done: The numbers of each key whose handler returned, in order.
        attempts: The attempt of each call that returned, by key and number.
        overlaps: The keys of which two handlers ran at the same time.
    """

    def __init__(self) -> None:
        self.begun: list[tuple[str, int]] = []
        self.done: dict[str, list[int]] = {}
        self.attempts: dict[tuple[str, int], int] = {}
        self.overlaps: list[str] = []
        self._running: list[str] = []

    @contextmanager
    def handling(self, number: int, message: Message) -> Generator[None, None, None]:
        """Record one call of a handler."""
        key = message.key or ""
        self.begun.append((key, number))
        if key in self._running:
            self.overlaps.append(key)
        self._running.append(key)
        try:
            yield
        finally:
            self._running.remove(key)
        self.done.setdefault(key, []).append(number)
        self.attempts[key, number] = message.attempt

    @property
    def count(self) -> int:
        """The number of different messages whose handler returned."""
        return len(self.attempts)

    @property
    def first(self) -> dict[str, list[int]]:
        """``done`` without repeats of a message."""
        return {key: list(dict.fromkeys(numbers)) for key, numbers in self.done.items()}


class LosesLeases(FaultInjectingBackend):
    """Backend that does not extend leases while ``losing`` is true, and reports them as lost."""

    losing = False

    async def extend(self, subscription: Subscription, delivery: Delivery, seconds: float) -> None:
        if self.losing:
            raise AckDeadlineExceeded("the lease has expired (injected fault)")
        await super().extend(subscription, delivery, seconds)


class KeyOrder(Harness):
    """Scenarios for ``ordered=True``: retries, pauses, shutdowns, losses and several services."""

    async def _send(self, serve: Serve, name: str, *, keys: str = "a", count: int = 10) -> None:
        """Send ``count`` numbers for each key, before a consumer exists."""
        sender = await serve()
        for number in range(count):
            for key in keys:
                await sender.send(name, number, key=key)

    # -- within one service ------------------------------------------------------------------

    @requires("key_order", "prefetch")
    async def test_an_unavailable_dependency_keeps_the_order_of_a_key(
        self, serve: Serve, name: str
    ) -> None:
        handled, failures = Handled(), 2

        @consume(name, prefetch=20, ordered=True)
        async def handle(number: int, message: Message) -> None:
            nonlocal failures
            with handled.handling(number, message):
                if number == 2 and failures:
                    failures -= 1
                    raise Unavailable(retry_after=0.2)

        await self._send(serve, name)
        await serve(handle)
        await self.until(lambda: handled.count == 10)
        assert handled.done == {"a": TEN}
        assert set(handled.attempts.values()) == {1}

    @requires("key_order", "prefetch")
    async def test_while_a_dependency_is_unavailable_no_handler_starts_and_its_message_is_the_probe(
        self, serve: Serve, name: str
    ) -> None:
        handled, down = Handled(), asyncio.Event()
        begun_before: list[int] = []

        @consume(name, prefetch=20, concurrency=3, ordered=True)
        async def handle(number: int, message: Message) -> None:
            with handled.handling(number, message):
                await asyncio.sleep(0.02)
                if (message.key, number) == ("b", 1) and not down.is_set():
                    down.set()
                    begun_before.append(len(handled.begun))
                    raise Unavailable(retry_after=1.0)

        await self._send(serve, name, keys="abc", count=4)
        service = await serve(handle)
        await down.wait()
        await self.elapse(0.5)
        # The others that were running may end, but none begins.
        assert len(handled.begun) == begun_before[0]
        assert service.health_check().consumers[0].state == "paused"
        await self.until(lambda: handled.count == 12)
        assert handled.begun[begun_before[0]] == ("b", 1)
        assert handled.done == {key: [0, 1, 2, 3] for key in "abc"}
        assert handled.overlaps == []

    @requires("key_order", "prefetch", "dead_letters")
    async def test_failures_keep_the_order_of_a_key(self, serve: Serve, name: str) -> None:
        handled = Handled()

        @consume(name, prefetch=20, ordered=True)
        async def handle(number: int, message: Message) -> None:
            with handled.handling(number, message):
                if number == 4 or (number == 2 and message.attempt < 3):
                    raise RuntimeError("not yet")
                if number == 6:
                    raise Reject("never")

        await self._send(serve, name)
        service = await serve(handle, retry={"initial_delay": 0.05})
        await self.until(lambda: handled.count == 8)
        assert handled.done == {"a": [0, 1, 2, 3, 5, 7, 8, 9]}
        calls = [number for _, number in handled.begun]
        assert calls == [0, 1, 2, 2, 2, 3, 4, 4, 4, 5, 6, 7, 8, 9]
        assert len(await self.letters(service, name, 2)) == 2

    @requires("key_order", "prefetch")
    async def test_a_handler_timeout_keeps_the_order_of_a_key(
        self, serve: Serve, name: str
    ) -> None:
        handled = Handled()

        @consume(name, prefetch=20, timeout=0.2, ordered=True)
        async def handle(number: int, message: Message) -> None:
            with handled.handling(number, message):
                if number == 2 and message.attempt == 1:
                    await asyncio.sleep(3600)

        await self._send(serve, name)
        await serve(handle, retry={"initial_delay": 0.05})
        await self.until(lambda: handled.count == 10)
        assert handled.done == {"a": TEN}

    # -- given back to the broker ------------------------------------------------------------

    @requires("key_lock", "prefetch")
    async def test_pause_and_resume_keep_the_order_of_a_key(self, serve: Serve, name: str) -> None:
        handled, started, finish = Handled(), asyncio.Event(), asyncio.Event()

        @consume(name, prefetch=20, ordered=True)
        async def handle(number: int, message: Message) -> None:
            with handled.handling(number, message):
                if number == 2:
                    started.set()
                    await finish.wait()

        await self._send(serve, name)
        service = await serve(handle)
        await started.wait()
        service.pause(name)
        await self.elapse(0.1)
        finish.set()
        await self.until(lambda: handled.count == 3)
        await self.elapse(0.2)
        assert handled.done == {"a": [0, 1, 2]}
        health = service.health_check()
        assert (health.status, health.consumers[0].state) == ("healthy", "paused")
        service.resume(name)
        await self.until(lambda: handled.count == 10)
        assert handled.done == {"a": TEN}
        assert set(handled.attempts.values()) == {1}

    @requires("key_lock", "prefetch")
    async def test_a_restart_keeps_the_order_of_a_key(self, serve: Serve, name: str) -> None:
        handled, started, finish = Handled(), asyncio.Event(), asyncio.Event()

        @consume(name, prefetch=20, ordered=True)
        async def handle(number: int, message: Message) -> None:
            with handled.handling(number, message):
                if number == 2:
                    started.set()
                    await finish.wait()

        await self._send(serve, name)
        service = await serve(handle)
        await started.wait()
        stopping = asyncio.ensure_future(service.shutdown())
        await self.until(lambda: not service.ready)
        finish.set()
        await stopping
        assert handled.done == {"a": [0, 1, 2]}
        await serve(handle)
        await self.until(lambda: handled.count == 10)
        assert handled.done == {"a": TEN}
        assert set(handled.attempts.values()) == {1}

    @requires("key_lock", "prefetch")
    async def test_the_shutdown_deadline_keeps_the_order_of_a_key(
        self, serve: Serve, name: str
    ) -> None:
        handled, started = Handled(), asyncio.Event()

        @consume(name, prefetch=20, ordered=True)
        async def handle(number: int, message: Message) -> None:
            with handled.handling(number, message):
                if number == 2 and not started.is_set():
                    started.set()
                    await asyncio.sleep(3600)

        await self._send(serve, name)
        service = await serve(handle)
        await started.wait()
        await service.shutdown(timeout=0.1)
        assert handled.done == {"a": [0, 1]}
        await serve(handle)
        await self.until(lambda: handled.count == 10)
        assert handled.done == {"a": TEN}
        assert handled.attempts["a", 2] == 1

    @requires("key_lock", "prefetch")
    async def test_a_shutdown_does_not_wait_for_a_retry_and_keeps_the_order_of_a_key(
        self, serve: Serve, name: str
    ) -> None:
        handled, failed = Handled(), asyncio.Event()

        @consume(name, prefetch=20, ordered=True)
        async def handle(number: int, message: Message) -> None:
            with handled.handling(number, message):
                if number == 2 and not failed.is_set():
                    failed.set()
                    raise RuntimeError("not yet")

        await self._send(serve, name)
        service = await serve(handle, retry={"initial_delay": NEVER_SECONDS, "max_delay": 7_200.0})
        await failed.wait()
        async with asyncio.timeout(20):
            await service.shutdown(timeout=1_000)
        assert handled.done == {"a": [0, 1]}
        await serve(handle)
        await self.until(lambda: handled.count == 10)
        assert handled.done == {"a": TEN}

    @requires("key_lock", "prefetch")
    async def test_a_lost_subscription_keeps_the_order_of_a_key(
        self, new_backend: NewBackend, serve: Serve, name: str
    ) -> None:
        backend = FaultInjectingBackend(new_backend())
        handled, started = Handled(), asyncio.Event()

        @consume(name, prefetch=20, ordered=True)
        async def handle(number: int, message: Message) -> None:
            with handled.handling(number, message):
                if number == 2 and not started.is_set():
                    started.set()
                    await asyncio.sleep(3600)

        await self._send(serve, name)
        await serve(handle, backend=backend)
        await started.wait()
        backend.sever()
        await self.until(lambda: handled.count == 10)
        assert handled.first == {"a": TEN}
        assert handled.overlaps == []

    @requires("key_lock", "lease", "prefetch")
    async def test_lost_leases_keep_the_order_of_a_key(
        self, new_backend: NewBackend, serve: Serve, name: str
    ) -> None:
        backend = LosesLeases(new_backend())
        handled, hung = Handled(), False

        @consume(name, prefetch=20, ordered=True)
        async def handle(number: int, message: Message) -> None:
            nonlocal hung
            with handled.handling(number, message):
                if number == 2 and not hung:
                    hung = backend.losing = True
                    try:
                        await asyncio.sleep(3600)
                    finally:
                        backend.losing = False

        await self._send(serve, name)
        await serve(handle, backend=backend, ack_deadline=0.6)
        await self.until(lambda: handled.count == 10)
        assert handled.first == {"a": TEN}
        assert handled.overlaps == []

    @requires("key_lock", "prefetch")
    async def test_several_keys_keep_their_order_through_outage_pause_and_restart(
        self, serve: Serve, name: str
    ) -> None:
        handled, down = Handled(), [("a", 1), ("b", 2)]

        @consume(name, prefetch=20, concurrency=3, ordered=True)
        async def handle(number: int, message: Message) -> None:
            with handled.handling(number, message):
                await asyncio.sleep(0.02)
                if (message.key, number) in down:
                    down.remove((message.key or "", number))
                    raise Unavailable(retry_after=0.1)

        await self._send(serve, name, keys="abcd", count=8)
        service = await serve(handle)
        await self.until(lambda: handled.count >= 12)
        service.pause(name)
        await self.elapse(0.2)
        service.resume(name)
        await self.until(lambda: handled.count >= 20)
        await service.shutdown()
        await serve(handle)
        await self.until(lambda: handled.count == 32)
        assert handled.first == {key: list(range(8)) for key in "abcd"}
        assert handled.overlaps == []

    # -- several services --------------------------------------------------------------------

    @requires("key_lock", "prefetch")
    async def test_two_services_never_handle_two_messages_of_a_key_at_once(
        self, serve: Serve, name: str
    ) -> None:
        handled = Handled()

        @consume(name, prefetch=5, concurrency=2, ordered=True, group="g")
        async def handle(number: int, message: Message) -> None:
            with handled.handling(number, message):
                await asyncio.sleep(0.01)

        services = [await serve(handle) for _ in range(2)]
        await self._send(serve, name, keys="abcd", count=8)
        await self.until(lambda: handled.count == 32)
        assert handled.first == {key: list(range(8)) for key in "abcd"}
        assert handled.overlaps == []
        await self.until(lambda: all(service.ready for service in services))
        states = {service.health_check().consumers[0].state for service in services}
        assert states <= {"consuming", "standby"}

    @requires("key_lock", "prefetch")
    async def test_another_service_takes_over_in_order_when_the_first_stops(
        self, serve: Serve, name: str
    ) -> None:
        handled, started, finish = Handled(), asyncio.Event(), asyncio.Event()
        taken_over: list[int] = []

        @consume(name, prefetch=20, ordered=True, group="g")
        async def first(number: int, message: Message) -> None:
            with handled.handling(number, message):
                if number == 2:
                    started.set()
                    await finish.wait()

        @consume(name, prefetch=20, ordered=True, group="g")
        async def second(number: int, message: Message) -> None:
            with handled.handling(number, message):
                taken_over.append(number)

        await self._send(serve, name)
        service = await serve(first)
        await started.wait()
        await serve(second)
        await self.elapse(0.3)
        stopping = asyncio.ensure_future(service.shutdown())
        await self.until(lambda: not service.ready)
        finish.set()
        await stopping
        await self.until(lambda: handled.count == 10)
        assert handled.first == {"a": TEN}
        assert handled.overlaps == []
        assert taken_over[-7:] == TEN[3:]

    @requires("key_lock", "prefetch")
    async def test_another_service_takes_over_in_order_when_the_first_is_paused(
        self, serve: Serve, name: str
    ) -> None:
        handled, started, finish = Handled(), asyncio.Event(), asyncio.Event()

        @consume(name, prefetch=20, ordered=True, group="g")
        async def first(number: int, message: Message) -> None:
            with handled.handling(number, message):
                if number == 2:
                    started.set()
                    await finish.wait()

        @consume(name, prefetch=20, ordered=True, group="g")
        async def second(number: int, message: Message) -> None:
            with handled.handling(number, message):
                await asyncio.sleep(0.01)

        await self._send(serve, name)
        service = await serve(first)
        await started.wait()
        await serve(second)
        service.pause(name)
        finish.set()
        await self.until(lambda: handled.count == 10)
        assert handled.first == {"a": TEN}
        assert handled.overlaps == []
        service.resume(name)  # it may take over again
        await self._send(serve, name, keys="b")
        await self.until(lambda: handled.count == 20)
        assert handled.first == {"a": TEN, "b": TEN}

    # -- the boundary itself -----------------------------------------------------------------

    @requires("key_lock", "lease")
    async def test_a_key_that_a_subscription_holds_is_not_delivered_to_another(
        self, backend: Backend, name: str
    ) -> None:
        await self.declare(backend, name)
        await self.put(backend, name, "a1", "a2", "a3", "a4", key="a")
        await self.put(backend, name, "b1", key="b")
        async with self.subscribe(backend, name, ordered=True) as second:
            async with self.subscribe(backend, name, ordered=True) as first:
                held = await self.take(first, 2)
                assert bodies(held) == ["a1", "a2"]
                (other,) = await self.take(second)
                assert other.envelope.body == b"b1"
                await self.nothing(second, 0.3)
                await first.ack(held[0])
                await self.nothing(second, 0.3)
                (third,) = await self.take(first)  # the holder of a key may receive more of it
                assert third.envelope.body == b"a3"
                for delivery in (held[1], third):
                    await first.release(delivery, 0.0, count_attempt=False)
            again = await self.take(second, 3)
            assert bodies(again) == ["a2", "a3", "a4"]
            assert [delivery.envelope.attempt for delivery in again] == [1, 1, 1]

    @requires("key_lock", "lease")
    async def test_the_messages_of_an_expired_lease_return_in_order(
        self, backend: Backend, name: str
    ) -> None:
        await self.declare(backend, name)
        await self.put(backend, name, *"12345", key="a")
        async with (
            self.subscribe(backend, name, ordered=True, ack_deadline=0.5) as first,
            self.subscribe(backend, name, ordered=True) as second,
        ):
            held = await self.take(first, 3)
            for delivery in held[1:]:  # only the first lease expires
                await first.extend(delivery, 300.0)
            again = await self.take(second, 5)
            assert bodies(again) == list("12345")
