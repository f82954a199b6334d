"""HTML page of a report: a single file with charts and no scripts, for browsers and email."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta
from html import escape
from typing import Final

from qkit.spark.report import Report

__all__ = ["render_report"]

MAX_BARS: Final = 12  # in one bar chart
MIN_HOURS: Final = 24  # shown in the chart by hour
MAX_HOURS: Final = 168
HOUR: Final = timedelta(hours=1)


def render_report(report: Report) -> str:
    """Return the HTML page of a report; all text is escaped."""
    return f"""<!doctype html>
<html lang=en>
<meta charset=utf-8>
<meta name=viewport content="width=device-width">
<title>Dead letters of {escape(report.channel)}</title>
<style>{_STYLE}</style>
<header>
<p class=over>Dead letters of</p>
<h1>{escape(report.channel)}</h1>
<p>{_span(report)}created {_minute(report.made_at)} UTC</p>
</header>
<main>{_charts(report) if report.total else "<section>There are no dead letters.</section>"}</main>
</html>
"""


def _charts(report: Report) -> str:
    return f"""
<dl>{_tiles(report)}</dl>
<section class=wide><h2>By hour of the last failure</h2>{_hours(report.by_hour)}</section>
<section><h2>By error</h2>{_bars(report.by_error)}</section>
<section><h2>By reason</h2>{_bars(report.by_reason)}
<h2>By attempts</h2>{_bars(report.by_attempts)}</section>
<section class=wide><h2>Latest of each error</h2>{_examples(report.examples)}</section>
"""


def _span(report: Report) -> str:
    if report.first is None or report.last is None:
        return ""
    return f"{_minute(report.first)} to {_minute(report.last)} UTC · "


def _minute(time: datetime) -> str:
    return f"{time:%d %b %Y %H:%M}"


def _tiles(report: Report) -> str:
    error, count = report.by_error[0]
    tiles = [
        (f"{report.total:,}", "in total"),
        (escape(error), f"most frequent error, {_percent(count / report.total)}"),
    ]
    if report.by_hour:
        day = sum(count for hour, count in report.by_hour if hour > report.made_at - 24 * HOUR)
        hour, largest = max(report.by_hour, key=lambda item: item[1])
        tiles.insert(1, (f"{day:,}", "in the last 24 hours"))
        tiles.append((f"{largest:,}", f"worst hour, {hour:%d %b %H:00}"))
    return "".join(f"<div><dd>{value}<dt>{name}</div>" for value, name in tiles)


def _bars(counts: Sequence[tuple[str, int]]) -> str:
    shown = list(counts[:MAX_BARS])
    remaining = sum(count for _, count in counts[MAX_BARS:])
    if remaining:
        shown.append((f"{len(counts) - MAX_BARS} others", remaining))
    largest, total = max(count for _, count in shown), sum(count for _, count in counts)
    rows = "".join(
        f"<li><b>{escape(name)}</b><span>{count:,}</span><span>{_percent(count / total)}</span>"
        f"<i><i style='width:{100 * count / largest:.1f}%'></i></i>"
        for name, count in shown
    )
    return f"<ul>{rows}</ul>"


def _percent(part: float) -> str:
    return f"{100 * part:.0f} %" if part >= 0.005 else "&lt; 1 %"


def _hours(counts: Sequence[tuple[datetime, int]]) -> str:
    """Return the chart by hour, with a column for every hour, even one without dead letters."""
    if not counts:
        return "<p>No dead letter has a time of failure.</p>"
    by_hour = dict(counts)
    last = max(by_hour)
    count = min(max(MIN_HOURS, (last - min(by_hour)) // HOUR + 1), MAX_HOURS)
    hours = [last - HOUR * back for back in reversed(range(count))]
    top = _round_up(max(by_hour.get(hour, 0) for hour in hours))
    columns = "".join(
        f"<i style='height:{100 * by_hour[hour] / top:.1f}%' "
        f"title='{hour:%d %b %H:00}: {by_hour[hour]:,}'></i>"
        if hour in by_hour
        else "<i></i>"
        for hour in hours
    )
    step, label_format = (24, "%d %b") if count > 48 else (6, "%d %b %H:00")
    labels = "".join(
        f"<span style='left:{100 * at / count:.2f}%'>{hour.strftime(label_format)}</span>"
        for at, hour in enumerate(hours)
        if hour.hour % step == 0 and at < 0.93 * count  # a later label would be cut off
    )
    lines = "".join(
        f"<span style='bottom:{100 * part:.0f}%'>{top * part:,.0f}</span>" for part in (1, 0.5)
    )
    return (
        f"<div class=hours role=img aria-label='dead letters by hour'>"
        f"<div class=lines>{lines}</div><div class=columns>{columns}</div></div>"
        f"<div class=labels>{labels}</div>"
    )


def _round_up(number: int) -> int:
    """Return the upper end of a chart's scale for its largest value.

    >>> [_round_up(number) for number in (1, 7, 41, 130, 281, 2_000)]
    [2, 8, 60, 200, 400, 2000]
    """
    power: int = 10 ** (len(str(number)) - 1)
    return max(2, next(step * power for step in (1, 2, 4, 6, 8, 10) if step * power >= number))


def _examples(examples: Sequence[tuple[str, str, str, str]]) -> str:
    return "".join(
        f"<article><h3>{escape(kind)}</h3><p>{escape(text)}</p>"
        f"<pre>{escape(body)}</pre><code>{escape(id)}</code></article>"
        for id, kind, text, body in examples
    )


# The same colours as the dashboard.
_STYLE: Final = """
:root{color-scheme:light dark;--ground:#f5f6f8;--surface:#fff;--sunken:#f0f2f5;--line:#e1e5ea;
--ink:#151a22;--soft:#4d5867;--faint:#667182;--bar:#bd1f3a}
@media(prefers-color-scheme:dark){:root{--ground:#0d1015;--surface:#151920;--sunken:#1b2029;
--line:#272d38;--ink:#e9ecf1;--soft:#b0b8c4;--faint:#8d97a6;--bar:#ff7d8f}}
*{box-sizing:border-box;margin:0;padding:0;min-width:0}
html{background:var(--ground);color:var(--ink);
font:15px/1.5 ui-sans-serif,system-ui,-apple-system,"Segoe UI","Noto Sans",sans-serif}
header,main{max-width:1080px;margin:0 auto;padding:0 20px}
header{padding-top:36px;padding-bottom:24px;color:var(--faint)}
header .over{font-weight:600}
h1{color:var(--ink);font-size:32px;line-height:1.25;letter-spacing:-.02em;overflow-wrap:anywhere}
main{display:grid;grid-template-columns:1fr 1fr;gap:16px;padding-bottom:48px}
dl,.wide{grid-column:1/-1}
dl{display:grid;grid-template-columns:repeat(auto-fit,minmax(190px,1fr));gap:16px}
dl div,section{background:var(--surface);border:1px solid var(--line);border-radius:12px;
padding:20px}
dl div{padding:16px 20px}
dd{font-size:21px;font-weight:650;letter-spacing:-.02em;line-height:1.4;
font-variant-numeric:tabular-nums;overflow-wrap:anywhere}
dt{color:var(--faint);font-size:13px}
h2{font-size:15px;margin-bottom:14px}
ul+h2{margin-top:26px}
ul{list-style:none;display:grid;gap:12px}
li{display:grid;grid-template-columns:1fr auto 52px;gap:2px 6px;font-size:14px;align-items:end}
li b{font-weight:500;overflow-wrap:anywhere}
li span{text-align:right;font-variant-numeric:tabular-nums}
li span+span{color:var(--faint)}
li i{display:block;height:6px;border-radius:3px}
li>i{grid-column:1/-1;background:var(--sunken)}
li i i{background:var(--bar);min-width:3px}
.hours{position:relative;height:200px;margin-top:22px;border-bottom:1px solid var(--line)}
.lines span{position:absolute;left:0;right:0;border-bottom:1px solid var(--line);
color:var(--faint);font-size:12px;line-height:18px;font-variant-numeric:tabular-nums}
.columns{position:absolute;inset:0 0 0 44px;display:flex;align-items:end}
.columns i{flex:1;border-radius:2px 2px 0 0}
.columns i[title]{background:var(--bar);min-height:2px;margin-right:clamp(0px,12%,2px)}
.columns i:hover{opacity:.7}
.labels{position:relative;height:22px;margin-left:44px}
.labels span{position:absolute;top:4px;color:var(--faint);font-size:12px;white-space:nowrap}
article{padding:16px 0;border-top:1px solid var(--line)}
h2+article{border:0;padding-top:0}
article:last-child{padding-bottom:0}
h3{font-size:14px;overflow-wrap:anywhere}
article p{color:var(--soft);overflow-wrap:anywhere}
pre{background:var(--sunken);border-radius:8px;padding:10px 12px;margin:8px 0 6px;
white-space:pre-wrap;overflow-wrap:anywhere}
pre,code{font:12.5px/1.5 ui-monospace,"SF Mono","DejaVu Sans Mono",monospace}
code{color:var(--faint)}
@media(max-width:700px){main{grid-template-columns:1fr}dl{grid-template-columns:1fr 1fr}
.labels span:nth-child(even){display:none}}
"""
