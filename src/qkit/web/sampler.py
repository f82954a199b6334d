"""Samples of every queue's figures, taken on request and shared by all requests.

There is no task in the background: without requests it costs nothing. The samples of the last
minutes are kept as a history.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import deque
from dataclasses import dataclass
from typing import TypeVar

from qkit._internal.text import error_text
from qkit.backend import QueueStats
from qkit.errors import LifecycleError, QueueError, QueueNotFound, Unsupported
from qkit.observability.health import ConsumerHealth
from qkit.observability.metrics import ChannelMetrics
from qkit.service import QueueService
from qkit.web.schemas import Overview, QueueState, QueueView, Totals

__all__ = ["Point", "Sampler"]

MAX_QUEUES = 200
MAX_CONCURRENT_QUERIES = 8
SAMPLE_TIMEOUT_SECONDS = 3.0  # for all queries of one sample
HISTORY_SECONDS = 300.0
MAX_POINTS = 300

Figure = TypeVar("Figure", int, float)

Point = tuple[float, int | None, float | None, float | None, int | None]
"""When, depth, messages in and out a second, dead letters."""


@dataclass(frozen=True, slots=True)
class _Counts:
    at: float
    sent: int
    handled: int
    own: bool


class Sampler:
    """Samples every queue of a service, at most once in ``every`` seconds for all callers."""

    def __init__(self, service: QueueService, *, writable: bool, every: float = 0.9) -> None:
        self._service = service
        self._writable = writable
        self._every = every
        self._sampling = asyncio.Lock()
        self._seen: Overview | None = None
        self._seen_at = float("-inf")
        self._before: dict[str, QueueStats | str] = {}
        self._counts: dict[str, _Counts] = {}
        self._points: dict[str, deque[Point]] = {}

    async def sample(self) -> Overview:
        """Return the state of the service; a broker that does not answer raises no error."""
        async with self._sampling:
            seen = self._seen
            if seen is None or time.monotonic() - self._seen_at >= self._every:
                seen = await self._overview()
                self._seen, self._seen_at = seen, time.monotonic()
            return seen

    def invalidate(self) -> None:
        """Make the next call take a new sample: something was changed."""
        self._seen_at = float("-inf")

    def history(self) -> dict[str, list[Point]]:
        """What was seen in the last minutes, by queue."""
        return {name: list(points) for name, points in self._points.items()}

    async def _overview(self) -> Overview:
        queues, hidden, problem = await self._queues()
        health = self._service.health_check()
        self._remember(queues)
        return Overview(
            at=time.time(),
            backend=self._service.backend_name,
            ready=health.status == "healthy",
            stopping=self._service.stopping,
            writable=self._writable,
            capabilities=self._service.capabilities.as_dict(),
            health=health,
            totals=_totals(queues, known=problem is None),
            queues=queues,
            hidden=hidden,
            problem=problem,
        )

    async def _queues(self) -> tuple[list[QueueView], int, str | None]:
        """Every queue that is shown, how many are not, and why figures are missing."""
        problem = None
        found: list[str] = []
        try:
            async with asyncio.timeout(SAMPLE_TIMEOUT_SECONDS):
                found = await self._service.queues()
        except LifecycleError:
            problem = "The service is not running."
        except Unsupported:
            pass  # then only the channels of this service are known
        except (QueueError, TimeoutError) as error:
            problem = _error_summary(error)
        settings = self._service.settings
        own = {channel.name for channel in self._service.channels}
        names = own | set(found)
        letters = {settings.dead_letter_name(name) for name in names}
        consumed = {handler.channel for handler in self._service.handlers}
        # Should the page or the time not do for all: what is consumed here comes first.
        rows = sorted(
            names - letters, key=lambda name: (name not in consumed, name not in own, name)
        )
        shown, hidden = rows[:MAX_QUEUES], len(rows[MAX_QUEUES:])
        asked: dict[bool, list[str]] = {True: [], False: []}  # by whether they are consumed here
        for name in shown if problem is None else ():
            both = (name, settings.dead_letter_name(name))
            asked[name in consumed] += [each for each in both if each in names]
        stats = await self._ask(asked[True], asked[False])
        metrics = self._service.metrics().channels
        health = self._service.health_check()
        topics = {
            channel.name
            for channel in self._service.channels
            if channel.options.get("broadcast", False)
        }
        views = [
            self._view(
                name,
                answer=stats.get(name),
                asked=problem is None,
                dead_letters=stats.get(settings.dead_letter_name(name)),
                mine=metrics.get(name, ChannelMetrics()),
                consumers=[item for item in health.consumers if item.channel == name],
                broadcast=name in topics,
            )
            for name in sorted(shown)
        ]
        return views, hidden, problem

    async def _ask(self, *turns: list[str]) -> dict[str, QueueStats | str]:
        """Figures by queue, or why there are none; those of before where time did not do.

        One turn after the other: a broker with many queues must not keep back those of the first.
        """
        answers: dict[str, QueueStats | str] = {}
        at_once = asyncio.Semaphore(MAX_CONCURRENT_QUERIES)

        async def ask(name: str) -> None:
            async with at_once:
                try:
                    answers[name] = await self._service.stats(name)
                except (QueueNotFound, Unsupported):
                    pass  # deleted meanwhile, or not yet there; or nobody counts here
                except QueueError as error:
                    answers[name] = _error_summary(error)

        try:
            async with asyncio.timeout(SAMPLE_TIMEOUT_SECONDS):
                for names in turns:
                    async with asyncio.TaskGroup() as tasks:
                        for name in names:
                            tasks.create_task(ask(name), name=f"qkit figures of {name}")
        except TimeoutError as error:
            for name in itertools.chain(*turns):
                answers.setdefault(name, self._before.get(name, _error_summary(error)))
        self._before = answers
        return answers

    def _view(
        self,
        name: str,
        *,
        answer: QueueStats | str | None,
        asked: bool,
        dead_letters: QueueStats | str | None,
        mine: ChannelMetrics,
        consumers: list[ConsumerHealth],
        broadcast: bool,
    ) -> QueueView:
        """One queue: the broker's own figures where it knows them, else this service's."""
        stats = answer if isinstance(answer, QueueStats) else None
        own = stats is None or stats.published_total is None or stats.acked_total is None
        sent = _known(stats.published_total if stats else None, mine.messages_sent)
        handled = _known(stats.acked_total if stats else None, _handled(mine))
        in_rate, out_rate = None, None
        if asked and not isinstance(answer, str):  # a broker that is gone has no traffic to tell of
            in_rate, out_rate = self._rates(name, _Counts(time.monotonic(), sent, handled, own))
        if own:  # 0 would be a lie where others send, and others consume
            in_rate = in_rate if mine.messages_sent else None
            out_rate = out_rate if consumers else None
        held = sum(consumer.in_flight for consumer in consumers)
        return QueueView(
            name=name,
            state=_state(consumers),
            broadcast=broadcast,
            depth=stats.depth if stats else None,
            in_flight=_known(stats.in_flight if stats else None, held),
            scheduled=stats.scheduled if stats else None,
            consumers=_known(stats.consumers if stats else None, len(consumers)),
            oldest_seconds=stats.oldest_message_age_secs if stats else None,
            wait_ms=stats.avg_wait_time_ms if stats else None,
            in_rate=in_rate,
            out_rate=out_rate,
            own_rates=own,
            sent=sent,
            handled=handled,
            retried=mine.messages_retried,
            failed=mine.messages_failed,
            dead_letters=dead_letters.depth
            if isinstance(dead_letters, QueueStats)
            else (0 if stats else None),
            problem=answer if isinstance(answer, str) else None,
        )

    def _rates(self, name: str, now: _Counts) -> tuple[float | None, float | None]:
        before, self._counts[name] = self._counts.get(name), now
        if before is None or now.at <= before.at or now.own != before.own:
            return None, None
        seconds = now.at - before.at  # counters that begin anew, after a restart, are no traffic
        return (
            max(0, now.sent - before.sent) / seconds,
            max(0, now.handled - before.handled) / seconds,
        )

    def _remember(self, queues: list[QueueView]) -> None:
        now = time.time()
        gone = self._points.keys() - {view.name for view in queues}
        for name in gone:
            del self._points[name]
            self._counts.pop(name, None)
        for view in queues:
            points = self._points.setdefault(view.name, deque(maxlen=MAX_POINTS))
            points.append((now, view.depth, view.in_rate, view.out_rate, view.dead_letters))
            while points[0][0] < now - HISTORY_SECONDS:
                points.popleft()


def _state(consumers: list[ConsumerHealth]) -> QueueState:
    """The state of them all: that of the one which is worst off."""
    ranks: tuple[QueueState, ...] = ("reconnecting", "starting", "stopped", "paused", "consuming")
    states = {consumer.state for consumer in consumers}
    for state in ranks:
        if state in states:
            return state
    return "none"


def _totals(queues: list[QueueView], *, known: bool) -> Totals:
    nothing = 0 if known and not queues else None  # of no queues the sum is known

    return Totals(
        depth=_sum([view.depth for view in queues], nothing),
        in_flight=_sum([view.in_flight for view in queues], nothing),
        dead_letters=_sum([view.dead_letters for view in queues], nothing),
        retried=sum(view.retried for view in queues),
        in_rate=_sum([view.in_rate for view in queues], nothing),
        out_rate=_sum([view.out_rate for view in queues], nothing),
    )


def _sum(figures: list[Figure | None], nothing: Figure | None) -> Figure | None:
    """The sum of what is known, or ``nothing`` where that is none of them."""
    total = nothing
    for figure in figures:
        if figure is not None:
            total = figure if total is None else total + figure
    return total


def _handled(mine: ChannelMetrics) -> int:
    return mine.messages_received - mine.messages_retried - mine.in_flight


def _known(figure: int | None, otherwise: int) -> int:
    return otherwise if figure is None else figure


def _error_summary(error: BaseException) -> str:
    if isinstance(error, TimeoutError):
        return f"The broker did not answer within {SAMPLE_TIMEOUT_SECONDS:g} seconds."
    return f"{type(error).__name__}: {error_text(error)}"
