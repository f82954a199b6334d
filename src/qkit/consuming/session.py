"""One subscription's life: fetch up to the free slots, run handlers, keep leases, drain."""

from __future__ import annotations

import asyncio
import contextvars
import math
from collections.abc import Sequence

from qkit._internal.deadlines import CancelScope
from qkit._internal.logging import logger
from qkit._internal.tasks import run_to_completion
from qkit.backend import (
    AckMany,
    Delivery,
    LossReporting,
    SettlementReporting,
    Subscription,
    SubscriptionSpec,
)
from qkit.consuming.ack_batcher import AckBatcher
from qkit.consuming.consumer_state import ConsumerState
from qkit.consuming.delivery_buffer import DeliveryBuffer
from qkit.consuming.executor import Executor
from qkit.consuming.job import Job
from qkit.consuming.lease_renewal import LeaseRenewal
from qkit.consuming.outcome import ABANDON, DONE, Dead, Outcome, Pause
from qkit.consuming.settlement import Settlement
from qkit.handlers.route import Route
from qkit.wiring import Wiring

__all__ = ["Session"]

MAX_FETCHES_BEFORE_YIELD = 5
MAX_ACKS_BEFORE_YIELD = 20


class Session:
    """One subscription: its fetcher, its workers, and the renewal of its leases.

    An idle worker fetches for itself; the fetcher tops up while the workers are busy. One at a
    time receives.

    Args:
        subscription: The open subscription.
        wiring: What the service shares.
        route: The channel.
        spec: What the subscription was opened with.
        state: Whether handlers may be started now; changed by the consumer.
        executor: Runs the handler.
        settlement: Carries out the outcomes.
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
    ) -> None:
        self._subscription = subscription
        self._spec = spec
        self._state = state
        self._executor = executor
        self._settlement = settlement
        self._counters = route.counters
        self._clock = wiring.clock
        self._channel = route.name
        self._loop = asyncio.get_running_loop()
        self._fetcher_waits: asyncio.Future[None] | None = None  # the fetcher waits for free slots
        self._receiving: CancelScope | None = None  # or for deliveries
        self._broken: Exception | None = None  # why nothing can be received any more
        self._fetch_check = False  # the fetcher is about to check whether to fetch
        self._fetches = 0
        self._buffer = DeliveryBuffer(lanes=route.ordered, on_empty=self._schedule_fetch)
        self.held = self._buffer.held
        """Every unsettled delivery."""
        self._stopped = asyncio.Event()  # it stops, or is broken
        self._withdrawn: list[Job] = []
        self._workers: set[asyncio.Task[None]] = set()
        self._refusals: set[asyncio.Task[None]] = set()  # dead letters of messages not handled
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
        if isinstance(subscription, LossReporting):
            subscription.on_lost(self._on_lost)
        if isinstance(subscription, SettlementReporting):
            subscription.on_settlement(settlement.reported)
        settlement.begin()
        self._acked = 0
        # An ack that comes back may free a lane: a worker must be there to take its next message.
        self._workers_fetch = self._acks is None or not route.ordered
        state.on_change = self.interrupt

    @property
    def settling(self) -> bool:
        """Whether deliveries are held and no handler runs: they are being settled."""
        return bool(self.held) and all(job.task is None for job in self.held)

    async def run(self) -> None:
        """Fetch and work until the consumer stops; raises when the subscription breaks."""
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
                    while running := self._workers | self._refusals:
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
        """Start a worker; one that a handler left with other context variables is replaced.

        A task for each message would keep messages apart as well, at several times the cost.
        """
        batches = self._executor.handler.metadata.batch_size
        work = self._work_batches if batches else self._work
        task = tasks.create_task(work(context.copy()), name=name, context=context.copy())
        self._workers.add(task)

        def leave(task: asyncio.Task[None]) -> None:
            self._workers.discard(task)
            if not task.cancelled() and task.exception() is None and not self._buffer.closed:
                self._start_worker(tasks, name, context)

        task.add_done_callback(leave)

    async def _fetch_until_stopped(self) -> Exception | None:
        """Fetch until the consumer stops or the subscription breaks; then the answer is why."""
        try:
            await self._fetch()
            await self._release_withdrawn()
            await self._subscription.stop()
        except Exception as error:
            # What a broken subscription delivered cannot be settled: its handlers stop, and a
            # thread that does not is left behind, or it would hold up the next subscription.
            for job in self.held:
                self._mark_lost(job)
            self._buffer.withdraw()
            self._leave_threads()
            self._stopped.set()
            return error
        return None

    def _end(self) -> None:
        """The task group cancels the workers: let them give back what they hold, and end."""
        for job in self.held:
            job.abandoned = job.stopped = True
        self._stopped.set()
        self._buffer.withdraw()
        self._buffer.close()

    def interrupt(self) -> None:
        """The consumer's state changed: take back what has not started, let the fetcher look."""
        self._withdraw_unstarted()
        if self._state.stopping:
            self._stopped.set()
        self._wake_fetcher()
        if self._receiving is not None:
            self._receiving.expire()

    def abandon(self) -> int:
        """Cancel every running handler; return how many."""
        # Each once: a handler that cleans up after itself is not to be cancelled in that.
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

    # -- fetching ----------------------------------------------------------------------------

    async def _fetch(self) -> None:
        """Give back what was withdrawn, and top up while the workers are busy."""
        task = _current_task()
        await asyncio.sleep(0)  # the workers first: an idle one fetches for itself
        while not self._state.stopping:
            if self._broken is not None:
                raise self._broken
            if self._withdrawn:
                await self._release_withdrawn()
            elif (limit := self._fetch_limit()) > 0:
                await self._receive(limit, task)
                await asyncio.sleep(0)  # again: then this waits, and the next takes a turn less
            else:
                self._fetcher_waits = self._loop.create_future()
                await self._fetcher_waits

    async def _receive(self, limit: int, task: asyncio.Task[None]) -> None:
        """Fetch up to ``limit`` deliveries, unless it is interrupted; one at a time may."""
        self._state.last_poll_at = self._clock.time()
        self._receiving = scope = CancelScope(task)
        try:
            with scope:
                deliveries = await self._subscription.receive(limit)
                # The renewal's timer first: a handler may block the loop at once.
                if self._renewal is not None and self._renewal.timer is None:
                    self._renewal.schedule()
                self._counters.received += len(deliveries)
                self._buffer.add(deliveries)
                if not self._state.active:
                    self._withdraw_unstarted()
        except TimeoutError:
            if not scope.expired:
                raise  # else it was interrupted; receive is safe to cancel
        finally:
            self._receiving = None

    def _withdraw_unstarted(self) -> None:
        """Take back what no worker has started on, if none may be started now."""
        if not self._state.active:
            self._withdrawn += self._buffer.withdraw()
            self._wake_fetcher()

    def _fetch_limit(self) -> int:
        """Return how many deliveries to ask for now.

        None while another worker asks, no handler may start, or so few fit that asking is not
        worth its cost.
        """
        state, buffer = self._state, self._buffer
        if self._receiving is not None or self._withdrawn or self._broken is not None:
            return 0
        if not state.active:
            return 0
        free = state.limit - len(self.held)
        return free if not buffer.ready or free * 2 >= state.limit else 0

    async def _release_withdrawn(self) -> None:
        """Release what was withdrawn, uncharged, so that others can have it."""
        while self._withdrawn:
            job = self._withdrawn.pop()
            if job.lost:
                self._finish(job)
            else:
                await self._settle(job, ABANDON)

    def _finish(self, job: Job) -> None:
        self._buffer.finish(job)
        if self._fetcher_waits is not None and not self._fetch_check:
            self._schedule_fetch()

    def _schedule_fetch(self) -> None:
        """Let the fetcher check soon whether there is more to fetch, unless a worker does."""
        if self._fetcher_waits is not None and not self._fetch_check:
            self._fetch_check = True
            self._loop.call_soon(self._check_fetch)

    def _check_fetch(self) -> None:
        self._fetch_check = False
        if self._fetch_limit() > 0:
            self._wake_fetcher()

    def _wake_fetcher(self) -> None:
        """Let the fetcher look, if it waits."""
        if self._fetcher_waits is not None and not self._fetcher_waits.done():
            self._fetcher_waits.set_result(None)
        self._fetcher_waits = None

    # -- working -----------------------------------------------------------------------------

    async def _next(self, task: asyncio.Task[None]) -> Job | None:
        """Wait for the next delivery to handle, ``None`` at the end.

        An idle worker fetches for itself, so a message takes one turn of the loop instead of two,
        and a long queue hardly any.
        """
        buffer = self._buffer
        while not buffer.closed:
            limit = self._fetch_limit() if self._workers_fetch else 0
            if limit <= 0:
                await buffer.wait()
            else:
                await self._fetch_for_worker(limit, task)
            if (job := buffer.pop()) is not None:
                return job
        return buffer.pop()

    async def _fetch_for_worker(self, limit: int, task: asyncio.Task[None]) -> None:
        try:
            await self._receive(limit, task)
        except Exception as error:
            self._broken = error
            self._wake_fetcher()
        if self._fetcher_waits is not None and not self._fetch_check:
            self._schedule_fetch()
        self._fetches += 1
        if not self._fetches % MAX_FETCHES_BEFORE_YIELD:
            await asyncio.sleep(0)  # handlers that never wait must not keep the loop

    async def _work(self, context: contextvars.Context) -> None:
        task = _current_task()
        while (job := self._buffer.pop() or await self._next(task)) is not None:
            if job.lost:
                self._drop_lost(job)
                continue
            job.task = task
            self._counters.in_flight += 1
            try:
                outcome = await self._executor.run(job)
            except asyncio.CancelledError:
                if not job.stopped:
                    raise
                outcome = ABANDON
            finally:
                job.task = None
                self._counters.in_flight -= 1
            await self._settle_outcome(task, job, outcome)
            if job.thread is not None:
                await self._wait_for_thread(job.thread)
            if contextvars.copy_context() != context:
                return

    async def _work_batches(self, context: contextvars.Context) -> None:
        task = _current_task()
        metadata = self._executor.handler.metadata
        size, wait = metadata.batch_size or 1, metadata.batch_wait
        while gathered := await self._buffer.next_batch(size, wait):
            jobs = [job for job in gathered if not job.lost]
            for job in gathered:
                if job.lost:
                    self._drop_lost(job)
            if not jobs:
                continue
            for job, outcome in zip(jobs, await self._run_batch(task, jobs), strict=True):
                await self._settle_outcome(task, job, outcome)
            for job in jobs:  # an inline retry of some of them has a thread of its own
                if job.thread is not None:
                    await self._wait_for_thread(job.thread)
            if contextvars.copy_context() != context:
                return

    async def _run_batch(self, task: asyncio.Task[None], jobs: list[Job]) -> list[Outcome]:
        for job in jobs:
            job.task = task
        self._counters.in_flight += len(jobs)
        try:
            return await self._executor.run_batch(jobs)
        except asyncio.CancelledError:
            if not any(job.stopped for job in jobs):
                raise
            return [ABANDON for _ in jobs]
        finally:
            for job in jobs:
                job.task = None
            self._counters.in_flight -= len(jobs)

    async def _settle_outcome(self, task: asyncio.Task[None], job: Job, outcome: Outcome) -> None:
        """Settle, out of reach of any cancellation that was meant for the handler."""
        if job.stopped:
            while task.cancelling():
                task.uncancel()
            if job.lost:
                self._drop_lost(job)
                return
            if outcome is not DONE:
                outcome = ABANDON  # however it put it, it failed because it was cancelled
        if outcome is DONE:
            if self._state.probing:
                self._state.probe_succeeded()
            if self._acks is not None and not self._acks.closed:
                self._acks.add(job)
                self._acked += 1
                if not self._acked % MAX_ACKS_BEFORE_YIELD:
                    await asyncio.sleep(0)  # handlers that never wait must not keep the loop
                return
        elif isinstance(outcome, Pause):
            outcome = self._state.back_off(outcome)
        elif isinstance(outcome, Dead) and not outcome.called:
            # Not in the worker's slot: expired messages would delay those behind them by a dead
            # letter each. The prefetch bounds how many there are.
            refusal = self._tasks.create_task(self._settle(job, outcome), name="qkit refusal")
            self._refusals.add(refusal)
            refusal.add_done_callback(self._refusals.discard)
            return
        await self._settle(job, outcome)

    async def _settle(self, job: Job, outcome: Outcome) -> None:
        await self._settlement.settle(self._subscription, job, outcome, self._stopped)
        self._finish(job)

    async def _wait_for_thread(self, thread: asyncio.Future[object]) -> None:
        """Keep the slot until a synchronous handler's thread returns: it cannot be stopped."""
        if not thread.done():
            await asyncio.wait({thread, self._abandoned}, return_when=asyncio.FIRST_COMPLETED)
            if not thread.done():
                thread.cancel()  # the thread goes on; its result concerns nobody any more
                logger.warning(
                    "%s: a synchronous handler of %s is still running and is left behind",
                    self._channel,
                    self._spec.group,
                    extra={"queue": self._channel, "consumer": self._spec.group},
                )

    # -- lost deliveries ---------------------------------------------------------------------

    def _on_lost(self, deliveries: Sequence[Delivery]) -> None:
        """The subscription has lost these, and says so of its own accord."""
        gone = set(deliveries)
        for job in [job for job in self.held if job.delivery in gone]:
            self._mark_lost(job)

    def _mark_lost(self, job: Job) -> None:
        """Stop its handler, once: one that cleans up after itself is left to it."""
        task = job.task
        if task is not None and not any(each.lost and each.task is task for each in self.held):
            task.cancel()
        job.lost = job.stopped = True

    def _drop_lost(self, job: Job) -> None:
        """Another has the message now: there is nothing to settle."""
        logger.warning(
            "%s: the claim on message %s was lost, its handler was stopped",
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
