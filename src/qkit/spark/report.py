"""Report on dead letters: counts by reason, error, attempts and hour."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

from pyspark.sql.functions import expr

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

__all__ = ["Report", "report_of"]

MAX_EXAMPLES: Final = 12  # maximum number of error types that are shown with an example


@dataclass(slots=True)
class Report:
    """Counts and examples of a channel's dead letters."""

    channel: str
    made_at: datetime
    total: int = 0
    first: datetime | None = None
    last: datetime | None = None
    by_reason: list[tuple[str, int]] = field(default_factory=list[tuple[str, int]])
    by_error: list[tuple[str, int]] = field(default_factory=list[tuple[str, int]])
    by_hour: list[tuple[datetime, int]] = field(default_factory=list[tuple[datetime, int]])
    by_attempts: list[tuple[str, int]] = field(default_factory=list[tuple[str, int]])
    examples: list[tuple[str, str, str, str]] = field(
        default_factory=list[tuple[str, str, str, str]]
    )

    def as_dict(self) -> dict[str, object]:
        """Return the counts as values that can be encoded as JSON."""
        return {
            "channel": self.channel,
            "total": self.total,
            "reasons": dict(self.by_reason),
            "errors": dict(self.by_error),
            "hours": {hour.isoformat(): count for hour, count in self.by_hour},
        }


def report_of(letters: DataFrame, channel: str, made_at: datetime) -> Report:
    """Build the report of dead letters that were read with the option ``dead_letters``.

    Times are collected in seconds, because Spark converts timestamps to the local time zone.
    """
    letters = letters.selectExpr(
        "id",
        "reason",
        "coalesce(error_type, '(none)') as kind",
        "coalesce(substring(error, 1, 200), '') as text",
        "substring(make_valid_utf8(string(value)), 1, 200) as body",
        "concat(attempts, if(attempts = 1, ' attempt', ' attempts')) as attempts",
        "unix_seconds(last_failed_at) as at",
    ).cache()
    try:
        [(total, first, last)] = _rows(letters.selectExpr("count(*)", "min(at)", "max(at)"))
        hours = _rows(letters.selectExpr("at - at % 3600 as hour").groupBy("hour").count())
        return Report(
            channel=channel,
            made_at=made_at,
            total=total,
            first=_as_datetime(first),
            last=_as_datetime(last),
            by_reason=_counts(letters, "reason"),
            by_error=_counts(letters, "kind"),
            by_attempts=_counts(letters, "attempts"),
            by_hour=sorted((hour, count) for at, count in hours if (hour := _as_datetime(at))),
            examples=_latest(letters),
        )
    finally:
        letters.unpersist()


def _rows(frame: DataFrame) -> list[tuple[Any, ...]]:
    return [tuple(row) for row in frame.collect()]


def _as_datetime(seconds: int | None) -> datetime | None:
    return None if seconds is None else datetime.fromtimestamp(seconds, UTC)


def _counts(letters: DataFrame, column: str) -> list[tuple[str, int]]:
    found = [(str(what), int(count)) for what, count in _rows(letters.groupBy(column).count())]
    return sorted(found, key=lambda item: (-item[1], item[0]))


def _latest(letters: DataFrame) -> list[tuple[str, str, str, str]]:
    """Return id, error type, text and body of the latest dead letter of each frequent error."""
    found = (
        letters.groupBy("kind")
        .agg(expr("count(*) as number"), expr("max(struct(at, id, text, body)) as latest"))
        .orderBy("number", "kind", ascending=[False, True])
        .limit(MAX_EXAMPLES)
        .select("latest.id", "kind", "latest.text", "latest.body")
    )
    return [(str(id), str(kind), str(text), str(body)) for id, kind, text, body in _rows(found)]
