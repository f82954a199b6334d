"""Owner's socket server: socket file, invalid data, slow clients, and lost connections."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import socket
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from qkit.backend import QueueSpec, SubscriptionSpec
from qkit.backends.native.backend import NativeBackend
from qkit.backends.native.socket import protocol
from qkit.backends.native.socket.client.backend import SocketBackend
from qkit.backends.native.socket.server import server as server_module
from qkit.backends.native.socket.server.server import SocketServer
from qkit.backends.native.socket.unix_socket import connect
from qkit.errors import BackendUnavailable, ConfigError, LifecycleError
from qkit.message import DeadLetter, Envelope
from qkit.native import Engine

SEED = int(os.environ.get("QKIT_TEST_SEED", "20240501"))


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(30):
        while not condition():  # noqa: ASYNC110  # there is no event to wait for
            await asyncio.sleep(0.005)


def spec(prefetch: int = 10, **options: Any) -> SubscriptionSpec:
    return SubscriptionSpec(queue="q", group="g", consumer="c", prefetch=prefetch, **options)


def files(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


# Socket file


async def test_only_the_same_user_can_connect_despite_the_umask(directory: Path) -> None:
    before = os.umask(0)
    try:
        async with Engine() as engine:
            server = SocketServer(NativeBackend(engine=engine), engine, directory / "socket")
            await server.start()
            mode = (directory / "socket").lstat().st_mode
            assert stat.S_ISSOCK(mode)
            assert stat.S_IMODE(mode) == 0o600
            with pytest.raises(LifecycleError):
                await server.start()
            await server.aclose()
    finally:
        os.umask(before)
    assert files(directory) == []


async def test_a_socket_left_by_a_killed_owner_is_replaced(owner: Any, directory: Path) -> None:
    left = directory / "left"
    dead = socket.socket(socket.AF_UNIX)
    dead.bind(str(left))
    dead.close()
    with pytest.raises(BackendUnavailable) as caught:
        await SocketBackend(left).start()
    assert isinstance(caught.value.cause, ConnectionRefusedError)
    server = SocketServer(owner.backend, owner.engine, left)
    await server.start()
    client = SocketBackend(left)
    await client.start()
    await client.ping()
    await client.aclose()
    await server.aclose()


@pytest.mark.parametrize("kind", ["symlink", "file", "directory"])
async def test_another_file_at_the_path_of_the_socket_is_rejected(
    owner: Any, directory: Path, kind: str
) -> None:
    planted, target = directory / "planted", directory / "target"
    if kind == "symlink":
        planted.symlink_to(target)
    elif kind == "file":
        planted.write_text("some data")
    else:
        planted.mkdir()
    with pytest.raises(ConfigError, match="remove it"):
        await SocketServer(owner.backend, owner.engine, planted).start()
    with pytest.raises(BackendUnavailable, match="not the socket"):
        await SocketBackend(planted).start()
    assert files(directory) == ["planted", "socket"]


async def test_a_client_does_not_follow_a_symlink(owner: Any, directory: Path) -> None:
    (directory / "link").symlink_to(owner.path)
    with pytest.raises(BackendUnavailable):
        await SocketBackend(directory / "link").start()


async def test_a_path_may_be_longer_than_a_socket_address(owner: Any, directory: Path) -> None:
    deep = directory.joinpath(*["d" * 50] * 5)
    deep.mkdir(parents=True)
    server = SocketServer(owner.backend, owner.engine, deep / "socket")
    await server.start()
    client = SocketBackend(deep / "socket")
    await client.start()
    await client.ping()
    await client.aclose()
    await server.aclose()
    assert files(deep) == []


async def test_closing_keeps_the_socket_of_another_owner(owner: Any, directory: Path) -> None:
    other = SocketServer(owner.backend, owner.engine, owner.path)
    await other.start()
    await owner.server.aclose()
    client = await owner.client()
    await client.ping()
    await client.aclose()
    await other.aclose()


# Invalid data and slow clients


async def test_invalid_data_closes_only_its_own_connection(owner: Any) -> None:
    print("seed", SEED)
    chance = random.Random(SEED)
    client = await owner.client()
    kinds = [*range(14), 64, 255]
    for _ in range(150):
        reader, writer = await asyncio.open_unix_connection(owner.path)
        match chance.randrange(4):
            case 0:
                writer.write(protocol.MAGIC[:1] + chance.randbytes(chance.randrange(40)))
            case 1:
                writer.write(protocol.MAGIC + chance.randbytes(chance.randrange(1, 200)))
            case 2:
                frames = [
                    protocol.frame(chance.choice(kinds), n, chance.randbytes(chance.randrange(60)))
                    for n in range(5)
                ]
                writer.write(protocol.MAGIC + b"".join(frames))
            case _:
                writer.write(chance.randbytes(chance.randrange(1, 200)).replace(b"\xf1", b""))
        if chance.random() < 0.5:
            writer.write_eof()
            await reader.read()
        writer.close()
    await client.ping()


async def test_a_frame_above_the_limit_closes_the_connection_with_an_error(directory: Path) -> None:
    async with Engine() as engine:
        path = directory / "socket"
        server = SocketServer(NativeBackend(engine=engine), engine, path, max_frame=10_000)
        await server.start()
        reader, writer = await asyncio.open_unix_connection(path)
        writer.write(protocol.MAGIC + protocol.HEAD.pack(10_001, protocol.PUBLISH, 1))
        assert b"the limit is 10000" in await reader.read()
        writer.close()
        await server.aclose()


async def test_another_protocol_version_gets_an_error(owner: Any) -> None:
    reader, writer = await asyncio.open_unix_connection(owner.path)
    writer.write(protocol.MAGIC[:-1] + b"\x63")
    assert b"same version" in await reader.read()
    writer.close()


async def test_buffers_for_a_client_that_does_not_read_are_bounded(owner: Any) -> None:
    await owner.engine.create("q", dead_letter=False)
    for _ in range(64):
        await owner.engine.publish("q", bytes(100_000))
    slow = connect(owner.path)
    peek = protocol.frame(protocol.ADMINISTER, 1, protocol.encode_json(["peek", "q", 64]))
    slow.sendall(protocol.MAGIC)
    sent = 0
    try:
        for _ in range(10_000):  # each requests 6 MB, which the client does not read
            sent += slow.send(peek)
            await asyncio.sleep(0)
    except BlockingIOError:
        pass
    (connection,) = owner.server._connections
    await asyncio.sleep(0.05)
    assert sent < 10_000 * len(peek), "the owner must stop reading"
    assert connection._write_buffer.waiting < 300 * (1 << 20)
    slow.close()
    await until(lambda: not owner.server._connections)
    client = await owner.client()
    await client.ping()


async def test_a_client_that_does_not_read_gets_few_deliveries(owner: Any) -> None:
    await owner.engine.create("q", dead_letter=False)
    for _ in range(50):
        await owner.engine.publish("q", bytes(300_000))
    slow = connect(owner.path)
    slow.sendall(
        protocol.MAGIC
        + protocol.frame(protocol.SUBSCRIBE, 1, protocol.encode_record(spec(1_000)))
        + protocol.frame(protocol.CREDIT, 1, protocol.encode_credit(1, 1))
    )
    await until(lambda: in_flight(owner) >= 1)
    for number in range(2, 60):
        slow.send(protocol.frame(protocol.CREDIT, 1, protocol.encode_credit(number, 1)))
        await asyncio.sleep(0.002)
    assert in_flight(owner) < 10, "the owner must stop sending"
    slow.close()


def in_flight(owner: Any) -> int:
    return int(owner.engine.catalogue.find("q", "test").state.in_flight)


# Clients that disconnect


async def test_closing_a_subscription_releases_its_deliveries_without_counting_attempts(
    owner: Any,
) -> None:
    client, other = await owner.client(), await owner.client()
    await client.declare(QueueSpec(name="q"))
    await client.publish("q", [Envelope("a", b"1"), Envelope("b", b"2")])
    async with client.subscribe(spec()) as subscription:
        assert len(await subscription.receive(5)) == 2
    async with other.subscribe(spec()) as subscription:
        found = await subscription.receive(5)
    assert [(item.envelope.id, item.envelope.attempt) for item in found] == [("a", 1), ("b", 1)]


async def test_closing_a_client_releases_its_deliveries_without_counting_attempts(
    owner: Any,
) -> None:
    client, other = await owner.client(), await owner.client()
    await client.declare(QueueSpec(name="q"))
    await client.publish("q", [Envelope("a", b"1")])
    async with client.subscribe(spec()) as subscription:
        await subscription.receive(5)
        await client.aclose()
    async with other.subscribe(spec()) as subscription:
        (found,) = await subscription.receive(5)
    assert found.envelope.attempt == 1


def crash(client: SocketBackend) -> None:
    """Close a client's connection as the kernel does when a process is killed."""
    assert client._connection is not None
    client._connection._transport.abort()


