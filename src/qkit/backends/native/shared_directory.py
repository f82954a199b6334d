"""A native directory for all processes of a machine: one owns and serves it, the others call it.

Which of the two a process is, it finds out by itself, and again whenever the owner dies.
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

SOCKET: Final = "socket"  # the file's name in the directory
RETRY_INTERVAL_SECONDS: Final = 0.05  # between attempts to own the directory or to connect
RETRY_AFTER_ERROR_SECONDS: Final = 1.0  # the same after an unexpected error

Own: TypeAlias = Callable[[], Awaitable[tuple[NativeBackend, Engine]]]


@dataclass(frozen=True, slots=True)
class _Role:
    """What this process is now: the owner if it has a server, else a client."""

    backend: NativeBackend | SocketBackend
    server: SocketServer | None = None
    engine: Engine | None = None

    async def aclose(self) -> None:
        # The server first: its clients notice at once, and one of them waits for the directory.
        try:
            if self.server is not None:
                await self.server.aclose()
            await self.backend.aclose()
        finally:  # whatever fails, the lock must not stay
            if self.engine is not None:
                await self.engine.aclose()


class SharedDirectoryBackend:
    """``Backend`` and ``Admin`` on a directory, wherever its owner is.

    ``own`` opens the directory in this process, and raises ``locked`` while another has it. When
    the owner dies, calls that wait raise ``BackendUnavailable`` and subscriptions
    ``SubscriptionLost``; the next calls wait up to ``patience`` seconds until this process owns
    the directory, or has found the one that does. ``capabilities`` hold before ``start``, which
    waits up to ``start_timeout`` seconds for an owner that is still recovering.
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
        patience: float = 3.0,
        start_timeout: float = 10.0,
        max_frame: int = protocol.MAX_FRAME,
    ) -> None:
        self._path = path
        self._own = own
        self._locked = locked
        self._clock = clock
        self._patience = patience
        self._start_timeout = start_timeout
        self._max_frame = max_frame
        self._specs: dict[str, QueueSpec] = {}
        self._callbacks: list[Callable[[DeadLetter], None]] = []
        self._drop_callbacks: list[Callable[[DeadLetter], None]] = []
        self._role: _Role | None = None
        self._reached = asyncio.Event()  # there is a role
        self._broken = asyncio.Event()  # there was one
        self._role_task: asyncio.Task[None] | None = None
        self.capabilities = capabilities

    @property
    def owner(self) -> bool:
        """Whether this process owns the directory now."""
        return self._role is not None and self._role.server is not None

    # Backend

    async def start(self) -> None:
        """Own the directory or reach its owner; ``BackendUnavailable`` if neither works in time."""
        if self._role_task is not None:
            return
        await self._own_or_connect(within=self._start_timeout)
        self._role_task = asyncio.create_task(self._role_loop(), name="qkit native directory")

    async def declare(self, spec: QueueSpec) -> None:
        """Make sure the queue exists, now and under every later owner."""
        await (await self._current_backend("declare", spec.name)).declare(spec)
        if not spec.passive:
            self._specs[spec.name] = spec

    async def publish(self, queue: str, envelopes: Sequence[Envelope]) -> list[Sent]:
        """Add messages in order; returns once the owner has accepted every one."""
        return await (await self._current_backend("publish", queue)).publish(queue, envelopes)

    def subscribe(self, spec: SubscriptionSpec) -> AbstractAsyncContextManager[Subscription]:
        """Claim messages; the claim ends with ``SubscriptionLost`` when its owner dies."""
        return self._subscription(spec)

    @asynccontextmanager
    async def _subscription(self, spec: SubscriptionSpec) -> AsyncGenerator[Subscription, None]:
        backend = await self._current_backend("subscribe", spec.queue)
        async with backend.subscribe(spec) as subscription:
            yield subscription

    async def ping(self) -> None:
        """Prove that the owner answers, or raise ``BackendUnavailable``."""
        await (await self._current_backend("ping")).ping()

    async def aclose(self) -> None:
        """Hand the directory over, or leave its owner; idempotent."""
        task, self._role_task = self._role_task, None
        if task is not None:
            task.cancel()  # once: what it is opening must come to its end, or keeps the lock
            await asyncio.wait({task})
        role, self._role = self._role, None
        self._reached.clear()
        self._broken.clear()
        if role is not None:
            await role.aclose()

    # Admin

    async def queues(self) -> list[str]:
        """The names of all queues and topics of the directory."""
        return await (await self._current_backend("queues")).queues()

    async def stats(self, queue: str) -> QueueStats:
        """The queue's figures now; a topic's are the sums of its groups'."""
        return await (await self._current_backend("stats", queue)).stats(queue)

    async def peek(self, queue: str, limit: int) -> list[Envelope]:
        """The next messages in order of delivery, delayed ones last."""
        return await (await self._current_backend("peek", queue)).peek(queue, limit)

    async def purge(self, queue: str) -> int:
        """Delete every message that no consumer holds; return how many."""
        return await (await self._current_backend("purge", queue)).purge(queue)

    async def remove(self, queue: str, ids: Sequence[str]) -> int:
        """Delete these messages unless a consumer holds them; return how many were there."""
        return await (await self._current_backend("remove", queue)).remove(queue, ids)

    async def delete(self, queue: str) -> None:
        """Delete the queue with all that is in it, also for later owners."""
        await (await self._current_backend("delete", queue)).delete(queue)
        self._specs.pop(queue, None)

    # DeadLetterSource and DroppedLetterSource

    def on_dead_letter(self, callback: Callable[[DeadLetter], None]) -> None:
        """Call ``callback`` for each dead letter that the engine wrote, whoever owns it."""
        self._callbacks.append(callback)
        if self._role is not None:
            self._role.backend.on_dead_letter(callback)

    def on_dropped_letter(self, callback: Callable[[DeadLetter], None]) -> None:
        """Call ``callback`` for each dead letter that a full dead-letter queue pushed out."""
        self._drop_callbacks.append(callback)
        if self._role is not None:
            self._role.backend.on_dropped_letter(callback)

    # Finding a role

    async def _current_backend(
        self, operation: str, queue: str | None = None
    ) -> NativeBackend | SocketBackend:
        """Whatever this process is now; waits a little while it finds out."""
        if self._role is None and self._role_task is not None:
            with suppress(TimeoutError):
                async with asyncio.timeout(self._patience):
                    await self._reached.wait()
        if self._role is None:
            raise BackendUnavailable(
                f"{self._path} has no owner that can be reached now: try again"
                if self._role_task is not None
                else "the backend is not open: start it first",
                backend=self.name,
                operation=operation,
                queue=queue,
            )
        return self._role.backend

    async def _role_loop(self) -> None:
        while True:
            await self._broken.wait()
            self._broken.clear()
            await self._own_or_connect()

    async def _own_or_connect(self, within: float | None = None) -> None:
        """Try until there is a role; with ``within``, until then, or until something is wrong."""
        loop = asyncio.get_running_loop()
        deadline = None if within is None else loop.time() + within
        while True:
            try:
                await self._restore_declarations(await self._try())
            except (BackendUnavailable, TimeoutError, self._locked) as error:
                if deadline is not None and loop.time() >= deadline:
                    raise BackendUnavailable(
                        f"another process owns {self._path} and did not answer within {within:g} "
                        "s: it may still be recovering; try again",
                        backend=self.name,
                        operation="start",
                    ) from error
                await asyncio.sleep(RETRY_INTERVAL_SECONDS)
            except Exception:
                if deadline is not None:
                    raise
                logger.exception("%s cannot be opened; trying again", self._path)
                await asyncio.sleep(RETRY_AFTER_ERROR_SECONDS)
            else:
                return

    async def _try(self) -> _Role:
        """Own the directory, or else call its owner."""
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
            async with asyncio.timeout(self._patience):  # its loop may be blocked
                await client.start()
            return _Role(client)
        except asyncio.CancelledError:
            with suppress(Exception):  # closed while it opened: it must not keep the lock
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
        """Bring along what this process has declared and listens to."""
        try:
            for callback in self._callbacks:
                role.backend.on_dead_letter(callback)
            for callback in self._drop_callbacks:
                role.backend.on_dropped_letter(callback)
            for spec in tuple(self._specs.values()):
                await role.backend.declare(replace(spec, again=True))
            if isinstance(role.backend, SocketBackend):
                role.backend.check()  # perhaps it broke before anybody watched
        except BaseException:
            await role.aclose()
            raise
        if role.server is not None:
            logger.info("this process owns %s now and serves it", self._path)
        self.capabilities = role.backend.capabilities
        self._role = role
        self._broken.clear()
        self._reached.set()

    def _lost(self, error: BackendUnavailable) -> None:
        """The owner is gone."""
        logger.warning("the owner of %s is gone: %s", self._path, error.message)
        self._role = None
        self._reached.clear()
        self._broken.set()
