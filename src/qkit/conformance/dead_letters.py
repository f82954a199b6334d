"""Dead letters: their record, and how they are listed, replayed, purged and capped."""

from __future__ import annotations

import asyncio

from qkit.conformance.harness import Harness, Serve, requires
from qkit.errors import Reject
from qkit.handlers.decorators import channel, consume
from qkit.message import Message
from qkit.observability.events import DeadLettered
from qkit.service import QueueService

__all__ = ["DeadLetterRecords"]

QUICK = {"max_attempts": 2, "initial_delay": 0.3, "jitter": 0.0}
ONCE = {"enabled": False}
TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"


class DeadLetterRecords(Harness):
    """What is kept of a message that failed for good, and what can be done with it."""

    async def failing(self, serve: Serve, name: str, *bodies: str, **options: object) -> _Failing:
        """A service with one dead letter for each body, in this order."""
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
    async def test_the_record_says_what_failed_why_and_when(self, serve: Serve, name: str) -> None:
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
        assert (letter.group is None) is bool(self.column.queues), "groups are a topic's"
        assert (letter.reason, letter.attempts) == ("MaxRetriesExceeded", 2)
        assert (letter.error_type, letter.error) == ("LookupError", "no such customer")
        assert self.on_time(letter.last_failed_at - letter.first_failed_at, 0.3)
        assert letter.trace_id == TRACE
        assert letter.body == b'{"id":7}'
        assert (letter.headers["tenant"], letter.key) == ("acme", "customer-7")
        assert letter.priority == (8 if self.column.priority else letter.priority)
        leaked = [header for header in letter.headers if header.startswith("qkit-")]
        assert leaked == [], "the facts are fields of the record, not headers"

    @requires("dead_letters")
    async def test_the_body_is_untouched_whatever_it_holds(self, serve: Serve, name: str) -> None:
        blob = bytes(range(256)) * 4

        @consume(name)
        async def reject(body: bytes) -> None:
            raise Reject

        service = await serve(reject)
        await service.send(name, blob)
        (letter,) = await self.letters(service, name)
        assert letter.body == blob

    @requires("dead_letters")
    async def test_the_text_of_an_error_may_be_anything(self, serve: Serve, name: str) -> None:
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
    async def test_the_oldest_are_listed_first_up_to_the_limit(
        self, serve: Serve, name: str
    ) -> None:
        failing = await self.failing(serve, name, "a", "b", "c")
        letters = failing.service.dead_letters(name)
        assert [letter.body for letter in await letters.list()] == [b'"a"', b'"b"', b'"c"']
        assert [letter.body for letter in await letters.list(2)] == [b'"a"', b'"b"']
        assert len(await letters.list()) == 3, "listing takes nothing away"

    @requires("dead_letters")
    async def test_a_list_can_be_filtered(self, serve: Serve, name: str) -> None:
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
            return [letter.message_id for letter in await letters.list(**filters)]  # type: ignore[arg-type]  # limit is no filter here

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
    async def test_replay_sends_all_of_them_again_as_they_were(
        self, serve: Serve, name: str
    ) -> None:
        failing = await self.failing(serve, name, "a", "b", "c")
        failing.broken = False
        assert await failing.service.dead_letters(name).replay() == 3
        await self.until(lambda: len(failing.handled) == 6)
        assert sorted(failing.handled[3:]) == [(body, failing.ids[body], 1) for body in "abc"]
        assert await failing.service.dead_letters(name).list() == []

    @requires("dead_letters")
    async def test_replay_takes_only_what_is_named(self, serve: Serve, name: str) -> None:
        failing = await self.failing(serve, name, "a", "b", "c")
        letters = failing.service.dead_letters(name)
        failing.broken = False
        assert await letters.replay(["never sent"]) == 0
        assert await letters.replay([failing.ids["b"]]) == 1
        await self.until(lambda: len(failing.handled) == 4)
        assert failing.handled[3][0] == "b"
        assert await letters.replay(error="c failed") == 1
        await self.until(lambda: len(failing.handled) == 5)
        assert failing.handled[4][0] == "c"
        (left,) = await letters.list()
        assert left.message_id == failing.ids["a"]

    @requires("dead_letters")
    async def test_a_replayed_message_that_fails_again_comes_back_once(
        self, serve: Serve, name: str
    ) -> None:
        failing = await self.failing(serve, name, "a")
        assert await failing.service.dead_letters(name).replay() == 1
        await self.until(lambda: len(failing.handled) == 2)
        (letter,) = await self.letters(failing.service, name)
        assert (letter.message_id, letter.attempts) == (failing.ids["a"], 1)
        await self.elapse(0.3)
        await self.letters(failing.service, name, 1)
        assert len(failing.handled) == 2

    @requires("dead_letters")
    async def test_replay_while_consumers_run_loses_and_repeats_nothing(
        self, serve: Serve, name: str
    ) -> None:
        bodies = [str(number) for number in range(30)]
        failing = await self.failing(serve, name, *bodies)
        failing.broken = False
        fresh = [str(number) for number in range(30, 60)]
        replayed, _ = await asyncio.gather(
            failing.service.dead_letters(name).replay(),
            failing.service.send_many(name, fresh),
        )
        assert replayed == 30
        await self.until(lambda: len(failing.handled) == 90)
        await self.elapse(0.3)
        again = sorted(int(body) for body, _, _ in failing.handled[30:])
        assert again == list(range(60))
        assert await failing.service.dead_letters(name).list() == []

    @requires("dead_letters")
    async def test_purge_deletes_them_and_says_how_many(self, serve: Serve, name: str) -> None:
        failing = await self.failing(serve, name, "a", "b")
        letters = failing.service.dead_letters(name)
        assert await letters.purge() == 2
        assert await letters.list() == []
        assert await letters.replay() == 0
        await self.elapse(0.3)
        assert len(failing.handled) == 2

    @requires("dead_letters")
    async def test_when_there_are_too_many_the_oldest_go(self, serve: Serve, name: str) -> None:
        failing = _Failing()
        service = await serve(failing.handler(name), retry=ONCE, dead_letter={"max_size": 2})
        for body in "abcd":
            await service.send(name, body)
        await self.until(lambda: service.metrics().messages_dead_lettered == 4)
        letters = await self.letters(service, name, 2)
        assert [letter.body for letter in letters] == [b'"c"', b'"d"']

    @requires("dead_letters")
    async def test_two_channels_keep_their_dead_letters_apart(
        self, serve: Serve, name: str
    ) -> None:
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
        deaths: list[DeadLettered] = []

        @consume(name)
        async def reject(body: str) -> None:
            raise Reject("first")

        @consume(f"{name}.dead")
        async def inspect(body: str) -> None:
            called.append(body)
            raise Reject("second")

        service = await serve(reject, inspect, dead_letter={"suffix": ".dead"})
        service.on("dead_letter", deaths.append)
        await service.send(name, "a")
        await self.until(lambda: len(deaths) == 2)
        assert called == ["a"]
        # A broker may hand the letter to its consumer before it confirms it to whoever wrote it.
        assert sorted((death.letter.channel, death.kept) for death in deaths) == [
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
    """A handler that fails while ``broken``, and what it was called with."""

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
