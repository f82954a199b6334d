"""Publish the rows of files: Parquet, JSON lines or CSV to a channel."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from pyspark.sql import DataFrame, SparkSession

from qkit.spark import write
from qkit.spark.job import add_channel, options_of, parser, report_errors, session
from qkit.spark.options import METADATA, OPTIONS, plan_of

EXAMPLE = (
    "spark-submit spark/publish_files.py orders/*.parquet --channel orders --set type=native "
    "--set path=data --job-id orders-2026-11-16"
)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the job."""
    options = parser(__doc__ or "", EXAMPLE)
    options.add_argument("files", nargs="+", help="files or directories")
    add_channel(options)
    options.add_argument(
        "--format",
        choices=["parquet", "json", "csv"],
        default="parquet",
        help="of the files (parquet)",
    )
    options.add_argument("--schema", help="of JSON or CSV, as in SQL: 'id long, total double'")
    options.add_argument("--model", metavar="MODULE:CLASS", help="validate each row with this type")
    options.add_argument(
        "--on-invalid",
        choices=["fail", "dead_letter"],
        help="a row that is not valid fails the job (the default), or is a dead letter",
    )
    options.add_argument(
        "--on-unheard",
        choices=["fail", "warn"],
        help="on Redis pub/sub, a message without a subscriber fails the job (the default), or is "
        "counted",
    )
    options.add_argument(
        "--job-id",
        metavar="NAME",
        help="on native: a job of this name is published once to this channel",
    )
    for name in METADATA:
        options.add_argument(f"--{name}", metavar="COLUMN", help=f"the column with the {name}")
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
        plan = plan_of(chosen)
        with session(f"publish {given.channel}") as spark:
            rows = load(spark, given.files, given.format, given.schema)
            own = {name: value for name, value in chosen.items() if name in OPTIONS - {"config"}}
            written = write(rows, settings=plan.settings, **own)
    number = "all rows as" if written.messages is None else written.messages
    print(f"{number} messages to {plan.channel}, {written.dead_letters} dead letters")
    if written.skipped:
        print(
            f"{written.skipped} rows were not written: job {written.job} was published to "
            f"{plan.channel} before"
        )
    if written.unheard:
        print(f"{written.unheard} messages had no subscriber and are lost", file=sys.stderr)


def load(spark: SparkSession, files: list[str], form: str, schema: str | None) -> DataFrame:
    """The rows; the first line of a CSV file names its columns."""
    reader = spark.read.format(form)
    if form == "csv":
        reader = reader.options(header=True, inferSchema=schema is None)
    if schema is not None:
        reader = reader.schema(schema)
    return reader.load(files)


if __name__ == "__main__":
    main(sys.argv[1:])
