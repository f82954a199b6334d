"""The directory of a durable engine: opened, recovered, kept tidy and closed.

LOCK      the owner's, see ``log/disk.py``
log/      the segments and a snapshot, see ``log/segment.py`` and ``snapshot.py``
inbox/    bulk files, see ``native/bulk.py``
readers/  who reads the log from outside, see ``log/retention.py``
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from itertools import islice
from typing import Final, ParamSpec, TypeVar

from qkit._internal.clock import Clock, SystemClock
from qkit._internal.tasks import run_to_completion
from qkit.errors import (
    ConfigError,
    Damage,
    InvalidName,
    LogDamaged,
)
from qkit.native.bulk import bulks, check_bulk, discard, read_bulk
from qkit.native.log.disk import Disk
from qkit.native.log.log import SEGMENT_BYTES, Fsync, Log, tidying
from qkit.native.log.record import Publish
from qkit.native.log.retention import exchanging
from qkit.native.queue.actor import QueueActor
from qkit.native.queue.topic import Topic
from qkit.native.storage.compaction import Compacted, Plan, choose, compact, plan, replaced
from qkit.native.storage.durable_queue import DurableActor
from qkit.native.storage.history import StatusChange, history_of
from qkit.native.storage.journal import Journal
from qkit.native.storage.replay import Recovered, Replay
from qkit.native.storage.snapshot import read_snapshot, write_snapshot

__all__ = ["Fsync", "Storage"]

logger = logging.getLogger("qkit.native")

_T = TypeVar("_T")
P = ParamSpec("P")

LOOK: Final = 1.0  # seconds between looks at whether there is anything to tidy
IDLE: Final = 5.0  # seconds without a write after which it is a good moment
PERIOD: Final = 600.0  # seconds after which it is done whatever else
WORTH: Final = 1 << 20  # bytes of new log below which a snapshot is not worth a segment's end
CHUNK: Final = 2_000  # messages of a bulk file written together
MOST: Final = 2_000_000  # messages above which a snapshot would cost more memory than it is worth


class Storage:
    """What lies under a durable engine. Blocking work is done in threads."""

    journal: Journal

    def __init__(
        self,
        disk: Disk,
        *,
        clock: Clock,
        fsync: Fsync = "always",
        fsync_interval: float = 1.0,
        memory_limit: int = 64 << 20,
        segment_bytes: int = SEGMENT_BYTES,
        repair: bool = False,
    ) -> None:
        self.path = disk.path
        self._clock = clock
        self._limit = memory_limit
        self._repair = repair
        self.recovered: list[Recovered] = []  # what the engine has to take over
        self._segment_bytes = segment_bytes
        self._damage: list[Damage] = []
        self._covered = 0  # the last segment that the snapshot covers
        self._snapshot_bytes = 0
        self._stuck: dict[int, tuple[int, ...]] = {}  # see ``_worth_it``
        self._queues: Callable[[], set[int]] = set
        self._tidying = asyncio.Lock()
        self._taking = asyncio.Lock()
        self._taken: set[str] = set()  # bulk files that were taken in
        self._refused: set[str] = set()  # and such as cannot be
        self._look_in: Callable[[], Awaitable[object]] | None = None
        self._keeper: asyncio.Task[None] | None = None
        self._closing: asyncio.Future[None] | None = None
        try:
            self.log = Log(
                disk,
                fsync=fsync,
                fsync_interval=fsync_interval,
                segment_bytes=segment_bytes,
                repair=repair,
                # Virtual time knows nothing of threads: it would pass while they write.
                inline=not isinstance(clock, SystemClock),
            )
        except BaseException:
            disk.close()
            raise

    @property
    def damage(self) -> list[Damage]:
        """What recovery found that was no record."""
        return self._damage + self.log.damage

    # Beginning and end

    async def recover(self) -> Replay:
        """Read the log and begin to write to it. If that fails the directory is let go."""
        try:
            replay = await self._in_thread(self._replay)
            self.log.start()
        except BaseException:
            await self.log.close()
            raise
        for damage in self.damage:
            logger.warning("recovering %s: %s", self.path, damage)
        self.journal = Journal(self.log, self._clock, replay)
        self._taken.update(replay.taken)
        return replay

    def _replay(self) -> Replay:
        replay = Replay(limit=self._limit, repaired=self._repair)
        self._covered = read_snapshot(self.log, replay, self._damage)
        start = (self._covered + 1, 0) if self._covered else None
        replay.read(self.log.recover(start))
        self.recovered = replay.finish()
        return replay

    def start(
        self, queues: Callable[[], set[int]], look_in: Callable[[], Awaitable[object]]
    ) -> None:
        """Keep the directory tidy from now on, and look for bulk files.

        ``queues`` tells which numbers are in use, ``look_in`` takes bulk files.

        Not in virtual time, where a second costs nothing: there ``tidy`` is called by hand.
        """
        self._queues, self._look_in = queues, look_in
        if not self.log.inline:
            self._keeper = asyncio.get_running_loop().create_task(
                self._keep(), name="qkit-native-keeper"
            )

    async def close(self) -> None:
        """Write what is pending and let the directory go. Again: wait for that."""
        if self._closing is None:
            self._closing = asyncio.ensure_future(self._close())
        await asyncio.shield(self._closing)  # it comes to its end although nobody waits any more

    async def _close(self) -> None:
        if self._keeper is not None:
            self._keeper.cancel()
            await asyncio.wait([self._keeper])
        try:
            await self.log.close()
        finally:
            if self.log.owed:
                logger.error(
                    "the disk is full: %d records could not be written before closing; what they "
                    "settled will be delivered again",
                    self.log.owed,
                )

    async def _in_thread(self, function: Callable[P, _T], *args: P.args, **kwargs: P.kwargs) -> _T:
        if self.log.inline:
            return function(*args, **kwargs)
        return await run_to_completion(asyncio.to_thread(function, *args, **kwargs))

    # Tidying

    async def _keep(self) -> None:
        seen, quiet, passed = -1, 0.0, 0.0
        while not self.log.read_only:
            await asyncio.sleep(LOOK)
            passed += LOOK
            quiet = quiet + LOOK if self.log.groups == seen else 0.0
            seen = self.log.groups
            due = quiet == IDLE or passed >= PERIOD or self._grown()
            # Whatever goes wrong, it is told and tried again: a directory that nobody tidies any
            # more would fill the disk in silence.
            try:
                waiting = await self._in_thread(self.waiting)
                if waiting and self._look_in is not None:
                    await self._look_in()
            except Exception:
                logger.exception("a bulk file could not be taken in; it stays where it is")
            try:
                if due:
                    await self.tidy(rotate=quiet >= IDLE)
            except Exception:
                logger.exception("the log could not be tidied; it is as before")
            if due:
                passed, seen = 0.0, self.log.groups

    def _grown(self) -> bool:
        behind = self.log.active - 1 - self._covered
        return behind * self._segment_bytes > max(self._segment_bytes, self._snapshot_bytes)

    async def tidy(self, *, rotate: bool = True, compact: bool = True) -> None:
        """Take out of the log what nobody needs any more, and write a snapshot.

        Writers are not stopped meanwhile. ``rotate`` ends the segment that is being written if it
        is worth it, so that the snapshot covers all that there is. Without ``compact`` only the
        snapshot is written. Raises ``StorageError``.
        """
        async with self._tidying:
            if rotate and self.log.active_bytes >= min(WORTH, self._segment_bytes):
                await self.log.rotate()
            if compact:
                await self._compact()
            upto = self.log.active - 1
            live = sum(segment.live for segment in self.journal.index)
            if upto > self._covered and live <= MOST:
                await self._in_thread(self._write_snapshot, upto)

    def _write_snapshot(self, upto: int) -> None:
        replay = Replay()
        covered = read_snapshot(self.log, replay, [])
        for number, _ in self.log.segments():
            if covered < number <= upto:
                replay.read(self.log.entries(number))
        with tidying("snapshot"):
            self._snapshot_bytes = write_snapshot(self.log, upto, replay)
        self._covered = upto

    async def _compact(self) -> None:
        sizes = await self._in_thread(self.log.segments)
        await self.log.sync()  # a segment may be complete before the index has heard what is in it
        index = self.journal.index
        oldest = sizes[0][0] if sizes else 0
        border = await self._in_thread(self._readers_border)
        runs = choose(
            [item for item in sizes if border is None or item[0] < border],
            index,
            limit=self._segment_bytes,
            border=self._covered,
            skip=self._is_stuck,
        )
        for run in runs:
            planned = plan(run, index, self._queues(), first=run[0] == oldest)
            # What became of the messages that are taken out (a dead letter, say) must not be lost
            # when they are.
            await self.log.sync()
            compacted = await self._in_thread(compact, self.log, planned, self._segment_bytes)
            planned.segments = compacted.segments
            await self._exchange(planned, compacted)
            self._stuck[run[0]] = self._signature(run[0])

    def _readers_border(self) -> int | None:
        with exchanging(self.path) as border:
            return border

    async def _exchange(self, plan: Plan, compacted: Compacted) -> None:
        """Put the new segment in the place of the old ones, unless a reader now wants those."""
        exchange = exchanging(self.path)
        border = await self._in_thread(exchange.__enter__)
        try:
            if border is not None and plan.segments[-1] >= border:
                await self._in_thread(self.log.drop, compacted.rewrite)
                return
            await self._in_thread(self.log.install, compacted.rewrite)
            self._switch(plan, compacted)
            if len(plan.segments) > 1:
                await self._in_thread(self.log.remove, plan.segments[1:])
        finally:
            exchange.__exit__(None, None, None)

    def _switch(self, plan: Plan, compacted: Compacted) -> None:
        """Take over the new places, in one turn of the loop."""
        index = self.journal.index
        new = replaced([index[number] for number in plan.segments], plan, compacted)
        self.log.switch(plan.segments[0])
        index.replace(plan.segments, new)

    def _is_stuck(self, number: int) -> bool:
        return self._stuck.get(number) == self._signature(number)

    def _signature(self, number: int) -> tuple[int, ...]:
        """What must change before writing a segment anew can win anything.

        One with little but the ends of messages that older segments tell of stays as long as it
        is until they are written anew.
        """
        index = self.journal.index
        older = sum(len(segment) for segment in index if segment.number < number)
        return index[number].live, older

    # Bulk files

    def waiting(self) -> list[str]:
        """The bulk files that were published and not taken in yet."""
        return [job for job in bulks(self.path) if job not in self._refused]

    async def take_in(
        self,
        channel: Callable[[str, Mapping[str, object]], QueueActor | Topic],
        admit: Callable[[list[tuple[DurableActor, int, Publish]]], None],
    ) -> int:
        """Write the messages of every waiting bulk file to the log, then hand them to ``admit``.

        Each file is taken exactly once; returns how many messages. One that is not whole, or
        names what cannot be a queue, is left where it is for good, and raised after the others.
        """
        count, failure = 0, None
        async with self._taking:
            for job in self.waiting():
                try:
                    count += await run_to_completion(self._take_job(job, channel, admit))
                except (LogDamaged, InvalidName, ConfigError) as error:
                    self._refused.add(job)
                    failure = failure or error
        if failure is not None:
            raise failure
        return count

    async def _take_job(
        self,
        job: str,
        channel: Callable[[str, Mapping[str, object]], QueueActor | Topic],
        admit: Callable[[list[tuple[DurableActor, int, Publish]]], None],
    ) -> int:
        messages: list[tuple[DurableActor, int, Publish]] = []
        if job not in self._taken:
            await self._in_thread(check_bulk, self.path, job)
            messages = await self.journal.take_in(job, self._chunks(job, channel))
            self._taken.add(job)
            admit(messages)
        await self._in_thread(discard, self.path, job)
        return len(messages)

    async def _chunks(
        self, job: str, channel: Callable[[str, Mapping[str, object]], QueueActor | Topic]
    ) -> AsyncGenerator[list[tuple[Sequence[DurableActor], bytes, Publish]], None]:
        bulk = read_bulk(self.path, job)
        while chunk := await self._in_thread(lambda: list(islice(bulk, CHUNK))):
            messages: list[tuple[Sequence[DurableActor], bytes, Publish]] = []
            for queue, content, message, config in chunk:
                target = channel(queue, config)
                if message is None:
                    continue
                targets, _ = target.targets(None)
                actors = [actor for actor in targets if isinstance(actor, DurableActor)]
                if actors:
                    messages.append((actors, content, message))
            if messages:
                yield messages

    # Looking back

    async def history(self, id: str) -> list[StatusChange]:
        """What the log still tells of a message."""
        written = self.journal.written()
        if written is not None:
            await written
        async with self._tidying:
            return await self._in_thread(self._history, id)

    def _history(self, id: str) -> list[StatusChange]:
        numbers = [number for number, _ in self.log.segments()]
        if self.log.active_bytes:
            numbers.append(self.log.active)
        contents = (entry.content for number in numbers for entry in self.log.entries(number))
        return history_of(id, contents)
