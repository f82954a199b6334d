"""One delivery through its handler: decode, fill the parameters, call, and judge how it ended.

Failure is data here. Nothing is settled: the outcome goes back to the consumer, which settles in
one place.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeGuard, cast

from pydantic import TypeAdapter, ValidationError

from qkit.codec.codec import decompress
from qkit.consuming.handler_threads import HandlerThreads
from qkit.consuming.job import Job
from qkit.consuming.outcome import DONE, Dead, Outcome, Pause, RetryLater, expired_outcome
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


#: Calls the handler once, for one job or for those of a batch.
Call = Callable[[Sequence[Job]], Awaitable[object]]


class _Undecodable(DecodeError):
    """A body or header that qkit, not the handler, could not read."""

    def __init__(self, cause: QueueError) -> None:
        super().__init__(cause.message, cause=cause)
        self.origin = cause


class Executor:
    """Runs a handler's deliveries. Everything that can be resolved is resolved here, once.

    Args:
        wiring: What the service shares.
        route: The channel.
        handler: The handler.
        threads: Run a synchronous handler.
        on_retry: Called when an attempt failed and is repeated inline, in its slot.
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
        self.policy = route.policy
        self._codec = wiring.routes.codec(handler.body_type)
        self._telemetry = wiring.telemetry
        self._threads = threads
        self._clock = wiring.clock
        self._max_bytes = wiring.settings.max_message_bytes
        self._on_retry = on_retry
        self._timeout = handler.metadata.timeout
        self._middleware = route.middleware
        self._takes_body = handler.body is not None
        self._resolvers = [_parameter_resolver(param, handler) for param in handler.params]
        self._keywords = [param.name if param.keyword_only else None for param in handler.params]
        self._call = self._choose_call()

    def _choose_call(self) -> Call:
        """How to call the handler once, with no more around it than it asks for."""
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

    async def run(self, job: Job) -> Outcome:
        """Handle one delivery and return how it ended."""
        envelope = job.delivery.envelope
        if envelope.expires_at is not None or envelope.attempt > self.policy.max_attempts:
            refused = self._check_before_call(envelope)
            if refused is not None:
                return refused
        jobs = (job,)
        while (error := await self._attempt(jobs)) is not None:
            outcome = self._outcome_of(error, envelope)
            if job.stopped or not self._inline(outcome):
                return outcome
            await self._wait_inline(job, {job: outcome})
        return DONE

    async def run_batch(self, jobs: Sequence[Job]) -> list[Outcome]:
        """Handle a batch in one call and say for each member how it ended.

        Members that cannot be decoded leave first; the others share the handler's fate, unless it
        raises ``BatchError``.
        """
        outcomes: dict[Job, Outcome] = {}
        live: list[Job] = []
        for job in jobs:
            refused = self._check_before_call(job.delivery.envelope) or self._decode_member(job)
            if refused is None:
                live.append(job)
            else:
                outcomes[job] = refused
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
            if again:
                await self._wait_inline(live[0], again)
            for job in again:  # its message says which attempt it is
                self._decode_member(job)
            live = list(again)
        return [outcomes[job] for job in jobs]

    def _decode_member(self, job: Job) -> Outcome | None:
        """Decode a member of a batch; the answer is its outcome if that fails."""
        try:
            job.message = self._message(job.delivery.envelope)
            job.body = self._decode(job.message.body, job.message.headers)
        except _Undecodable as error:
            return self._outcome_of(error, job.delivery.envelope)
        return None

    def _check_before_call(self, envelope: Envelope) -> Outcome | None:
        """What is decided before the handler runs: expired, or delivered too often."""
        expired = expired_outcome(envelope, self._clock.time())
        most = self.policy.max_attempts
        if expired is None and envelope.attempt > most:
            crashed = LeaseExpired(
                f"delivery {envelope.attempt - 1} of {most} was never settled: the handler "
                "crashed, hung or outran ack_deadline, or another service allows more attempts"
            )
            return Dead(Reason.MAX_RETRIES_EXCEEDED, crashed, called=False)
        return expired

    async def _attempt(self, jobs: Sequence[Job]) -> Exception | None:
        """Call the handler once; what it raised is the answer."""
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
        """The common shape, an async handler of the body alone, needs no ``Message``."""
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
                raise  # the handler's own time-out
            raise self._timed_out(error) from error
        if scope.expired():  # it swallowed the cancellation, so it may have stopped half-way
            raise self._timed_out()

    async def _call_traced(self, call: Call, jobs: Sequence[Job]) -> None:
        envelopes = [job.delivery.envelope for job in jobs]
        with self._telemetry.consumer_span(self.handler.channel, self.handler.group, envelopes):
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
        """Fill the parameters and call the handler, in a thread if it is synchronous."""
        args: list[object] = []
        kwargs: dict[str, object] = {}
        for fill, keyword in zip(self._resolvers, self._keywords, strict=True):
            value = fill(body, message)
            if keyword is None:
                args.append(value)
            else:
                kwargs[keyword] = value
        if self.handler.is_async:
            return await cast("Awaitable[object]", self.handler.call(*args, **kwargs))
        job.thread = self._threads.submit(functools.partial(self.handler.call, *args, **kwargs))
        # A thread cannot be cancelled: shielded, its future still tells when it has returned.
        result = await asyncio.shield(job.thread)
        # A plain function that hands on a coroutine has not done its work before that has.
        return await result if inspect.isawaitable(result) else result

    def _outcome_of(self, error: Exception, envelope: Envelope) -> Outcome:
        """What an attempt's failure means for the message."""
        if isinstance(error, _Undecodable):
            return Dead(Reason.UNDECODABLE, error.origin)
        if isinstance(error, Reject):
            return Dead(Reason.EXPLICIT_NACK, error)
        if isinstance(error, Unavailable):
            return Pause(error.retry_after, error)
        asked = error.delay if isinstance(error, Retry) else None
        delay = self.policy.wait(error, attempt=envelope.attempt, asked=asked)
        if delay is None:
            return Dead(Reason.MAX_RETRIES_EXCEEDED, error)
        return RetryLater(delay, error)

    def _inline(self, outcome: Outcome) -> TypeGuard[RetryLater]:
        return isinstance(outcome, RetryLater) and self.policy.mode == "inline"

    async def _wait_inline(self, called: Job, failed: dict[Job, RetryLater]) -> None:
        """Wait in the slot, as inline retries do, and count the attempt that follows."""
        for job, outcome in failed.items():
            self._on_retry(job.delivery.envelope, outcome)
        await asyncio.sleep(max(outcome.delay for outcome in failed.values()))
        if called.thread is not None:  # it may have outlived its time-out: never two in one slot
            await asyncio.wait({called.thread})
        for job in failed:
            job.delivery.envelope.attempt += 1

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
        if not self._takes_body:  # bytes that nobody reads need not make sense
            return None
        try:
            return self._codec.decode(body, cast("dict[str, str]", headers))
        except (DecodeError, PayloadTooLarge) as error:
            raise _Undecodable(error) from error


