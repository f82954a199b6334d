"""Dead letters as a page: counts by reason, error and hour, with charts and no script."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from html import escape
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

__all__ = ["Report", "page", "report_of"]

TOP: Final = 12  # rows of a chart
HOURS: Final = 168  # columns of the chart by hour: a week


@dataclass(slots=True)
class Report:
    """What there is to tell of a channel's dead letters."""

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
        """For programs."""
        return {
            "channel": self.channel,
            "total": self.total,
            "reasons": dict(self.by_reason),
            "errors": dict(self.by_error),
            "hours": {hour.isoformat(): count for hour, count in self.by_hour},
        }


def report_of(letters: DataFrame, channel: str, made_at: datetime) -> Report:
    """Count them; ``letters`` has the columns of a read with ``dead_letters``."""
    letters = letters.cache()
    try:
        row = letters.selectExpr(
            "count(*) as total", "min(last_failed_at) as first", "max(last_failed_at) as last"
        ).collect()[0]
        return Report(
            channel=channel,
            made_at=made_at,
            total=row["total"],
            first=row["first"],
            last=row["last"],
            by_reason=_counts(letters, "reason"),
            by_error=_counts(letters, "coalesce(error_type, '(none)')"),
            by_attempts=_counts(
                letters, "concat(attempts, if(attempts = 1, ' attempt', ' attempts'))"
            ),
            by_hour=sorted(_hours(letters)),
            examples=[
                (str(row[0]), str(row[1]), str(row[2] or ""), str(row[3] or ""))
                for row in letters.selectExpr(
                    "id",
                    "error_type",
                    "substring(error, 1, 200)",
                    "substring(decode(value, 'UTF-8'), 1, 200)",
                )
                .dropDuplicates(["error_type"])
                .orderBy("error_type")
                .limit(TOP)
                .collect()
            ],
        )
    finally:
        letters.unpersist()


def _counts(letters: DataFrame, expression: str) -> list[tuple[str, int]]:
    found = letters.selectExpr(f"{expression} as what").groupBy("what").count().collect()
    return sorted(
        ((str(row[0]), int(row[1])) for row in found), key=lambda item: (-item[1], item[0])
    )


def _hours(letters: DataFrame) -> list[tuple[datetime, int]]:
    found = letters.selectExpr("date_trunc('hour', last_failed_at) as hour").groupBy("hour").count()
    return [(row[0], int(row[1])) for row in found.collect()]


def page(report: Report) -> str:
    """The page; every text in it is escaped."""
    span = (
        ""
        if report.first is None
        else f"{report.first:%Y-%m-%d %H:%M} to {report.last:%Y-%m-%d %H:%M} UTC"
    )
    body = "<p class=none>There are no dead letters.</p>"
    if report.total:
        body = f"""
<div><section><h2>By reason</h2>{_bars(report.by_reason)}</section>
<section><h2>By attempts</h2>{_bars(report.by_attempts)}</section></div>
<section><h2>By error</h2>{_bars(report.by_error)}</section>
<section class=wide><h2>By hour of the last failure</h2>{_columns(report.by_hour)}</section>
<section class=wide><h2>An example of each error</h2>{_examples(report.examples)}</section>"""
    return f"""<!doctype html>
<html lang=en><meta charset=utf-8><meta name=viewport content="width=device-width">
<title>Dead letters of {escape(report.channel)}</title>
<style>{_STYLE}</style>
<header><h1>Dead letters of <code>{escape(report.channel)}</code></h1>
<p><b>{report.total:,}</b> in all · {escape(span)} · made {report.made_at:%Y-%m-%d %H:%M} UTC</p>
</header>
<main>{body}</main>
</html>
"""


def _bars(counts: Sequence[tuple[str, int]]) -> str:
    shown = list(counts[:TOP])
    rest = sum(count for _, count in counts[TOP:])
    if rest:
        shown.append((f"{len(counts) - TOP} others", rest))
    most, all_ = max(count for _, count in shown), sum(count for _, count in counts)
    rows = "".join(
        f"<tr><th>{escape(name)}<td class=bar><i style='width:{100 * count / most:.1f}%'></i>"
        f"<td>{count:,}<td class=part>{_percent(count / all_)}"
        for name, count in shown
    )
    return f"<table>{rows}</table>"


