"""One connection for many commands: order, callers that give up, silence and nonsense."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest
from redis import exceptions

from qkit.backends.redis.connection import Address, Link
from qkit.backends.redis.scripts import script as lua
from qkit.errors import BackendUnavailable
from tests.support.waiting import eventually

Script = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def server_that(behaves: Script) -> AsyncIterator[Address]:
    """A server that greets as Redis does (the driver introduces itself), then does as told."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for _ in range(2):  # CLIENT SETINFO, twice
            for _ in range(9):
                await reader.readline()
            writer.write(b"+OK\r\n")
        try:
            await behaves(reader, writer)
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        port = server.sockets[0].getsockname()[1]
        yield Address(f"redis://127.0.0.1:{port}/0", timeout=0.3)
    finally:
        server.close()


async def test_answers_come_to_those_who_asked_whoever_gave_up(redis_url: str) -> None:
    seed = random.randrange(2**32)
    print("seed", seed)
    chance = random.Random(seed)
    wire = await Address(redis_url).wire()

    async def ask(number: int) -> None:
        word = f"{number}-{chance.random()}"
        if chance.random() < 0.5:
            assert await wire.call("ECHO", word) == word.encode()
        else:
            answers = await wire.call_all([("ECHO", word), ("NONSENSE",), ("ECHO", b"")])
            assert [answers[0], answers[2]] == [word.encode(), b""]
            assert isinstance(answers[1], exceptions.ResponseError)

    async def impatient(number: int) -> None:
        asking = asyncio.create_task(ask(number))
        await asyncio.sleep(chance.random() / 500)
        asking.cancel()
        await asyncio.wait({asking})
        assert asking.cancelled() or asking.exception() is None

    for _ in range(20):
        await asyncio.gather(
            *((ask if chance.random() < 0.5 else impatient)(number) for number in range(100))
        )
    assert await wire.call("PING") == b"PONG"
    await wire.aclose()


async def test_an_error_is_raised_and_the_connection_lives(redis_url: str) -> None:
    wire = await Address(redis_url).wire()
    with pytest.raises(exceptions.ResponseError, match="NONSENSE"):
        await wire.call("NONSENSE")
    assert await wire.call_all([("PING",)]) == [b"PONG"]
    await wire.aclose()
    await wire.aclose()
    with pytest.raises(exceptions.ConnectionError):
        await wire.call("PING")


async def test_silence_ends_the_connection_and_everybodys_wait() -> None:
    async def mute(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()

    async with server_that(mute) as address:
        wire = await address.wire()
        answers = [wire.call("PING"), wire.call_all([("PING",), ("PING",)])]
        for answer in answers:
            with pytest.raises(exceptions.TimeoutError):
                await answer
        assert isinstance(wire.lost, exceptions.TimeoutError)
        await wire.aclose()


async def test_a_command_that_waits_on_the_server_has_longer() -> None:
    async def slow(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readline()
        await asyncio.sleep(0.6)  # twice the address's timeout
        writer.write(b"+LATE\r\n")
        await reader.read()

    async with server_that(slow) as address:
        wire = await address.wire()
        assert await wire.call("BLMOVE", longer=20.0) == b"LATE"
        await wire.aclose()


@pytest.mark.parametrize("said", [b"?what\r\n", b"+OK\r\n+OK\r\n"], ids=["nonsense", "too much"])
async def test_what_is_no_answer_ends_the_connection(said: bytes) -> None:
    async def babble(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readline()
        writer.write(said)
        await reader.read()

    async with server_that(babble) as address:
        wire = await address.wire()
        await asyncio.wait({wire.call("PING")})
        with pytest.raises(exceptions.InvalidResponse):
            await wire.call("PING")
        await wire.aclose()


async def test_a_server_that_hangs_up_is_noticed_at_once() -> None:
    async def leave(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readline()

    async with server_that(leave) as address:
        wire = await address.wire()
        with pytest.raises(exceptions.ConnectionError):
            await wire.call("PING")
        assert wire.lost is not None
        await wire.aclose()


async def test_a_loop_that_was_blocked_does_not_take_answers_for_late(redis_url: str) -> None:
    address = Address(redis_url, timeout=0.2)
    wire = await address.wire()
    answer = wire.call("PING")
    _block(0.5)
    assert await answer == b"PONG"
    await wire.aclose()


def _block(seconds: float) -> None:
    time.sleep(seconds)


# The link


async def test_a_link_connects_again_after_its_connection_broke(redis_url: str) -> None:
    link = Link(Address(redis_url))
    with pytest.raises(BackendUnavailable, match="start"):
        await link.command("PING")
    link.connect()
    first = await link.wire()
    number = await link.command("CLIENT", "ID")
    other = await Address(redis_url).wire()
    await other.call("CLIENT", "KILL", "ID", number)
    await other.aclose()
    await eventually(lambda: first.lost)
    answers = await asyncio.gather(*(link.command("CLIENT", "ID") for _ in range(20)))
    assert len(set(answers)) == 1, "all share one new connection"
    assert answers[0] != number
    await link.aclose()
    await link.aclose()


async def test_one_that_gives_up_leaves_the_others_their_connection(redis_url: str) -> None:
    link = Link(Address(redis_url))
    link.connect()
    hasty, patient = (asyncio.create_task(link.command("PING")) for _ in range(2))
    await asyncio.sleep(0)
    hasty.cancel()
    assert await patient == b"PONG"
    await link.aclose()


async def test_closing_while_it_connects_leaves_nothing_behind() -> None:
    async def mute(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    server = await asyncio.start_server(mute, "127.0.0.1", 0)
    link = Link(Address(f"redis://127.0.0.1:{server.sockets[0].getsockname()[1]}/0", timeout=30.0))
    link.connect()
    asking = asyncio.create_task(link.command("PING"))
    await asyncio.sleep(0.05)
    await link.aclose()
    with pytest.raises(BackendUnavailable, match="closed"):
        await asking
    server.close()


async def test_a_script_that_the_server_forgot_is_told_again(redis_url: str) -> None:
    link = Link(Address(redis_url))
    link.connect()
    source = f"return ARGV[1] .. '{random.random()}'"
    script = lua.Script(source)
    answer = await link.run(script, ["k"], "x")
    assert answer.startswith(b"x0.")
    assert await link.run(script, ["k"], "x") == answer
    unknown = lua.Script(f"{source} .. ''")
    assert await link.run_and_wait(unknown, ["k"], ["x"], 0, 0.1) == (answer, 0)
    await link.aclose()
