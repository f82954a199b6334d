"""Samples of the statistics of all queues, taken on request and shared by all requests.

No task runs in the background, so an idle app costs nothing. The samples of the last five minutes
are kept as the history.
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
"""Wall time, depth, published and acked messages per second, dead letters."""


@dataclass(frozen=True, slots=True)
class _Counts:
    """Counters of one queue at one monotonic time."""

    at: float
    published: int
    acked: int
    by_service: bool


class Sampler:
    """Sampler of all queues of a service; requests within an interval share one sample.

    Args:
        service: Service whose queues are sampled.
        writable: Whether the app has a token for changes and therefore accepts them.
        min_interval: Seconds for which a sample is reused. Default: 0.9.
    """

    def __init__(self, service: QueueService, *, writable: bool, min_interval: float = 0.9) -> None:
        self._service = service
        self._writable = writable
        self._min_interval = min_interval
        self._sampling = asyncio.Lock()
        self._latest: Overview | None = None
        self._latest_at = float("-inf")
        self._previous_stats: dict[str, QueueStats | str] = {}
        self._counts: dict[str, _Counts] = {}
        self._points: dict[str, deque[Point]] = {}

    async def sample(self) -> Overview:
        """Return the latest sample, or take a new one if it is too old.

        Does not raise if the broker does not respond; the sample then has an ``error``.
        """
        async with self._sampling:
            latest = self._latest
            if latest is None or time.monotonic() - self._latest_at >= self._min_interval:
                latest = await self._overview()
                self._latest, self._latest_at = latest, time.monotonic()
            return latest

    def invalidate(self) -> None:
        """Make the next ``sample`` call take a new sample, after a request changed something."""
        self._latest_at = float("-inf")

    def history(self) -> dict[str, list[Point]]:
        """Return the points of the last five minutes, by queue."""
        return {name: list(points) for name, points in self._points.items()}

    async def _overview(self) -> Overview:
        queues, omitted, error = await self._queues()
        health = self._service.health_check()
        self._add_points(queues)
        return Overview(
            sampled_at=time.time(),
            backend=self._service.backend_name,
            ready=health.status == "healthy",
            stopping=self._service.stopping,
            writable=self._writable,
            capabilities=self._service.capabilities.as_dict(),
            health=health,
            totals=_totals(queues, known=error is None),
            queues=queues,
            queues_omitted=omitted,
            error=error,
        )

    async def _queues(self) -> tuple[list[QueueView], int, str | None]:
        """Return the queues, the number of omitted ones, and the error if listing them failed."""
        list_error = None
        listed: list[str] = []
        try:
            async with asyncio.timeout(SAMPLE_TIMEOUT_SECONDS):
                listed = await self._service.queues()
        except LifecycleError:
            list_error = "The service is not running."
        except Unsupported as error:
            if not self._service.channels:  # otherwise those channels are shown
                list_error = _error_summary(error)
        except (QueueError, TimeoutError) as error:
            list_error = _error_summary(error)
        settings = self._service.settings
        own = {channel.name for channel in self._service.channels}
        names = own | set(listed)
        dead_letter_names = {settings.dead_letter_name(name) for name in names}
        consumed = {handler.channel for handler in self._service.handlers}
        # Consumed queues come first, because MAX_QUEUES or the timeout may exclude the last ones.
        rows = sorted(
            names - dead_letter_names,
            key=lambda name: (name not in consumed, name not in own, name),
        )
        shown, omitted = rows[:MAX_QUEUES], len(rows[MAX_QUEUES:])
        queries: dict[bool, list[str]] = {True: [], False: []}  # key: whether consumed here
        for name in shown if list_error is None else ():
            both = (name, settings.dead_letter_name(name))
            queries[name in consumed] += [each for each in both if each in names]
        stats = await self._query_stats(queries[True], queries[False])
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
                queried=list_error is None,
                dead_letters=stats.get(settings.dead_letter_name(name)),
                metrics=metrics.get(name, ChannelMetrics()),
                consumers=[item for item in health.consumers if item.channel == name],
                broadcast=name in topics,
            )
            for name in sorted(shown)
        ]
        return views, omitted, list_error

    async def _query_stats(self, *rounds: list[str]) -> dict[str, QueueStats | str]:
        """Return the statistics of each queue, or the reason why there are none.

        The rounds run in sequence, so that many queues in a later round do not delay the first.
        Queues that time out keep their previous statistics.
        """
        answers: dict[str, QueueStats | str] = {}
        limit = asyncio.Semaphore(MAX_CONCURRENT_QUERIES)

        async def query(name: str) -> None:
            async with limit:
                try:
                    answers[name] = await self._service.stats(name)
                except (QueueNotFound, Unsupported):
                    pass  # not declared yet or just deleted; or the backend has no statistics
                except QueueError as error:
                    answers[name] = _error_summary(error)

        try:
            async with asyncio.timeout(SAMPLE_TIMEOUT_SECONDS):
                for names in rounds:
                    async with asyncio.TaskGroup() as tasks:
                        for name in names:
                            tasks.create_task(query(name), name=f"qkit stats of {name}")
        except TimeoutError as error:
            for name in itertools.chain(*rounds):
                answers.setdefault(name, self._previous_stats.get(name, _error_summary(error)))
        self._previous_stats = answers
        return answers

    def _view(
        self,
        name: str,
        *,
        answer: QueueStats | str | None,
        queried: bool,
        dead_letters: QueueStats | str | None,
        metrics: ChannelMetrics,
        consumers: list[ConsumerHealth],
        broadcast: bool,
    ) -> QueueView:
        """Build the view of one queue, with this service's counters where the broker has none."""
        stats = answer if isinstance(answer, QueueStats) else None
        by_service = stats is None or stats.published_total is None or stats.acked_total is None
        published = _known(stats.published_total if stats else None, metrics.messages_sent)
        acked = _known(stats.acked_total if stats else None, _settled(metrics))
        published_rate, acked_rate = None, None
        if queried and not isinstance(answer, str):  # otherwise there is no rate to show
            counts = _Counts(time.monotonic(), published, acked, by_service)
            published_rate, acked_rate = self._rates(name, counts)
        if by_service:  # 0 would be wrong: other processes may send and consume
            published_rate = published_rate if metrics.messages_sent else None
            acked_rate = acked_rate if consumers else None
        in_flight_here = sum(consumer.in_flight for consumer in consumers)
        return QueueView(
            name=name,
            state=_state(consumers),
            broadcast=broadcast,
            depth=stats.depth if stats else None,
            in_flight=_known(stats.in_flight if stats else None, in_flight_here),
            scheduled=stats.scheduled if stats else None,
            consumers=_known(stats.consumers if stats else None, len(consumers)),
            oldest_message_age_secs=stats.oldest_message_age_secs if stats else None,
            avg_wait_time_ms=stats.avg_wait_time_ms if stats else None,
            published_per_second=published_rate,
            acked_per_second=acked_rate,
            counted_by_service=by_service,
            published_total=published,
            acked_total=acked,
            messages_retried=metrics.messages_retried,
            messages_failed=metrics.messages_failed,
            dead_letters=dead_letters.depth
            if isinstance(dead_letters, QueueStats)
            else (0 if stats else None),
            error=answer if isinstance(answer, str) else None,
        )

    def _rates(self, name: str, current: _Counts) -> tuple[float | None, float | None]:
        """Return published and acked messages per second since the previous sample."""
        previous, self._counts[name] = self._counts.get(name), current
        if (
            previous is None
            or current.at <= previous.at
            or current.by_service != previous.by_service
        ):
            return None, None
        seconds = current.at - previous.at
        return (  # no negative rate after a counter was reset
            max(0, current.published - previous.published) / seconds,
            max(0, current.acked - previous.acked) / seconds,
        )

    def _add_points(self, queues: list[QueueView]) -> None:
        now = time.time()
        deleted = self._points.keys() - {view.name for view in queues}
        for name in deleted:
            del self._points[name]
            self._counts.pop(name, None)
        for view in queues:
            points = self._points.setdefault(view.name, deque(maxlen=MAX_POINTS))
            rates = view.published_per_second, view.acked_per_second
            points.append((now, view.depth, *rates, view.dead_letters))
            while points[0][0] < now - HISTORY_SECONDS:
                points.popleft()


