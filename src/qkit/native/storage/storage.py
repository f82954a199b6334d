"""``Storage``: recovery, maintenance and closing of a durable engine's directory.

LOCK      lock of the owner, see ``log/disk.py``
log/      segments and a snapshot, see ``log/segment.py`` and ``snapshot.py``
inbox/    bulk files, see ``native/bulk.py``
readers/  positions of processes that read the log, see ``log/retention.py``
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Final, ParamSpec, TypeVar

from qkit._internal.clock import Clock, SystemClock
from qkit._internal.tasks import run_to_completion
from qkit.errors import (
    ConfigError,
    Damage,
    InvalidName,
    LogDamaged,
)
from qkit.native.bulk import check_bulk, published_jobs, read_bulk, remove_job
from qkit.native.log.disk import Disk
from qkit.native.log.log import SEGMENT_BYTES, Fsync, Log, storage_errors
from qkit.native.log.record import Publish
from qkit.native.log.retention import retention_lock
from qkit.native.queue.queue import Queue
from qkit.native.queue.topic import Topic
from qkit.native.storage.compaction import (
    CompactionPlan,
    CompactionResult,
    choose_segments,
    compact,
    plan,
    reindex,
)
from qkit.native.storage.history import StatusChange, history_of
from qkit.native.storage.journal import Journal
from qkit.native.storage.replay import RecoveredMessage, Replay
from qkit.native.storage.snapshot import read_snapshot, write_snapshot

__all__ = ["Fsync", "Storage"]

logger: logging.Logger = logging.getLogger("qkit.native")

_T = TypeVar("_T")
P = ParamSpec("P")

CHECK_INTERVAL_SECONDS: Final = 1.0  # time between checks whether maintenance is due
IDLE_SECONDS: Final = 5.0  # time without a write until maintenance starts
MAINTENANCE_INTERVAL_SECONDS: Final = 600.0  # time between maintenance runs of a busy log
MIN_SNAPSHOT_BYTES: Final = 1 << 20  # a smaller active segment is not sealed for a snapshot
BULK_CHUNK_MESSAGES: Final = 2_000  # messages of a bulk file that are written together
MAX_SNAPSHOT_MESSAGES: Final = 2_000_000  # above this, a snapshot would need too much memory


class Storage:
    """Storage of a durable engine. Blocking work runs in threads.

    Args:
        disk: Open directory. It is closed with the storage.
        clock: Clock of the engine. With a virtual clock, everything runs in the event loop.
        fsync: When records are synced; see ``Engine.open``. Default: ``"always"``.
        fsync_interval: Maximum time until written records are synced, in seconds. Default: 1.
        memory_limit: Bytes of bodies that are kept in memory. Default: 64 MiB.
        segment_bytes: Size in bytes at which a segment is sealed. Default: 64 MiB.
        repair: Keep the intact records of a damaged log. Default: false.
    """

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
        self.path: Path = disk.path
        self._clock = clock
        self._limit = memory_limit
        self._repair = repair
        self.recovered: list[RecoveredMessage] = []  # for the engine to put into its queues
        self._segment_bytes = segment_bytes
        self._damage: list[Damage] = []
        self._covered = 0  # the last segment that the snapshot covers
        self._snapshot_bytes = 0
        self._stuck: dict[int, tuple[int, ...]] = {}  # see ``_signature``
        self._queues: Callable[[], set[int]] = set
        self._maintenance_lock = asyncio.Lock()
        self._import_lock = asyncio.Lock()
        self._imported: set[str] = set()  # bulk files that were imported
        self._rejected: set[str] = set()  # bulk files that cannot be imported
        self._import: Callable[[], Awaitable[object]] | None = None
        self._maintenance_task: asyncio.Task[None] | None = None
        self._closing: asyncio.Future[None] | None = None
        try:
            self.log: Log = Log(
                disk,
                fsync=fsync,
                fsync_interval=fsync_interval,
                segment_bytes=segment_bytes,
                repair=repair,
                # Virtual time would advance while a thread writes.
                inline=not isinstance(clock, SystemClock),
            )
        except BaseException:
            disk.close()
            raise

    @property
    def damage(self) -> list[Damage]:
        """Damage that recovery found."""
        return self._damage + self.log.damage

    # Lifecycle

    async def recover(self) -> Replay:
        """Read the log and start its writer. After an error the directory is closed."""
        try:
            replay = await self._in_thread(self._replay)
            self.log.start()
        except BaseException:
            await self.log.close()
            raise
        for damage in self.damage:
            logger.warning("recovering %s: %s", self.path, damage)
        self.journal = Journal(self.log, self._clock, replay)
        self._imported.update(replay.imported)
        return replay

    def _replay(self) -> Replay:
        replay = Replay(limit=self._limit, repaired=self._repair)
        repaired = self.log.repair_sealed() if self._repair else set[int]()
        self._covered = read_snapshot(self.log, replay, self._damage, repaired)
        for segment, message in replay.lost:
            words = f"message {message.id!r} of {replay.name_of(message.queue)!r} is lost"
            self._damage.append(Damage("damaged", segment, 0, 0, words))
        start = (self._covered + 1, 0) if self._covered else None
        replay.read(self.log.recover(start))
        self.recovered = replay.finish()
        return replay

    def start(
        self, queues: Callable[[], set[int]], import_files: Callable[[], Awaitable[object]]
    ) -> None:
        """Start the maintenance task: compaction, snapshots and the import of bulk files.

        With a virtual clock, no task is started; tests call ``maintain``.

        Args:
            queues: Returns the log numbers of the existing queues.
            import_files: Imports bulk files.
        """
        self._queues, self._import = queues, import_files
        if not self.log.inline:
            self._maintenance_task = asyncio.get_running_loop().create_task(
                self._maintenance_loop(), name="qkit-native-maintenance"
            )

    async def close(self) -> None:
        """Write pending records and close the directory. A second call waits for the first."""
        if self._closing is None:
            self._closing = asyncio.ensure_future(self._close())
        await asyncio.shield(self._closing)  # finishes even if all callers are cancelled

    async def _close(self) -> None:
        if self._maintenance_task is not None:
            self._maintenance_task.cancel()
            await asyncio.wait([self._maintenance_task])
        try:
            await self.log.close()
        finally:
            deferred = self.log.writer.deferred_records
            if deferred:
                logger.error(
                    "the disk is full: %d records could not be written before closing; the "
                    "messages that they settle will be delivered again",
                    deferred,
                )

    async def _in_thread(self, function: Callable[P, _T], *args: P.args, **kwargs: P.kwargs) -> _T:
        if self.log.inline:
            return function(*args, **kwargs)
        return await run_to_completion(asyncio.to_thread(function, *args, **kwargs))

    # Maintenance

    async def _maintenance_loop(self) -> None:
        seen, idle, passed = -1, 0.0, 0.0
        while not self.log.read_only:
            await asyncio.sleep(CHECK_INTERVAL_SECONDS)
            passed += CHECK_INTERVAL_SECONDS
            idle = idle + CHECK_INTERVAL_SECONDS if self.log.writer.groups == seen else 0.0
            seen = self.log.writer.groups
            due = idle == IDLE_SECONDS or passed >= MAINTENANCE_INTERVAL_SECONDS or self._grown()
            # Log every error and try again: without maintenance, the disk would silently fill up.
            try:
                waiting = await self._in_thread(self.waiting)
                if waiting and self._import is not None:
                    await self._import()
            except Exception:
                logger.exception("a bulk file could not be imported; it stays in the inbox")
            try:
                if due:
                    await self.maintain(rotate=idle >= IDLE_SECONDS)
            except Exception:
                logger.exception("maintenance of the log failed; it will be tried again later")
            if due:
                passed, seen = 0.0, self.log.writer.groups

    def _grown(self) -> bool:
        behind = self.log.active - 1 - self._covered
        return behind * self._segment_bytes > max(self._segment_bytes, self._snapshot_bytes)

    async def maintain(self, *, rotate: bool = True, compact: bool = True) -> None:
        """Compact the log and write a snapshot. Records can be appended meanwhile.

        Args:
            rotate: First seal the active segment if it is large enough, so that the snapshot
                covers everything. Default: true.
            compact: Compact the log. If false, only write the snapshot. Default: true.

        Raises:
            StorageError: The disk is full or failed.
        """
        async with self._maintenance_lock:
            if rotate and self.log.active_bytes >= min(MIN_SNAPSHOT_BYTES, self._segment_bytes):
                await self.log.rotate()
            if compact:
                await self._compact()
            upto = self.log.active - 1
            live = sum(segment.live for segment in self.journal.index)
            if upto > self._covered and live <= MAX_SNAPSHOT_MESSAGES:
                await self._in_thread(self._write_snapshot, upto)

    def _write_snapshot(self, upto: int) -> None:
        replay = Replay()
        covered = read_snapshot(self.log, replay, [])
        for number, _ in self.log.segments():
            if covered < number <= upto:
                replay.read(self.log.entries(number))
        with storage_errors("snapshot"):
            self._snapshot_bytes = write_snapshot(self.log, upto, replay)
        self._covered = upto

    async def _compact(self) -> None:
        sizes = await self._in_thread(self.log.segments)
        # A segment may be sealed before the index contains its messages.
        await self.log.writer.sync()
        index = self.journal.index
        oldest = sizes[0][0] if sizes else 0
        border = await self._in_thread(self._readers_border)
        runs = choose_segments(
            [item for item in sizes if border is None or item[0] < border],
            index,
            limit=self._segment_bytes,
            border=self._covered,
            skip=self._is_stuck,
        )
        for run in runs:
            planned = plan(run, index, self._queues(), first=run[0] == oldest)
            # Before settled messages are removed, the records that settle them (for example a dead
            # letter) must be on disk.
            await self.log.writer.sync()
            compacted = await self._in_thread(compact, self.log, planned, self._segment_bytes)
            planned.segments = compacted.segments
            await self._exchange(planned, compacted)
            self._stuck[run[0]] = self._signature(run[0])

    def _readers_border(self) -> int | None:
        with retention_lock(self.path) as border:
            return border

    async def _exchange(self, plan: CompactionPlan, compacted: CompactionResult) -> None:
        """Replace the old segments with the new one, unless a reader retains them."""
        exchange = retention_lock(self.path)
        border = await self._in_thread(exchange.__enter__)
        try:
            if border is not None and plan.segments[-1] >= border:
                await self._in_thread(self.log.discard_rewrite, compacted.rewrite)
                return
            await self._in_thread(self.log.install, compacted.rewrite)
            self._activate_rewrite(plan, compacted)
            if len(plan.segments) > 1:
                await self._in_thread(self.log.remove, plan.segments[1:])
        finally:
            exchange.__exit__(None, None, None)

    def _activate_rewrite(self, plan: CompactionPlan, compacted: CompactionResult) -> None:
        """Switch the index to the new positions within one iteration of the event loop."""
        index = self.journal.index
        new = reindex([index[number] for number in plan.segments], plan, compacted)
        self.log.activate_rewrite(plan.segments[0])
        index.replace(plan.segments, new)

    def _is_stuck(self, number: int) -> bool:
        return self._stuck.get(number) == self._signature(number)

    def _signature(self, number: int) -> tuple[int, ...]:
        """Return a value that must change before rewriting a segment can save space.

        A segment whose records mostly settle messages of older segments keeps its size until the
        older segments are rewritten.
        """
        index = self.journal.index
        older = sum(len(segment) for segment in index if segment.number < number)
        return index[number].live, older

    # Bulk files

    def waiting(self) -> list[str]:
        """Return the names of published bulk files that were neither imported nor rejected."""
        return [job for job in published_jobs(self.path) if job not in self._rejected]

    async def import_bulk_files(
        self, channel: Callable[[str, Mapping[str, object]], Queue | Topic]
    ) -> int:
        """Import every waiting bulk file: write its messages to the log, then add them to queues.

        Each file is imported exactly once. A file that cannot be imported stays in the inbox and
        is not tried again; the first such error is raised after the remaining files are imported.

        Args:
            channel: Returns the queue or topic with a name; creates it with the given fields if it
                is missing.

        Returns:
            The number of imported messages.

        Raises:
            LogDamaged: A file is damaged.
            InvalidName: A file declares a queue with an invalid name.
            ConfigError: A file declares an invalid configuration.
        """
        count, failure = 0, None
        async with self._import_lock:
            for job in self.waiting():
                try:
                    count += await run_to_completion(self._import_job(job, channel))
                except (LogDamaged, InvalidName, ConfigError) as error:
                    self._rejected.add(job)
                    failure = failure or error
        if failure is not None:
            raise failure
        return count

    async def _import_job(
        self, job: str, channel: Callable[[str, Mapping[str, object]], Queue | Topic]
    ) -> int:
        messages: list[tuple[Queue, int, Publish]] = []
        if job not in self._imported:
            await self._in_thread(check_bulk, self.path, job)
            messages = await self.journal.import_messages(job, self._chunks(job, channel))
            self._imported.add(job)
            self._add_imported(messages)
        await self._in_thread(remove_job, self.path, job)
        return len(messages)

    def _add_imported(self, messages: list[tuple[Queue, int, Publish]]) -> None:
        """Add the messages of a bulk file to their queues, regardless of the queues' limits."""
        for queue, seq, message in messages:
            if queue.lost is not None:
                self.journal.forget(seq)
                continue
            body = self.journal.body_to_keep(message.body)
            recovered = RecoveredMessage(message, queue.number, seq, body)
            recovered.at = message.at or self._clock.time()
            recovered.priority = min(message.priority, queue.config.max_priority)
            queue.state.published += 1
            queue.restore(recovered)
        for queue in {queue for queue, _, _ in messages}:
            queue.resume()

    async def _chunks(
        self, job: str, channel: Callable[[str, Mapping[str, object]], Queue | Topic]
    ) -> AsyncGenerator[list[tuple[Sequence[Queue], bytes, Publish]], None]:
        bulk = read_bulk(self.path, job)
        while chunk := await self._in_thread(lambda: list(islice(bulk, BULK_CHUNK_MESSAGES))):
            messages: list[tuple[Sequence[Queue], bytes, Publish]] = []
            for queue, content, message, config in chunk:
                target = channel(queue, config)
                if message is None:
                    continue
                targets, _ = target.targets(None)
                if targets:
                    messages.append((targets, content, message))
            if messages:
                yield messages

    # History

    async def history(self, id: str) -> list[StatusChange]:
        """Return the status changes of a message that the log still contains."""
        written = self.journal.written()
        if written is not None:
            await written
        async with self._maintenance_lock:
            return await self._in_thread(self._history, id)

    def _history(self, id: str) -> list[StatusChange]:
        numbers = [number for number, _ in self.log.segments()]
        if self.log.active_bytes:
            numbers.append(self.log.active)
        contents = (entry.content for number in numbers for entry in self.log.entries(number))
        return history_of(id, contents)