async def test_the_attempts_of_a_crashed_client_are_counted(directory: Path) -> None:
    async with Engine() as engine:
        path = directory / "socket"
        server = SocketServer(NativeBackend(engine=engine), engine, path)
        await server.start()
        client, other = SocketBackend(path), SocketBackend(path)
        await client.start()
        await other.start()
        await client.declare(QueueSpec(name="q", ack_deadline=60))
        await client.publish("q", [Envelope("a", b"1")])
        async with client.subscribe(spec()) as subscription:
            await subscription.receive(1)
            crash(client)
            async with other.subscribe(spec()) as survivor, asyncio.timeout(30):
                (found,) = await survivor.receive(1)
                assert found.envelope.attempt == 2, (
                    "the attempt of the crashed client was not counted"
                )
        await other.aclose()
        await server.aclose()


async def test_dead_letters_are_reported_to_every_client_with_a_callback(owner: Any) -> None:
    client, other, silent = [await owner.client() for _ in range(3)]
    letters: list[DeadLetter] = []
    dropped: list[DeadLetter] = []
    client.on_dead_letter(letters.append)
    other.on_dead_letter(letters.append)
    other.on_dropped_letter(dropped.append)
    await silent.declare(QueueSpec(name="q", dead_letter="d"))
    await other.declare(QueueSpec(name="d", max_depth=1, drop_oldest=True))
    await client.ping()
    for id in ("a", "b"):
        await owner.engine.publish("q", b"x", ttl=0.01, message_id=id)
    await until(lambda: len(letters) == 4 and dropped)
    assert sorted(letter.message_id for letter in letters) == ["a", "a", "b", "b"]
    assert {letter.reason for letter in letters} == {"TTLExpired"}
    assert [letter.message_id for letter in dropped] == ["a"]