def _percent(part: float) -> str:
    return f"{100 * part:.0f} %" if part >= 0.005 else "&lt; 1 %"


def _columns(counts: Sequence[tuple[datetime, int]]) -> str:
    """A column for each hour, also for those without any; the last week of them."""
    by_hour = dict(counts)
    last = max(by_hour)
    first = max(min(by_hour), last - timedelta(hours=HOURS - 1))
    hours = [
        first + timedelta(hours=at) for at in range(int((last - first).total_seconds()) // 3600 + 1)
    ]
    most = max(by_hour.values())
    width, height, step = 960, 180, 960 / max(24, len(hours))
    columns = "".join(
        f"<rect x='{at * step:.1f}' y='{height - height * count / most:.1f}' "
        f"width='{max(1.0, step - 2):.1f}' height='{height * count / most:.1f}'>"
        f"<title>{hour:%Y-%m-%d %H:00}: {count:,}</title></rect>"
        for at, hour in enumerate(hours)
        if (count := by_hour.get(hour, 0))
    )
    every = max(1, len(hours) // 8)
    labels = "".join(
        f"<text x='{at * step:.1f}' y='{height + 18}'>{hour:%d %b %H:00}</text>"
        for at, hour in enumerate(hours)
        if at % every == 0
    )
    scale = f"<text class=most x='{width}' y='12' text-anchor=end>most: {most:,} in an hour</text>"
    line = f"<line x1=0 x2='{width}' y1='{height}' y2='{height}' />"
    return f"<svg viewBox='0 0 {width} {height + 26}' role=img>{columns}{line}{labels}{scale}</svg>"


def _examples(examples: Sequence[tuple[str, str, str, str]]) -> str:
    rows = "".join(
        f"<tr><th>{escape(kind)}<td>{escape(text)}<td><code>{escape(body)}</code>"
        f"<td><code>{escape(id)}</code>"
        for id, kind, text, body in examples
    )
    return f"<table class=examples><tr><th>error<th>text<th>body<th>id{rows}</table>"


_STYLE: Final = """
:root{color-scheme:light dark;
--ink:#1d2733;--soft:#66717f;--line:#dfe4ea;--page:#f6f7f9;--card:#fff;--bar:#c2410c}
@media(prefers-color-scheme:dark){:root{
--ink:#e6eaf0;--soft:#98a3b3;--line:#2c3541;--page:#12161c;--card:#1a2029;--bar:#fb923c}}
*{box-sizing:border-box}
body{margin:0}
html{background:var(--page);color:var(--ink);font:15px/1.45 system-ui,sans-serif}
header,main{max-width:1040px;margin:0 auto;padding:0 20px}
header{padding-top:28px}
h1{font-size:24px;margin:0}
h2{font-size:15px;margin:0 0 10px}
header p{color:var(--soft);margin:6px 0 20px}
header b{color:var(--ink)}
main{display:grid;grid-template-columns:1fr 1fr;gap:16px;padding-bottom:40px}
section{background:var(--card);border:1px solid var(--line);
border-radius:8px;padding:16px;min-width:0}
main>div{display:grid;gap:16px;align-content:start}
.wide{grid-column:1/-1}
table{width:100%;border-collapse:collapse;font-size:13px}
th{text-align:left;font-weight:500;padding:4px 10px 4px 0;overflow-wrap:anywhere}
td{text-align:right;padding:4px 0 4px 8px;font-variant-numeric:tabular-nums;white-space:nowrap}
td.bar{width:45%}
td.bar i{display:block;height:12px;border-radius:3px;background:var(--bar)}
.part{color:var(--soft)}
svg{width:100%;height:auto;display:block}
rect{fill:var(--bar)}
line{stroke:var(--line)}
text{fill:var(--soft);font-size:11px}
.examples td{text-align:left;white-space:normal;overflow-wrap:anywhere;vertical-align:top}
.examples td,.examples th{padding:6px 16px 6px 0}
.examples th{white-space:nowrap;vertical-align:top}
.examples tr{border-top:1px solid var(--line)}
.examples tr:first-child{border:0;color:var(--soft)}
code{font:12px ui-monospace,monospace}
h1 code{font-size:22px}
.none{color:var(--soft)}
@media(max-width:700px){main{grid-template-columns:1fr}}
"""
