"""Translation of redis-py errors and server error replies."""

from __future__ import annotations

import asyncio
import inspect
import ssl
import uuid
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from redis import exceptions

from qkit.backend import QueueSpec, SubscriptionSpec
from qkit.backends.redis.driver import PipelinedConnection
from qkit.backends.redis.errors import DRIVER_ERRORS, to_queue_error, translate_errors
from qkit.backends.redis.list_backend import RedisListBackend
from qkit.backends.redis.pubsub_backend import RedisPubSubBackend
from qkit.errors import (
    BackendUnavailable,
    ConfigError,
    QueueError,
    QueueFull,
    QueueNotFound,
    SendTimeout,
    SubscriptionLost,
)
from qkit.message import Envelope

DRIVERS = [
    kind
    for _, kind in inspect.getmembers(exceptions, inspect.isclass)
    if issubclass(kind, exceptions.RedisError)
]
OTHERS: list[type[Exception]] = [
    OSError,
    ConnectionResetError,
    ConnectionRefusedError,
    BrokenPipeError,
    TimeoutError,
    EOFError,
    asyncio.IncompleteReadError,
    ssl.SSLError,
    ssl.SSLCertVerificationError,
]


def raised(kind: type[Exception]) -> Exception:
    """Return an instance of an exception class with any constructor."""
    for arguments in (("text",), ("text", "more"), ("1 host:1",), (b"", 1)):
        try:
            return kind(*arguments)
        except (TypeError, ValueError, IndexError):
            continue
    raise AssertionError(f"could not create an instance of {kind}")


@pytest.mark.parametrize("kind", [*DRIVERS, *OTHERS], ids=lambda kind: kind.__name__)
def test_every_driver_error_becomes_a_queue_error_with_its_cause(
    kind: type[Exception],
) -> None:
    error = raised(kind)
    assert isinstance(error, DRIVER_ERRORS)
    with pytest.raises(QueueError) as caught, translate_errors("publish", "orders"):
        raise error
    assert caught.value.cause is error
    assert caught.value.__cause__ is error
    assert (caught.value.backend, caught.value.operation) == ("redis", "publish")
    assert caught.value.queue == "orders"
    connection = issubclass(kind, exceptions.ConnectionError | exceptions.TimeoutError | OSError)
    if connection:
        assert isinstance(caught.value, BackendUnavailable), "the service would not retry it"


@pytest.mark.parametrize(
    ("reply", "kind"),
    [
        ("OOM command not allowed when used memory > 'maxmemory'.", QueueFull),
        ("WRONGTYPE Operation against a key holding the wrong kind of value", ConfigError),
        ("NOPERM this user has no permissions to run the 'evalsha' command", ConfigError),
        ("NOAUTH Authentication required.", BackendUnavailable),
        ("WRONGPASS invalid username-password pair or user is disabled.", BackendUnavailable),
        ("READONLY You can't write against a read only replica.", BackendUnavailable),
        ("LOADING Redis is loading the dataset in memory", BackendUnavailable),
        ("MASTERDOWN Link with MASTER is down", BackendUnavailable),
        ("CLUSTERDOWN Hash slot not served", BackendUnavailable),
        ("TRYAGAIN Multiple keys request during rehashing of slot", BackendUnavailable),
        ("MOVED 3999 127.0.0.1:6381", ConfigError),
        ("ASK 3999 127.0.0.1:6381", ConfigError),
        ("CROSSSLOT Keys in request don't hash to the same slot", ConfigError),
        ("MISCONF Redis is configured to save RDB snapshots", BackendUnavailable),
        ("NOREPLICAS Not enough good replicas to write.", BackendUnavailable),
        ("UNBLOCKED force unblock from blocking operation", BackendUnavailable),
        ("BUSY Redis is busy running a script.", BackendUnavailable),
        ("ERR max number of clients reached", BackendUnavailable),
        ("ERR unknown command 'BLMOVE', with args beginning with:", ConfigError),
        ("ERR Error running script: @user_script:1: WRONGTYPE Operation", ConfigError),
        ("ERR some unknown error", QueueError),
    ],
)
def test_server_error_replies_are_translated(reply: str, kind: type[QueueError]) -> None:
    error = to_queue_error(exceptions.ResponseError(reply), "publish", "orders")
    assert type(error) is kind
    assert reply[:40] in error.message


