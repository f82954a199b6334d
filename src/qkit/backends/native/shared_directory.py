"""Native backend on a directory that several processes on one machine share.

One process owns the directory and serves it; the other processes are its clients. Each process
determines its role when it starts, and again when it loses the connection to the owner.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, TypeAlias

from qkit._internal.clock import Clock
from qkit._internal.logging import logger
from qkit.backend import (
    BALANCES,
    Capabilities,
    QueueSpec,
    QueueStats,
    Subscription,
    SubscriptionSpec,
)
from qkit.backends.capability_matrix import MATRIX
from qkit.backends.native.backend import NativeBackend
from qkit.backends.native.socket import protocol
from qkit.backends.native.socket.client.backend import SocketBackend
from qkit.backends.native.socket.server.server import SocketServer
from qkit.errors import BackendUnavailable
from qkit.message import DeadLetter, Envelope, Sent
from qkit.native.engine import Engine

__all__ = ["SOCKET", "SharedDirectoryBackend"]

SOCKET: Final = "socket"  # file name of the socket in the directory
RETRY_INTERVAL_SECONDS: Final = 0.05  # between attempts to own the directory or connect to it
RETRY_AFTER_ERROR_SECONDS: Final = 1.0  # between attempts after an unexpected error

Own: TypeAlias = Callable[[], Awaitable[tuple[NativeBackend, Engine]]]


@dataclass(frozen=True, slots=True)
class _Role:
    """Current role of this process: owner if it has a server, client otherwise."""

    backend: NativeBackend | SocketBackend
    server: SocketServer | None = None
    engine: Engine | None = None

    async def aclose(self) -> None:
        # Close the server first, so that the clients notice immediately; one of them becomes the
        # new owner once the lock is released.
        try:
            if self.server is not None:
                await self.server.aclose()
            await self.backend.aclose()
        finally:  # release the lock even if closing the server or the backend fails
            if self.engine is not None:
                await self.engine.aclose()


class SharedDirectoryBackend:
    """Implementation of ``Backend`` and ``Admin`` as the owner of a directory or as its client.

    When a client loses the owner, pending calls raise ``BackendUnavailable`` and subscriptions
    raise ``SubscriptionLost``. Later calls wait until this process owns the directory or is
    connected to the new owner.

    Args:
        path: Directory of the engine.
        own: Function that opens the engine on the directory and returns a backend and the engine.
        locked: Exception that ``own`` raises while another process owns the directory.
        clock: Clock of the service; the system clock by default.
        capabilities: Capabilities to report before ``start``, which replaces them with the
            owner's.
        call_timeout: Time limit in seconds for a call to wait for a role, and for connecting to
            the owner; 3 by default.
        start_timeout: Time limit in seconds for ``start`` to wait for an owner that is still
            recovering; 10 by default.
        max_frame: Maximum size in bytes of a frame that this process accepts as the owner; 64 MiB
            by default.
    """

    name: str = "native"
    balances = BALANCES

    def __init__(
        self,
        path: Path,
        own: Own,
        *,
        locked: type[Exception],
        clock: Clock | None = None,
        capabilities: Capabilities = MATRIX["native-memory"],
        call_timeout: float = 3.0,
        start_timeout: float = 10.0,
        max_frame: int = protocol.MAX_FRAME,
    ) -> None:
        self._path = path
        self._own = own
        self._locked = locked
        self._clock = clock
        self._call_timeout = call_timeout
        self._start_timeout = start_timeout
        self._max_frame = max_frame
        self._specs: dict[str, QueueSpec] = {}
        self._dead_letter_callbacks: list[Callable[[DeadLetter], None]] = []
        self._drop_callbacks: list[Callable[[DeadLetter], None]] = []
        self._role: _Role | None = None
        self._has_role = asyncio.Event()
        self._role_lost = asyncio.Event()
        self._role_task: asyncio.Task[None] | None = None
        self.capabilities: Capabilities = capabilities

    @property
    def owner(self) -> bool:
        """Whether this process currently owns the directory."""
        return self._role is not None and self._role.server is not None

    # Backend

    async def start(self) -> None:
        """Become the owner of the directory, or connect to its owner.

        Raises:
            BackendUnavailable: Neither succeeded within ``start_timeout``.
        """
        if self._role_task is not None:
            return
        await self._own_or_connect(within=self._start_timeout)
        self._role_task = asyncio.create_task(self._role_loop(), name="qkit native directory")

    async def declare(self, spec: QueueSpec) -> None:
        """Declare the queue; unless passive, declare it again whenever the owner changes."""
        await (await self._current_backend("declare", spec.name)).declare(spec)
        if not spec.passive:
            self._specs[spec.name] = spec

    async def publish(self, queue: str, envelopes: Sequence[Envelope]) -> list[Sent]:
        """Add messages in order; return once the owner has confirmed all of them."""
        role = self._role
        backend = role.backend if role else await self._current_backend("publish", queue)
        return await backend.publish(queue, envelopes)

    def subscribe(self, spec: SubscriptionSpec) -> AbstractAsyncContextManager[Subscription]:
        """Subscribe to a queue; a client loses the subscription if it loses the owner."""
        return self._subscription(spec)

    @asynccontextmanager
    async def _subscription(self, spec: SubscriptionSpec) -> AsyncGenerator[Subscription, None]:
        backend = await self._current_backend("subscribe", spec.queue)
        async with backend.subscribe(spec) as subscription:
            yield subscription

    async def ping(self) -> None:
        """Check that the owner responds; raise ``BackendUnavailable`` otherwise."""
        await (await self._current_backend("ping")).ping()

    async def aclose(self) -> None:
        """Release the directory, or disconnect from its owner; idempotent."""
        task, self._role_task = self._role_task, None
        if task is not None:
            # Cancel only once: a second cancellation would leave the engine open and locked.
            task.cancel()
            await asyncio.wait({task})
        role, self._role = self._role, None
        self._has_role.clear()
        self._role_lost.clear()
        if role is not None:
            await role.aclose()

    # Admin

    async def queues(self) -> list[str]:
        """Return the names of all queues and topics in the directory."""
        return await (await self._current_backend("queues")).queues()

    async def stats(self, queue: str) -> QueueStats:
        """Return the queue's statistics; for a topic, the sums over its groups."""
        return await (await self._current_backend("stats", queue)).stats(queue)

    async def peek(self, queue: str, limit: int) -> list[Envelope]:
        """Return up to ``limit`` messages in delivery order, scheduled messages last."""
        return await (await self._current_backend("peek", queue)).peek(queue, limit)

    async def purge(self, queue: str) -> int:
        """Delete every message that is not in flight; return the number deleted."""
        return await (await self._current_backend("purge", queue)).purge(queue)

    async def remove(self, queue: str, ids: Sequence[str]) -> int:
        """Delete the messages with these ids that are not in flight; return the number deleted."""
        return await (await self._current_backend("remove", queue)).remove(queue, ids)

    async def delete(self, queue: str) -> None:
        """Delete the queue and its messages; it is not declared again when the owner changes."""
        await (await self._current_backend("delete", queue)).delete(queue)
        self._specs.pop(queue, None)

    # DeadLetterSource and DroppedLetterSource

    def on_dead_letter(self, callback: Callable[[DeadLetter], None]) -> None:
        """Call ``callback`` for each message that the owner's engine dead-letters."""
        self._dead_letter_callbacks.append(callback)
        if self._role is not None:
            self._role.backend.on_dead_letter(callback)

    def on_dropped_letter(self, callback: Callable[[DeadLetter], None]) -> None:
        """Call ``callback`` for each dead letter dropped because its queue was full."""
        self._drop_callbacks.append(callback)
        if self._role is not None:
            self._role.backend.on_dropped_letter(callback)

    # Role of this process

    async def _current_backend(
        self, operation: str, queue: str | None = None
    ) -> NativeBackend | SocketBackend:
        """Return the backend of the current role; wait up to ``call_timeout`` for a role."""
        if self._role is None and self._role_task is not None:
            with suppress(TimeoutError):
                async with asyncio.timeout(self._call_timeout):
                    await self._has_role.wait()
        if self._role is None:
            raise BackendUnavailable(
                f"could not reach the owner of {self._path}: try again"
                if self._role_task is not None
                else "the backend is not started: start it first",
                backend=self.name,
                operation=operation,
                queue=queue,
            )
        return self._role.backend

    async def _role_loop(self) -> None:
        while True:
            await self._role_lost.wait()
            self._role_lost.clear()
            await self._own_or_connect()

    async def _own_or_connect(self, within: float | None = None) -> None:
        """Retry until this process owns the directory or is connected to its owner.

        Args:
            within: Time limit in seconds. With a limit, an unexpected error is raised immediately;
                with ``None`` (no limit) it is logged and the attempt is repeated.
        """
        loop = asyncio.get_running_loop()
        deadline = None if within is None else loop.time() + within
        while True:
            try:
                await self._restore_declarations(await self._try())
            except (BackendUnavailable, TimeoutError, self._locked) as error:
                if deadline is not None and loop.time() >= deadline:
                    raise BackendUnavailable(
                        f"the process that owns {self._path} did not respond within {within:g} s: "
                        "it may still be recovering; try again",
                        backend=self.name,
                        operation="start",
                    ) from error
                await asyncio.sleep(RETRY_INTERVAL_SECONDS)
            except Exception:
                if deadline is not None:
                    raise
                logger.exception(
                    "could not open %s; retrying in %g s", self._path, RETRY_AFTER_ERROR_SECONDS
                )
                await asyncio.sleep(RETRY_AFTER_ERROR_SECONDS)
            else:
                return

    async def _try(self) -> _Role:
        """Try once to own the directory or to connect to its owner; return the new role."""
        opening = asyncio.ensure_future(self._own())
        try:
            backend, engine = await asyncio.shield(opening)
        except self._locked:
            client = SocketBackend(
                self._path / SOCKET,
                clock=self._clock,
                capabilities=self.capabilities,
                on_lost=self._lost,
            )
            async with asyncio.timeout(self._call_timeout):  # the owner's loop may be blocked
                await client.start()
            return _Role(client)
        except asyncio.CancelledError:
            with suppress(Exception):  # close the opened engine, so that it releases the lock
                await (await opening)[1].aclose()
            raise
        server = SocketServer(backend, engine, self._path / SOCKET, max_frame=self._max_frame)
        role = _Role(backend, server, engine)
        try:
            await backend.start()
            await server.start()
        except BaseException:
            await role.aclose()
            raise
        return role

    async def _restore_declarations(self, role: _Role) -> None:
        """Repeat the callback registrations and declarations in a new role, then adopt the role."""
        try:
            for callback in self._dead_letter_callbacks:
                role.backend.on_dead_letter(callback)
            for callback in self._drop_callbacks:
                role.backend.on_dropped_letter(callback)
            for spec in tuple(self._specs.values()):
                await role.backend.declare(replace(spec, again=True))
            if isinstance(role.backend, SocketBackend):
                # ``_role_lost`` is cleared below, so a connection lost by now would go unnoticed.
                role.backend.check()
        except BaseException:
            await role.aclose()
            raise
        if role.server is not None:
            logger.info("this process now owns %s and serves it", self._path)
        self.capabilities = role.backend.capabilities
        self._role = role
        self._role_lost.clear()
        self._has_role.set()

    def _lost(self, error: BackendUnavailable) -> None:
        """Give up the client role after the connection to the owner was lost."""
        logger.warning("lost the owner of %s; reconnecting: %s", self._path, error.message)
        self._role = None
        self._has_role.clear()
        self._role_lost.set()