def _state(consumers: list[ConsumerHealth]) -> QueueState:
    """Return the worst state of all consumers; ``none`` if there are none."""
    worst_first: tuple[QueueState, ...] = (
        "reconnecting",
        "starting",
        "stopped",
        "paused",
        "standby",
        "consuming",
    )
    states = {consumer.state for consumer in consumers}
    for state in worst_first:
        if state in states:
            return state
    return "none"


def _totals(queues: list[QueueView], *, known: bool) -> Totals:
    empty = 0 if known and not queues else None  # without queues, the sums are 0, not unknown

    return Totals(
        depth=_sum([view.depth for view in queues], empty),
        in_flight=_sum([view.in_flight for view in queues], empty),
        dead_letters=_sum([view.dead_letters for view in queues], empty),
        messages_retried=sum(view.messages_retried for view in queues),
        published_per_second=_sum([view.published_per_second for view in queues], empty),
        acked_per_second=_sum([view.acked_per_second for view in queues], empty),
    )


def _sum(figures: list[Figure | None], empty: Figure | None) -> Figure | None:
    """Return the sum of the known values, or ``empty`` if none is known."""
    total = empty
    for figure in figures:
        if figure is not None:
            total = figure if total is None else total + figure
    return total


def _settled(metrics: ChannelMetrics) -> int:
    return metrics.messages_received - metrics.messages_retried - metrics.in_flight


def _known(figure: int | None, otherwise: int) -> int:
    return otherwise if figure is None else figure


def _error_summary(error: BaseException) -> str:
    if isinstance(error, TimeoutError):
        return f"The broker did not respond within {SAMPLE_TIMEOUT_SECONDS:g} seconds."
    return f"{type(error).__name__}: {error_text(error)}"
