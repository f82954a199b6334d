"""Connection to RabbitMQ that is opened on first use and reopened after it was lost.

aio-pika's robust connection is not used, because it reconnects forever without raising an error.
Here a call on a lost connection raises ``BackendUnavailable``, and the next call reconnects.
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
from qkit.backends.common.errors import other_loop
from qkit.backends.common.reopened import Reopened
from qkit.backends.common.tls import client_context
from qkit.backends.rabbitmq.codec import DEFAULT_FRAME_BYTES
from qkit.backends.rabbitmq.driver import (
    AbortableTransport,
    driver_logs_demoted,
    is_blocked,
    max_frame_bytes,
    open_connection,
)
from qkit.backends.rabbitmq.errors import BACKEND, translate_errors
from qkit.backends.rabbitmq.lenient_decoding import enable_lenient_decoding

__all__ = ["ConnectionParameters", "ReconnectingConnection"]

#: Heartbeat interval. The broker closes a connection after two intervals without a heartbeat, for
#: example because the event loop is blocked. The ping detects a dead broker earlier.
HEARTBEAT_SECONDS: Final = 30
#: Time limit of a ping or a handshake, after which a connection counts as dead.
PING_TIMEOUT_SECONDS: Final = 4.0
PING_SLICES: Final = 8  # number of equal waits into which the ping timeout is divided
CLOSE_TIMEOUT_SECONDS: Final = 2.0


class ConnectionParameters:
    """URL, timeouts and TLS files for connections to the broker.

    Args:
        url: AMQP URL. Without ``heartbeat`` in its query, ``HEARTBEAT_SECONDS`` applies.
        timeout: Seconds to wait for a response from the broker; 10 by default.
        tls_ca_file: PEM file of trusted CA certificates; those of the system by default.
        tls_cert_file: PEM file of the client certificate; none by default.
        tls_key_file: PEM file of its private key; not needed if ``tls_cert_file`` contains the key.
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
        self.ping_timeout: float = min(PING_TIMEOUT_SECONDS, timeout)
        parsed = URL(url)
        if "heartbeat" not in parsed.query:
            parsed = parsed.update_query(heartbeat=str(HEARTBEAT_SECONDS))
        self._url = parsed
        self._files = (tls_ca_file, tls_cert_file, tls_key_file)
        self._context: ssl.SSLContext | None = None

    @property
    def secure(self) -> bool:
        """Whether the connection uses TLS."""
        return self._url.scheme == "amqps"

    def connection(self, purpose: str, transport: AbortableTransport) -> aiormq.Connection:
        """Return a new connection, not yet open, which the broker lists as ``qkit <purpose>``.

        Raises:
            ConfigError: A TLS file cannot be read or is not valid.
        """
        enable_lenient_decoding()
        return aiormq.Connection(
            self._url,
            context=self.tls_context(),
            transport_factory=transport,
            client_properties={"connection_name": f"qkit {purpose}", "product": "qkit"},
        )

    def tls_context(self) -> ssl.SSLContext | None:
        """Return the TLS context; ``None`` if the connection uses no TLS.

        Raises:
            ConfigError: A TLS file cannot be read or is not valid.
        """
        if self.secure and self._context is None:
            self._context = client_context(*self._files, backend=BACKEND, operation="connect")
        return self._context


