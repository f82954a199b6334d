"""``write``: a DataFrame to a channel in one call, by the quickest way, with its counts."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from pydantic import BaseModel, SecretStr

from qkit.settings.model import Settings
from qkit.spark.kafka_connector import connector_options, has_connector, kafka_frame, suits
from qkit.spark.options import Plan, absolute, plan_of
from qkit.spark.source import QkitDataSource
from qkit.spark.task_sender import TaskSender

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

__all__ = ["Written", "as_options", "write"]


class Written(NamedTuple):
    """What a write came to.

    Attributes:
        messages: How many messages this run wrote; ``None`` where Spark's own Kafka connector
            wrote them, which does not count.
        dead_letters: How many rows became dead letters.
        job: The name of the job; on native it is published at once.
        skipped: How many rows this run did not write, because the same ``job_id`` was published
            to this channel before; then ``messages`` and ``dead_letters`` are 0.
        unheard: How many messages no subscriber received, on Redis pub/sub with
            ``on_unheard="warn"``.
    """

    messages: int | None
    dead_letters: int = 0
    job: str | None = None
    skipped: int = 0
    unheard: int = 0


def write(df: DataFrame, channel: str, settings: Settings, **options: str) -> Written:
    """Send every row; ``options`` are those of ``format("qkit")``, such as ``model`` or ``key``.

    To Kafka it takes Spark's own connector if that is on the class path and can do what is asked.
    Raises what Spark makes of a task's error.
    """
    settings.require_mode()
    chosen = {**as_options(settings), **options, "channel": channel}
    plan = plan_of(chosen)
    chosen = absolute(chosen, plan)
    if suits(settings, options, df.columns) and has_connector(df.sparkSession):
        return _by_connector(df, plan)
    df.sparkSession.dataSource.register(QkitDataSource)
    with tempfile.TemporaryDirectory() as directory:
        report = Path(directory, "report.json")
        df.write.format("qkit").mode("append").options(**chosen, report=str(report)).save()
        if not report.exists():  # there was no task
            return Written(0)
        told = json.loads(report.read_text())
    return Written(
        told["messages"], told["dead_letters"], told["job"], told["skipped"], told["unheard"]
    )


def _by_connector(df: DataFrame, plan: Plan) -> Written:
    sender = TaskSender(plan.settings)
    sender.route(plan.channel, broadcast=plan.broadcast)
    sender.open().close()  # declares the channel
    ready = kafka_frame(df, plan.channel, settings=plan.settings, **plan.columns)
    ready.write.format("kafka").options(**connector_options(plan.settings)).save()
    return Written(None)  # an Observation of this write would never be told


def as_options(settings: Settings) -> dict[str, str]:
    """Settings as the options that mean the same.

    >>> as_options(Settings(type="native", path="data", retry={"max_attempts": 5}))
    {'type': 'native', 'retry.max_attempts': '5', 'path': 'data'}
    """
    return {"type": settings.type} | dict(_differing(settings, ""))


def _differing(section: BaseModel, prefix: str) -> Iterator[tuple[str, str]]:
    for name, info in type(section).model_fields.items():
        value = getattr(section, name)
        if isinstance(value, BaseModel):
            yield from _differing(value, f"{name}.")
        elif value is not None and value != info.get_default(call_default_factory=True):
            shown = value.get_secret_value() if isinstance(value, SecretStr) else str(value)
            yield prefix + name, shown