async def _step(middleware: Middleware, call_next: CallNext, message: Message) -> object:
    return await middleware(message, call_next)


async def _handler_cancellation(error: asyncio.CancelledError, jobs: Sequence[Job]) -> QueueError:
    """A cancellation that qkit did not ask for came from the handler's own work."""
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        while task.cancelling():  # perhaps it cancelled its own task: the worker lives on
            task.uncancel()
        # Or the whole loop is being torn down: then the session marks its jobs just now.
        await asyncio.sleep(0)
    if any(job.stopped for job in jobs):
        raise error
    return QueueError("the handler awaited something that was cancelled", cause=error)


def _wrap_base_exception(error: BaseException) -> QueueError:
    """Something that is no ``Exception``, such as a panic of an extension: a failure all the same.

    A program that is told to end is another matter: that goes through.
    """
    if isinstance(error, KeyboardInterrupt | SystemExit):
        raise error
    return QueueError(f"the handler raised {type(error).__name__}", cause=error)


def _parameter_resolver(
    param: ParamMetadata, handler: Handler
) -> Callable[[object, object], object]:
    """How to fill one parameter, given the decoded body and the message."""
    if param.kind == "body":
        return lambda body, message: body
    if param.kind == "message":
        return lambda body, message: message
    try:
        adapter: TypeAdapter[object] = TypeAdapter(cast("type[object]", param.type))
    except Exception as error:
        raise HandlerError(
            f"{handler.name}: parameter {param.name!r} has a type that a header cannot become: "
            f"{param.type!r}",
            cause=error,
        ) from error
    header = cast("str", param.header)

    def fill(body: object, message: object) -> object:
        value = cast("Message", message).headers.get(header)
        if value is None:
            if param.default is MISSING:
                raise _Undecodable(DecodeError(f"the header {header!r} is missing"))
            return param.default
        try:
            return adapter.validate_python(value)
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]["msg"]
            raise _Undecodable(DecodeError(f"the header {header!r}: {first}")) from None

    return fill
