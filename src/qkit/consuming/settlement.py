"""The one place where a delivery is settled: acknowledged, released or made a dead letter.

Durable copy before ack: a dead letter is written and confirmed before its message is
acknowledged, so a crash between the two duplicates and never loses.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import assert_never

from qkit._internal.logging import logger
from qkit._internal.retry import Backoff
from qkit._internal.text import error_text
from qkit.backend import AckMany, Delivery, Subscription, SubscriptionSpec
from qkit.consuming.job import Job
from qkit.consuming.outcome import DONE, Abandon, Dead, Done, Outcome, Pause, RetryLater
from qkit.errors import (
    AckDeadlineExceeded,
    InvalidHeader,
    MessageNotFound,
    QueueError,
    Signal,
    SubscriptionLost,
)
from qkit.handlers.route import Route
from qkit.message import FIRST_FAILED_AT, DeadLetter, Envelope
from qkit.observability.events import DeadLettered, Events, Retried
from qkit.observability.metrics import ChannelCounters
from qkit.observability.settlement_failures import SettlementFailures
from qkit.wiring import Wiring

__all__ = ["Settlement"]

DEAD_LETTER_WRITE_BACKOFF = Backoff(initial=0.5, multiplier=2.0, maximum=10.0, jitter=0.1)

_SETTLE = "settle"  # of all messages together: one that is settled shows that it works

WriteDeadLetter = Callable[[DeadLetter], Awaitable[None]]


class Settlement:
    """Settles one consumer's deliveries and tells of every failure.

    Args:
        wiring: What the service shares.
        route: The channel.
        spec: What the consumer subscribes with.
        write: Writes a dead letter and returns once it is confirmed; ``None`` if the channel
            keeps none.
    """

    def __init__(
        self,
        wiring: Wiring,
        route: Route,
        spec: SubscriptionSpec,
        write: WriteDeadLetter | None,
    ) -> None:
        self._channel = route.name
        self._group = spec.group
        self._broadcast = route.broadcast
        self._consumer = spec.consumer
        self._write = write
        # On an ordered channel a wait in the broker would let its successors overtake.
        self._can_delay = route.can_delay and not route.ordered
        self._timeout = wiring.settings.send_timeout
        self._counters = route.counters
        self._events = wiring.events
        self._connection = wiring.connection
        self._clock = wiring.clock
        self.last_settle_at: float | None = None
        self.failures = SettlementFailures(wiring.clock)

    async def settle(
        self,
        subscription: Subscription,
        job: Job,
        outcome: Outcome,
        over: asyncio.Event,
    ) -> None:
        """Carry out ``outcome``. What cannot be settled is logged: the broker delivers it again.

        ``over`` is set when the subscription ends: nothing may be tried again after that.
        """
        delivery = job.delivery
        try:
            if outcome is DONE:  # the hot path: no timer, a backend bounds its own acks
                await subscription.ack(delivery)
            elif isinstance(outcome, Dead):
                await self._dead_letter(subscription, job, outcome, over)
            else:
                async with asyncio.timeout(self._timeout):
                    await self._apply(subscription, delivery, outcome)
        except (QueueError, TimeoutError) as error:
            self._unsettled(delivery, error)
        else:
            self._record_success()

    async def acknowledge(self, subscription: AckMany, deliveries: Sequence[Delivery]) -> None:
        """Carry out ``Done`` for several at once; as ``settle`` for what cannot be."""
        errors: Sequence[QueueError | None]
        try:
            errors = await subscription.ack_many(deliveries)
        except QueueError as error:
            errors = [error] * len(deliveries)
        for delivery, problem in zip(deliveries, errors, strict=True):
            if problem is not None:
                self._unsettled(delivery, problem)
        if not all(errors):
            self._record_success()

    def _unsettled(self, delivery: Delivery, error: Exception) -> None:
        match error:
            case AckDeadlineExceeded():
                text = "settled too late: the lease is lost, it may run twice"
            case MessageNotFound():
                text = "nothing to settle: the message is gone"
            case _:
                text = "could not be settled: it will be delivered again"
                if not isinstance(error, SubscriptionLost):  # which is told by itself
                    self.failures.add(_SETTLE, "messages cannot be settled", error, repeated=False)
        self._warn(text, delivery, error)

    def begin(self) -> None:
        """Forget what could not be settled in an earlier subscription: it is delivered again."""
        self.failures.remove(_SETTLE)

    def reported(self, what: str, error: Exception | None) -> None:
        """Take note of what the subscription settles itself: that it failed, or is over."""
        if error is None:
            self.failures.remove(what)
        else:
            self.failures.add(what, what, error)

    def _record_success(self) -> None:
        if self.failures.current:
            self.failures.remove(_SETTLE)
        self.last_settle_at = self._connection.last_success_at = self._clock.time()

    async def _apply(
        self,
        subscription: Subscription,
        delivery: Delivery,
        outcome: Done | RetryLater | Pause | Abandon,
    ) -> None:
        match outcome:
            case Done():
                await subscription.ack(delivery)
            case RetryLater(delay):
                self.record_retry(delivery.envelope, outcome)
                await subscription.release(delivery, delay)
            case Pause(delay, error):
                self._warn("a dependency is unavailable: the channel pauses", delivery, error)
                wait = (delay or 0.0) if self._can_delay else 0.0
                await subscription.release(delivery, wait, count_attempt=False)
            case Abandon():
                await subscription.release(delivery, 0.0, count_attempt=False)
            case _:
                assert_never(outcome)

    def record_retry(self, envelope: Envelope, outcome: RetryLater) -> None:
        """An attempt failed and another follows: note the first failure, count, log and tell."""
        envelope.headers.setdefault(FIRST_FAILED_AT, repr(self._clock.time()))
        self._counters.retried += 1
        self._warn(
            f"attempt {envelope.attempt} failed, the next comes in {outcome.delay:.3g} s",
            envelope,
            outcome.error,
        )
        self._events.emit(
            Retried(self._channel, envelope.id, envelope.attempt, outcome.delay, outcome.error)
        )

    async def _dead_letter(
        self,
        subscription: Subscription,
        job: Job,
        outcome: Dead,
        over: asyncio.Event,
    ) -> None:
        delivery = job.delivery
        letter = DeadLetter.of(
            delivery.envelope,
            channel=self._channel,
            group=self._group if self._broadcast else None,
            reason=outcome.reason,
            error=outcome.error,
            at=self._clock.time(),
            called=outcome.called,
        )
        if self._write is not None:
            written = await self._write_dead_letter(self._write, letter, job, over)
            if not written:
                async with asyncio.timeout(self._timeout):
                    await subscription.release(delivery, 0.0, count_attempt=False)
                return
        record_dead_letter(
            letter,
            kept=self._write is not None,
            counters=self._counters,
            events=self._events,
            consumer=self._consumer,
            error=outcome.error,
        )
        async with asyncio.timeout(self._timeout):
            await subscription.ack(delivery)

    async def _write_dead_letter(
        self, write: WriteDeadLetter, letter: DeadLetter, job: Job, over: asyncio.Event
    ) -> bool:
        """Write a dead letter until it is confirmed; false if the session is over before that.

        Meanwhile the delivery is held. Giving it back would run its handler again, although its
        failure is final. Once it is lost another handles it, perhaps well: then there is none.
        """
        failures = 0
        try:
            while True:
                if job.lost:
                    raise AckDeadlineExceeded("another has the message: no dead letter is written")
                try:
                    await write(letter)  # it has a deadline of its own
                except (QueueError, TimeoutError) as error:
                    failures += 1
                    wait = DEAD_LETTER_WRITE_BACKOFF.after(failures)
                    self.failures.add(job, "dead letters cannot be written", error)
                    self._warn(
                        f"no dead letter could be written, again in {wait:.1f} s",
                        job.delivery,
                        error,
                    )
                    if isinstance(error, InvalidHeader):
                        letter = letter.with_plain_headers()
                else:
                    return True
                try:
                    async with asyncio.timeout(wait):
                        await over.wait()
                except TimeoutError:
                    continue
                return False
        finally:
            self.failures.remove(job)

    def _warn(self, text: str, subject: Delivery | Envelope, error: BaseException) -> None:
        envelope = subject.envelope if isinstance(subject, Delivery) else subject
        _log(
            logging.WARNING,
            text,
            error,
            queue=self._channel,
            consumer=self._consumer,
            message_id=envelope.id,
            attempt=envelope.attempt,
        )


def record_dead_letter(
    letter: DeadLetter,
    *,
    kept: bool,
    counters: ChannelCounters,
    events: Events,
    consumer: str,
    error: Exception | None = None,
) -> None:
    """A message failed for good, here or inside the backend: count it, log it, tell of it."""
    counters.failed += 1
    counters.dead_lettered += kept
    _log(
        logging.ERROR,
        f"failed for good ({letter.reason}), "
        + ("to the dead letters" if kept else "dropped: the channel keeps no dead letters"),
        error,
        queue=letter.channel,
        consumer=consumer,
        message_id=letter.message_id,
        attempt=letter.attempts,
    )
    events.emit(DeadLettered(letter, kept))


def _log(
    level: int,
    text: str,
    error: BaseException | None,
    *,
    queue: str,
    consumer: str,
    message_id: str,
    attempt: int,
) -> None:
    # A signal is the handler's word, not an accident: its stack would tell nothing.
    accident = error is not None and not isinstance(error, Signal)
    logger.log(
        level,
        "%s: message %s %s%s",
        queue,
        message_id,
        text,
        f": {type(error).__name__}: {error_text(error)}" if error is not None else "",
        exc_info=error if accident else None,
        extra={
            "queue": queue,
            "consumer": consumer,
            "message_id": message_id,
            "attempt": attempt,
            "error": f"{type(error).__name__}: {error_text(error)}" if error is not None else None,
        },
    )
