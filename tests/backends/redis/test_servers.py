"""Redis setups: TLS, users, replicas, a cluster, older servers and Valkey."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import uuid
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import pytest
import redis.asyncio

from local_brokers.probes import free_port
from qkit import QueueService, Settings, consume
from qkit.backend import QueueSpec
from qkit.backends.redis.connection import ConnectionParameters
from qkit.backends.redis.list_backend import RedisListBackend
from qkit.errors import BackendUnavailable, ConfigError, SendTimeout
from qkit.message import Envelope
from tests.support.private_brokers import PrivateBroker, private_broker
from tests.support.redis_tour import tour
from tests.support.waiting import eventually

pytestmark = pytest.mark.broker

# ACL rule from docs/redis.md.
RULE = (
    "~orders* ~{orders* ~qkit:queues resetchannels &orders* -@all +@list +@hash +@sortedset "
    "+@set +@scripting +@pubsub +ping +auth +select +unlink +time +client|id +client|setname "
    "+client|unblock +client|list"
)


@pytest.fixture
def name() -> str:
    return f"orders-{uuid.uuid4().hex[:8]}"


# TLS and users


def _certificates(directory: Path) -> None:
    """Create a CA and certificates, signed by it, for a server and a client."""

    def openssl(*words: str) -> None:
        subprocess.run(["openssl", *words], cwd=directory, check=True, capture_output=True)

    openssl(
        *("req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=authority"),
        *("-keyout", "ca.key", "-out", "ca.crt"),
    )
    (directory / "names").write_text("subjectAltName=DNS:localhost,IP:127.0.0.1")
    for role in ("server", "client"):
        openssl(
            *("req", "-newkey", "rsa:2048", "-nodes", "-subj", f"/CN={role}"),
            *("-keyout", f"{role}.key", "-out", f"{role}.csr"),
        )
        openssl(
            *("x509", "-req", "-days", "2", "-in", f"{role}.csr", "-CA", "ca.crt"),
            *("-CAkey", "ca.key", "-CAcreateserial", "-extfile", "names", "-out", f"{role}.crt"),
        )


class Guarded:
    """Server that requires TLS, a client certificate and a user."""

    def __init__(self, directory: Path, port: int) -> None:
        self.directory = directory
        self.url = f"rediss://shop:s3cret-canary@localhost:{port}/0"
        self.files = {
            "tls_ca_file": str(directory / "ca.crt"),
            "tls_cert_file": str(directory / "client.crt"),
            "tls_key_file": str(directory / "client.key"),
        }


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    directory = tmp_path_factory.mktemp("tls")
    _certificates(directory)
    port = free_port()
    rule = RULE.replace("{", "{{")  # broker settings are format strings
    settings = [
        f"tls-port {port}",
        f"tls-cert-file {directory}/server.crt",
        f"tls-key-file {directory}/server.key",
        f"tls-ca-cert-file {directory}/ca.crt",
        "tls-auth-clients yes",
        f"user shop on >s3cret-canary {rule}",
    ]
    with private_broker("redis", settings=settings) as _:
        yield Guarded(directory, port)


async def test_all_operations_work_over_tls_with_the_documented_permissions(
    guarded: Guarded, name: str
) -> None:
    await tour(ConnectionParameters(guarded.url, **guarded.files), name)  # type: ignore[arg-type]  # paths


async def test_settings_configure_user_and_certificates(guarded: Guarded, name: str) -> None:
    settings = Settings(type="redis", mode="list", url=guarded.url, **guarded.files)  # type: ignore[arg-type]  # paths
    async with QueueService(settings) as service:
        assert (await service.send(name, 1)).position == 0
        await service.delete(name)
        await service.delete(f"{name}.dlq")


async def test_a_missing_permission_raises_config_error(guarded: Guarded) -> None:
    backend = RedisListBackend(ConnectionParameters(guarded.url, **guarded.files))  # type: ignore[arg-type]  # paths
    await backend.start()
    with pytest.raises(ConfigError, match="lacks a permission") as caught:
        await backend.declare(QueueSpec(name="invoices"))
    assert isinstance(caught.value.cause, redis.exceptions.RedisError)
    assert "s3cret-canary" not in str(caught.value)
    await backend.aclose()


async def test_health_reports_what_the_server_tells_about_persistence(
    guarded: Guarded, caplog: pytest.LogCaptureFixture
) -> None:
    reported: list[bool | None] = []

    async def report(settings: Settings) -> None:
        caplog.clear()
        async with QueueService(settings) as service:
            reported.append(service.health_check().durable)
        assert ("redis is not durable" in caplog.text) is (reported[-1] is False)

    with private_broker("redis") as server:
        client: Any = redis.asyncio.Redis.from_url(server.url)
        async with client:
            for appendonly, save in (("yes", ""), ("no", "60 1"), ("no", "")):
                await client.config_set("appendonly", appendonly)
                await client.config_set("save", save)
                await report(Settings(type="redis", mode="list", url=server.url))
    assert reported == [True, None, False]
    # This user may read neither INFO nor the configuration.
    await report(Settings(type="redis", mode="list", url=guarded.url, **guarded.files))  # type: ignore[arg-type]  # paths
    assert reported[-1] is None


@pytest.mark.parametrize("what", ["a wrong password", "no certificate", "an unknown CA"])
async def test_a_rejected_login_does_not_reveal_the_password(
    guarded: Guarded, what: str, tmp_path: Path
) -> None:
    url, files = guarded.url, dict(guarded.files)
    match what:
        case "a wrong password":
            url = url.replace("s3cret-canary", "s3cret-canary-2")
        case "no certificate":
            del files["tls_cert_file"], files["tls_key_file"]
        case _:
            _certificates(tmp_path)
            files["tls_ca_file"] = str(tmp_path / "ca.crt")
    backend = RedisListBackend(ConnectionParameters(url, timeout=5.0, **files))
    with pytest.raises(BackendUnavailable) as caught:
        await backend.start()
    assert caught.value.cause is not None
    assert "s3cret-canary" not in f"{caught.value} {caught.value!r}"
    await backend.aclose()


# Shutdown


@pytest.mark.proves("003-shutdown-14")
async def test_shutdown_of_a_service_on_lists_closes_all_connections_and_is_the_last_event(
    name: str,
) -> None:
    events: list[str] = []

    @consume(name)
    async def handle(body: int) -> None:
        events.append(f"handled {body}")

    with private_broker("redis") as server:
        async with redis.asyncio.from_url(server.url) as raw:

            async def clients() -> set[str]:
                return {client["id"] for client in await raw.client_list()}

            before = await clients()
            service = QueueService(Settings(type="redis", mode="list", url=server.url))
            service.register(handle)
            service.on("state_change", lambda change: events.append(str(change.new)))
            service.on("shutdown", lambda _: events.append("shutdown"))
            async with service:
                await service.send(name, 1)
                await eventually(lambda: "handled 1" in events)
                assert (await service.stats(name)).consumers == 1
            assert events[-1] == "shutdown"

            async def disconnected() -> bool:
                return await clients() == before

            await eventually(disconnected)


# Replicas


@asynccontextmanager
async def _pair() -> AsyncIterator[tuple[PrivateBroker, PrivateBroker]]:
    with (
        private_broker("redis", settings=["repl-diskless-sync-delay 0"]) as primary,
        private_broker("redis", settings=[f"replicaof 127.0.0.1 {primary.port}"]) as replica,
    ):
        async with redis.asyncio.from_url(primary.url) as raw:

            async def replicating() -> bool:
                found = (await raw.info("replication")).get("slave0", {})
                return bool(found.get("state") == "online")

            await eventually(replicating)
        yield primary, replica


@pytest.mark.proves("000-replication-1")
async def test_a_send_waits_for_a_replica_and_raises_send_timeout_if_it_does_not_respond(
    name: str,
) -> None:
    async with _pair() as (primary, replica):
        backend = RedisListBackend(ConnectionParameters(primary.url, timeout=2.0), replicas=2)
        await backend.start()
        await backend.declare(QueueSpec(name=name, replicas=2))
        await backend.publish(name, [Envelope("a", b"x")])
        async with redis.asyncio.from_url(replica.url) as copy:
            assert await copy.llen(name) == 1, "the replica lacks a confirmed message"
        with replica.frozen():
            with pytest.raises(SendTimeout, match="0 of 1 replicas"):
                await backend.publish(name, [Envelope("b", b"x")])
            # The send timed out, but the primary has the message.
            assert [item.id for item in await backend.peek(name, 10)] == ["a", "b"]
            slow = asyncio.ensure_future(backend.publish(name, [Envelope("c", b"x")]))
            await asyncio.sleep(0.1)
            await asyncio.wait_for(backend.ping(), 1.5)  # other calls do not wait for the replica
            with pytest.raises(SendTimeout):
                await slow
        await eventually(lambda: _sends(backend, name))
        with pytest.raises(ConfigError, match="replicas=3"):
            await backend.declare(QueueSpec(name=f"{name}-3", replicas=3))
        await backend.aclose()


async def _sends(backend: RedisListBackend, name: str) -> bool:
    try:
        return bool(await backend.publish(name, [Envelope("d", b"x")]))
    except SendTimeout:
        return False


async def test_publishing_to_a_replica_raises_backend_unavailable(name: str) -> None:
    async with _pair() as (primary, replica):
        owner, reader = RedisListBackend(primary.url), RedisListBackend(replica.url)
        await owner.start()
        await owner.declare(QueueSpec(name=name))
        await reader.start()
        await owner.publish(name, [Envelope("first", b"x")])
        await eventually(lambda: _has(reader, name))
        with pytest.raises(BackendUnavailable, match="read-only replica"):
            await reader.publish(name, [Envelope("a", b"x")])
        await reader.aclose()
        await owner.aclose()


async def _has(backend: RedisListBackend, name: str) -> bool:
    return bool(await backend.connection.command("LLEN", name))


# Redis Cluster


async def test_all_keys_of_a_queue_are_in_one_hash_slot(name: str) -> None:
    with private_broker("redis", settings=["cluster-enabled yes"]) as node:
        async with redis.asyncio.from_url(node.url) as raw:
            await raw.execute_command("CLUSTER", "ADDSLOTSRANGE", 0, 16383)

            async def ready() -> bool:
                return b"cluster_state:ok" in await raw.execute_command("CLUSTER", "INFO")

            await eventually(ready)
            # A cluster node rejects a script that uses keys from different slots.
            await tour(ConnectionParameters(node.url), name)
            backend = RedisListBackend(node.url)
            await backend.start()
            await backend.declare(QueueSpec(name=name, broadcast=True))
            sent = [
                Envelope(id, b"x", {"qkit-group": f"g{id}"}, priority=int(id), not_before=late)
                for id in "0459"
                for late in (None, 4e9)
            ]
            await backend.publish(name, sent)
            keys = [key async for key in raw.scan_iter(f"*{name}*")]
            slots = {await raw.execute_command("CLUSTER", "KEYSLOT", key) for key in keys}
            own = await raw.execute_command("CLUSTER", "KEYSLOT", name)
            assert len(keys) > 8
            assert slots == {own}
            await backend.aclose()


# Older servers and Valkey


async def test_no_command_is_newer_than_redis_6_2(name: str) -> None:
    with private_broker("redis") as server:
        used = await _commands_of(server, tour(ConnectionParameters(server.url), name))
        assert {"lpop", "zrem", "blmove", "evalsha", "publish", "hmget"} <= used
        connection = await ConnectionParameters(server.url).open_connection()
        described = await connection.call("COMMAND", "DOCS", *sorted(used))
        await connection.aclose()
    facts = dict(zip(described[::2], described[1::2], strict=True))
    assert {command.decode() for command in facts} == used
    newer: dict[str, str] = {}
    for command, about in facts.items():
        since = dict(zip(about[::2], about[1::2], strict=True))[b"since"].decode()
        if tuple(map(int, since.split("."))) >= (6, 3, 0):
            newer[command.decode()] = since
    assert newer == {}


async def _commands_of(server: PrivateBroker, work: Any) -> set[str]:
    """Return the names of all commands that ran during ``work``, including those in scripts."""
    reader, writer = await asyncio.open_connection(server.host, server.port, limit=2**24)
    writer.write(b"MONITOR\r\n")
    assert await reader.readline() == b"+OK\r\n"
    await work
    writer.write(b"QUIT\r\n")
    seen: set[str] = set()
    while (line := await reader.readline()).startswith(b"+"):
        if line == b"+OK\r\n":
            break
        words = line.decode(errors="replace").partition("] ")[2]
        seen.add(words.split('"')[1].lower())
    writer.close()
    await writer.wait_closed()
    return seen


def _other_servers() -> list[str]:
    """Return the paths of Valkey and of the servers named in ``QKIT_TEST_REDIS_SERVERS``."""
    named = os.environ.get("QKIT_TEST_REDIS_SERVERS", "").split(os.pathsep)
    found = [shutil.which(program) for program in ("valkey-server", *filter(None, named))]
    return [program for program in found if program is not None]


@pytest.mark.parametrize("program", _other_servers() or [None])
async def test_other_redis_compatible_servers_work(
    program: str | None, name: str, tmp_path: Path
) -> None:
    if program is None:
        pytest.skip("no other server found; install Valkey or set QKIT_TEST_REDIS_SERVERS")
    with _running(program, tmp_path) as url:
        async with redis.asyncio.from_url(url) as raw:
            await eventually(lambda: _answers(raw))
        await tour(ConnectionParameters(url), name)


@contextmanager
def _running(program: str, directory: Path) -> Iterator[str]:
    port = free_port()
    words = ["--port", str(port), "--bind", "127.0.0.1", "--dir", str(directory), "--save", ""]
    with (directory / "log").open("wb") as log:
        server = subprocess.Popen([program, *words], stdout=log, stderr=log)
    try:
        yield f"redis://127.0.0.1:{port}/0"
    finally:
        server.kill()
        server.wait()


async def _answers(raw: Any) -> bool:
    try:
        return bool(await raw.ping())
    except redis.exceptions.ConnectionError:
        return False
