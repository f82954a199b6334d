"""Service settings for each backend, for tests that run on all backends."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from qkit import Settings

__all__ = ["BACKENDS", "NAMES", "GetFixture"]

GetFixture = Callable[[str], Any]
RETRY = {"initial_delay": 0.05, "jitter": 0}

# For each backend, its OpenTelemetry ``messaging.system`` and a function that returns the settings,
# given a function that returns a fixture by name.
BACKENDS: dict[str, tuple[str, Callable[[GetFixture], Settings]]] = {
    "native": ("qkit", lambda fixture: Settings(type="native", retry=RETRY)),
    "native on disk": (
        "qkit",
        lambda fixture: Settings(type="native", path=fixture("tmp_path") / "data", retry=RETRY),
    ),
    "redis list": (
        "redis",
        lambda fixture: Settings(type="redis", mode="list", url=fixture("redis_url"), retry=RETRY),
    ),
    "redis pub/sub": (
        "redis",
        lambda fixture: Settings(
            type="redis", mode="pubsub", url=fixture("redis_url"), retry=RETRY
        ),
    ),
    "rabbitmq": (
        "rabbitmq",
        lambda fixture: Settings(type="rabbitmq", url=fixture("rabbitmq_url"), retry=RETRY),
    ),
    "kafka": (
        "kafka",
        lambda fixture: Settings(type="kafka", url=fixture("kafka_url"), retry=RETRY),
    ),
}

# Values for ``params=``. The marks are explicit because the collection hook that adds them cannot
# see fixtures that a test requests at run time.
NAMES = [
    name if system == "qkit" else pytest.param(name, marks=pytest.mark.broker)
    for name, (system, _) in BACKENDS.items()
]
