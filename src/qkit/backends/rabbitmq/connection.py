"""A connection to RabbitMQ that is opened when it is needed, and again when it was lost.

The driver's own reconnecting is not used: it tries for ever and tells nobody. Whoever meets a lost
connection here gets an error of ours, and the next who asks gets a new connection.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

import aiormq
from aiormq import Channel
from yarl import URL

from qkit._internal.tasks import retrieve_exception
from qkit.backends.common.reopened import Reopened
from qkit.backends.common.tls import client_context
from qkit.backends.rabbitmq.codec import FRAME
from qkit.backends.rabbitmq.driver import (
    AbortableTransport,
    is_blocked,
    max_frame_bytes,
    open_connection,
)
from qkit.backends.rabbitmq.errors import BACKEND, translate_errors
from qkit.backends.rabbitmq.lenient_decoding import enable_lenient_decoding

__all__ = ["ConnectionParameters", "ReconnectingConnection"]

# A loop that is blocked for longer loses its connection: the broker hears no heartbeat for twice
# this long. A dead peer is noticed sooner, by the ping.
HEARTBEAT_SECONDS: Final = 30
#: For the answer to a ping or a handshake, so that a dead connection is found in time.
PING_TIMEOUT_SECONDS: Final = 4.0
PING_SLICES: Final = 8  # of that time
CLOSE_TIMEOUT_SECONDS: Final = 2.0


class ConnectionParameters:
    """Address, timeouts and TLS files of the broker.

    Args:
        url: AMQP URL. Without ``heartbeat`` in its query, ``HEARTBEAT_SECONDS`` applies.
        timeout: Seconds for an answer of the broker.
        tls_ca_file: Authorities to trust, PEM; the system's by default.
        tls_cert_file: Client certificate, PEM.
        tls_key_file: Its key, PEM.
    """

    def __init__(
        self,
        url: str,
        *,
        timeout: float = 10.0,
        tls_ca_file: str | Path | None = None,
        tls_cert_file: str | Path | None = None,
        tls_key_file: str | Path | None = None,
    ) -> None:
        self.timeout = timeout
        self.ping_timeout = min(PING_TIMEOUT_SECONDS, timeout)
        parsed = URL(url)
        if "heartbeat" not in parsed.query:
            parsed = parsed.update_query(heartbeat=str(HEARTBEAT_SECONDS))
        self._url = parsed
        self._files = (tls_ca_file, tls_cert_file, tls_key_file)
        self._context: ssl.SSLContext | None = None

    @property
    def secure(self) -> bool:
        """Whether the connection is encrypted."""
        return self._url.scheme == "amqps"

    def connection(self, purpose: str, transport: AbortableTransport) -> aiormq.Connection:
        """A connection that is not open yet; people find it under its purpose."""
        enable_lenient_decoding()
        return aiormq.Connection(
            self._url,
            context=self._tls(),
            transport_factory=transport,
            client_properties={"connection_name": f"qkit {purpose}", "product": "qkit"},
        )

    def _tls(self) -> ssl.SSLContext | None:
        if self.secure and self._context is None:
            self._context = client_context(*self._files, backend=BACKEND, operation="connect")
        return self._context


class ReconnectingConnection:
    """One connection for one purpose, opened by the first caller that needs it.

    Publishing and consuming have one each: a broker that is short of memory stops reading from
    connections that publish, and acks must still reach it.
    """

    def __init__(self, parameters: ConnectionParameters, purpose: str) -> None:
        self.parameters = parameters
        self._purpose = purpose
        self._shared = Reopened(
            self._open_connection,
            lambda connection: not connection.is_opened,
            self._close_connection,
            backend=BACKEND,
        )
        self._transport: AbortableTransport | None = None
        self._control: Channel | None = None
        self._controlling = asyncio.Lock()
        self._probe: asyncio.Task[None] | None = None

    async def connect(self) -> aiormq.Connection:
        """The connection, opened if need be; once for all who ask at the same time."""
        self.enable()
        return await self._shared.get()

    def enable(self) -> None:
        """Allow callers to connect."""
        self._shared.open()

    async def _open_connection(self) -> aiormq.Connection:
        self._abort()
        transport = AbortableTransport(secure=self.parameters.secure)
        connection = self.parameters.connection(self._purpose, transport)
        try:
            async with asyncio.timeout(self.parameters.ping_timeout):
                await open_connection(connection)
        except BaseException:
            transport.abort()
            raise
        self._transport = transport
        return connection

    async def _close_connection(self, connection: aiormq.Connection) -> None:
        with contextlib.suppress(Exception):
            async with asyncio.timeout(CLOSE_TIMEOUT_SECONDS):
                await connection.close()
        self._abort()

    @property
    def frame(self) -> int:
        """The largest frame in bytes that the broker takes, as far as it is known yet."""
        return max_frame_bytes(self._shared.value) or FRAME

    async def channel(self, *, confirms: bool = False) -> Channel:
        """A new channel; whoever opens it closes it."""
        connection = await self._shared.get()
        async with asyncio.timeout(self.parameters.timeout):
            channel = await connection.channel(publisher_confirms=confirms)
        assert isinstance(channel, Channel)  # the driver promises less
        return channel

    @asynccontextmanager
    async def own_channel(self) -> AsyncGenerator[Channel, None]:
        """A channel for a piece of work; what was read on it and not settled goes back."""
        channel = await self.channel()
        try:
            yield channel
        finally:
            await close(channel)

    @asynccontextmanager
    async def control(self) -> AsyncGenerator[Channel, None]:
        """The channel for short questions, one at a time.

        An answer that is no closes a channel, and so does a call that was cancelled: then the next
        question has a new one.
        """
        async with self._controlling:
            channel = self._control
            if channel is None or channel.is_closed:
                channel = self._control = await self.channel()
            try:
                async with asyncio.timeout(self.parameters.timeout):
                    yield channel
            except BaseException:
                self._control = None
                if not channel.is_closed:
                    _close_soon(channel)
                raise

    async def ping(self) -> None:
        """Ask the broker something. A connection that does not answer is given up.

        The question goes on when the asking is cancelled: it decides about the connection.
        """
        await asyncio.shield(self._probing())

    def ping_soon(self) -> None:
        """The same for a connection that nobody waits for, if there is one."""
        connection = self._shared.value
        if connection is not None and connection.is_opened:
            self._probing()

    def _probing(self) -> asyncio.Task[None]:
        if self._probe is None or self._probe.done():
            self._probe = asyncio.create_task(self._ask(), name=f"qkit {self._purpose} ping")
            self._probe.add_done_callback(retrieve_exception)
        return self._probe

    async def _ask(self) -> None:
        with translate_errors("ping"):
            answer = asyncio.create_task(self._round_trip(), name=f"qkit {self._purpose} question")
            try:
                # In slices: a loop that was blocked has used up one of them, not all.
                for _ in range(PING_SLICES):
                    await asyncio.wait({answer}, timeout=self.parameters.ping_timeout / PING_SLICES)
                    if answer.done():
                        with contextlib.suppress(TimeoutError):  # its own patience ended first
                            return await answer
                        break
            finally:
                answer.cancel()
                answer.add_done_callback(retrieve_exception)
            connection = self._shared.value
            if connection is None or not is_blocked(connection):
                self._abort()
            raise TimeoutError("no answer")

    async def _round_trip(self) -> None:
        async with self.control() as channel:
            await channel.exchange_declare("amq.direct", passive=True)

    def _abort(self) -> None:
        """Hang up without a word; everybody who waits on the connection hears of it."""
        if self._transport is not None:
            self._transport.abort()

    async def aclose(self) -> None:
        """Close the connection with all its channels; idempotent."""
        if self._probe is not None:
            self._probe.cancel()
        self._control = None
        await self._shared.aclose()


async def close(channel: Channel) -> None:
    """Close a channel, in whatever state it is."""
    if not channel.is_closed:
        with contextlib.suppress(Exception):
            async with asyncio.timeout(CLOSE_TIMEOUT_SECONDS):
                await channel.close()


_closing: set[asyncio.Task[None]] = set()


def _close_soon(channel: Channel) -> None:
    task = asyncio.create_task(close(channel), name="qkit rabbitmq close")
    _closing.add(task)
    task.add_done_callback(_closing.discard)
