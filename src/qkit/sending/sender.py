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

from qkit._internal.deadlines import Deadline, Deadlines
from qkit._internal.logging import logger
from qkit._internal.retry import Backoff, persist
from qkit.backend import Backend
from qkit.errors import BackendUnavailable, CircuitOpen, PartialSend, QueueError, SendTimeout
from qkit.message import Envelope, Sent
from qkit.observability.connection_state import ConnectionTracker
from qkit.sending.circuit_breaker import CircuitBreaker

__all__ = ["Sender"]

R = TypeVar("R")
Arguments = TypeVarTuple("Arguments")

MAX_GATHERED = 1_000

# What one sender hands over, the answer it waits for, and when it gives up.
_Waiting = tuple[Sequence[Envelope], asyncio.Future[list[Sent]], float]


class Sender:
    """Sends envelopes through a backend; never hangs, never reports what was not confirmed."""

    def __init__(
        self,
        backend: Backend,
        *,
        breaker: CircuitBreaker,
        connection: ConnectionTracker,
        backoff: Backoff,
        timeout: float,
    ) -> None:
        self.breaker = breaker
        self.timeout = timeout
        self.backend = backend
        self.connection = connection
        self.deadlines = Deadlines(timeout)
        self._backoff = backoff
        self._outboxes: dict[str, _Outbox] = {}
        self._under_way = 0
        self._emptied: asyncio.Event | None = None  # somebody waits until nothing is under way

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
        end = self.deadlines.end()
        failures: list[QueueError] = []
        self._under_way += 1
        try:
            if prepare is None:
                try:
                    return await outbox.send(envelopes, end)
                except CircuitOpen:
                    raise
                except BackendUnavailable as error:
                    self._note(queue, envelopes, error, failures)
            return await self._persist(outbox, envelopes, end, prepare, failures)
        except QueueError as error:
            self._locate(error, queue, envelopes)
            raise
        finally:
            self._under_way -= 1
            if self._emptied is not None and not self._under_way:
                self._emptied.set()

    async def _persist(
        self,
        outbox: _Outbox,
        envelopes: Sequence[Envelope],
        end: float,
        prepare: Callable[[], Awaitable[None]] | None,
        failures: list[QueueError],
    ) -> list[Sent]:
        """Try until the end; what failed before is among the ``failures``."""
        # Among the usual ones, which end in the order in which they began, it would be too late.
        deadline = Deadline(Deadlines(end - self.deadlines.loop.time()))
        pending = [] if prepare is None else [prepare]

        async def attempt() -> list[Sent]:
            while pending:
                await self.ask(deadline, pending[0])
                pending.pop()  # once: done again it would touch no broker, yet count as an answer
            return await outbox.send(envelopes, self.deadlines.end(), deadline)

        try:
            with deadline:
                if failures:
                    await asyncio.sleep(self._backoff.after(1))
                return await persist(
                    attempt,
                    backoff=self._backoff,
                    note=lambda error: self._note(outbox.queue, envelopes, error, failures),
                )
        except CircuitOpen as error:
            if failures:  # its own tries were among those that opened the circuit
                raise error from failures[-1]
            raise
        except TimeoutError:
            if not deadline.expired:
                raise
            raise self.too_late(failures) from (failures[-1] if failures else None)

    async def drain(self) -> None:
        """Wait until nothing is on its way out any more, for as long as a send may take."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self.timeout):
                while self._under_way:
                    self._emptied = asyncio.Event()
                    await self._emptied.wait()
        for outbox in self._outboxes.values():
            if outbox.task is not None:
                outbox.task.cancel()

    def too_late(self, failures: Sequence[QueueError] = ()) -> SendTimeout:
        """What a sender is told at its deadline."""
        return SendTimeout(
            f"no confirmation within {self.timeout:g} s; "
            + (
                f"the connection failed {len(failures)} times, last: {failures[-1].message}"
                if failures
                else "the message may or may not have arrived: send it again if a duplicate "
                "does no harm"
            )
        )

    def _locate(self, error: QueueError, queue: str, envelopes: Sequence[Envelope]) -> None:
        """Say in an error where it happened."""
        error.located(
            backend=self.backend.name,
            operation="send",
            queue=queue,
            message_id=_only_id(envelopes),
        )

    def _note(
        self,
        queue: str,
        envelopes: Sequence[Envelope],
        error: QueueError,
        failures: list[QueueError],
    ) -> None:
        self._locate(error, queue, envelopes)
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
            self.connection.record_failure(error)
            raise
        except QueueError:  # the broker answered: the connection works
            self.breaker.succeeded()
            self.connection.record_success()
            raise
        except BaseException:
            if deadline.expired:  # the broker took the message and fell silent
                self.breaker.failed(probe=probe)
                self.connection.record_failure(TimeoutError(f"no answer within {self.timeout:g} s"))
            else:
                self.breaker.gave_up(probe=probe)
            raise
        self.breaker.succeeded()
        self.connection.record_success()
        return result


class _Outbox:
    """One queue's way out: at most one publish at a time, the rest gathered behind it."""

    def __init__(self, sender: Sender, queue: str) -> None:
        self.queue = queue
        self.task: asyncio.Task[None] | None = None
        self._sender = sender
        self._publish = sender.backend.publish
        self._busy = False
        self._waiting: deque[_Waiting] = deque()
        self._leaving: list[_Waiting] = []  # the group that is under way
        self._watch: asyncio.TimerHandle | None = None

    def send(
        self, envelopes: Sequence[Envelope], end: float, deadline: Deadline | None = None
    ) -> Awaitable[list[Sent]]:
        """One try: at once if nothing is on its way to this queue, else with the next group.

        ``end`` is the usual deadline from now on. ``deadline``, if given, is one that the caller
        keeps itself.
        """
        if not self._busy:
            if deadline is None:
                return self._send_in_time(envelopes, end)
            return self._send_alone(envelopes, deadline)
        self._sender.breaker.check()
        # A sender that only waits needs no deadline of its own, which costs as much as all the
        # rest of this: one timer looks after them all.
        loop = self._sender.deadlines.loop
        future: asyncio.Future[list[Sent]] = loop.create_future()
        self._waiting.append((envelopes, future, end))
        if self._watch is None:
            self._watch = loop.call_at(end, self._give_up)
        return future

    async def _send_in_time(self, envelopes: Sequence[Envelope], end: float) -> list[Sent]:
        deadline = Deadline(self._sender.deadlines, end)
        try:
            with deadline:
                return await self._send_alone(envelopes, deadline)
        except TimeoutError:
            if not deadline.expired:
                raise
            raise self._sender.too_late() from None

    async def _send_alone(self, envelopes: Sequence[Envelope], deadline: Deadline) -> list[Sent]:
        self._busy = True
        try:
            sent = await self._sender.ask(deadline, self._publish, self.queue, envelopes)
            self._sender.connection.record_message()
            return sent
        finally:
            self._busy = bool(self._waiting)
            if self._busy:
                self.task = asyncio.create_task(self._flush(), name=f"qkit send {self.queue}")

    async def _flush(self) -> None:
        """Send what has gathered, until nothing more has."""
        try:
            while group := self._next_group():
                await self._send_group(group)
                # Those who were answered may send again at once: all of them go in the next group,
                # not the first alone and the others behind it.
                await asyncio.sleep(0)
        finally:
            # Cut off: whoever has no answer waits for the next group, in the old order.
            self._waiting.extendleft(reversed(self._leaving))
            self._leaving = []
            self._busy = False
            self.task = None

    async def _send_group(self, group: list[_Waiting]) -> None:
        # Each sender gives up in its own time, but a backend that never answers must not hold up
        # those who come later.
        deadline = Deadline(self._sender.deadlines)
        together = [item for envelopes, _, _ in group for item in envelopes]
        sent: Sequence[Sent | QueueError]
        self._leaving = group
        try:
            with deadline:
                sent = await self._sender.ask(deadline, self._publish, self.queue, together)
        except PartialSend as error:
            sent = error.results
        except Exception as error:
            _fail(group, self._sender.too_late() if deadline.expired else error)
            self._leaving = []
            return
        self._sender.connection.record_message()
        _share_out(group, sent)
        self._leaving = []

    def _next_group(self) -> list[_Waiting]:
        group: list[_Waiting] = []
        size = 0
        while self._waiting:
            waiting = self._waiting.popleft()
            if waiting[1].done():
                continue  # its sender gave up before it left
            size += len(waiting[0])
            if size > MAX_GATHERED and group:
                self._waiting.appendleft(waiting)
                break
            group.append(waiting)
        return group

    def _give_up(self) -> None:
        """Tell those whose time is up; they stand in the order of their ends."""
        self._watch = None
        now = self._sender.deadlines.loop.time()
        for _, future, end in (*self._leaving, *self._waiting):
            if future.done():
                continue
            if end > now:
                self._watch = self._sender.deadlines.loop.call_at(end, self._give_up)
                return
            future.set_exception(self._sender.too_late())


def _only_id(envelopes: Sequence[Envelope]) -> str | None:
    return envelopes[0].id if len(envelopes) == 1 else None


def _fail(group: list[_Waiting], error: Exception) -> None:
    """Give each sender an error of its own: raising adds to it, and it names one message."""
    for envelopes, future, _ in group:
        if future.done():
            continue
        if isinstance(error, QueueError):
            error = copy.copy(error)
            error.message_id = _only_id(envelopes)
        future.set_exception(error)


def _share_out(group: list[_Waiting], results: Sequence[Sent | QueueError]) -> None:
    """Give each sender its own part of a group's results."""
    start = 0
    for envelopes, future, _ in group:
        end = start + len(envelopes)
        mine = results[start:end]
        start = end
        if future.done():
            continue
        if len(mine) == 1:  # as nearly all
            (only,) = mine
            if isinstance(only, QueueError):
                future.set_exception(only)
            else:
                future.set_result([only])
            continue
        sent = [item for item in mine if isinstance(item, Sent)]
        if len(sent) == len(mine):
            future.set_result(sent)
        else:
            future.set_exception(
                PartialSend(f"{len(sent)} of {len(mine)} messages were accepted", list(mine))
            )
