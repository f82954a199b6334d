"""One subscription's life: fetch up to the free slots, run handlers, keep leases, drain."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Sequence
from typing import TYPE_CHECKING

from qkit._internal.deadlines import CancelScope
from qkit._internal.logging import logger
from qkit.backend import AckMany, Delivery, LossReporting, SettlementReporting, Subscription
from qkit.consuming.ack_batcher import Acknowledger
from qkit.consuming.delivery_buffer import Intake
from qkit.consuming.job import Job
from qkit.consuming.outcome import ABANDON, DONE, Outcome, Pause
from qkit.errors import AckDeadlineExceeded, MessageNotFound, QueueError

if TYPE_CHECKING:
    from qkit.consuming.consumer import Consumer

__all__ = ["Session"]

RENEWALS_PER_LEASE = 3
FETCHES_PER_TURN = 5
ACKS_PER_TURN = 20


class Session:
    """One subscription's life: its fetcher, its workers, and the renewal of its leases.

    An idle worker fetches for itself; the fetcher tops up while the workers are busy. One at a
    time receives.
    """

    def __init__(self, consumer: Consumer, subscription: Subscription) -> None:
        self._consumer = consumer
        self._subscription = subscription
        self._executor = consumer.executor
        self._settlement = consumer.settlement
        self._counters = consumer.counters
        self._loop = asyncio.get_running_loop()
        self._room: asyncio.Future[None] | None = None  # the fetcher waits for free slots
        self._receiving: CancelScope | None = None  # or for deliveries
        self._broken: Exception | None = None  # why nothing can be received any more
        self._looking = False  # the fetcher is about to look
        self._fetches = 0
        self._intake = Intake(lanes=consumer.ordered, drained=self._look_soon)
        self._renewal: asyncio.TimerHandle | None = None
        self._due = asyncio.Event()  # it is time to renew leases
        self._over = asyncio.Event()  # it stops, or is broken
        self._withdrawn: list[Job] = []
        self._workers: set[asyncio.Task[None]] = set()
        self._abandoned = self._loop.create_future()
        self._acknowledger: Acknowledger | None = None
        if isinstance(subscription, AckMany):
            self._acknowledger = Acknowledger(subscription, self._settlement, self._finish)
        if isinstance(subscription, LossReporting):
            subscription.on_lost(self._taken_away)
        if isinstance(subscription, SettlementReporting):
            subscription.on_settlement(self._settlement.reported)
        self._settlement.begin()
        self._acks = 0
        # An ack that comes back may free a lane: somebody must be there to take its next message.
        self._self_service = self._acknowledger is None or not consumer.ordered

    @property
    def settling(self) -> bool:
        """Whether deliveries are held and no handler runs: they are being settled."""
        return bool(self.held) and all(job.task is None for job in self.held)

    @property
    def held(self) -> set[Job]:
        """Every unsettled delivery."""
        return self._intake.held

    async def run(self) -> None:
        """Fetch and work until the consumer stops; raises when the subscription breaks."""
        metadata = self._executor.handler.metadata
        name = f"qkit {self._consumer.channel} {self._consumer.group}"
        async with asyncio.TaskGroup() as tasks:
            renewer = tasks.create_task(self._renew(), name=f"{name} leases")
            acks = None
            if self._acknowledger is not None:
                acks = tasks.create_task(self._acknowledger.run(), name=f"{name} acks")
            context = contextvars.copy_context()
            for number in range(metadata.concurrency):
                self._hire(tasks, f"{name} #{number}", context)
            try:
                broken = await self._fetch_to_the_end()
                self._intake.close()
                while self._workers:
                    await asyncio.wait(self._workers)
                if self._acknowledger is not None and acks is not None:
                    self._acknowledger.close()
                    await asyncio.wait([acks])
            except asyncio.CancelledError:
                self._end()
                raise
            renewer.cancel()
        if broken is not None:
            raise broken

    def _hire(self, tasks: asyncio.TaskGroup, name: str, context: contextvars.Context) -> None:
        """Start a worker; one that a handler left with other context variables is replaced.

        A task for each message would keep messages apart as well, at several times the cost.
        """
        batches = self._executor.handler.metadata.batch_size
        work = self._work_batches if batches else self._work
        task = tasks.create_task(work(context.copy()), name=name, context=context.copy())
        self._workers.add(task)

        def leave(task: asyncio.Task[None]) -> None:
            self._workers.discard(task)
            if not task.cancelled() and task.exception() is None and not self._intake.closed:
                self._hire(tasks, name, context)

        task.add_done_callback(leave)

    async def _fetch_to_the_end(self) -> Exception | None:
        """Fetch until the consumer stops or the subscription breaks; then the answer is why."""
        try:
            await self._fetch()
            await self._give_back()
            await self._subscription.stop()
        except Exception as error:
            # What a broken subscription delivered cannot be settled: its handlers stop, and a
            # thread that does not is left behind, or it would hold up the next subscription.
            for job in self.held:
                self._lose(job)
            self._intake.withdraw()
            self._leave_threads()
            self._over.set()
            return error
        return None

    def _end(self) -> None:
        """The task group cancels the workers: let them give back what they hold, and end."""
        for job in self.held:
            job.abandoned = True
        self._over.set()
        self._intake.withdraw()
        self._intake.close()

    def interrupt(self) -> None:
        """The consumer's state changed: take back what has not started, let the fetcher look."""
        self._take_back()
        if self._consumer.stopping:
            self._over.set()
        self._make_room()
        if self._receiving is not None:
            self._receiving.expire()

    def abandon(self) -> int:
        """Cancel every running handler; return how many."""
        # Each once: a handler that cleans up after itself is not to be cancelled in that.
        running = [job for job in self.held if job.task is not None and not job.abandoned]
        for job in running:
            job.abandoned = True
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
        while not self._consumer.stopping:
            if self._broken is not None:
                raise self._broken
            if self._withdrawn:
                await self._give_back()
            elif (limit := self._wanted()) > 0:
                await self._receive(limit, task)
                await asyncio.sleep(0)  # again: then this waits, and the next takes a turn less
            else:
                self._room = self._loop.create_future()
                await self._room

    async def _receive(self, limit: int, task: asyncio.Task[None]) -> None:
        """Fetch up to ``limit`` deliveries, unless it is interrupted; one at a time may."""
        self._consumer.last_poll_at = self._consumer.clock.time()
        self._receiving = scope = CancelScope(task)
        try:
            with scope:
                deliveries = await self._subscription.receive(limit)
                if self._renewal is None:  # its timer first: a handler may block the loop at once
                    self._renew_later()
                self._counters.received += len(deliveries)
                self._intake.take(deliveries)
                self._take_back()
        except TimeoutError:
            if not scope.expired:
                raise  # else it was interrupted; receive is safe to cancel
        finally:
            self._receiving = None

    def _take_back(self) -> None:
        """What no worker has started on, if none may be started now."""
        if self._consumer.quiet or self._consumer.stopping:
            self._withdrawn += self._intake.withdraw()
            self._make_room()

    def _wanted(self) -> int:
        """How many deliveries to ask for now: none while another asks, or no handler may start."""
        if self._receiving is not None or self._withdrawn or self._broken is not None:
            return 0
        return 0 if self._consumer.quiet or self._consumer.stopping else self._free()

    def _free(self) -> int:
        """How many more to ask for; none while so few fit that asking is not worth its cost."""
        prefetch = 1 if self._consumer.probing else self._consumer.spec.prefetch
        free = prefetch - len(self.held)
        return free if self._intake.empty or free * 2 >= prefetch else 0

    async def _give_back(self) -> None:
        """Release what was withdrawn, uncharged, so that others can have it."""
        while self._withdrawn:
            job = self._withdrawn.pop()
            if not job.lost:
                await self._settlement.settle(self._subscription, job, ABANDON, self._over)
            self._finish(job)

    def _finish(self, job: Job) -> None:
        self._intake.finish(job)
        self._look_soon()

    def _look_soon(self) -> None:
        """There may be more to fetch: look for it soon, unless a worker does before that."""
        if self._room is not None and not self._looking:
            self._looking = True
            self._loop.call_soon(self._look)

    def _look(self) -> None:
        self._looking = False
        if self._wanted() > 0:
            self._make_room()

    def _make_room(self) -> None:
        """Let the fetcher look, if it waits."""
        if self._room is not None and not self._room.done():
            self._room.set_result(None)
        self._room = None

    # -- working -----------------------------------------------------------------------------

    async def _next(self, task: asyncio.Task[None]) -> Job | None:
        """The next delivery to handle, ``None`` at the end; an idle worker fetches for itself.

        So a message takes one turn of the loop instead of two, and a long queue hardly any.
        """
        while (job := self._intake.pop()) is None and not self._intake.closed:
            limit = self._wanted() if self._self_service else 0
            if limit <= 0:
                await self._intake.park()
                continue
            try:
                await self._receive(limit, task)
            except Exception as error:
                self._broken = error
                self._make_room()
            self._look_soon()
            self._fetches += 1
            if not self._fetches % FETCHES_PER_TURN:
                await asyncio.sleep(0)  # handlers that never wait must not keep the loop
        return job

    async def _work(self, context: contextvars.Context) -> None:
        task = _current_task()
        while (job := self._intake.pop() or await self._next(task)) is not None:
            if job.lost:
                self._let_go(job)
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
            await self._conclude(task, job, outcome)
            if job.thread is not None:
                await self._outlive(job.thread)
            if contextvars.copy_context() != context:
                return

    async def _work_batches(self, context: contextvars.Context) -> None:
        task = _current_task()
        metadata = self._executor.handler.metadata
        size, wait = metadata.batch_size or 1, metadata.batch_wait
        while gathered := await self._intake.next_batch(size, wait):
            jobs = [job for job in gathered if not job.lost]
            for job in gathered:
                if job.lost:
                    self._let_go(job)
            if not jobs:
                continue
            for job in jobs:
                job.task = task
            self._counters.in_flight += len(jobs)
            try:
                outcomes = await self._executor.run_batch(jobs)
            except asyncio.CancelledError:
                if not any(job.stopped for job in jobs):
                    raise
                outcomes = [ABANDON for _ in jobs]
            finally:
                for job in jobs:
                    job.task = None
                self._counters.in_flight -= len(jobs)
            for job, outcome in zip(jobs, outcomes, strict=True):
                await self._conclude(task, job, outcome)
            for job in jobs:  # an inline retry of some of them has a thread of its own
                if job.thread is not None:
                    await self._outlive(job.thread)
            if contextvars.copy_context() != context:
                return

    async def _conclude(self, task: asyncio.Task[None], job: Job, outcome: Outcome) -> None:
        """Settle, out of reach of any cancellation that was meant for the handler."""
        if job.stopped:
            while task.cancelling():
                task.uncancel()
            if job.lost:
                self._let_go(job)
                return
            if outcome is not DONE:
                outcome = ABANDON  # however it put it, it failed because it was cancelled
        if outcome is DONE:
            if self._consumer.probing:
                self._consumer.recovered()
            if self._acknowledger is not None and not self._acknowledger.closed:
                self._acknowledger.add(job)
                self._acks += 1
                if not self._acks % ACKS_PER_TURN:
                    await asyncio.sleep(0)  # handlers that never wait must not keep the loop
                return
        elif isinstance(outcome, Pause):
            outcome = self._consumer.rest(outcome)
        await self._settlement.settle(self._subscription, job, outcome, self._over)
        self._finish(job)

    async def _outlive(self, thread: asyncio.Future[object]) -> None:
        """Keep the slot until a synchronous handler's thread returns: it cannot be stopped."""
        if not thread.done():
            await asyncio.wait({thread, self._abandoned}, return_when=asyncio.FIRST_COMPLETED)
            if not thread.done():
                thread.cancel()  # the thread goes on; its result concerns nobody any more
                logger.warning(
                    "%s: a synchronous handler of %s is still running and is left behind",
                    self._consumer.channel,
                    self._consumer.group,
                    extra={"queue": self._consumer.channel, "consumer": self._consumer.group},
                )

    # -- leases ------------------------------------------------------------------------------

    async def _renew(self) -> None:
        """Extend every lease that is held, three times in its length.

        On backends that run in this loop a blocked loop blocks expiry too, and expiry waits until
        overdue renewals have run; so this needs no thread.
        """
        try:
            while (lease := self._consumer.lease) is not None:
                await self._due.wait()
                self._due.clear()
                # All at once: one after the other, many on a slow network would come too late.
                held = [job for job in self.held if not job.lost]
                await asyncio.gather(*[self._extend(job, lease) for job in held])
                self._renewal = None
                if self.held:  # an idle consumer needs no timer
                    self._renew_later()
        finally:
            if self._renewal is not None:
                self._renewal.cancel()

    def _renew_later(self) -> None:
        if (lease := self._consumer.lease) is not None:
            self._renewal = self._loop.call_later(lease / RENEWALS_PER_LEASE, self._due.set)

    async def _extend(self, job: Job, lease: float) -> None:
        if job not in self.held:
            return
        try:
            await self._subscription.extend(job.delivery, lease)
        except (AckDeadlineExceeded, MessageNotFound):
            if job in self.held:
                self._lose(job)
        except QueueError as error:
            logger.warning("%s: a lease could not be renewed: %s", self._consumer.channel, error)

    def _taken_away(self, deliveries: Sequence[Delivery]) -> None:
        """The subscription has lost these, and says so of its own accord."""
        gone = set(deliveries)
        for job in [job for job in self.held if job.delivery in gone]:
            self._lose(job)

    def _lose(self, job: Job) -> None:
        """Stop its handler, once: one that cleans up after itself is left to it."""
        task = job.task
        if task is not None and not any(each.lost and each.task is task for each in self.held):
            task.cancel()
        job.lost = True

    def _let_go(self, job: Job) -> None:
        """Another has the message now: there is nothing to settle."""
        logger.warning(
            "%s: the claim on message %s was lost, its handler was stopped",
            self._consumer.channel,
            job.delivery.envelope.id,
            extra={
                "queue": self._consumer.channel,
                "consumer": self._consumer.spec.consumer,
                "message_id": job.delivery.envelope.id,
                "attempt": job.delivery.envelope.attempt,
            },
        )
        self._finish(job)


def _current_task() -> asyncio.Task[None]:
    task = asyncio.current_task()
    assert task is not None
    return task
