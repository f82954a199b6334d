"""``write``: a DataFrame to a channel in one call, by the quickest way, with its counts."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from pydantic import BaseModel, SecretStr

from qkit.config import Settings
from qkit.spark.options import plan_of
from qkit.spark.source import QkitDataSource

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

__all__ = ["Written", "as_options", "write"]


class Written(NamedTuple):
    """What a write came to. ``job`` names it where it is published at once, on native."""

    messages: int
    dead_letters: int = 0
    job: str | None = None


def write(df: DataFrame, channel: str, settings: Settings, **options: str) -> Written:
    """Send every row; ``options`` are those of ``format("qkit")``, such as ``model`` or ``key``.

    Raises what Spark makes of a task's error.
    """
    chosen = {**as_options(settings), **options, "channel": channel}
    plan_of(chosen)
    df.sparkSession.dataSource.register(QkitDataSource)
    with tempfile.TemporaryDirectory() as directory:
        report = Path(directory, "report.json")
        df.write.format("qkit").mode("append").options(**chosen, report=str(report)).save()
        if not report.exists():  # there was no task
            return Written(0)
        told = json.loads(report.read_text())
    return Written(told["messages"], told["dead_letters"], told["job"])


def as_options(settings: Settings) -> dict[str, str]:
    """Settings as the options that mean the same.

    >>> as_options(Settings(type="native", path="data", retry={"max_attempts": 5}))
    {'type': 'native', 'path': 'data', 'retry.max_attempts': '5'}
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
