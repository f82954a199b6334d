"""The way out: deadline, circuit breaker, retries and the gathering of concurrent sends.

Gathering is by need: a send goes out at once while nothing is on its way to that queue;
whatever is sent meanwhile leaves together in the next round trip. So a lone send waits for
nobody, and a hundred at once cost two round trips.
"""

from __future__ import annotations

import asyncio
import copy
from collections import deque
from collections.abc import Sequence

from qkit.backend import Backend
from qkit.breaker import CircuitBreaker
from qkit.errors import BackendUnavailable, CircuitOpen, PartialSend, QueueError, SendTimeout
from qkit.health import Connection
from qkit.logs import logger
from qkit.message import Envelope, Sent
from qkit.retry import Backoff, persist

__all__ = ["Sender"]

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
        self._backend = backend
        self._breaker = breaker
        self._connection = connection
        self._backoff = backoff
        self._timeout = timeout
        self._outboxes: dict[str, _Outbox] = {}

    async def send(self, queue: str, envelopes: Sequence[Envelope]) -> list[Sent]:
        """Hand envelopes over and return once the broker has confirmed them.

        Raises ``SendTimeout`` after the deadline, ``CircuitOpen`` at once while the breaker is
        open, ``PartialSend`` when only some were accepted, or what the backend said.
        """
        failures: list[QueueError] = []
        scope = asyncio.timeout(self._timeout)
        try:
            async with scope:
                try:
                    return await self._attempt(queue, envelopes)
                except CircuitOpen:
                    raise
                except BackendUnavailable as error:
                    self._note(queue, error, failures)
                await asyncio.sleep(self._backoff.after(1))
                return await persist(
                    lambda: self._attempt(queue, envelopes),
                    backoff=self._backoff,
                    note=lambda error: self._note(queue, error, failures),
                )
        except TimeoutError as error:
            if not scope.expired():
                raise
            if not failures:  # the broker took the message and fell silent
                self._breaker.failed()
                self._connection.failed(error)
            raise SendTimeout(
                f"no confirmation within {self._timeout:g} s; "
                + (
                    f"the connection failed {len(failures)} times, last: {failures[-1].message}"
                    if failures
                    else "the message may or may not have arrived: send it again if a duplicate "
                    "does no harm"
                ),
                backend=self._backend.name,
                operation="send",
                queue=queue,
                message_id=envelopes[0].id if len(envelopes) == 1 else None,
                cause=failures[-1] if failures else None,
            ) from (failures[-1] if failures else None)

    async def drain(self) -> None:
        """Wait until nothing is on its way out any more."""
        tasks = [box.task for box in self._outboxes.values() if box.task is not None]
        if tasks:
            await asyncio.wait(tasks, timeout=self._timeout)

    def _note(self, queue: str, error: QueueError, failures: list[QueueError]) -> None:
        failures.append(error)
        logger.warning(
            "%s: sending failed, trying again: %s",
            queue,
            error.message,
            extra={"queue": queue, "attempt": len(failures), "error": str(error)},
        )

    async def _attempt(self, queue: str, envelopes: Sequence[Envelope]) -> list[Sent]:
        self._breaker.admit()
        outbox = self._outboxes.get(queue)
        if outbox is None:
            outbox = self._outboxes[queue] = _Outbox(self._backend, queue)
        try:
            sent = await outbox.publish(envelopes)
        except BackendUnavailable as error:
            self._breaker.failed()
            self._connection.failed(error)
            error.located(backend=self._backend.name, operation="send", queue=queue)
            raise
        except QueueError as error:  # the broker answered: the connection works
            self._breaker.succeeded()
            self._connection.worked()
            error.located(backend=self._backend.name, operation="send", queue=queue)
            raise
        except BaseException:
            self._breaker.gave_up()
            raise
        self._breaker.succeeded()
        self._connection.worked()
        self._connection.carried()
        return sent


class _Outbox:
    """One queue's way out: at most one publish at a time, the rest gathered behind it."""

    def __init__(self, backend: Backend, queue: str) -> None:
        self._backend = backend
        self._queue = queue
        self._busy = False
        self._waiting: deque[_Waiting] = deque()
        self.task: asyncio.Task[None] | None = None

    async def publish(self, envelopes: Sequence[Envelope]) -> list[Sent]:
        if self._busy:
            future: asyncio.Future[list[Sent]] = asyncio.get_running_loop().create_future()
            self._waiting.append((envelopes, future))
            return await future
        self._busy = True
        try:
            return await self._backend.publish(self._queue, envelopes)
        finally:
            self._busy = False
            if self._waiting:
                self._flush_soon()

    def _flush_soon(self) -> None:
        self._busy = True
        self.task = asyncio.create_task(self._flush(), name=f"qkit send {self._queue}")

    async def _flush(self) -> None:
        """Send what has gathered, until nothing more has."""
        try:
            while group := self._next_group():
                try:
                    sent: list[Sent | QueueError] = list(
                        await self._backend.publish(
                            self._queue, [item for envelopes, _ in group for item in envelopes]
                        )
                    )
                except PartialSend as error:
                    sent = error.results
                except Exception as error:
                    for _, future in group:
                        if not future.done():
                            future.set_exception(copy.copy(error))
                    continue
                _share_out(group, sent)
        finally:
            self._busy = False
            self.task = None

    def _next_group(self) -> list[_Waiting]:
        size = 0
        group: list[_Waiting] = []
        while self._waiting and (not group or size + len(self._waiting[0][0]) <= MAX_GATHERED):
            envelopes, future = self._waiting.popleft()
            if not future.done():  # else its sender gave up before it left
                group.append((envelopes, future))
                size += len(envelopes)
        return group


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
