"""Conformance scenarios for dead letters: contents, listing, replay, purge and size limit."""

from __future__ import annotations

import asyncio

from qkit.conformance.harness import Harness, Serve, requires
from qkit.errors import Reject
from qkit.handlers.decorators import channel, consume
from qkit.message import Message
from qkit.observability.events import DeadLettered
from qkit.service import QueueService

__all__ = ["DeadLetterRecords"]

QUICK: dict[str, float] = {"max_attempts": 2, "initial_delay": 0.3, "jitter": 0.0}
ONCE = {"enabled": False}
TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"


class DeadLetterRecords(Harness):
    """Scenarios for the contents of dead letters and the operations on them."""

    async def _failing(self, serve: Serve, name: str, *bodies: str, **options: object) -> _Failing:
        """Start a service with a failing handler, and wait for one dead letter per body."""
        failing = _Failing()
        service = await serve(failing.handler(name), **{"retry": ONCE, **options})
        failing.service = service
        for body in bodies:
            sent = await service.send(name, body)
            failing.ids[body] = sent.message_id
        await self.until(lambda: len(failing.handled) == len(bodies))
        await self.letters(service, name, len(bodies))
        return failing

    @requires("dead_letters")
    async def test_a_dead_letter_records_what_failed_why_and_when(
        self, serve: Serve, name: str
    ) -> None:
        @consume(name)
        async def fail(body: dict[str, int]) -> None:
            raise LookupError("no such customer")

        service = await serve(fail, retry=QUICK)
        sent = await service.send(
            name,
            {"id": 7},
            key="customer-7",
            headers={"tenant": "acme", "traceparent": f"00-{TRACE}-00f067aa0ba902b7-01"},
            priority=8 if self.column.priority else None,
        )
        (letter,) = await self.letters(service, name)
        assert (letter.message_id, letter.channel) == (sent.message_id, name)
        assert (letter.group is None) is bool(self.column.queues), "only topics have groups"
        assert (letter.reason, letter.attempts) == ("MaxRetriesExceeded", 2)
        assert (letter.error_type, letter.error) == ("LookupError", "no such customer")
        assert self.on_time(letter.last_failed_at - letter.first_failed_at, 0.3)
        assert letter.trace_id == TRACE
        assert letter.body == b'{"id":7}'
        assert (letter.headers["tenant"], letter.key) == ("acme", "customer-7")
        assert letter.priority == (8 if self.column.priority else letter.priority)
        leaked = [header for header in letter.headers if header.startswith("qkit-")]
        assert leaked == [], "qkit's own headers must become fields of the record"

    @requires("dead_letters")
    async def test_a_dead_letter_keeps_any_body_unchanged(self, serve: Serve, name: str) -> None:
        blob = bytes(range(256)) * 4

        @consume(name)
        async def reject(body: bytes) -> None:
            raise Reject

        service = await serve(reject)
        await service.send(name, blob)
        (letter,) = await self.letters(service, name)
        assert letter.body == blob

    @requires("dead_letters")
    async def test_error_text_is_escaped_and_truncated(self, serve: Serve, name: str) -> None:
        @consume(name)
        async def fail(body: str) -> None:
            raise ValueError("first line\nzweite Zeile: größer\x00" + "x" * 10_000)

        service = await serve(fail, retry=ONCE)
        await service.send(name, "a")
        (letter,) = await self.letters(service, name)
        text = letter.error or ""
        assert text.startswith("first line\\nzweite Zeile: größer")
        assert len(text) <= 2_000

    @requires("dead_letters")
    async def test_dead_letters_are_listed_oldest_first_up_to_the_limit(
        self, serve: Serve, name: str
    ) -> None:
        failing = await self._failing(serve, name, "a", "b", "c")
        letters = failing.service.dead_letters(name)
        assert [letter.body for letter in await letters.list()] == [b'"a"', b'"b"', b'"c"']
        assert [letter.body for letter in await letters.list(2)] == [b'"a"', b'"b"']
        assert len(await letters.list()) == 3, "listing must not remove dead letters"

    @requires("dead_letters")
    async def test_dead_letters_can_be_filtered(self, serve: Serve, name: str) -> None:
        @consume(name)
        async def fail(body: str) -> None:
            if body == "rejected":
                raise Reject("not for us")
            raise KeyError(body) if body == "key" else ConnectionError("port 5432 refused")

        service = await serve(fail, retry=ONCE)
        ids = [(await service.send(name, body)).message_id for body in ("rejected", "key", "port")]
        await self.letters(service, name, 3)
        letters = service.dead_letters(name)

        async def found(**filters: str) -> list[str]:
            return [letter.message_id for letter in await letters.list(**filters)]  # type: ignore[arg-type]  # the filters never include limit

        assert await found(reason="ExplicitNack") == ids[:1]
        assert await found(reason="MaxRetriesExceeded") == ids[1:]
        assert await found(error="KeyError") == ids[1:2]
        assert await found(error="port 5432") == ids[2:]
        assert await found(reason="ExplicitNack", error="KeyError") == []

    @requires("dead_letters")
    async def test_a_channel_without_dead_letters_lists_none(self, serve: Serve, name: str) -> None:
        service = await serve()
        letters = service.dead_letters(name)
        assert await letters.list() == []
        assert await letters.replay() == 0
        assert await letters.purge() == 0

    @requires("dead_letters")
    async def test_replay_resends_all_dead_letters_unchanged(self, serve: Serve, name: str) -> None:
        failing = await self._failing(serve, name, "a", "b", "c")
        failing.broken = False
        assert await failing.service.dead_letters(name).replay() == 3
        await self.until(lambda: len(failing.handled) == 6)
        assert sorted(failing.handled[3:]) == [(body, failing.ids[body], 1) for body in "abc"]
        assert await failing.service.dead_letters(name).list() == []

    @requires("dead_letters")
    async def test_replay_resends_only_the_selected_dead_letters(
        self, serve: Serve, name: str
    ) -> None:
        failing = await self._failing(serve, name, "a", "b", "c")
        letters = failing.service.dead_letters(name)
        failing.broken = False
        assert await letters.replay(["never sent"]) == 0
        assert await letters.replay([failing.ids["b"]]) == 1
        await self.until(lambda: len(failing.handled) == 4)
        assert failing.handled[3][0] == "b"
        assert await letters.replay(error="c failed") == 1
        await self.until(lambda: len(failing.handled) == 5)
        assert failing.handled[4][0] == "c"
        (remaining,) = await letters.list()
        assert remaining.message_id == failing.ids["a"]

    @requires("dead_letters")
    async def test_a_replayed_message_that_fails_is_dead_lettered_once(
        self, serve: Serve, name: str
    ) -> None:
        failing = await self._failing(serve, name, "a")
        assert await failing.service.dead_letters(name).replay() == 1
        await self.until(lambda: len(failing.handled) == 2)
        (letter,) = await self.letters(failing.service, name)
        assert (letter.message_id, letter.attempts) == (failing.ids["a"], 1)
        await self.elapse(0.3)
        await self.letters(failing.service, name, 1)
        assert len(failing.handled) == 2

    @requires("dead_letters")
    async def test_replay_while_consumers_run_neither_loses_nor_repeats_messages(
        self, serve: Serve, name: str
    ) -> None:
        bodies = [str(number) for number in range(30)]
        failing = await self._failing(serve, name, *bodies)
        failing.broken = False
        new_bodies = [str(number) for number in range(30, 60)]
        replayed, _ = await asyncio.gather(
            failing.service.dead_letters(name).replay(),
            failing.service.send_many(name, new_bodies),
        )
        assert replayed == 30
        await self.until(lambda: len(failing.handled) == 90)
        await self.elapse(0.3)
        handled_later = sorted(int(body) for body, _, _ in failing.handled[30:])
        assert handled_later == list(range(60))
        assert await failing.service.dead_letters(name).list() == []

    @requires("dead_letters")
    async def test_purge_deletes_dead_letters_and_returns_the_count(
        self, serve: Serve, name: str
    ) -> None:
        failing = await self._failing(serve, name, "a", "b")
        letters = failing.service.dead_letters(name)
        assert await letters.purge() == 2
        assert await letters.list() == []
        assert await letters.replay() == 0
        await self.elapse(0.3)
        assert len(failing.handled) == 2

    @requires("dead_letters")
    async def test_a_full_dead_letter_queue_drops_the_oldest(self, serve: Serve, name: str) -> None:
        failing = _Failing()
        service = await serve(failing.handler(name), retry=ONCE, dead_letter={"max_size": 2})
        for body in "abcd":
            await service.send(name, body)
        await self.until(lambda: service.metrics().messages_dead_lettered == 4)
        letters = await self.letters(service, name, 2)
        assert [letter.body for letter in letters] == [b'"c"', b'"d"']

    @requires("dead_letters")
    async def test_each_channel_has_its_own_dead_letters(self, serve: Serve, name: str) -> None:
        @channel(name)
        class One:
            @consume
            async def reject(self, body: str) -> None:
                raise Reject("one")

        @channel(f"{name}-two")
        class Two:
            @consume
            async def reject(self, body: str) -> None:
                raise Reject("two")

        service = await serve(One(), Two())
        await service.send(name, "a")
        await service.send(f"{name}-two", "b")
        (one,) = await self.letters(service, name)
        (two,) = await self.letters(service, f"{name}-two")
        assert (one.error, two.error) == ("one", "two")
        assert await service.dead_letters(name).purge() == 1
        await self.letters(service, f"{name}-two", 1)

    @requires("dead_letters")
    async def test_a_dead_letter_queue_has_no_dead_letter_queue(
        self, serve: Serve, name: str
    ) -> None:
        called: list[str] = []
        dead_lettered: list[DeadLettered] = []

        @consume(name)
        async def reject(body: str) -> None:
            raise Reject("first")

        @consume(f"{name}.dead")
        async def inspect(body: str) -> None:
            called.append(body)
            raise Reject("second")

        service = await serve(reject, inspect, dead_letter={"suffix": ".dead"})
        service.on("dead_letter", dead_lettered.append)
        await service.send(name, "a")
        await self.until(lambda: len(dead_lettered) == 2)
        assert called == ["a"]
        # In either order: a broker may deliver the dead letter before it confirms the write.
        assert sorted((event.letter.channel, event.kept) for event in dead_lettered) == [
            (name, True),
            (f"{name}.dead", False),
        ]
        assert await service.dead_letters(f"{name}.dead").list() == []
        assert await service.dead_letters(name).list() == []
        assert service.metrics().messages_dead_lettered == 1

    @requires("dead_letters", "ttl", "redelivery")
    async def test_an_expired_message_can_be_replayed(self, serve: Serve, name: str) -> None:
        handled: list[str] = []

        @consume(name)
        async def handle(body: str) -> None:
            handled.append(body)

        service = await serve(handle)
        service.pause(name)
        await service.send(name, "a", ttl=0.3)
        await self.elapse(0.4)
        service.resume(name)
        (letter,) = await self.letters(service, name)
        assert (letter.reason, handled) == ("TTLExpired", [])
        assert await service.dead_letters(name).replay() == 1
        await self.until(lambda: handled == ["a"])


class _Failing:
    """Handler that fails while ``broken`` is true, and a record of its calls."""

    service: QueueService

    def __init__(self) -> None:
        self.broken = True
        self.ids: dict[str, str] = {}
        self.handled: list[tuple[str, str, int]] = []

    def handler(self, name: str) -> object:
        @consume(name)
        async def handle(body: str, message: Message) -> None:
            self.handled.append((body, message.id, message.attempt))
            if self.broken:
                raise ValueError(f"{body} failed")

        return handle