async def test_closing_the_server_finishes_requests_and_wakes_every_client(owner: Any) -> None:
    client = await owner.client()
    await client.declare(QueueSpec(name="q"))
    publishing = asyncio.create_task(client.publish("q", [Envelope("a", b"1")]))
    async with client.subscribe(
        SubscriptionSpec(queue="q", group="g", consumer="c", prefetch=1)
    ) as s:
        assert (await publishing)[0].position == 0
        (found,) = await s.receive(1)
        receiving = asyncio.create_task(s.receive(1))
        await asyncio.sleep(0)
        await owner.server.aclose()
        with pytest.raises(BackendUnavailable):
            await asyncio.wait_for(receiving, 30)
        with pytest.raises(BackendUnavailable):
            await s.ack(found)
    stats = await owner.engine.stats("q")
    assert (stats.depth, stats.in_flight) == (1, 0), "the delivery was not released"


async def test_incomplete_requests_of_all_clients_share_a_limit(directory: Path) -> None:
    """The connection with most incomplete data is closed, and the others go on."""
    path = directory / "socket"
    async with Engine() as engine:
        server = SocketServer(NativeBackend(engine=engine), engine, path, max_received=300_000)
        await server.start()
        client = SocketBackend(path)
        await client.start()
        await client.declare(QueueSpec(name="q"))
        greedy, modest = [await asyncio.open_unix_connection(path) for _ in range(2)]
        head = protocol.MAGIC + protocol.HEAD.pack(1 << 20, protocol.PUBLISH, 1)
        modest[1].write(head + bytes(100_000))
        await modest[1].drain()
        greedy[1].write(head + bytes(250_000))
        with contextlib.suppress(ConnectionError):
            await greedy[1].drain()
            answer = await asyncio.wait_for(greedy[0].read(), 30)
            assert b"bytes of incomplete requests" in answer
        await until(lambda: len(server._connections) == 2)
        assert len(await client.publish("q", [Envelope("1", bytes(150_000))])) == 1
        for _, writer in (greedy, modest):
            writer.close()
        await client.aclose()
        await server.aclose()


async def test_reading_pauses_while_running_requests_exceed_the_limit(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = directory / "socket"
    async with Engine() as engine:
        backend = NativeBackend(engine=engine)
        server = SocketServer(backend, engine, path, max_received=300_000)
        await server.start()
        clients = [SocketBackend(path) for _ in range(3)]
        for client in clients:
            await client.start()
        await clients[0].declare(QueueSpec(name="q"))
        free, publish, running = asyncio.Event(), backend.publish, 0

        async def slow(queue: str, envelopes: Any) -> Any:
            nonlocal running
            running += 1
            await free.wait()
            return await publish(queue, envelopes)

        monkeypatch.setattr(backend, "publish", slow)
        sends = [
            asyncio.create_task(client.publish("q", [Envelope(f"{at}-{number}", bytes(100_000))]))
            for number in range(10)
            for at, client in enumerate(clients)
        ]
        await until(lambda: server._budget.exceeded)
        await asyncio.sleep(0.05)
        assert running <= 6, "each connection had at most one more frame in its buffer"
        free.set()
        await asyncio.gather(*sends)
        assert (await clients[0].stats("q")).depth == 30
        for client in clients:
            await client.aclose()
        await server.aclose()


async def test_requests_of_a_lost_connection_end_before_the_server_is_closed(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with Engine() as engine:
        backend = NativeBackend(engine=engine)
        server = SocketServer(backend, engine, directory / "socket")
        await server.start()
        started = asyncio.Event()

        async def never() -> list[str]:
            started.set()
            await asyncio.get_running_loop().create_future()
            return []

        monkeypatch.setattr(backend, "queues", never)
        monkeypatch.setattr(server_module, "CLOSE_GRACE_SECONDS", 0.01)
        client = SocketBackend(directory / "socket")
        await client.start()
        asking = asyncio.create_task(client.queues())
        await started.wait()
        await client.aclose()
        with pytest.raises(BackendUnavailable):
            await asking
        await until(lambda: not server._connections)
        await server.aclose()
    left = [task for task in asyncio.all_tasks() if task.get_name().startswith("qkit socket")]
    assert left == []
