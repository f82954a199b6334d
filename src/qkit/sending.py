"""The way out: deadline, circuit breaker, retries and the gathering of concurrent sends.

Gathering is by need: a send goes out at once while nothing is on its way to that queue;
whatever is sent meanwhile leaves together in the next round trip. So a lone send waits for
nobody, and a hundred at once cost two round trips.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from qkit.backend import Backend
from qkit.breaker import CircuitBreaker
from qkit.deadlines import Deadlines
from qkit.errors import BackendUnavailable, CircuitOpen, PartialSend, QueueError, SendTimeout
from qkit.health import Connection
from qkit.logs import logger
from qkit.message import Envelope, Sent
from qkit.retry import Backoff, persist

__all__ = ["Sender"]

R = TypeVar("R")

MAX_GATHERED = 1_000

_Waiting = tuple[Sequence[Envelope], asyncio.Future[list[Sent]]]


class Sender:
    """Sends envelopes through a backend; never hangs, never reports what was not confirmed."""

    def __init__(
        self,
        backend: Backend,
        *,
        breaker: CircuitBreaker,
        connection: Connection,
        backoff: Backoff,
        timeout: float,
    ) -> None:
        self.breaker = breaker
        self.timeout = timeout
        self._backend = backend
        self._connection = connection
        self._backoff = backoff
        self._outboxes: dict[str, _Outbox] = {}
        self._deadlines = Deadlines(timeout)
        self._active = 0  # sends and round trips that have not ended
        self._idle = asyncio.Event()

    async def send(
        self,
        queue: str,
        envelopes: Sequence[Envelope],
        *,
        prepare: Callable[[], Awaitable[None]] | None = None,
    ) -> list[Sent]:
        """Hand envelopes over and return once the broker has confirmed them.

        ``prepare``, if given, comes first, under the same deadline: it declares the queue.

        Raises ``SendTimeout`` after the deadline, ``CircuitOpen`` at once while the breaker is
        open, ``PartialSend`` when only some were accepted, or what the backend said.
        """
        failures: list[QueueError] = []
        scope = self._deadlines.begin()
        pending = [] if prepare is None else [prepare]
        self.begin()
        try:
            async with scope:
                try:
                    return await self._attempt(queue, envelopes, scope, pending)
                except CircuitOpen:
                    raise
                except BackendUnavailable as error:
                    self._note(queue, error, failures)
                await asyncio.sleep(self._backoff.after(1))
                return await persist(
                    lambda: self._attempt(queue, envelopes, scope, pending),
                    backoff=self._backoff,
                    note=lambda error: self._note(queue, error, failures),
                )
        except CircuitOpen as error:
            if failures:  # its own tries were among those that opened the circuit
                raise error from failures[-1]
            raise
        except TimeoutError:
            if not scope.expired():
                raise
            raise SendTimeout(
                f"no confirmation within {self.timeout:g} s; "
                + (
                    f"the connection failed {len(failures)} times, last: {failures[-1].message}"
                    if failures
                    else "the message may or may not have arrived: send it again if a duplicate "
                    "does no harm"
                ),
                backend=self._backend.name,
                operation="send",
                queue=queue,
                message_id=_only_id(envelopes),
            ) from (failures[-1] if failures else None)
        finally:
            self._deadlines.end(scope)
            self.end()

    async def drain(self) -> None:
        """Wait until nothing is on its way out any more, for as long as a send may take."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self.timeout):
                while self._active:
                    self._idle.clear()
                    await self._idle.wait()
        for outbox in self._outboxes.values():
            if outbox.task is not None:
                outbox.task.cancel()

    def begin(self) -> None:
        """Something sets out."""
        self._active += 1

    def end(self) -> None:
        """It has arrived, or will not."""
        self._active -= 1
        if not self._active:
            self._idle.set()

    def _note(self, queue: str, error: QueueError, failures: list[QueueError]) -> None:
        failures.append(error)
        logger.warning(
            "%s: sending failed, trying again: %s",
            queue,
            error.message,
            extra={"queue": queue, "attempt": len(failures), "error": str(error)},
        )

    async def _attempt(
        self,
        queue: str,
        envelopes: Sequence[Envelope],
        scope: asyncio.Timeout,
        pending: list[Callable[[], Awaitable[None]]],
    ) -> list[Sent]:
        try:
            while pending:
                probe = self.breaker.admit()
                await self._judge(pending[0](), scope, probe=probe)
                pending.pop()  # once: done again it would touch no broker, yet count as an answer
            outbox = self._outboxes.get(queue)
            if outbox is None:
                outbox = self._outboxes[queue] = _Outbox(self, queue)
            return await outbox.publish(envelopes, scope)
        except QueueError as error:
            error.located(
                backend=self._backend.name,
                operation="send",
                queue=queue,
                message_id=_only_id(envelopes),
            )
            raise

    async def publish(
        self, queue: str, envelopes: Sequence[Envelope], scope: asyncio.Timeout
    ) -> list[Sent]:
        """One round trip, unless the circuit is open; ``scope`` is its deadline."""
        probe = self.breaker.admit()
        sent = await self._judge(self._backend.publish(queue, envelopes), scope, probe=probe)
        self._connection.carried()
        return sent

    async def _judge(self, call: Awaitable[R], scope: asyncio.Timeout, *, probe: bool) -> R:
        """Await a call to the backend; what it says about the connection is counted here, once.

        Not for each sender: a hundred that shared a round trip met one failure.
        """
        try:
            result = await call
        except BackendUnavailable as error:
            self.breaker.failed(probe=probe)
            self._connection.failed(error)
            raise
        except QueueError:  # the broker answered: the connection works
            self.breaker.succeeded()
            self._connection.worked()
            raise
        except BaseException:
            if scope.expired():  # the broker took the message and fell silent
                self.breaker.failed(probe=probe)
                self._connection.failed(TimeoutError(f"no answer within {self.timeout:g} s"))
            else:
                self.breaker.gave_up(probe=probe)
            raise
        self.breaker.succeeded()
        self._connection.worked()
        return result


