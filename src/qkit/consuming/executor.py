"""``Executor``: decodes a delivery, calls its handler and returns the outcome.

The executor settles nothing: it returns an outcome, which ``Settlement`` carries out.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import math
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeGuard, cast

from pydantic import TypeAdapter, ValidationError

from qkit.codec.codec import decompress
from qkit.consuming.handler_threads import HandlerThreads
from qkit.consuming.job import Job
from qkit.consuming.outcome import (
    ABANDON,
    DONE,
    Dead,
    Outcome,
    Pause,
    RetryLater,
    expired_outcome,
)
from qkit.consuming.retry_gate import RetryGate
from qkit.errors import (
    BatchError,
    DecodeError,
    HandlerError,
    HandlerTimeout,
    PayloadTooLarge,
    QueueError,
    Reject,
    Retry,
    Unavailable,
)
from qkit.handlers.channel import CallNext, Middleware
from qkit.handlers.registry import Handler
from qkit.handlers.retry_policy import RetryPolicy
from qkit.handlers.route import Route
from qkit.handlers.signature import MISSING, ParamMetadata
from qkit.message import (
    CONTENT_ENCODING,
    Envelope,
    LeaseExpired,
    Message,
    Reason,
)
from qkit.wiring import Wiring

__all__ = ["Executor"]


#: Calls the handler once, for one job or for all jobs of a batch.
Call = Callable[[Sequence[Job]], Awaitable[object]]


class _Undecodable(DecodeError):
    """Failure to decode a body or header, as opposed to an error that the handler raised."""

    def __init__(self, cause: QueueError) -> None:
        super().__init__(cause.message, cause=cause)
        self.origin = cause


class Executor:
    """Executor that calls one handler and returns the outcome of each delivery.

    Prepares as much as possible at construction, to keep the work per message small.

    Args:
        wiring: Objects shared by all parts of the service.
        route: The channel.
        handler: The handler.
        threads: Threads for a synchronous handler.
        on_retry: Called after a failed attempt that will be retried inline.
    """

    def __init__(
        self,
        wiring: Wiring,
        route: Route,
        handler: Handler,
        threads: HandlerThreads,
        on_retry: Callable[[Envelope, RetryLater], None],
    ) -> None:
        self.handler = handler
        self.policy: RetryPolicy = route.policy
        self._codec = wiring.routes.codec(handler.body_type)
        self._telemetry = wiring.telemetry
        # The group for traces. A queue has no groups, and neither has a backend without queues.
        grouped = route.broadcast and bool(wiring.backend.capabilities.queues)
        self._group = handler.group if grouped else None
        self._threads = threads
        self._clock = wiring.clock
        self._redelivers = bool(wiring.backend.capabilities.redelivery)
        self._max_bytes = wiring.settings.max_message_bytes
        self._on_retry = on_retry
        self._timeout = handler.metadata.timeout
        self._middleware = route.middleware
        self._takes_body = handler.body is not None
        self._resolvers = [_parameter_resolver(param, handler) for param in handler.params]
        self._keywords = [param.name if param.keyword_only else None for param in handler.params]
        self._call = self._choose_call()

    def _choose_call(self) -> Call:
        """Return the fastest function that can call this handler once."""
        shape = [(param.kind, param.keyword_only) for param in self.handler.params]
        call: Call
        if self.handler.metadata.batch_size is not None:
            call = self._call_batch
        elif self.handler.is_async and not self._middleware and shape == [("body", False)]:
            call = self._call_body_only
        else:
            call = self._call_with_message
        if self._timeout is not None:
            call = functools.partial(self._call_with_timeout, call, self._timeout)
        if self._telemetry.enabled:
            call = functools.partial(self._call_traced, call)
        return call

    async def run(self, job: Job, gate: RetryGate) -> Outcome:
        """Handle one delivery and return its outcome; ``gate`` lets inline retries begin."""
        envelope = job.delivery.envelope
        if envelope.expires_at is not None or envelope.attempt > self.policy.max_attempts:
            early = self._check_before_call(envelope)
            if early is not None:
                return early
        jobs = (job,)
        while (error := await self._attempt(jobs)) is not None:
            outcome = self._outcome_of(error, envelope)
            if job.stopped or not self._inline(outcome):
                return outcome
            over = await self._wait_inline(job, {job: outcome}, gate)
            if over:
                return over[job]
        return DONE

    async def run_batch(self, jobs: Sequence[Job], gate: RetryGate) -> list[Outcome]:
        """Handle a batch in one call and return the outcome of each message.

        Messages that have expired or cannot be decoded are excluded from the call. All others share
        the outcome of the call, unless the handler raises ``BatchError``.
        """
        outcomes: dict[Job, Outcome] = {}
        live: list[Job] = []
        for job in jobs:
            early = self._check_before_call(job.delivery.envelope) or self._decode_member(job)
            if early is None:
                live.append(job)
            else:
                outcomes[job] = early
        while live:
            error = await self._attempt(live)
            again: dict[Job, RetryLater] = {}
            for job in live:
                envelope = job.delivery.envelope
                own = error.failures.get(envelope.id) if isinstance(error, BatchError) else error
                outcome = DONE if own is None else self._outcome_of(own, envelope)
                if self._inline(outcome) and not job.stopped:
                    again[job] = outcome
                outcomes[job] = outcome
            over = await self._wait_inline(live[0], again, gate) if again else {}
            outcomes |= over
            live = [job for job in again if job not in over]
            for job in live:  # rebuild the message with its new attempt number
                self._decode_member(job)
        return [outcomes[job] for job in jobs]

    def _decode_member(self, job: Job) -> Outcome | None:
        """Decode a message of a batch; return its outcome if it cannot be decoded."""
        try:
            job.message = self._message(job.delivery.envelope)
            job.body = self._decode(job.message.body, job.message.headers)
        except _Undecodable as error:
            return self._outcome_of(error, job.delivery.envelope)
        return None

    def _check_before_call(self, envelope: Envelope) -> Outcome | None:
        """Return the outcome of a message that expired or was delivered too often, or ``None``."""
        expired = expired_outcome(envelope, self._clock.time())
        limit = self.policy.max_attempts
        if expired is None and envelope.attempt > limit:
            crashed = LeaseExpired(
                f"delivery {envelope.attempt - 1} of {limit} was never settled: the handler "
                "crashed, hung or exceeded ack_deadline, or another service allows more attempts"
            )
            return Dead(Reason.MAX_RETRIES_EXCEEDED, crashed, called=False)
        return expired

    async def _attempt(self, jobs: Sequence[Job]) -> Exception | None:
        """Call the handler once and return the error that it raised, or ``None``.

        The error is caught here and not by the callers, because its traceback refers to the frame
        that caught it: a caller that keeps the error in a variable would form a reference cycle.
        """
        try:
            await self._call(jobs)
        except Exception as error:
            return error
        except asyncio.CancelledError as error:
            return await _handler_cancellation(error, jobs)
        except BaseException as error:
            return _wrap_base_exception(error)
        return None

    def _call_body_only(self, jobs: Sequence[Job]) -> Awaitable[object]:
        """Call an async handler that takes only the body: this common case needs no ``Message``."""
        envelope = jobs[0].delivery.envelope
        try:
            body = self._codec.decode(envelope.body, envelope.headers)
        except (DecodeError, PayloadTooLarge) as error:
            raise _Undecodable(error) from error
        return cast("Awaitable[object]", self.handler.call(body))

    def _call_with_message(self, jobs: Sequence[Job]) -> Awaitable[object]:
        return self._through_middleware(jobs[0], self._message(jobs[0].delivery.envelope))

    def _call_batch(self, jobs: Sequence[Job]) -> Awaitable[object]:
        return self._invoke(jobs[0], [job.body for job in jobs], [job.message for job in jobs])

    async def _call_with_timeout(self, call: Call, timeout: float, jobs: Sequence[Job]) -> None:
        scope = asyncio.timeout(timeout)
        handling = call(jobs)
        try:
            async with scope:
                await handling
        except TimeoutError as error:
            if not scope.expired():
                raise  # the handler raised it
            raise self._timed_out(error) from error
        if scope.expired():  # the handler suppressed its cancellation and may not have finished
            raise self._timed_out()

    async def _call_traced(self, call: Call, jobs: Sequence[Job]) -> None:
        deliveries = [job.delivery for job in jobs]
        with self._telemetry.consumer_span(self.handler.channel, self._group, deliveries):
            await call(jobs)

    def _timed_out(self, error: TimeoutError | None = None) -> HandlerTimeout:
        return HandlerTimeout(
            f"{self.handler.name} ran longer than its timeout of {self._timeout:g} s",
            operation="handle",
            queue=self.handler.channel,
            cause=error,
        )

    async def _through_middleware(self, job: Job, message: Message) -> object:
        async def innermost(inner: Message) -> object:
            body = self._decode(inner.body, inner.headers)
            return await self._invoke(job, body, inner)

        call: CallNext = innermost
        for middleware in reversed(self._middleware):
            call = functools.partial(_step, middleware, call)
        return await call(message)

    async def _invoke(self, job: Job, body: object, message: object) -> object:
        """Resolve the parameters and call the handler, in a thread if it is synchronous."""
        args: list[object] = []
        kwargs: dict[str, object] = {}
        for resolve, keyword in zip(self._resolvers, self._keywords, strict=True):
            value = resolve(body, message)
            if keyword is None:
                args.append(value)
            else:
                kwargs[keyword] = value
        if self.handler.is_async:
            return await cast("Awaitable[object]", self.handler.call(*args, **kwargs))
        job.thread = self._threads.submit(functools.partial(self.handler.call, *args, **kwargs))
        # A thread cannot be cancelled. The shield keeps its future alive, so that the worker can
        # wait for the thread.
        result = await asyncio.shield(job.thread)
        # A synchronous function may return a coroutine, which is part of the handler's work.
        return await result if inspect.isawaitable(result) else result

    def _outcome_of(self, error: Exception, envelope: Envelope) -> Outcome:
        """Return the outcome of a failed attempt."""
        if isinstance(error, _Undecodable):
            return Dead(Reason.UNDECODABLE, error.origin)
        if isinstance(error, Reject):
            return Dead(Reason.EXPLICIT_NACK, error)
        if isinstance(error, Unavailable):
            return Pause(error.retry_after, error)
        if isinstance(error, self.policy.dead_on):
            return Dead(Reason.REJECTED, error)
        asked = error.delay if isinstance(error, Retry) else None
        delay = self.policy.wait(error, attempt=envelope.attempt, asked=asked)
        if delay is None:
            return Dead(Reason.MAX_RETRIES_EXCEEDED, error)
        return RetryLater(delay, error)

    def _inline(self, outcome: Outcome) -> TypeGuard[RetryLater]:
        return isinstance(outcome, RetryLater) and self.policy.mode == "inline"

    async def _wait_inline(
        self, called: Job, failed: dict[Job, RetryLater], gate: RetryGate
    ) -> dict[Job, Outcome]:
        """Wait before an inline retry, keeping the slot; then count the next attempt.

        Returns:
            The outcomes of the jobs that are not retried, because they expire before the retry or
            because the session ends.
        """
        now = self._clock.time()
        delay = 0.0
        expiring: set[Job] = set()
        for job, outcome in failed.items():
            envelope = job.delivery.envelope
            self._on_retry(envelope, outcome)
            expires_at = envelope.expires_at
            if expires_at is not None and expires_at <= now + outcome.delay:
                expiring.add(job)
                delay = max(delay, expires_at - now)
            else:
                delay = max(delay, outcome.delay)
        if not await gate.wait(delay, called.thread):
            return {job: self._give_back(outcome.error) for job, outcome in failed.items()}
        over: dict[Job, Outcome] = {}
        for job in failed:
            envelope = job.delivery.envelope
            envelope.attempt += 1
            at = math.inf if job in expiring else self._clock.time()
            if (expired := expired_outcome(envelope, at)) is not None:
                over[job] = expired
        return over

    def _give_back(self, error: Exception) -> Outcome:
        """Return the outcome of a failed message that gets no further attempt in this session.

        Where the broker does not deliver it again, the message would be lost.
        """
        return ABANDON if self._redelivers else Dead(Reason.MAX_RETRIES_EXCEEDED, error)

    def outcome_of_exit(self, error: BaseException, envelope: Envelope) -> Outcome:
        """Return the outcome of a handler that raised ``SystemExit`` or ``KeyboardInterrupt``."""
        failure = QueueError(f"the handler raised {type(error).__name__}", cause=error)
        outcome = self._outcome_of(failure, envelope)
        if isinstance(outcome, RetryLater):
            if not self._redelivers:
                return self._give_back(failure)
            if self.policy.mode == "inline":
                return RetryLater(0.0, failure)
        return outcome

    def _message(self, envelope: Envelope) -> Message:
        body, headers = envelope.body, envelope.headers
        if CONTENT_ENCODING in headers:
            try:
                body = decompress(body, headers, self._max_bytes)
            except (DecodeError, PayloadTooLarge) as error:
                raise _Undecodable(error) from error
            headers = {name: value for name, value in headers.items() if name != CONTENT_ENCODING}
        return Message(
            id=envelope.id,
            channel=self.handler.channel,
            body=body,
            headers=headers,
            key=envelope.key,
            priority=envelope.priority,
            attempt=envelope.attempt,
            max_attempts=self.policy.max_attempts,
            expires_at=envelope.expires_at,
        )

    def _decode(self, body: bytes, headers: object) -> object:
        if not self._takes_body:  # the body is not used, so it may be invalid
            return None
        try:
            return self._codec.decode(body, cast("dict[str, str]", headers))
        except (DecodeError, PayloadTooLarge) as error:
            raise _Undecodable(error) from error


async def _step(middleware: Middleware, call_next: CallNext, message: Message) -> object:
    return await middleware(message, call_next)


async def _handler_cancellation(error: asyncio.CancelledError, jobs: Sequence[Job]) -> QueueError:
    """Return an error for a cancellation that qkit did not request; re-raise one that it did."""
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        while task.cancelling():  # the handler may have cancelled this task: keep the worker
            task.uncancel()
        # If the event loop is shutting down, this lets the session mark its jobs as stopped.
        await asyncio.sleep(0)
    if any(job.stopped for job in jobs):
        raise error
    return QueueError("the handler raised CancelledError, but qkit did not cancel it", cause=error)


def _wrap_base_exception(error: BaseException) -> QueueError:
    """Return an error for a ``BaseException``, such as a panic in a Rust extension.

    ``KeyboardInterrupt`` and ``SystemExit`` are re-raised, because they end the program.
    """
    if isinstance(error, KeyboardInterrupt | SystemExit):
        raise error
    return QueueError(f"the handler raised {type(error).__name__}", cause=error)


def _parameter_resolver(
    param: ParamMetadata, handler: Handler
) -> Callable[[object, object], object]:
    """Return a function that computes a parameter from the decoded body and the message."""
    if param.kind == "body":
        return lambda body, message: body
    if param.kind == "message":
        return lambda body, message: message
    try:
        adapter: TypeAdapter[object] = TypeAdapter(cast("type[object]", param.type))
    except Exception as error:
        raise HandlerError(
            f"{handler.name}: parameter {param.name!r}: a header cannot be converted to "
            f"{param.type!r}",
            cause=error,
        ) from error
    header = cast("str", param.header)

    def resolve(body: object, message: object) -> object:
        value = cast("Message", message).headers.get(header)
        if value is None:
            if param.default is MISSING:
                raise _Undecodable(DecodeError(f"header {header!r} is missing"))
            return param.default
        try:
            return adapter.validate_python(value)
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]["msg"]
            raise _Undecodable(DecodeError(f"header {header!r}: {first}")) from None

    return resolve
