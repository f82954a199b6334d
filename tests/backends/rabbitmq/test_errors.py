"""Translation of driver errors, and connection errors."""

from __future__ import annotations

import asyncio
import ssl

import pytest
from aiormq import exceptions
from aiormq.abc import DeliveredMessage
from pamqp.commands import Basic
from pamqp.exceptions import UnmarshalingException
from pamqp.header import ContentHeader

from qkit.backends.rabbitmq.backend import RabbitMQBackend
from qkit.backends.rabbitmq.errors import to_queue_error, translate_errors
from qkit.errors import (
    BackendUnavailable,
    ConfigError,
    PayloadTooLarge,
    QueueError,
    QueueFull,
    QueueNotFound,
)


def returned() -> exceptions.PublishError:
    frame = Basic.Return(reply_code=312, reply_text="NO_ROUTE", routing_key="orders")
    message = DeliveredMessage(frame, ContentHeader(), b"", None)  # type: ignore[arg-type]  # no channel is needed
    return exceptions.PublishError(message, frame)


def tls_failure() -> exceptions.AMQPConnectionError:
    error = exceptions.AMQPConnectionError("wrapped")
    error.__cause__ = ssl.SSLCertVerificationError(1, "certificate verify failed")
    return error


ERRORS: list[tuple[BaseException, type[QueueError]]] = [
    (returned(), QueueNotFound),
    (exceptions.DeliveryError(None, Basic.Nack(delivery_tag=1)), QueueFull),
    (exceptions.ChannelNotFoundEntity("NOT_FOUND - no queue 'orders' in vhost '/'"), QueueNotFound),
    (
        exceptions.ChannelNotFoundEntity(
            "NOT_FOUND - home node 'rabbit@b' of durable queue 'q' is down or inaccessible"
        ),
        BackendUnavailable,
    ),
    (exceptions.ChannelAccessRefused("ACCESS_REFUSED - access to queue 'q' refused"), ConfigError),
    (exceptions.ChannelLockedResource("RESOURCE_LOCKED - exclusive access"), ConfigError),
    (
        exceptions.ChannelPreconditionFailed(
            "PRECONDITION_FAILED - inequivalent arg 'x-max-length' for queue 'q' in vhost '/': "
            "received none but current is the value '3' of type 'signedint'"
        ),
        ConfigError,
    ),
    (
        exceptions.ChannelPreconditionFailed("PRECONDITION_FAILED - message size 9 is too large"),
        PayloadTooLarge,
    ),
    (
        exceptions.ChannelPreconditionFailed(
            "PRECONDITION_FAILED - delivery acknowledgement on channel 1 timed out."
        ),
        BackendUnavailable,
    ),
    (exceptions.ChannelPreconditionFailed("PRECONDITION_FAILED - something else"), ConfigError),
    (exceptions.ChannelClosed(504, "CHANNEL_ERROR"), BackendUnavailable),
    (exceptions.DuplicateConsumerTag(1), BackendUnavailable),
    (exceptions.ChannelInvalidStateError("closed"), BackendUnavailable),
    (exceptions.ProbableAuthenticationError("ACCESS_REFUSED"), BackendUnavailable),
    (exceptions.AuthenticationError("PLAIN", []), BackendUnavailable),
    (exceptions.IncompatibleProtocolError("no"), ConfigError),
    (exceptions.ProtocolSyntaxError("no"), ConfigError),
    (exceptions.InvalidFrameError("no"), ConfigError),
    (exceptions.InvalidFrameError("Expected OpenOk, got <Connection.Close>"), ConfigError),
    (exceptions.ConnectionNotAllowed("NOT_ALLOWED - vhost x not found"), ConfigError),
    (exceptions.ConnectionClosed(530, "NOT_ALLOWED - vhost x not found"), ConfigError),
    (exceptions.ConnectionClosed(320, "CONNECTION_FORCED - shutdown"), BackendUnavailable),
    *(
        (kind("no"), BackendUnavailable)
        for kind in (
            exceptions.ConnectionSyntaxError,
            exceptions.ConnectionFrameError,
            exceptions.ConnectionCommandInvalid,
            exceptions.ConnectionChannelError,
            exceptions.ConnectionUnexpectedFrame,
            exceptions.ConnectionResourceError,
            exceptions.ConnectionNotImplemented,
            exceptions.ConnectionInternalError,
        )
    ),
    (exceptions.MethodNotImplemented("basic.nack"), ConfigError),
    (exceptions.AMQPChannelError("no"), BackendUnavailable),
    (exceptions.AMQPConnectionError("reset"), BackendUnavailable),
    (exceptions.AMQPError("no"), BackendUnavailable),
    (tls_failure(), BackendUnavailable),
    (UnmarshalingException("frame", "no"), QueueError),
    (ValueError("Channel number too large"), QueueError),
    (TypeError("Unknown type"), QueueError),
    (RuntimeError("closed"), BackendUnavailable),
    (TimeoutError(), BackendUnavailable),
    (ConnectionResetError("reset"), BackendUnavailable),
    (OSError("no route"), BackendUnavailable),
    (EOFError("end"), BackendUnavailable),
]


