"""``SendBatcher``: sends to one queue, with deadlines, retries and batching.

A queue is one group of messages, unless the backend divides it into groups (``PublishGroups``).
Each group has at most one publish in flight, and groups do not wait for each other.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable, Hashable, Sequence

from qkit._internal.channel_errors import name_channel
from qkit._internal.deadlines import Deadline, DeadlineTimer
from qkit._internal.logging import logger
from qkit._internal.retry import Backoff, retry_while_unavailable
from qkit.backend import PublishGroups, PublishNow
from qkit.errors import BackendUnavailable, CircuitOpen, PartialSend, QueueError, QueueNotFound
from qkit.handlers.route import Route
from qkit.message import Envelope, Sent
from qkit.sending.circuit_breaker import BreakerState
from qkit.sending.group_publisher import GroupPublisher, message_id_of
from qkit.sending.guarded_backend import GuardedBackend

__all__ = ["SendBatcher"]

Declare = Callable[[Route], Awaitable[None]]


class SendBatcher:
    """Sender of envelopes to one queue.

    A send ends by its deadline, and succeeds only if the broker has confirmed all its messages.

    Args:
        guarded: The backend.
        queue: The name of the queue on the broker.
        backoff: Delays between the attempts of one send.
        declare: Declares a channel.
        channel: The name without the prefix, for errors and logs. Default: ``queue``.
    """

    def __init__(
        self,
        guarded: GuardedBackend,
        queue: str,
        backoff: Backoff,
        declare: Declare,
        *,
        channel: str | None = None,
    ) -> None:
        self._guarded = guarded
        self._declare = declare
        self._timer = guarded.timer
        self._queue = queue
        self._channel = queue if channel is None else channel
        self._backoff = backoff
        self._groups: dict[Hashable, GroupPublisher] = {}
        self._only_group: GroupPublisher | None = None  # None if the backend has groups
        self._backend: PublishGroups | None = None
        if isinstance(guarded.backend, PublishGroups):
            self._backend = guarded.backend
        else:
            self._only_group = self._groups[None] = GroupPublisher(
                guarded,
                functools.partial(guarded.backend.publish, queue),
                name=f"qkit send {queue}",
            )
        # If no send is in progress, messages are published without a deadline and without the
        # circuit breaker, because such a publish cannot wait.
        self._publish_now: Callable[[str, Sequence[Envelope]], list[Sent] | None] | None = None
        if isinstance(guarded.backend, PublishNow):
            self._publish_now = guarded.backend.publish_now
        self._in_progress = 0
        self._idle: asyncio.Event | None = None  # set when no send is in progress

    async def send(self, envelopes: Sequence[Envelope], route: Route | None = None) -> list[Sent]:
        """Send envelopes and wait until the broker has confirmed them.

        Args:
            envelopes: The messages.
            route: The channel of the queue. It is declared first if it was never declared, or if
                the queue no longer exists. Default: the queue is not declared.

        Returns:
            One ``Sent`` for each envelope, in order.

        Raises:
            SendTimeout: The deadline has passed.
            CircuitOpen: The circuit is open.
            PartialSend: Only some messages were confirmed.
            QueueError: The backend raised it.
        """
        self._in_progress += 1
        try:
            declared = route is None or route.declared
            if declared and self._publish_now is not None and self._in_progress == 1:
                sent = self._publish_now(self._queue, envelopes)
                if sent is not None:
                    self._guarded.connection.record_message()
                    return sent
            return await self._send(envelopes, route, declared=declared)
        except QueueError as error:
            self._locate(error, envelopes)
            raise
        finally:
            self._in_progress -= 1
            if self._idle is not None and not self._in_progress:
                self._idle.set()

    async def _send(
        self, envelopes: Sequence[Envelope], route: Route | None, *, declared: bool
    ) -> list[Sent]:
        """Send envelopes; end by the deadline."""
        deadline = Deadline(self._timer)
        failure: BackendUnavailable | None = None
        if declared:
            try:
                group = self._only_group or self._common_group(envelopes)
                if group is None:
                    return await self._send_to_groups(envelopes, deadline.end)
                if group.coalescer.busy:
                    return await group.join(envelopes, deadline.end)
                with deadline:
                    call = self._guarded.call(deadline, group.publish, envelopes)
                    sent = await group.coalescer.run_now(call)
                self._guarded.connection.record_message()
                return sent
            except CircuitOpen:
                raise
            except BackendUnavailable as error:
                failure = error
            except QueueNotFound:
                if route is None:
                    raise
                route.declared = False
            except TimeoutError:
                if not deadline.expired:
                    raise
                raise self._guarded.timeout_error() from None
        return await self._retry_until(deadline.end, envelopes, route, failure)

    async def drain(self) -> None:
        """Wait until no send is in progress; the caller limits the wait."""
        while self._in_progress:
            self._idle = asyncio.Event()
            await self._idle.wait()

    async def close(self) -> None:
        """Fail the sends that are still in progress with ``SendTimeout``."""
        for group in list(self._groups.values()):
            await group.close()

    @property
    def in_progress(self) -> bool:
        """Whether a send is in progress."""
        return self._in_progress > 0

    def _common_group(self, envelopes: Sequence[Envelope]) -> GroupPublisher | None:
        """Return the group of a single message; ``None`` for several, whose groups may differ."""
        if len(envelopes) != 1:
            return None
        assert self._backend is not None
        return self._group(self._backend.publish_group(self._queue, envelopes[0]))

    def _group(self, name: Hashable) -> GroupPublisher:
        group = self._groups.get(name)
        if group is None:
            assert self._backend is not None
            group = self._groups[name] = GroupPublisher(
                self._guarded,
                functools.partial(self._backend.publish_in_group, self._queue, name),
                name=f"qkit send {self._queue} group {name}",
            )
        return group

    async def _send_to_groups(self, envelopes: Sequence[Envelope], end: float) -> list[Sent]:
        """Divide messages among their groups and wait for all results.

        Raises:
            PartialSend: Some messages failed, or all failed for different reasons.
            QueueError: All failed for the same reason.
        """
        backend, queue = self._backend, self._queue
        assert backend is not None
        positions: dict[Hashable, list[int]] = {}
        for position, envelope in enumerate(envelopes):
            positions.setdefault(backend.publish_group(queue, envelope), []).append(position)
        if len(positions) == 1:
            (name,) = positions
            return await self._group(name).join(envelopes, end)
        parts = [
            (self._group(name), [envelopes[position] for position in members])
            for name, members in positions.items()
        ]
        outcomes: list[list[Sent] | BaseException] = []
        if self._guarded.breaker.state is BreakerState.HALF_OPEN:  # admits only one trial call
            group, part = parts.pop(0)
            try:
                outcomes.append(await group.join(part, end))
            except QueueError as error:
                if self._guarded.breaker.failures:
                    raise  # the trial call failed
                outcomes.append(error)
        outcomes += await asyncio.gather(
            *(group.join(part, end) for group, part in parts), return_exceptions=True
        )
        results: dict[int, Sent | QueueError] = {}
        for members, outcome in zip(positions.values(), outcomes, strict=True):
            results.update(zip(members, _results(outcome, len(members)), strict=True))
        ordered = [results[position] for position in range(len(envelopes))]
        sent = [item for item in ordered if isinstance(item, Sent)]
        if len(sent) < len(ordered):
            raise PartialSend.of(ordered, backend=self._guarded.backend.name, queue=self._queue)
        return sent

    async def _retry_until(
        self,
        end: float,
        envelopes: Sequence[Envelope],
        route: Route | None,
        failure: BackendUnavailable | None,
    ) -> list[Sent]:
        """Retry while the connection fails, until ``end`` in the loop's time.

        ``failure`` is the error of the first attempt, or ``None`` if there was none.
        """
        # Use a separate timer, because all deadlines of the shared timer have the same length.
        deadline = Deadline(DeadlineTimer(end - self._timer.loop.time()))
        failures: list[QueueError] = []

        async def attempt() -> list[Sent]:
            try:
                return await self._attempt(deadline, envelopes, route)
            except QueueNotFound:
                if route is None or not route.declared:
                    raise
                route.declared = False
                return await self._attempt(deadline, envelopes, route)  # declares it first

        def record(error: QueueError) -> None:
            self._record_failure(error, envelopes, failures)

        try:
            with deadline:
                if failure is not None:
                    record(failure)
                    await asyncio.sleep(self._backoff.after(1))
                return await retry_while_unavailable(
                    attempt, backoff=self._backoff, on_failure=record
                )
        except CircuitOpen as error:
            if failures:  # failures of this send contributed to opening the circuit
                raise error from failures[-1]
            raise
        except TimeoutError:
            if not deadline.expired:
                raise
            raise self._guarded.timeout_error(failures) from (failures[-1] if failures else None)

    async def _attempt(
        self, deadline: Deadline, envelopes: Sequence[Envelope], route: Route | None
    ) -> list[Sent]:
        """Declare the queue if needed, then send once; the caller has entered the deadline."""
        if route is not None and not route.declared:
            await self._guarded.call(deadline, self._declare, route)
        group = self._only_group or self._common_group(envelopes)
        if group is None:
            return await self._send_to_groups(envelopes, self._timer.deadline_from_now())
        if group.coalescer.busy:
            return await group.join(envelopes, self._timer.deadline_from_now())
        call = self._guarded.call(deadline, group.publish, envelopes)
        sent = await group.coalescer.run_now(call)
        self._guarded.connection.record_message()
        return sent

    def _record_failure(
        self, error: QueueError, envelopes: Sequence[Envelope], failures: list[QueueError]
    ) -> None:
        self._locate(error, envelopes)
        failures.append(error)
        logger.warning(
            "%s: send failed, retrying: %s",
            self._channel,
            error.message,
            extra={"queue": self._channel, "attempt": len(failures), "error": str(error)},
        )

    def _locate(self, error: QueueError, envelopes: Sequence[Envelope]) -> None:
        """Add the backend, channel and message id to an error."""
        name_channel(error, self._channel)
        error.located(
            backend=self._guarded.backend.name,
            operation="send",
            message_id=message_id_of(envelopes),
        )


def _results(outcome: list[Sent] | BaseException, count: int) -> Sequence[Sent | QueueError]:
    """Return a result for each of ``count`` messages; raise errors other than ``QueueError``."""
    if isinstance(outcome, PartialSend):
        return outcome.results
    if isinstance(outcome, QueueError):
        return [outcome] * count
    if isinstance(outcome, BaseException):
        raise outcome
    return outcome
