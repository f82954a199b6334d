"""Report a channel's dead letters by reason, error and hour, as an HTML page with charts."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from qkit.spark.job import add_channel, options_of, parser, report_errors, session
from qkit.spark.options import parse_options, with_absolute_paths
from qkit.spark.report import report_of
from qkit.spark.report_html import render_report

EXAMPLE = (
    "spark-submit spark/dead_letter_report.py --channel orders --config qkit.toml "
    "--output orders.html"
)


def main(arguments: Sequence[str] | None = None) -> None:
    """Parse the arguments and run the job."""
    options = parser(__doc__ or "", EXAMPLE)
    add_channel(options)
    options.add_argument(
        "--output", required=True, type=Path, metavar="FILE", help="HTML file to write"
    )
    options.add_argument(
        "--json", type=Path, metavar="FILE", help="write the counts to this file as JSON"
    )
    given = options.parse_args(arguments)
    chosen = options_of(given, dead_letters="true")
    with report_errors():
        chosen = with_absolute_paths(chosen, parse_options(chosen))
        with session(f"report {given.channel}") as spark:
            letters = spark.read.format("qkit").options(**chosen).load()
            report = report_of(letters, given.channel, datetime.now(UTC))
        given.output.write_text(render_report(report))
        if given.json:
            given.json.write_text(json.dumps(report.as_dict(), indent=2) + "\n")
    print(f"{report.total} dead letters of {given.channel}: {given.output}")


if __name__ == "__main__":
    main(sys.argv[1:])
