"""HTML page of a dead-letter report."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from qkit.spark.report import Report
from qkit.spark.report_html import render_report


def test_texts_are_escaped_and_every_hour_has_a_column() -> None:
    hour = datetime(2026, 11, 16, 8, tzinfo=UTC)
    report = Report(
        channel="orders",
        made_at=hour,
        total=20,
        first=hour,
        last=hour + timedelta(hours=3),
        by_reason=[("<script>alert(1)</script>", 20)],
        by_error=[(f"Error{number}", 1) for number in range(20)],
        by_attempts=[("3 attempts", 20)],
        by_hour=[(hour, 5), (hour + timedelta(hours=3), 15)],
        examples=[("0190", "Error0", "<b>", '{"id": 1}')],
    )
    text = render_report(report)
    assert "<script" not in text
    assert "&lt;script&gt;" in text
    assert "16 Nov 08:00: 5'" in text
    assert "16 Nov 11:00: 15'" in text
    assert text.count("<i></i>") == 24 - 2, "the chart covers less than a day"
    assert "8 others" in text
    assert "There are no dead letters" in render_report(Report(channel="orders", made_at=hour))
    report.by_hour = []
    assert "No dead letter has a time" in render_report(report)
