"""``Settlement``: acks, releases or dead-letters the deliveries of a consumer.

A dead letter is confirmed before its message is acked. A crash between the two can duplicate the
message, but cannot lose it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import assert_never

from qkit._internal.channel_errors import name_channel
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

_SETTLE = "settle"  # one key for all messages, because any success shows that settling works

WriteDeadLetter = Callable[[DeadLetter], Awaitable[None]]


class Settlement:
    """Settlement of one consumer's deliveries; counts and logs every failure.

    Args:
        wiring: Objects shared by all parts of the service.
        route: The channel.
        spec: The options of the subscription.
        write: Writes a dead letter and waits until it is confirmed; ``None`` if the channel has
            no dead-letter queue.

    Attributes:
        last_settle_at: Wall time of the last settlement, or ``None``.
        failures: The settlements that currently fail.
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
        # In an ordered channel, later messages would overtake a message that waits in the broker.
        self._can_delay = route.can_delay and not route.ordered
        self._timeout = wiring.settings.send_timeout
        self._counters = route.counters
        self._events = wiring.events
        self._connection = wiring.connection
        self._clock = wiring.clock
        self.last_settle_at: float | None = None
        self.failures: SettlementFailures = SettlementFailures(wiring.clock)

    async def settle(
        self,
        subscription: Subscription,
        job: Job,
        outcome: Outcome,
        over: asyncio.Event,
    ) -> None:
        """Settle a delivery according to its outcome.

        A failure to settle is logged, and the broker delivers the message again.

        Args:
            subscription: The subscription of the delivery.
            job: The delivery.
            outcome: The outcome to carry out.
            over: Set when the subscription ends; nothing is retried after that.
        """
        delivery = job.delivery
        try:
            if outcome is DONE:  # hot path without a timer: backends have their own ack timeout
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
        """Ack several deliveries in one call; log failures as ``settle`` does."""
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
        if isinstance(error, QueueError):
            name_channel(error, self._channel)
        match error:
            case AckDeadlineExceeded():
                text = "was settled too late: its lease has expired, so it may be handled twice"
            case MessageNotFound():
                text = "could not be settled: it no longer exists"
            case _:
                text = "could not be settled and will be delivered again"
                if not isinstance(error, SubscriptionLost):  # which the consumer reports
                    self.failures.add(_SETTLE, "messages cannot be settled", error, repeated=False)
        self._warn(text, delivery, error)

    def begin(self) -> None:
        """Clear failures of an earlier subscription, whose messages are delivered again."""
        self.failures.remove(_SETTLE)

    def reported(self, what: str, error: Exception | None) -> None:
        """Record whether a settlement that the subscription performs itself is failing.

        Args:
            what: Description of the settlement.
            error: Why it fails; ``None`` when it succeeds again.
        """
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
                self._warn("was released: a dependency is unavailable", delivery, error)
                wait = (delay or 0.0) if self._can_delay else 0.0
                await subscription.release(delivery, wait, count_attempt=False)
            case Abandon():
                await subscription.release(delivery, 0.0, count_attempt=False)
            case _:
                assert_never(outcome)

    def record_retry(self, envelope: Envelope, outcome: RetryLater) -> None:
        """Count and log a failed attempt that will be retried, and emit ``Retried``.

        The time of the first failure is stored in a header.
        """
        envelope.headers.setdefault(FIRST_FAILED_AT, repr(self._clock.time()))
        self._counters.retried += 1
        self._warn(
            f"failed on attempt {envelope.attempt}, retrying in {outcome.delay:.3g} s",
            envelope,
            outcome.error,
        )
        self._events.emit(
            Retried(self._channel, envelope.id, envelope.attempt, outcome.delay, outcome.error)
        )

    def record_pause(self, delivery: Delivery, outcome: Pause) -> None:
        """Log that a message is held, because its handler raised ``Unavailable``."""
        text = f"is held for {outcome.delay or 0.0:.3g} s: a dependency is unavailable"
        self._warn(text, delivery, outcome.error)

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
        """Write a dead letter, retrying until it is confirmed; return false if the session ends.

        The delivery is held meanwhile: releasing it would run the handler again, although the
        failure is final. If the delivery is lost, another consumer handles the message and may
        succeed, so no dead letter is written.
        """
        failures = 0
        try:
            while True:
                if job.lost:
                    raise AckDeadlineExceeded("the lease was lost, so no dead letter was written")
                try:
                    await write(letter)  # applies its own deadline
                except (QueueError, TimeoutError) as error:
                    failures += 1
                    wait = DEAD_LETTER_WRITE_BACKOFF.after(failures)
                    self.failures.add(job, "dead letters cannot be written", error)
                    self._warn(
                        f"could not be dead-lettered, retrying in {wait:.1f} s",
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
    """Count and log a final failure, in a handler or in the backend; emit ``DeadLettered``."""
    counters.failed += 1
    counters.dead_lettered += kept
    _log(
        logging.ERROR,
        f"failed for good ({letter.reason}), "
        + ("dead-lettered" if kept else "discarded: the channel keeps no dead letters"),
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
    # Handlers raise signals such as ``Retry`` and ``Reject`` on purpose: log no traceback for them.
    unexpected = error is not None and not isinstance(error, Signal)
    logger.log(
        level,
        "%s: message %s %s%s",
        queue,
        message_id,
        text,
        f": {type(error).__name__}: {error_text(error)}" if error is not None else "",
        exc_info=error if unexpected else None,
        extra={
            "queue": queue,
            "consumer": consumer,
            "message_id": message_id,
            "attempt": attempt,
            "error": f"{type(error).__name__}: {error_text(error)}" if error is not None else None,
        },
    )
