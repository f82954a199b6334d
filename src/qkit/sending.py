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
from typing import TypeVar, TypeVarTuple

from qkit.backend import Backend
from qkit.breaker import CircuitBreaker
from qkit.deadlines import Deadline, Deadlines
from qkit.errors import BackendUnavailable, CircuitOpen, PartialSend, QueueError, SendTimeout
from qkit.health import Connection
from qkit.logs import logger
from qkit.message import Envelope, Sent
from qkit.retry import Backoff, persist

__all__ = ["Sender"]

R = TypeVar("R")
Arguments = TypeVarTuple("Arguments")

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
        self.backend = backend
        self._connection = connection
        self._backoff = backoff
        self._outboxes: dict[str, _Outbox] = {}
        self.deadlines = Deadlines(timeout)

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
        outbox = self._outboxes.get(queue)
        if outbox is None:
            outbox = self._outboxes[queue] = _Outbox(self, queue)
        failures: list[QueueError] = []
        pending = [] if prepare is None else [prepare]
        deadline = Deadline(self.deadlines)
        try:
            with deadline:
                try:
                    sent = await outbox.send(envelopes, deadline, pending)
                except CircuitOpen:
                    raise
                except BackendUnavailable as error:
                    self._note(queue, error, failures)
                    sent = None
                if sent is None:
                    await asyncio.sleep(self._backoff.after(1))
                    sent = await persist(
                        lambda: outbox.send(envelopes, deadline, pending),
                        backoff=self._backoff,
                        note=lambda error: self._note(queue, error, failures),
                    )
                self._connection.carried()
                return sent
        except CircuitOpen as error:
            if failures:  # its own tries were among those that opened the circuit
                raise error from failures[-1]
            raise
        except TimeoutError:
            if not deadline.expired:
                raise
            raise SendTimeout(
                f"no confirmation within {self.timeout:g} s; "
                + (
                    f"the connection failed {len(failures)} times, last: {failures[-1].message}"
                    if failures
                    else "the message may or may not have arrived: send it again if a duplicate "
                    "does no harm"
                ),
                backend=self.backend.name,
                operation="send",
                queue=queue,
                message_id=_only_id(envelopes),
            ) from (failures[-1] if failures else None)

    async def drain(self) -> None:
        """Wait until nothing is on its way out any more, for as long as a send may take."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self.timeout):
                await self.deadlines.wait_empty()
        for outbox in self._outboxes.values():
            if outbox.task is not None:
                outbox.task.cancel()

    def locate(self, error: QueueError, queue: str, envelopes: Sequence[Envelope]) -> None:
        """Say in an error where it happened."""
        error.located(
            backend=self.backend.name,
            operation="send",
            queue=queue,
            message_id=_only_id(envelopes),
        )

    def _note(self, queue: str, error: QueueError, failures: list[QueueError]) -> None:
        failures.append(error)
        logger.warning(
            "%s: sending failed, trying again: %s",
            queue,
            error.message,
            extra={"queue": queue, "attempt": len(failures), "error": str(error)},
        )

    async def ask(
        self,
        deadline: Deadline,
        call: Callable[[*Arguments], Awaitable[R]],
        *arguments: *Arguments,
    ) -> R:
        """Call the backend, unless the circuit is open.

        What the answer says about the connection is counted here, once. Not for each sender: a
        hundred that shared a round trip met one failure.
        """
        probe = self.breaker.admit()
        try:
            result = await call(*arguments)
        except BackendUnavailable as error:
            self.breaker.failed(probe=probe)
            self._connection.failed(error)
            raise
        except QueueError:  # the broker answered: the connection works
            self.breaker.succeeded()
            self._connection.worked()
            raise
        except BaseException:
            if deadline.expired:  # the broker took the message and fell silent
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
        self._ask = sender.ask
        self._publish = sender.backend.publish
        self._queue = queue
        self._busy = False
        self._waiting: deque[_Waiting] = deque()
        self.task: asyncio.Task[None] | None = None

    async def send(
        self,
        envelopes: Sequence[Envelope],
        deadline: Deadline,
        pending: list[Callable[[], Awaitable[None]]],
    ) -> list[Sent]:
        """One try: at once if nothing is on its way to this queue, else with the next group."""
        try:
            while pending:
                await self._ask(deadline, pending[0])
                pending.pop()  # once: done again it would touch no broker, yet count as an answer
            if self._busy:
                self._sender.breaker.check()
                loop = self._sender.deadlines.loop
                future: asyncio.Future[list[Sent]] = loop.create_future()
                self._waiting.append((envelopes, future))
                return await future
            self._busy = True
            try:
                return await self._ask(deadline, self._publish, self._queue, envelopes)
            finally:
                self._busy = False
                if self._waiting:
                    self._flush_soon()
        except QueueError as error:
            self._sender.locate(error, self._queue, envelopes)
            raise

    def _flush_soon(self) -> None:
        self._busy = True
        self.task = asyncio.create_task(self._flush(), name=f"qkit send {self._queue}")

    async def _flush(self) -> None:
        """Send what has gathered, until nothing more has."""
        try:
            while group := self._next_group():
                await self._send_group(group)
                # Those who were answered may send again at once: all of them go in the next group,
                # not the first alone and the others behind it.
                await asyncio.sleep(0)
        finally:
            self._busy = False
            self.task = None

    async def _send_group(self, group: list[_Waiting]) -> None:
        # Each sender has a deadline of its own, but a backend that never answers must not hold up
        # those who come later.
        deadline = Deadline(self._sender.deadlines)
        together = [item for envelopes, _ in group for item in envelopes]
        sent: list[Sent | QueueError] = []
        try:
            with deadline:
                sent += await self._ask(deadline, self._publish, self._queue, together)
        except PartialSend as error:
            sent = error.results
        except Exception as error:
            if not deadline.expired:  # else so has the deadline of each of them
                _fail(group, error)
            return
        _share_out(group, sent)

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
        if len(mine) == 1:
            (only,) = mine
            if isinstance(only, QueueError):
                future.set_exception(only)
            else:
                future.set_result([only])
            continue
        sent = [item for item in mine if not isinstance(item, QueueError)]
        if len(sent) == len(mine):
            future.set_result(sent)
        else:
            future.set_exception(
                PartialSend(f"{len(sent)} of {len(mine)} messages were accepted", mine)
            )
