"""``write``: send a DataFrame to a channel in one call and return the counts."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from pydantic import BaseModel, SecretStr

from qkit.settings.model import Settings
from qkit.spark.kafka_connector import (
    connector_options,
    connector_supports,
    has_connector,
    kafka_frame,
)
from qkit.spark.options import Plan, parse_options, with_absolute_paths
from qkit.spark.source import QkitDataSource
from qkit.spark.task_sender import TaskSender

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

__all__ = ["Written", "as_options", "write"]


class Written(NamedTuple):
    """Result of ``write``.

    Attributes:
        messages: Number of messages that this run wrote; ``None`` if Spark's own Kafka connector
            wrote them, because it reports no counts.
        dead_letters: Number of rows that became dead letters.
        job: Name of the job: the ``job_id`` if it was set. ``None`` if there was no task, or if
            the Kafka connector wrote the messages.
        skipped: Number of rows that this run did not write because the same ``job_id`` was
            already published to this channel; ``messages`` and ``dead_letters`` are then 0.
        unheard: Number of messages that no subscriber received, on Redis pub/sub with
            ``on_unheard="warn"``.

    Example:
        >>> Written(messages=1_000, job="load-1")
        Written(messages=1000, dead_letters=0, job='load-1', skipped=0, unheard=0)
    """

    messages: int | None
    dead_letters: int = 0
    job: str | None = None
    skipped: int = 0
    unheard: int = 0


def write(df: DataFrame, channel: str, settings: Settings, **options: str) -> Written:
    """Send every row of a DataFrame to a channel, and wait until all are written.

    For Kafka, Spark's own connector is used if it is on the class path and supports the options.

    Args:
        df: The rows. All columns together form the JSON body, unless there is a column ``value``.
        channel: The queue or topic.
        settings: The settings of the backend.
        options: Further options of ``format("qkit")``, such as ``model``, ``key`` or ``job_id``.

    Returns:
        The counts of this run.

    Raises:
        ConfigError: A setting or an option is invalid.
        pyspark.errors.PySparkException: A task failed; the message contains the task's error.

    Example:
        >>> from qkit import Settings
        >>> settings = Settings(type="native", path=directory)  # doctest: +SKIP
        >>> qkit.spark.write(spark.range(3), "orders", settings).messages  # doctest: +SKIP
        3
    """
    settings.require_mode()
    chosen = {**as_options(settings), **options, "channel": channel}
    plan = parse_options(chosen)
    chosen = with_absolute_paths(chosen, plan)
    if connector_supports(settings, options, df.columns) and has_connector(df.sparkSession):
        return _write_with_connector(df, plan)
    df.sparkSession.dataSource.register(QkitDataSource)
    with tempfile.TemporaryDirectory() as directory:
        report = Path(directory, "report.json")
        df.write.format("qkit").mode("append").options(**chosen, report=str(report)).save()
        if not report.exists():  # there was no task
            return Written(0)
        counts = json.loads(report.read_text())
    return Written(
        counts["messages"],
        counts["dead_letters"],
        counts["job"],
        counts["skipped"],
        counts["unheard"],
    )


def _write_with_connector(df: DataFrame, plan: Plan) -> Written:
    sender = TaskSender(plan.settings)
    sender.route(plan.channel, broadcast=plan.broadcast)
    sender.open().close()  # declares the channel
    ready = kafka_frame(df, plan.channel, settings=plan.settings, **plan.columns)
    ready.write.format("kafka").options(**connector_options(plan.settings)).save()
    return Written(None)  # the connector reports no counts, not even to a Spark Observation


def as_options(settings: Settings) -> dict[str, str]:
    """Return the settings that differ from their defaults as options.

    >>> as_options(Settings(type="native", path="data", retry={"max_attempts": 5}))
    {'type': 'native', 'retry.max_attempts': '5', 'path': 'data'}
    """
    return {"type": settings.type} | dict(_non_defaults(settings, ""))


def _non_defaults(section: BaseModel, prefix: str) -> Iterator[tuple[str, str]]:
    for name, info in type(section).model_fields.items():
        value = getattr(section, name)
        if isinstance(value, BaseModel):
            yield from _non_defaults(value, f"{name}.")
        elif value is not None and value != info.get_default(call_default_factory=True):
            shown = value.get_secret_value() if isinstance(value, SecretStr) else str(value)
            yield prefix + name, shown
