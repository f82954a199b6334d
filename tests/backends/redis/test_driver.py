"""One connection for many commands: order, callers that give up, silence and nonsense."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest
from redis import exceptions

from qkit.backends.redis.connection import ConnectionParameters, ReconnectingConnection
from qkit.backends.redis.scripts import script as lua
from qkit.errors import BackendUnavailable
from tests.support.waiting import eventually

Script = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def server_that(behaves: Script) -> AsyncIterator[ConnectionParameters]:
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
        yield ConnectionParameters(f"redis://127.0.0.1:{port}/0", timeout=0.3)
    finally:
        server.close()


async def test_answers_come_to_those_who_asked_whoever_gave_up(redis_url: str) -> None:
    seed = random.randrange(2**32)
    print("seed", seed)
    chance = random.Random(seed)
    connection = await ConnectionParameters(redis_url).open_connection()

    async def ask(number: int) -> None:
        word = f"{number}-{chance.random()}"
        if chance.random() < 0.5:
            assert await connection.call("ECHO", word) == word.encode()
        else:
            answers = await connection.call_all([("ECHO", word), ("NONSENSE",), ("ECHO", b"")])
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
    assert await connection.call("PING") == b"PONG"
    await connection.aclose()


async def test_an_error_is_raised_and_the_connection_lives(redis_url: str) -> None:
    connection = await ConnectionParameters(redis_url).open_connection()
    with pytest.raises(exceptions.ResponseError, match="NONSENSE"):
        await connection.call("NONSENSE")
    assert await connection.call_all([("PING",)]) == [b"PONG"]
    await connection.aclose()
    await connection.aclose()
    with pytest.raises(exceptions.ConnectionError):
        await connection.call("PING")


async def test_silence_ends_the_connection_and_everybodys_wait() -> None:
    async def mute(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()

    async with server_that(mute) as parameters:
        connection = await parameters.open_connection()
        answers = [connection.call("PING"), connection.call_all([("PING",), ("PING",)])]
        for answer in answers:
            with pytest.raises(exceptions.TimeoutError):
                await answer
        assert isinstance(connection.lost, exceptions.TimeoutError)
        await connection.aclose()


async def test_a_command_that_waits_on_the_server_has_longer() -> None:
    async def slow(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readline()
        await asyncio.sleep(0.6)  # twice the timeout of the parameters
        writer.write(b"+LATE\r\n")
        await reader.read()

    async with server_that(slow) as parameters:
        connection = await parameters.open_connection()
        assert await connection.call("BLMOVE", longer=20.0) == b"LATE"
        await connection.aclose()


@pytest.mark.parametrize("said", [b"?what\r\n", b"+OK\r\n+OK\r\n"], ids=["nonsense", "too much"])
async def test_what_is_no_answer_ends_the_connection(said: bytes) -> None:
    async def babble(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readline()
        writer.write(said)
        await reader.read()

    async with server_that(babble) as parameters:
        connection = await parameters.open_connection()
        await asyncio.wait({connection.call("PING")})
        with pytest.raises(exceptions.InvalidResponse):
            await connection.call("PING")
        await connection.aclose()


async def test_a_server_that_hangs_up_is_noticed_at_once() -> None:
    async def leave(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readline()

    async with server_that(leave) as parameters:
        connection = await parameters.open_connection()
        with pytest.raises(exceptions.ConnectionError):
            await connection.call("PING")
        assert connection.lost is not None
        await connection.aclose()


async def test_a_loop_that_was_blocked_does_not_take_answers_for_late(redis_url: str) -> None:
    parameters = ConnectionParameters(redis_url, timeout=0.2)
    connection = await parameters.open_connection()
    answer = connection.call("PING")
    _block(0.5)
    assert await answer == b"PONG"
    await connection.aclose()


def _block(seconds: float) -> None:
    time.sleep(seconds)


# The reconnecting connection


async def test_a_link_connects_again_after_its_connection_broke(redis_url: str) -> None:
    connection = ReconnectingConnection(ConnectionParameters(redis_url))
    with pytest.raises(BackendUnavailable, match="start"):
        await connection.command("PING")
    connection.connect()
    first = await connection.current()
    number = await connection.command("CLIENT", "ID")
    other = await ConnectionParameters(redis_url).open_connection()
    await other.call("CLIENT", "KILL", "ID", number)
    await other.aclose()
    await eventually(lambda: first.lost)
    answers = await asyncio.gather(*(connection.command("CLIENT", "ID") for _ in range(20)))
    assert len(set(answers)) == 1, "all share one new connection"
    assert answers[0] != number
    await connection.aclose()
    await connection.aclose()


async def test_one_that_gives_up_leaves_the_others_their_connection(redis_url: str) -> None:
    connection = ReconnectingConnection(ConnectionParameters(redis_url))
    connection.connect()
    hasty, patient = (asyncio.create_task(connection.command("PING")) for _ in range(2))
    await asyncio.sleep(0)
    hasty.cancel()
    assert await patient == b"PONG"
    await connection.aclose()


async def test_closing_while_it_connects_leaves_nothing_behind() -> None:
    async def mute(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    server = await asyncio.start_server(mute, "127.0.0.1", 0)
    connection = ReconnectingConnection(
        ConnectionParameters(
            f"redis://127.0.0.1:{server.sockets[0].getsockname()[1]}/0", timeout=30.0
        )
    )
    connection.connect()
    asking = asyncio.create_task(connection.command("PING"))
    await asyncio.sleep(0.05)
    await connection.aclose()
    with pytest.raises(BackendUnavailable, match="closed"):
        await asking
    server.close()


async def test_a_script_that_the_server_forgot_is_told_again(redis_url: str) -> None:
    connection = ReconnectingConnection(ConnectionParameters(redis_url))
    connection.connect()
    source = f"return ARGV[1] .. '{random.random()}'"
    script = lua.Script(source)
    answer = await connection.run(script, ["k"], "x")
    assert answer.startswith(b"x0.")
    assert await connection.run(script, ["k"], "x") == answer
    unknown = lua.Script(f"{source} .. ''")
    assert await connection.run_and_wait(unknown, ["k"], ["x"], 0, 0.1) == (answer, 0)
    await connection.aclose()