@pytest.mark.parametrize(
    ("error", "kind"), ERRORS, ids=[type(error).__name__ for error, _ in ERRORS]
)
async def test_driver_errors_are_translated_with_their_cause(
    error: BaseException, kind: type[QueueError]
) -> None:
    with pytest.raises(QueueError) as caught:
        with translate_errors("publish", "orders"):
            raise error
    assert type(caught.value) is kind
    assert caught.value.cause is error
    assert (caught.value.backend, caught.value.operation) == ("rabbitmq", "publish")
    assert caught.value.queue == "orders"
    assert type(to_queue_error(error, "ack")) is kind


def test_the_table_contains_every_driver_error() -> None:
    known = {type(error) for error, _ in ERRORS}
    public = {
        item
        for item in vars(exceptions).values()
        if isinstance(item, type) and issubclass(item, Exception)
    }
    assert public <= known


async def test_a_cancellation_by_the_driver_is_translated_but_not_a_task_cancellation() -> None:
    """When the driver closes a channel, it cancels the calls that wait on the channel."""
    with pytest.raises(BackendUnavailable) as caught:
        with translate_errors("publish"):
            raise asyncio.CancelledError
    assert isinstance(caught.value.cause, asyncio.CancelledError)

    async def wait() -> None:
        with translate_errors("publish"):
            await asyncio.sleep(60)

    task = asyncio.create_task(wait())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_an_unreachable_broker_raises_backend_unavailable() -> None:
    backend = RabbitMQBackend("amqp://guest:secret@127.0.0.1:1/")
    with pytest.raises(BackendUnavailable) as caught:
        await backend.start()
    assert isinstance(caught.value.cause, exceptions.AMQPConnectionError)
    assert "secret" not in str(caught.value)
    await backend.aclose()
    with pytest.raises(BackendUnavailable, match="start the backend"):
        await backend.ping()


async def test_a_server_that_does_not_respond_raises_backend_unavailable_in_time() -> None:
    async def never_answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    server = await asyncio.start_server(never_answer, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    backend = RabbitMQBackend(f"amqp://127.0.0.1:{port}/", timeout=0.2)
    with pytest.raises(BackendUnavailable, match="in time"):
        await backend.start()
    await backend.aclose()
    server.close()


async def test_a_server_with_another_protocol_is_rejected(redis_like: int) -> None:
    backend = RabbitMQBackend(f"amqp://127.0.0.1:{redis_like}/", timeout=2)
    with pytest.raises((ConfigError, BackendUnavailable)):
        await backend.start()
    await backend.aclose()


@pytest.fixture
async def redis_like() -> object:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"-ERR unknown command 'AMQP'\r\n")
        await reader.read()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    yield server.sockets[0].getsockname()[1]
    server.close()


async def test_a_wrong_password_and_a_wrong_vhost_raise_different_errors(rabbitmq_url: str) -> None:
    host = rabbitmq_url.rpartition("@")[2].rstrip("/")
    backend = RabbitMQBackend(f"amqp://guest:canary@{host}/")
    with pytest.raises(BackendUnavailable, match="check user and password") as caught:
        await backend.start()
    assert "canary" not in str(caught.value)
    backend = RabbitMQBackend(f"amqp://guest:guest@{host}/nowhere")
    with pytest.raises(ConfigError, match="vhost"):
        await backend.start()


def test_an_unreadable_tls_file_raises_config_error(tmp_path: object) -> None:
    backend = RabbitMQBackend("amqps://localhost/", tls_ca_file=f"{tmp_path}/none.pem")
    with pytest.raises(ConfigError, match="tls_ca_file"):
        asyncio.run(backend.start())
