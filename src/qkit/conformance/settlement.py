"""Conformance scenarios for settlement: ack, release, leases, cancellation of ``receive``."""

from __future__ import annotations

import asyncio
import contextlib
import random

import pytest

from qkit.backend import Backend, Delivery, Subscription
from qkit.conformance.harness import Harness, bodies, requires
from qkit.errors import AckDeadlineExceeded, MessageNotFound, QueueError

__all__ = ["Settlement"]

NOT_SETTLEABLE = (AckDeadlineExceeded, MessageNotFound)


class Settlement(Harness):
    """Scenarios for acks, releases and leases."""

    async def test_an_acknowledged_message_is_not_redelivered(
        self, backend: Backend, name: str
    ) -> None:
        await self.declare(backend, name)
        async with self.subscribe(backend, name) as subscription:
            await self.put(backend, name, "a")
            (delivery,) = await self.take(subscription)
            await subscription.ack(delivery)
            await self.nothing(subscription, 0.2)
        async with self.subscribe(backend, name) as second:
            await self.nothing(second)

    @requires("redelivery")
    async def test_a_released_message_is_redelivered_immediately(
        self, backend: Backend, name: str
    ) -> None:
        await self.declare(backend, name)
        (message_id,) = await self.put(backend, name, "a")
        async with self.subscribe(backend, name) as subscription:
            (first,) = await self.take(subscription)
            await subscription.release(first, 0.0)
            (second,) = await self.take(subscription)
            assert second.envelope.id == message_id
            assert second.envelope.body == b"a"
            await subscription.ack(second)

    @requires("redelivery")
    async def test_each_delivery_increments_the_attempt_number(
        self, backend: Backend, name: str
    ) -> None:
        await self.declare(backend, name, max_deliveries=10)
        await self.put(backend, name, "a")
        async with self.subscribe(backend, name) as subscription:
            for attempt in (1, 2, 3):
                (delivery,) = await self.take(subscription)
                assert delivery.envelope.attempt == attempt
                await subscription.release(delivery, 0.0)

    @requires("redelivery")
    async def test_a_release_without_count_attempt_keeps_the_attempt_number(
        self, backend: Backend, name: str
    ) -> None:
        await self.declare(backend, name)
        await self.put(backend, name, "a")
        async with self.subscribe(backend, name) as subscription:
            for _ in range(3):
                (delivery,) = await self.take(subscription)
                assert delivery.envelope.attempt == 1
                await subscription.release(delivery, 0.0, count_attempt=False)

    @requires("redelivery", "delay")
    async def test_a_message_released_with_a_delay_is_redelivered_on_time(
        self, backend: Backend, name: str
    ) -> None:
        await self.declare(backend, name)
        await self.put(backend, name, "a")
        async with self.subscribe(backend, name) as subscription:
            (first,) = await self.take(subscription)
            loop = asyncio.get_running_loop()
            released = loop.time()
            await subscription.release(first, 1.5)
            (second,) = await self.take(subscription)
            waited = loop.time() - released
            assert self.on_time(waited, 1.5)
            assert second.envelope.attempt == 2

    @requires("redelivery")
    async def test_release_stores_the_changed_headers(self, backend: Backend, name: str) -> None:
        await self.declare(backend, name)
        await self.put(backend, name, "a", headers={"kept": "1"})
        async with self.subscribe(backend, name) as subscription:
            (first,) = await self.take(subscription)
            first.envelope.headers["added"] = "2"
            await subscription.release(first, 0.0)
            (second,) = await self.take(subscription)
            assert second.envelope.headers["kept"] == "1"
            assert second.envelope.headers["added"] == "2"

    @requires("redelivery")
    async def test_settling_a_delivery_twice_raises(self, backend: Backend, name: str) -> None:
        await self.declare(backend, name)
        await self.put(backend, name, "a", "b")
        async with self.subscribe(backend, name) as subscription:
            first, second = await self.take(subscription, 2)
            await subscription.ack(first)
            with pytest.raises(NOT_SETTLEABLE):
                await subscription.ack(first)
            with pytest.raises(NOT_SETTLEABLE):
                await subscription.release(first, 0.0)
            await subscription.release(second, 0.0)
            with pytest.raises(NOT_SETTLEABLE):
                await subscription.ack(second)
            (redelivered,) = await self.take(subscription)
            assert redelivered.envelope.body == b"b"

    @requires("lease")
    async def test_an_expired_lease_redelivers_the_message_and_counts_an_attempt(
        self, backend: Backend, name: str
    ) -> None:
        await self.declare(backend, name, ack_deadline=1.0)
        await self.put(backend, name, "a")
        async with self.subscribe(backend, name, ack_deadline=1.0) as subscription:
            loop = asyncio.get_running_loop()
            claimed = loop.time()
            await self.take(subscription)
            (redelivered,) = await self.take(subscription)
            assert redelivered.envelope.attempt == 2
            assert 1.0 - 0.002 <= loop.time() - claimed <= 1.0 + 5.0

    @requires("lease")
    async def test_a_late_ack_raises_and_settles_no_other_delivery(
        self, backend: Backend, name: str
    ) -> None:
        await self.declare(backend, name, ack_deadline=1.0)
        await self.put(backend, name, "a")
        async with self.subscribe(backend, name, ack_deadline=1.0) as slow:
            (late,) = await self.take(slow)
            async with self.subscribe(backend, name, ack_deadline=30.0) as other:
                (held,) = await self.take(other)
                with pytest.raises(AckDeadlineExceeded):
                    await slow.ack(late)
                with pytest.raises(AckDeadlineExceeded):
                    await slow.release(late, 0.0)
                with pytest.raises(AckDeadlineExceeded):
                    await slow.extend(late, 30.0)
                await other.ack(held)
            await self.nothing(slow)

    @requires("lease")
    async def test_a_renewed_lease_does_not_expire(self, backend: Backend, name: str) -> None:
        await self.declare(backend, name, ack_deadline=1.0)
        await self.put(backend, name, "a")
        async with self.subscribe(backend, name, ack_deadline=2.0) as subscription:
            (delivery,) = await self.take(subscription)
            for _ in range(5):
                await self.elapse(0.5)
                await subscription.extend(delivery, 2.0)
            await subscription.ack(delivery)
            await self.nothing(subscription, 2.0)

    @requires("lease")
    async def test_a_lease_lasts_as_long_as_the_consumer_requested(
        self, backend: Backend, name: str
    ) -> None:
        await self.declare(backend, name, ack_deadline=1.0)
        await self.put(backend, name, "a")
        async with self.subscribe(backend, name, ack_deadline=4.0) as subscription:
            (delivery,) = await self.take(subscription)
            assert delivery.lease == 4.0
            await self.nothing(subscription, 2.0)
            await subscription.ack(delivery)

    @requires("lease", "counts_crashes", "dead_letters")
    async def test_a_message_whose_lease_expires_too_often_is_dead_lettered(
        self, backend: Backend, name: str
    ) -> None:
        """Only for backends that write dead letters; ``Outages`` covers the others."""
        self.require_dead_letter_source(backend)
        await self.declare(backend, name, ack_deadline=0.5, max_deliveries=2)
        (message_id,) = await self.put(backend, name, "a")
        async with self.subscribe(backend, name, ack_deadline=0.5) as subscription:
            for attempt in (1, 2):
                (delivery,) = await self.take(subscription)
                assert delivery.envelope.attempt == attempt
            await self.nothing(subscription, 2.0)
        async with self.subscribe(backend, f"{name}.dead") as letters:
            (letter,) = await self.take(letters)
            assert letter.envelope.id == message_id
            assert letter.envelope.body == b"a"

    @requires("redelivery")
    async def test_closing_a_subscription_releases_its_messages_without_counting_an_attempt(
        self, backend: Backend, name: str
    ) -> None:
        await self.declare(backend, name)
        await self.put(backend, name, "a", "b")
        async with self.subscribe(backend, name) as subscription:
            await self.take(subscription, 2)
        async with self.subscribe(backend, name) as second:
            deliveries = await self.take(second, 2)
            assert sorted(bodies(deliveries)) == ["a", "b"]
            if self.column.counts_crashes:
                assert [delivery.envelope.attempt for delivery in deliveries] == [1, 1]

    async def test_deliveries_can_be_settled_after_stop(self, backend: Backend, name: str) -> None:
        await self.declare(backend, name)
        async with self.subscribe(backend, name) as subscription:
            await self.put(backend, name, "a")
            (delivery,) = await self.take(subscription)
            await subscription.stop()
            assert await subscription.receive(5) == []
            await subscription.ack(delivery)
        async with self.subscribe(backend, name) as second:
            await self.nothing(second)

    async def test_stop_wakes_a_parked_receive(self, backend: Backend, name: str) -> None:
        await self.declare(backend, name)
        async with self.subscribe(backend, name) as subscription:
            parked = asyncio.ensure_future(subscription.receive(1))
            await self.elapse(0.2)
            assert not parked.done()
            await subscription.stop()
            async with asyncio.timeout(30):
                assert await parked == []

    @requires("redelivery")
    async def test_a_cancelled_receive_loses_no_message(self, backend: Backend, name: str) -> None:
        """Cancel ``receive`` fifty times, at random moments around the arrival of a message."""
        seed = random.randrange(2**32)
        print(f"seed {seed}")
        rng = random.Random(seed)
        await self.declare(backend, name, max_deliveries=100)
        sent: list[str] = []
        got: list[str] = []

        async def settle(subscription: Subscription, deliveries: list[Delivery]) -> None:
            for delivery in deliveries:
                got.append(delivery.envelope.id)
                await subscription.ack(delivery)

        async with self.subscribe(backend, name, prefetch=100) as subscription:
            for number in range(50):
                receiving = asyncio.ensure_future(subscription.receive(5))
                for _ in range(rng.randrange(4)):
                    await asyncio.sleep(0)
                sent += await self.put(backend, name, str(number))
                for _ in range(rng.randrange(6)):
                    await asyncio.sleep(rng.choice([0, 0, 0.0005]))
                receiving.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await settle(subscription, await receiving)
            try:
                async with asyncio.timeout(20):
                    while set(got) != set(sent):
                        await settle(subscription, await subscription.receive(10))
            except TimeoutError:
                raise AssertionError(f"lost {len(set(sent) - set(got))} of 50 messages") from None

    @requires("redelivery")
    async def test_concurrent_receives_share_the_messages(
        self, backend: Backend, name: str
    ) -> None:
        await self.declare(backend, name)
        async with self.subscribe(backend, name) as one, self.subscribe(backend, name) as two:
            waiting = [asyncio.ensure_future(each.receive(1)) for each in (one, two)]
            await self.elapse(0.1)
            await self.put(backend, name, "a", "b")
            async with asyncio.timeout(30):
                found = [delivery for task in waiting for delivery in await task]
                while len(found) < 2:  # one call may have received both messages
                    found += await one.receive(1) or await two.receive(1)
            assert sorted(bodies(found)) == ["a", "b"]

    @requires("redelivery")
    async def test_an_unknown_receipt_settles_nothing(self, backend: Backend, name: str) -> None:
        await self.declare(backend, name)
        await self.put(backend, name, "a")
        async with self.subscribe(backend, name) as subscription:
            (delivery,) = await self.take(subscription)
            forged_delivery = Delivery(delivery.envelope, name, None)
            with pytest.raises(QueueError):
                await subscription.ack(forged_delivery)
            await subscription.release(delivery, 0.0)
            (redelivered,) = await self.take(subscription)
            await subscription.ack(redelivered)
