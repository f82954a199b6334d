"""Helpers for tests without a Spark session: services, and the rows of staging files."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from qkit import SyncQueueService
from qkit.spark import staging
from qkit.spark.options import parse_options
from qkit.spark.staging import StageFile

BROKERS = ["redis", "rabbitmq", "kafka", "native"]


@contextmanager
def service_of(options: Mapping[str, str]) -> Iterator[SyncQueueService]:
    with SyncQueueService(parse_options(options).settings) as service:
        yield service


def rows(files: list[list[StageFile]]) -> list[dict[str, Any]]:
    return [row for names in files for batch in staging.read(names) for row in batch.to_pylist()]


def values(found: list[dict[str, Any]]) -> list[int]:
    return [json.loads(row["value"]) for row in found]
