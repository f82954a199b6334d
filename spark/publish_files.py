"""Publish the rows of files: Parquet, JSON lines or CSV to a channel."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from qkit.spark import write
from qkit.spark.job import add_channel, parser, plan_from, session, told
from qkit.spark.options import METADATA

EXAMPLE = (
    "spark-submit spark/publish_files.py orders/*.parquet --channel orders --set type=native "
    "--set path=data --job-id orders-2026-11-16"
)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the job."""
    options = parser(__doc__ or "", EXAMPLE)
    options.add_argument("files", nargs="+", help="files or directories")
    add_channel(options)
    options.add_argument("--format", choices=["parquet", "json", "csv"], default="parquet")
    options.add_argument("--schema", help="of JSON or CSV, as in SQL: 'id long, total double'")
    options.add_argument("--model", help="validate each row: package.module:Class")
    options.add_argument("--on-invalid", choices=["fail", "dead_letter"], default="fail")
    options.add_argument("--job-id", help="on native: a job of this name is published once")
    for name in METADATA:
        options.add_argument(f"--{name}", metavar="COLUMN", help=f"the column with the {name}")
    given = options.parse_args(arguments)
    with told():
        plan = plan_from(given)
        more = {"model": given.model, "on_invalid": given.on_invalid, "job_id": given.job_id}
        more |= {name: getattr(given, name) for name in METADATA}
        with session(f"publish {given.channel}") as spark:
            reader = spark.read.format(given.format)
            if given.format == "csv":
                reader = reader.options(header=True, inferSchema=given.schema is None)
            if given.schema:
                reader = reader.schema(given.schema)
            chosen = {name: value for name, value in more.items() if value is not None}
            written = write(reader.load(given.files), plan.channel, plan.settings, **chosen)
    count = "all rows as" if written.messages is None else written.messages
    print(f"{count} messages to {plan.channel}, {written.dead_letters} dead letters")


if __name__ == "__main__":
    main(sys.argv[1:])
