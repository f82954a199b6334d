"""Pipelined connection: reply order, cancelled callers, timeouts and invalid replies."""

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
async def fake_server(behavior: Script) -> AsyncIterator[ConnectionParameters]:
    """Run a server that completes the driver's handshake and then calls ``behavior``."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for _ in range(2):  # CLIENT SETINFO, twice
            for _ in range(9):
                await reader.readline()
            writer.write(b"+OK\r\n")
        try:
            await behavior(reader, writer)
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        port = server.sockets[0].getsockname()[1]
        yield ConnectionParameters(f"redis://127.0.0.1:{port}/0", timeout=0.3)
    finally:
        server.close()


async def test_replies_reach_their_callers_when_other_callers_are_cancelled(redis_url: str) -> None:
    seed = random.randrange(2**32)
    print("seed", seed)
    chance = random.Random(seed)
    connection = await ConnectionParameters(redis_url).open_connection()

    async def call(number: int) -> None:
        word = f"{number}-{chance.random()}"
        if chance.random() < 0.5:
            assert await connection.call("ECHO", word) == word.encode()
        else:
            answers = await connection.call_all([("ECHO", word), ("NONSENSE",), ("ECHO", b"")])
            assert [answers[0], answers[2]] == [word.encode(), b""]
            assert isinstance(answers[1], exceptions.ResponseError)

    async def cancelled_call(number: int) -> None:
        calling = asyncio.create_task(call(number))
        await asyncio.sleep(chance.random() / 500)
        calling.cancel()
        await asyncio.wait({calling})
        assert calling.cancelled() or calling.exception() is None

    for _ in range(20):
        await asyncio.gather(
            *((call if chance.random() < 0.5 else cancelled_call)(number) for number in range(100))
        )
    assert await connection.call("PING") == b"PONG"
    await connection.aclose()


async def test_an_error_reply_is_raised_and_the_connection_stays_usable(redis_url: str) -> None:
    connection = await ConnectionParameters(redis_url).open_connection()
    with pytest.raises(exceptions.ResponseError, match="NONSENSE"):
        await connection.call("NONSENSE")
    assert await connection.call_all([("PING",)]) == [b"PONG"]
    await connection.aclose()
    await connection.aclose()
    with pytest.raises(exceptions.ConnectionError):
        await connection.call("PING")


async def test_a_silent_server_fails_all_pending_calls() -> None:
    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()

    async with fake_server(silent) as parameters:
        connection = await parameters.open_connection()
        answers = [connection.call("PING"), connection.call_all([("PING",), ("PING",)])]
        for answer in answers:
            with pytest.raises(exceptions.TimeoutError):
                await answer
        assert isinstance(connection.lost, exceptions.TimeoutError)
        await connection.aclose()


async def test_a_blocking_command_has_a_longer_timeout() -> None:
    async def slow(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readline()
        await asyncio.sleep(0.6)  # twice the connection's timeout
        writer.write(b"+LATE\r\n")
        await reader.read()

    async with fake_server(slow) as parameters:
        connection = await parameters.open_connection()
        assert await connection.call("BLMOVE", longer=20.0) == b"LATE"
        await connection.aclose()


@pytest.mark.parametrize("reply", [b"?what\r\n", b"+OK\r\n+OK\r\n"], ids=["invalid", "too many"])
async def test_an_invalid_reply_closes_the_connection(reply: bytes) -> None:
    async def send_reply(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readline()
        writer.write(reply)
        await reader.read()

    async with fake_server(send_reply) as parameters:
        connection = await parameters.open_connection()
        await asyncio.wait({connection.call("PING")})
        with pytest.raises(exceptions.InvalidResponse):
            await connection.call("PING")
        await connection.aclose()


async def test_a_closed_connection_is_detected_immediately() -> None:
    async def disconnect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readline()

    async with fake_server(disconnect) as parameters:
        connection = await parameters.open_connection()
        with pytest.raises(exceptions.ConnectionError):
            await connection.call("PING")
        assert connection.lost is not None
        await connection.aclose()


async def test_a_blocked_loop_does_not_cause_timeouts(redis_url: str) -> None:
    parameters = ConnectionParameters(redis_url, timeout=0.2)
    connection = await parameters.open_connection()
    answer = connection.call("PING")
    _block(0.5)
    assert await answer == b"PONG"
    await connection.aclose()


def _block(seconds: float) -> None:
    time.sleep(seconds)


# ReconnectingConnection


async def test_a_lost_connection_is_reopened(redis_url: str) -> None:
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
    assert len(set(answers)) == 1, "callers use different connections"
    assert answers[0] != number
    await connection.aclose()
    await connection.aclose()


async def test_a_cancelled_caller_does_not_cancel_the_shared_connection(redis_url: str) -> None:
    connection = ReconnectingConnection(ConnectionParameters(redis_url))
    connection.connect()
    cancelled, other = (asyncio.create_task(connection.command("PING")) for _ in range(2))
    await asyncio.sleep(0)
    cancelled.cancel()
    assert await other == b"PONG"
    await connection.aclose()


async def test_closing_while_connecting_fails_the_caller() -> None:
    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    server = await asyncio.start_server(silent, "127.0.0.1", 0)
    connection = ReconnectingConnection(
        ConnectionParameters(
            f"redis://127.0.0.1:{server.sockets[0].getsockname()[1]}/0", timeout=30.0
        )
    )
    connection.connect()
    calling = asyncio.create_task(connection.command("PING"))
    await asyncio.sleep(0.05)
    await connection.aclose()
    with pytest.raises(BackendUnavailable, match="closed"):
        await calling
    server.close()


async def test_a_script_that_the_server_does_not_have_is_sent(redis_url: str) -> None:
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
