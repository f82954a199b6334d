"""``Session``: one open subscription, from the first fetch to the drain."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import math
from collections.abc import Callable, Sequence

from qkit._internal.logging import logger
from qkit._internal.tasks import run_to_completion
from qkit.backend import (
    AckMany,
    Delivery,
    LossReporting,
    SettlementReporting,
    StandbyReporting,
    Subscription,
    SubscriptionSpec,
)
from qkit.consuming.ack_batcher import AckBatcher
from qkit.consuming.consumer_state import ConsumerState
from qkit.consuming.delivery_buffer import DeliveryBuffer
from qkit.consuming.executor import Executor
from qkit.consuming.fetcher import Fetcher
from qkit.consuming.job import Job
from qkit.consuming.lease_renewal import LeaseRenewal
from qkit.consuming.outcome import ABANDON, DONE, Dead, Outcome, Pause
from qkit.consuming.retry_gate import RetryGate
from qkit.consuming.settlement import Settlement
from qkit.handlers.route import Route
from qkit.wiring import Wiring

__all__ = ["Session"]

MAX_ACKS_BEFORE_YIELD = 20


class Session:
    """One subscription with its fetcher, its workers and its lease renewal.

    An idle worker fetches for itself. While all workers are busy, the fetcher refills the buffer.
    Only one task receives at a time.

    Args:
        subscription: The open subscription.
        wiring: Objects shared by all parts of the service.
        route: The channel.
        spec: The options of the subscription.
        state: Whether handlers may be started; changed by the consumer.
        executor: Runs the handler.
        settlement: Carries out the outcomes.
        on_exit: Called with the ``SystemExit`` or ``KeyboardInterrupt`` of a handler.

    Attributes:
        held: All unsettled deliveries.
    """

    def __init__(
        self,
        subscription: Subscription,
        wiring: Wiring,
        route: Route,
        spec: SubscriptionSpec,
        state: ConsumerState,
        executor: Executor,
        settlement: Settlement,
        on_exit: Callable[[BaseException], None],
    ) -> None:
        self._subscription = subscription
        self._spec = spec
        self._state = state
        self._executor = executor
        self._settlement = settlement
        self._on_exit = on_exit
        self._counters = route.counters
        self._channel = route.name
        self._ordered = route.ordered
        self._exit_timeout = wiring.settings.send_timeout
        self._loop = asyncio.get_running_loop()
        self._buffer = DeliveryBuffer(lanes=route.ordered)
        self.held: set[Job] = self._buffer.held
        self._gate = RetryGate()
        self._stopped = self._gate.ended  # set when the session ends or the subscription is lost
        self._workers: set[asyncio.Task[None]] = set()
        self._dead_letter_tasks: set[asyncio.Task[None]] = set()  # for unhandled messages
        self._tasks = asyncio.TaskGroup()
        self._abandoned = self._loop.create_future()
        name = f"qkit {self._channel} {spec.group} acks"
        self._acks: AckBatcher | None = None
        if isinstance(subscription, AckMany):
            self._acks = AckBatcher(subscription, settlement, self.held, self._finish, name)
        self._renewal: LeaseRenewal | None = None
        lease = spec.ack_deadline
        if lease is not None and math.isfinite(lease):
            self._renewal = LeaseRenewal(
                subscription, lease, self.held, self._mark_lost, self._channel
            )
        self._fetcher = Fetcher(
            subscription,
            self._buffer,
            state,
            route.counters,
            wiring.clock,
            self._renewal,
            self._release,
        )
        if isinstance(subscription, LossReporting):
            subscription.on_lost(self._on_lost)
        if isinstance(subscription, SettlementReporting):
            subscription.on_settlement(settlement.reported)
        settlement.begin()
        self._acked = 0
        # A batched ack may make the next message of a lane ready. A worker that waits in the buffer
        # takes that message, but a worker that is fetching would not.
        self._workers_fetch = self._acks is None or not route.ordered
        state.on_change = self.interrupt
        self.interrupt()  # the consumer may already be paused, or back off

    @property
    def settling(self) -> bool:
        """Whether deliveries are being settled and no handler is running."""
        return bool(self.held) and all(job.task is None for job in self.held)

    @property
    def standby(self) -> bool:
        """Whether another subscription is active, so that this one receives nothing."""
        return isinstance(self._subscription, StandbyReporting) and self._subscription.standby

    def is_running(self, task: asyncio.Task[object] | None) -> bool:
        """Return whether a task is running a handler."""
        return any(job.task is task for job in self.held if job.task is not None)

    async def run(self) -> None:
        """Fetch and handle messages until the consumer stops; raise if the subscription is lost."""
        name = f"qkit {self._channel} {self._spec.group}"
        try:
            async with self._tasks as tasks:
                renewer = None
                if self._renewal is not None:
                    renewer = tasks.create_task(self._renewal.run(), name=f"{name} leases")
                context = contextvars.copy_context()
                for number in range(self._executor.handler.metadata.concurrency):
                    self._start_worker(tasks, f"{name} #{number}", context)
                try:
                    broken = await self._fetch_until_stopped()
                    self._buffer.close()
                    while running := self._workers | self._dead_letter_tasks:
                        await asyncio.wait(running)
                    if self._acks is not None:
                        await self._acks.close()
                except asyncio.CancelledError:
                    self._end()
                    raise
                if renewer is not None:
                    renewer.cancel()
        finally:
            self._state.on_change = None
            if self._acks is not None:
                await run_to_completion(self._acks.close())
        if broken is not None:
            raise broken

    def _start_worker(
        self, tasks: asyncio.TaskGroup, name: str, context: contextvars.Context
    ) -> None:
        """Start a worker; replace it when a handler has changed its context variables.

        One task per message would isolate messages too, but would cost several times as much.
        """
        batches = self._executor.handler.metadata.batch_size
        work = self._work_batches if batches else self._work
        task = tasks.create_task(work(context.copy()), name=name, context=context.copy())
        self._workers.add(task)

        def on_done(task: asyncio.Task[None]) -> None:
            self._workers.discard(task)
            if not task.cancelled() and task.exception() is None and not self._buffer.closed:
                self._start_worker(tasks, name, context)

        task.add_done_callback(on_done)

    async def _fetch_until_stopped(self) -> Exception | None:
        """Fetch until the consumer stops or the subscription is lost; return the error if lost."""
        try:
            await self._fetcher.run(_current_task())
            if not self._ordered:  # leaving an ordered subscription gives everything back together
                await self._fetcher.release_withdrawn()
            await self._subscription.stop()
        except Exception as error:
            # Deliveries of a lost subscription cannot be settled, so cancel their handlers. Do not
            # wait for handler threads, which would delay the next subscription.
            for job in self.held:
                self._mark_lost(job)
            self._buffer.withdraw()
            self._leave_threads()
            self._gate.end()
            return error
        return None

    def _end(self) -> None:
        """Make the workers release their deliveries and end; the task group cancels them."""
        for job in self.held:
            job.abandoned = job.stopped = True
        self._gate.end()
        self._buffer.withdraw()
        self._buffer.close()

    def interrupt(self) -> None:
        """React to a change of the consumer's state: withdraw or hold back deliveries."""
        self._fetcher.interrupt()
        if self._fetcher.ending:
            self._gate.end()
            return
        state = self._state
        self._gate.change(active=state.active)
        if self._ordered:
            if not state.active:
                self._buffer.hold()
            elif state.probing:
                self._buffer.probe()
            else:
                self._buffer.resume()

    def abandon(self) -> int:
        """Cancel all running handlers; return how many."""
        # Cancel each handler only once, so that its cleanup is not cancelled too.
        running = [job for job in self.held if job.task is not None and not job.abandoned]
        for job in running:
            job.abandoned = job.stopped = True
        for task in {job.task for job in running if job.task is not None}:
            task.cancel()
        self._leave_threads()
        return len(running)

    def _leave_threads(self) -> None:
        if not self._abandoned.done():
            self._abandoned.set_result(None)

    async def _release(self, job: Job) -> None:
        """Release a withdrawn delivery without counting an attempt."""
        if job.lost:
            self._finish(job)
        else:
            await self._settle(job, ABANDON)

    def _finish(self, job: Job) -> None:
        self._buffer.finish(job)
        fetcher = self._fetcher
        if fetcher.waiting is not None and not fetcher.checking:
            fetcher.schedule()

    # -- working -----------------------------------------------------------------------------

    async def _next(self, task: asyncio.Task[None]) -> Job | None:
        """Wait for the next delivery; return ``None`` when the buffer is closed and empty.

        An idle worker fetches for itself, which takes one loop iteration per message instead of
        two, and almost none when many messages are ready.
        """
        buffer = self._buffer
        while not buffer.closed:
            limit = self._fetcher.limit() if self._workers_fetch else 0
            if limit <= 0:
                await buffer.wait()
            else:
                await self._fetcher.fetch_for_worker(limit, task)
            if (job := buffer.pop()) is not None:
                return job
        return buffer.pop()

    async def _work(self, context: contextvars.Context) -> None:
        task = _current_task()
        while (job := self._buffer.pop() or await self._next(task)) is not None:
            if job.lost:
                self._drop_lost(job)
                del job
                continue
            job.task = task
            self._counters.in_flight += 1
            try:
                outcome = await self._executor.run(job, self._gate)
            except asyncio.CancelledError:
                if not job.stopped:
                    raise
                outcome = ABANDON
            except (KeyboardInterrupt, SystemExit) as error:
                await self._exit(task, [job], error)
                return
            finally:
                job.task = None
                self._counters.in_flight -= 1
            await self._settle_outcome(task, job, outcome)
            if job.thread is not None:
                await self._wait_for_thread(job.thread)
            del job, outcome  # an idle worker must not keep the message and its error alive
            if contextvars.copy_context() != context:
                return

    async def _work_batches(self, context: contextvars.Context) -> None:
        task = _current_task()
        metadata = self._executor.handler.metadata
        size, wait = metadata.batch_size or 1, metadata.batch_wait
        while batch := await self._buffer.next_batch(size, wait):
            await self._handle_batch(task, batch)
            del batch  # an idle worker must not keep messages and their errors alive
            if contextvars.copy_context() != context:
                return

    async def _handle_batch(self, task: asyncio.Task[None], batch: list[Job]) -> None:
        jobs = [job for job in batch if not job.lost]
        for job in batch:
            if job.lost:
                self._drop_lost(job)
        if not jobs:
            return
        try:
            outcomes = await self._run_batch(task, jobs)
        except (KeyboardInterrupt, SystemExit) as error:
            await self._exit(task, jobs, error)
            return
        for job, outcome in zip(jobs, outcomes, strict=True):
            await self._settle_outcome(task, job, outcome)
        for job in jobs:  # each inline retry of a partial batch has its own thread
            if job.thread is not None:
                await self._wait_for_thread(job.thread)

    async def _run_batch(self, task: asyncio.Task[None], jobs: list[Job]) -> list[Outcome]:
        for job in jobs:
            job.task = task
        self._counters.in_flight += len(jobs)
        try:
            return await self._executor.run_batch(jobs, self._gate)
        except asyncio.CancelledError:
            if not any(job.stopped for job in jobs):
                raise
            return [ABANDON for _ in jobs]
        finally:
            for job in jobs:
                job.task = None
            self._counters.in_flight -= len(jobs)

    async def _settle_outcome(self, task: asyncio.Task[None], job: Job, outcome: Outcome) -> None:
        """Settle a job; a cancellation of its handler does not cancel the settlement."""
        if job.stopped:
            while task.cancelling():
                task.uncancel()
            if job.lost:
                self._drop_lost(job)
                return
            if outcome is not DONE:
                outcome = ABANDON  # the failure is a result of the cancellation
        if outcome is DONE:
            if self._state.probing:
                self._state.probe_succeeded()
            if self._acks is not None and not self._acks.closed:
                self._acks.add(job)
                self._acked += 1
                if not self._acked % MAX_ACKS_BEFORE_YIELD:
                    await asyncio.sleep(0)  # handlers that never suspend must not block the loop
                return
        elif isinstance(outcome, Pause):
            outcome = self._state.back_off(outcome)
            if self._ordered and not self._fetcher.ending:
                # Releasing the message would let others overtake it. It is the next probe.
                self._settlement.record_pause(job.delivery, outcome)
                self._buffer.put_back(job)
                return
        elif isinstance(outcome, Dead) and not outcome.called:
            # Use a separate task, because writing the dead letters of many expired messages would
            # delay the messages behind them. The prefetch limits the number of tasks.
            writing = self._tasks.create_task(self._settle(job, outcome), name="qkit dead letter")
            self._dead_letter_tasks.add(writing)
            writing.add_done_callback(self._dead_letter_tasks.discard)
            return
        # As in ``_settle``, but without another coroutine on the path of each message.
        await self._settlement.settle(self._subscription, job, outcome, self._stopped)
        self._finish(job)

    async def _exit(
        self, task: asyncio.Task[None], jobs: Sequence[Job], error: BaseException
    ) -> None:
        """Settle the messages of a handler that ends the process as failed, then end it."""
        while task.cancelling():
            task.uncancel()
        for job in jobs:
            job.task = None  # from here on, a cancellation does not concern the handler
        self._state.stop()
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._exit_timeout):
                    for job in jobs:
                        if job.lost:
                            self._drop_lost(job)
                        else:
                            failed = self._executor.outcome_of_exit(error, job.delivery.envelope)
                            await self._settle(job, failed)
        finally:
            self._on_exit(error)

    async def give_up(self) -> list[asyncio.Task[None]]:
        """Release all messages, because a handler ignores its cancellation.

        Returns:
            The tasks of these handlers, which still run.
        """
        held = list(self.held)
        tasks = {job.task for job in held if job.task is not None}
        for job in held:
            job.lost = job.stopped = True  # what the handler does from now on has no effect
        await asyncio.gather(
            *[
                self._settlement.settle(self._subscription, job, ABANDON, self._stopped)
                for job in held
            ],
            return_exceptions=True,
        )
        return list(tasks)

    async def _settle(self, job: Job, outcome: Outcome) -> None:
        await self._settlement.settle(self._subscription, job, outcome, self._stopped)
        self._finish(job)

    async def _wait_for_thread(self, thread: asyncio.Future[object]) -> None:
        """Keep the slot until a synchronous handler returns, because a thread cannot be stopped."""
        if not thread.done():
            await asyncio.wait({thread, self._abandoned}, return_when=asyncio.FIRST_COMPLETED)
            if not thread.done():
                thread.cancel()  # the thread continues, but its result is ignored
                logger.warning(
                    "%s: a synchronous handler of %s is still running; no longer waiting for it",
                    self._channel,
                    self._spec.group,
                    extra={"queue": self._channel, "consumer": self._spec.consumer},
                )

    # -- lost deliveries ---------------------------------------------------------------------

    def _on_lost(self, deliveries: Sequence[Delivery]) -> None:
        """Mark deliveries as lost; called by the subscription."""
        lost = set(deliveries)
        for job in [job for job in self.held if job.delivery in lost]:
            self._mark_lost(job)

    def _mark_lost(self, job: Job) -> None:
        """Mark a job as lost and cancel its handler, unless another lost job already did.

        In an ordered channel all jobs of its key are lost: they return to the broker together.
        """
        if job.lost:
            return
        for each in self._buffer.same_key(job):
            task = each.task
            if task is not None and not any(one.lost and one.task is task for one in self.held):
                task.cancel()
            each.lost = each.stopped = True

    def _drop_lost(self, job: Job) -> None:
        """Finish a lost job without settling it, because its message is delivered again."""
        logger.warning(
            "%s: the delivery of message %s was lost; the message will be delivered again",
            self._channel,
            job.delivery.envelope.id,
            extra={
                "queue": self._channel,
                "consumer": self._spec.consumer,
                "message_id": job.delivery.envelope.id,
                "attempt": job.delivery.envelope.attempt,
            },
        )
        self._finish(job)


def _current_task() -> asyncio.Task[None]:
    task = asyncio.current_task()
    assert task is not None
    return task