def test_queue_errors_propagate_unchanged() -> None:
    own = SendTimeout("late")  # also a TimeoutError
    with pytest.raises(SendTimeout) as caught, translate_errors("publish"):
        raise own
    assert caught.value is own


Calls = dict[str, Callable[[Any, str], Awaitable[object]]]


async def _subscribed(backend: Any, name: str) -> None:
    spec = SubscriptionSpec(queue=name, group="g", consumer="c", prefetch=5, broadcast=False)
    async with backend.subscribe(spec) as subscription:
        await subscription.receive(1)


CALLS: Calls = {
    "declare": lambda backend, name: backend.declare(QueueSpec(name=name)),
    "passive": lambda backend, name: backend.declare(QueueSpec(name=name, passive=True)),
    "publish": lambda backend, name: backend.publish(name, [Envelope("a", b"x")]),
    "priority": lambda backend, name: backend.publish(name, [Envelope("a", b"x", priority=9)]),
    "subscribe": _subscribed,
    "ping": lambda backend, _: backend.ping(),
    "queues": lambda backend, _: backend.queues(),
    "stats": lambda backend, name: backend.stats(name),
    "peek": lambda backend, name: backend.peek(name, 1),
    "purge": lambda backend, name: backend.purge(name),
    "remove": lambda backend, name: backend.remove(name, ["a"]),
    "delete": lambda backend, name: backend.delete(name),
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("make", [RedisListBackend, RedisPubSubBackend])
@pytest.mark.parametrize("kind", [exceptions.ConnectionError, exceptions.ResponseError])
async def test_no_call_raises_a_driver_error(
    redis_url: str,
    make: type[RedisListBackend] | type[RedisPubSubBackend],
    call: str,
    kind: type[Exception],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    name = f"failing-{uuid.uuid4().hex[:8]}"
    backend = make(redis_url)
    await backend.start()

    def fail(
        connection: PipelinedConnection, *words: object, **options: object
    ) -> asyncio.Future[Any]:
        answer = asyncio.get_running_loop().create_future()
        answer.set_exception(kind("it failed"))
        return answer

    with monkeypatch.context() as patch:
        patch.setattr(PipelinedConnection, "call", fail)
        patch.setattr(PipelinedConnection, "call_all", fail)
        with pytest.raises(QueueError) as caught:
            await CALLS[call](backend, name)
        assert isinstance(caught.value.cause, kind)
    await backend.aclose()


@pytest.mark.parametrize(
    "settle", ["ack", "ack_many", "release", "extend", "extend_many", "receive"]
)
async def test_no_settlement_raises_a_driver_error(
    redis_url: str, settle: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = f"failing-{uuid.uuid4().hex[:8]}"
    backend = RedisListBackend(redis_url)
    await backend.start()
    await backend.declare(QueueSpec(name=name))
    await backend.publish(name, [Envelope("a", b"x")])
    spec = SubscriptionSpec(queue=name, group="g", consumer="c", prefetch=5)
    async with backend.subscribe(spec) as subscription:
        (delivery,) = await subscription.receive(1)
        calls: dict[str, Callable[[], Awaitable[object]]] = {
            "ack": lambda: subscription.ack(delivery),
            "ack_many": lambda: subscription.ack_many([delivery]),
            "release": lambda: subscription.release(delivery, 0.0),
            "extend": lambda: subscription.extend(delivery, 1.0),
            "extend_many": lambda: subscription.extend_many([delivery], 1.0),
            "receive": lambda: subscription.receive(1),
        }

        def fail(
            connection: PipelinedConnection, *words: object, **options: object
        ) -> asyncio.Future[Any]:
            answer = asyncio.get_running_loop().create_future()
            answer.set_exception(exceptions.ConnectionError("it failed"))
            return answer

        with monkeypatch.context() as patch:
            patch.setattr(PipelinedConnection, "call", fail)
            patch.setattr(PipelinedConnection, "call_all", fail)
            with pytest.raises(BackendUnavailable) as caught:
                await calls[settle]()
        assert isinstance(caught.value.cause, exceptions.ConnectionError)
        if settle == "receive":
            assert isinstance(caught.value, SubscriptionLost)
    with pytest.raises(QueueNotFound):
        await backend.stats(f"{name}-unknown")
    await backend.delete(name)
    await backend.aclose()
