"""Conformance scenarios for administration: stats, peek, purge, delete, list of queues."""

from __future__ import annotations

import asyncio

import pytest

from qkit.conformance.harness import Harness, Serve, requires
from qkit.errors import InvalidName, QueueNotFound, Reject
from qkit.handlers.decorators import consume
from qkit.message import Message

__all__ = ["Admin"]


class Admin(Harness):
    """Scenarios for administrative calls."""

    @requires("depth")
    async def test_stats_count_ready_messages(self, serve: Serve, name: str) -> None:
        service = await serve()
        await service.send_many(name, ["a", "b", "c"])
        stats = await service.stats(name)
        assert (stats.queue, stats.depth) == (name, 3)
        assert stats.in_flight in (None, 0)
        assert stats.scheduled in (None, 0)
        assert stats.consumers in (None, 0)

    @requires("depth", "prefetch", "redelivery")
    async def test_stats_count_ready_and_in_flight_messages_separately(
        self, serve: Serve, name: str
    ) -> None:
        started, release = asyncio.Event(), asyncio.Event()

        @consume(name, prefetch=1)
        async def handle(body: str) -> None:
            started.set()
            await release.wait()

        service = await serve(handle)
        await service.send_many(name, ["a", "b", "c"])
        await started.wait()
        stats = await service.stats(name)
        assert stats.in_flight in (None, 1)
        assert stats.depth == (2 if stats.in_flight is not None else stats.depth)
        assert stats.consumers in (None, 1)
        release.set()
        for _ in range(500):
            if (stats := await service.stats(name)).depth == 0 and not stats.in_flight:
                break
            await asyncio.sleep(0.02)
        assert stats.depth == 0
        assert stats.in_flight in (None, 0)

    @requires("depth", "delay")
    async def test_a_delayed_message_counts_as_scheduled_and_not_as_ready(
        self, serve: Serve, name: str
    ) -> None:
        service = await serve()
        await service.send(name, "now")
        await service.send(name, "later", delay=600)
        stats = await service.stats(name)
        assert stats.depth == 1
        assert stats.scheduled in (None, 1)

    @requires("peek")
    async def test_peek_shows_the_next_messages_in_order(self, serve: Serve, name: str) -> None:
        service = await serve()
        sent = await service.send_many(name, ["a", "b", "c"], key="k", headers={"tenant": "acme"})
        found = await service.peek(name, 2)
        assert [message.id for message in found] == [item.message_id for item in sent[:2]]
        assert [message.body for message in found] == [b'"a"', b'"b"']
        assert (found[0].channel, found[0].key) == (name, "k")
        assert found[0].headers["tenant"] == "acme"
        assert len(await service.peek(name, 10)) == 3
        assert len(await service.peek(name, 10)) == 3, "peek must not remove messages"

    @requires("peek")
    async def test_peek_does_not_count_an_attempt(self, serve: Serve, name: str) -> None:
        attempts: list[int] = []

        @consume(name)
        async def handle(body: str, message: Message) -> None:
            attempts.append(message.attempt)

        service = await serve()
        await service.send(name, "a")
        for _ in range(5):
            await service.peek(name)
        await serve(handle)
        await self.until(lambda: attempts)
        await self.elapse(0.2)
        assert attempts == [1]

    @requires("peek", "priority")
    async def test_peek_shows_higher_priorities_first(self, serve: Serve, name: str) -> None:
        service = await serve()
        await service.send(name, "usual")
        await service.send(name, "urgent", priority=9)
        assert [message.body for message in await service.peek(name)] == [b'"urgent"', b'"usual"']

    @requires("purge")
    async def test_purge_empties_a_queue_and_returns_the_count(
        self, serve: Serve, name: str
    ) -> None:
        handled: list[str] = []

        @consume(name)
        async def handle(body: str) -> None:
            handled.append(body)

        service = await serve()
        await service.send_many(name, ["a", "b"])
        assert await service.purge(name) == 2
        assert await service.purge(name) == 0
        consumer = await serve(handle)
        await consumer.send(name, "after")
        await self.until(lambda: handled)
        await self.elapse(0.2)
        assert handled == ["after"]

    @requires("purge", "prefetch", "redelivery")
    async def test_purge_leaves_messages_in_flight(self, serve: Serve, name: str) -> None:
        started, release = asyncio.Event(), asyncio.Event()
        done: list[str] = []

        @consume(name, prefetch=1)
        async def handle(body: str) -> None:
            started.set()
            await release.wait()
            done.append(body)

        service = await serve(handle)
        await service.send_many(name, ["held", "b", "c"])
        await started.wait()
        assert await service.purge(name) == 2
        release.set()
        await self.until(lambda: service.health_check().consumers[0].last_settle_at)
        await self.elapse(0.3)
        assert done == ["held"]

    @requires("purge", "delay")
    async def test_purge_removes_delayed_messages(self, serve: Serve, name: str) -> None:
        handled: list[str] = []

        @consume(name)
        async def handle(body: str) -> None:
            handled.append(body)

        service = await serve()
        await service.send(name, "a", delay=1.0)
        assert await service.purge(name) == 1
        await serve(handle)
        await self.elapse(2.0)
        assert handled == []

    @requires("delete", "depth")
    async def test_a_deleted_queue_does_not_exist_until_the_next_send(
        self, serve: Serve, name: str
    ) -> None:
        service = await serve()
        await service.send_many(name, ["a", "b"])
        await service.delete(name)
        with pytest.raises(QueueNotFound):
            await service.stats(name)
        await service.send(name, "c")
        assert (await service.stats(name)).depth == 1

    @requires("delete", "depth")
    async def test_a_queue_deleted_by_another_service_is_declared_by_the_next_send(
        self, serve: Serve, name: str
    ) -> None:
        service, other = await serve(), await serve()
        await service.send(name, "a")
        await other.delete(name)
        await service.send(name, "b")
        assert (await service.stats(name)).depth == 1

    @requires("depth", "dead_letters")
    async def test_queues_lists_queues_and_dead_letter_queues(
        self, serve: Serve, name: str
    ) -> None:
        @consume(name)
        async def reject(body: str) -> None:
            raise Reject

        service = await serve(reject)
        await service.send(f"{name}-other", "a")
        await service.send(name, "a")
        await self.letters(service, name)
        letters = service.settings.dead_letter_name(name)
        names = await service.queues()
        assert {name, f"{name}-other", letters} <= set(names)
        assert names == sorted(names)
        assert (await service.stats(letters)).depth == 1

    @requires("depth")
    async def test_stats_of_an_unknown_queue_raise_queue_not_found(
        self, serve: Serve, name: str
    ) -> None:
        service = await serve()
        with pytest.raises(QueueNotFound):
            await service.stats(name)
        with pytest.raises(InvalidName):
            await service.stats("../etc")

    @requires("peek", "purge", "delete")
    async def test_admin_calls_on_an_unknown_queue_raise_queue_not_found(
        self, serve: Serve, name: str
    ) -> None:
        service = await serve()
        await service.send(f"{name}-known", 1)
        for call in (service.peek, service.purge, service.delete):
            with pytest.raises(QueueNotFound):
                await call(name)
        assert name not in await service.queues(), "the calls must not create a queue"