class _Outbox:
    """One queue's way out: at most one publish at a time, the rest gathered behind it."""

    def __init__(self, sender: Sender, queue: str) -> None:
        self._sender = sender
        self._queue = queue
        self._busy = False
        self._waiting: deque[_Waiting] = deque()
        self.task: asyncio.Task[None] | None = None

    async def publish(self, envelopes: Sequence[Envelope], scope: asyncio.Timeout) -> list[Sent]:
        if self._busy:
            self._sender.breaker.check()
            future: asyncio.Future[list[Sent]] = asyncio.get_running_loop().create_future()
            self._waiting.append((envelopes, future))
            return await future
        self._busy = True
        try:
            return await self._sender.publish(self._queue, envelopes, scope)
        finally:
            self._busy = False
            if self._waiting:
                self._flush_soon()

    def _flush_soon(self) -> None:
        self._busy = True
        self._sender.begin()
        self.task = asyncio.create_task(self._flush(), name=f"qkit send {self._queue}")

    async def _flush(self) -> None:
        """Send what has gathered, until nothing more has."""
        try:
            while group := self._next_group():
                # Each sender has a deadline of its own, but a backend that never answers must
                # not hold up those who come later.
                scope = asyncio.timeout(self._sender.timeout)
                try:
                    async with scope:
                        sent: list[Sent | QueueError] = list(
                            await self._sender.publish(
                                self._queue,
                                [item for envelopes, _ in group for item in envelopes],
                                scope,
                            )
                        )
                except PartialSend as error:
                    sent = error.results
                except Exception as error:
                    if not scope.expired():  # else so has the deadline of each of them
                        _fail(group, error)
                    continue
                _share_out(group, sent)
        finally:
            self._busy = False
            self.task = None
            self._sender.end()

    def _next_group(self) -> list[_Waiting]:
        size = 0
        group: list[_Waiting] = []
        while self._waiting and (not group or size + len(self._waiting[0][0]) <= MAX_GATHERED):
            envelopes, future = self._waiting.popleft()
            if not future.done():  # else its sender gave up before it left
                group.append((envelopes, future))
                size += len(envelopes)
        return group


def _only_id(envelopes: Sequence[Envelope]) -> str | None:
    return envelopes[0].id if len(envelopes) == 1 else None


def _fail(group: list[_Waiting], error: Exception) -> None:
    """Give each sender an error of its own: raising adds to it, and it names one message."""
    for envelopes, future in group:
        if future.done():
            continue
        if isinstance(error, QueueError):
            error = copy.copy(error)
            error.message_id = _only_id(envelopes)
        future.set_exception(error)


def _share_out(group: list[_Waiting], results: list[Sent | QueueError]) -> None:
    """Give each sender its own part of a group's results."""
    start = 0
    for envelopes, future in group:
        mine = results[start : start + len(envelopes)]
        start += len(envelopes)
        if future.done():
            continue
        sent = [item for item in mine if not isinstance(item, QueueError)]
        if len(sent) == len(mine):
            future.set_result(sent)
        elif len(mine) == 1 and isinstance(mine[0], QueueError):
            future.set_exception(mine[0])
        else:
            future.set_exception(
                PartialSend(f"{len(sent)} of {len(mine)} messages were accepted", mine)
            )
