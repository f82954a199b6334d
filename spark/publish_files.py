"""Publish the rows of Parquet, JSON lines or CSV files to a channel."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from pyspark.sql import DataFrame, SparkSession

from qkit.spark import write
from qkit.spark.job import add_channel, options_of, parser, report_errors, session
from qkit.spark.options import METADATA, OPTIONS, parse_options

EXAMPLE = (
    "spark-submit spark/publish_files.py orders/*.parquet --channel orders --set type=native "
    "--set path=data --job-id orders-2026-11-16"
)


def main(arguments: Sequence[str] | None = None) -> None:
    """Parse the arguments and run the job."""
    options = parser(__doc__ or "", EXAMPLE)
    options.add_argument("files", nargs="+", help="files or directories to publish")
    add_channel(options)
    options.add_argument(
        "--format",
        choices=["parquet", "json", "csv"],
        default="parquet",
        help="format of the files (default: parquet)",
    )
    options.add_argument(
        "--schema", help="schema of JSON or CSV files, as in SQL: 'id long, total double'"
    )
    options.add_argument("--model", metavar="MODULE:CLASS", help="validate each row with this type")
    options.add_argument(
        "--on-invalid",
        choices=["fail", "dead_letter"],
        help="fail the job on an invalid row (default), or dead-letter the row",
    )
    options.add_argument(
        "--on-unheard",
        choices=["fail", "warn"],
        help="Redis pub/sub: fail if a message has no subscriber (default), or only warn",
    )
    options.add_argument(
        "--job-id",
        metavar="NAME",
        help="native: publish a job with this name only once to this channel",
    )
    for name in METADATA:
        options.add_argument(f"--{name}", metavar="COLUMN", help=f"column that holds the {name}")
    given = options.parse_args(arguments)
    columns = {name: getattr(given, name) for name in METADATA}
    chosen = options_of(
        given,
        model=given.model,
        on_invalid=given.on_invalid,
        on_unheard=given.on_unheard,
        job_id=given.job_id,
        **columns,
    )
    with report_errors():
        plan = parse_options(chosen)
        with session(f"publish {given.channel}") as spark:
            rows = load(spark, given.files, given.format, given.schema)
            own = {name: value for name, value in chosen.items() if name in OPTIONS - {"config"}}
            written = write(rows, settings=plan.settings, **own)
    messages = "all rows as" if written.messages is None else written.messages
    print(f"{messages} messages to {plan.channel}, {written.dead_letters} dead letters")
    if written.skipped:
        print(
            f"{written.skipped} rows were not written: job {written.job} was already published to "
            f"{plan.channel}"
        )
    if written.unheard:
        print(f"{written.unheard} messages had no subscriber and are lost", file=sys.stderr)


def load(spark: SparkSession, files: list[str], file_format: str, schema: str | None) -> DataFrame:
    """Return the rows of the files; the first line of a CSV file names its columns."""
    reader = spark.read.format(file_format)
    if file_format == "csv":
        reader = reader.options(header=True, inferSchema=schema is None)
    if schema is not None:
        reader = reader.schema(schema)
    return reader.load(files)


if __name__ == "__main__":
    main(sys.argv[1:])