class ReconnectingConnection:
    """Connection for one purpose, which the first caller opens.

    Publishing and consuming use separate connections: a broker that is short of memory stops
    reading from connections that publish, but must still receive acks.

    Args:
        parameters: Connection parameters.
        purpose: ``sending``, ``consuming`` or ``reading``, shown in the connection name.
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
        #: Event loop in which the connection was enabled; ``None`` before and after ``aclose``.
        self.loop: asyncio.AbstractEventLoop | None = None
        self._control: Channel | None = None
        self._control_lock = asyncio.Lock()
        self._probe: asyncio.Task[None] | None = None

    async def connect(self) -> aiormq.Connection:
        """Return the connection, opening it if necessary; concurrent callers share it."""
        self.enable()
        return await self._shared.get()

    def enable(self) -> None:
        """Allow other methods to open the connection, in this event loop."""
        self.loop = asyncio.get_running_loop()
        self._shared.open()

    def check_loop(self) -> None:
        """Raise ``LifecycleError`` in another event loop, whose tasks cannot use the connection."""
        if self.loop is not None and asyncio.get_running_loop() is not self.loop:
            raise other_loop(BACKEND)

    async def _open_connection(self) -> aiormq.Connection:
        self._abort()
        transport = AbortableTransport(secure=self.parameters.secure)
        connection = self.parameters.connection(self._purpose, transport)
        try:
            with driver_logs_demoted():
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
    def is_open(self) -> bool:
        """Whether the connection is open."""
        connection = self._shared.value
        return connection is not None and connection.is_opened

    @property
    def frame(self) -> int:
        """Largest frame in bytes that the broker accepts; RabbitMQ's default if not connected."""
        return max_frame_bytes(self._shared.value) or DEFAULT_FRAME_BYTES

    async def channel(self, *, confirms: bool = False) -> Channel:
        """Open a new channel, which the caller must close.

        Args:
            confirms: Whether the broker confirms published messages; false by default.

        Raises:
            LifecycleError: The connection was enabled in another event loop.
        """
        self.check_loop()
        connection = await self._shared.get()
        with driver_logs_demoted():
            async with asyncio.timeout(self.parameters.timeout):
                channel = await connection.channel(publisher_confirms=confirms)
        assert isinstance(channel, Channel)  # the driver declares an abstract type
        return channel

    @asynccontextmanager
    async def own_channel(self) -> AsyncGenerator[Channel, None]:
        """Open a channel and close it on exit; unsettled messages then return to their queue."""
        channel = await self.channel()
        try:
            yield channel
        finally:
            await close(channel)

    @asynccontextmanager
    async def control(self) -> AsyncGenerator[Channel, None]:
        """Lock the shared channel for short requests and yield it.

        The broker closes a channel after a failed request, and the driver closes it after a
        cancelled request. The next call then opens a new channel.
        """
        self.check_loop()
        async with self._control_lock:
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
        """Check that the broker responds; close the connection if it does not.

        A connection that the broker has blocked is not closed. Cancelling this call does not cancel
        the check.

        Raises:
            BackendUnavailable: The broker does not respond in time.
        """
        self.check_loop()
        await asyncio.shield(self._start_probe())

    def ping_soon(self) -> None:
        """Check the connection in the background if it is open."""
        if self.is_open:
            self._start_probe()

    def _start_probe(self) -> asyncio.Task[None]:
        if self._probe is None or self._probe.done():
            self._probe = asyncio.create_task(self._run_probe(), name=f"qkit {self._purpose} ping")
            self._probe.add_done_callback(retrieve_exception)
        return self._probe

    async def _run_probe(self) -> None:
        with translate_errors("ping"):
            answer = asyncio.create_task(
                self._round_trip(), name=f"qkit {self._purpose} ping request"
            )
            try:
                # If the event loop is blocked, only one slice of the timeout expires.
                for _ in range(PING_SLICES):
                    await asyncio.wait({answer}, timeout=self.parameters.ping_timeout / PING_SLICES)
                    if answer.done():
                        with contextlib.suppress(TimeoutError):  # raised by ``control``
                            return await answer
                        break
            finally:
                answer.cancel()
                answer.add_done_callback(retrieve_exception)
            connection = self._shared.value
            if connection is None or not is_blocked(connection):
                self._abort()
            raise TimeoutError("no response to the ping")

    async def _round_trip(self) -> None:
        async with self.control() as channel:
            await channel.exchange_declare("amq.direct", passive=True)

    def _abort(self) -> None:
        """Close the socket immediately; calls that wait for a response raise an error."""
        if self._transport is not None:
            self._transport.abort()

    async def aclose(self) -> None:
        """Close the connection and all its channels; idempotent."""
        if self._probe is not None:
            self._probe.cancel()
        self._control = None
        self.loop = None
        await self._shared.aclose()


async def close(channel: Channel) -> None:
    """Close a channel unless it is closed; ignore errors and a timeout."""
    if not channel.is_closed:
        with contextlib.suppress(Exception):
            async with asyncio.timeout(CLOSE_TIMEOUT_SECONDS):
                await channel.close()


_closing: set[asyncio.Task[None]] = set()


def _close_soon(channel: Channel) -> None:
    task = asyncio.create_task(close(channel), name="qkit rabbitmq close")
    _closing.add(task)
    task.add_done_callback(_closing.discard)
