"""Settings for a service on each backend, for tests of what stands above all of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from qkit import Settings

__all__ = ["BACKENDS", "NAMES", "Ask"]

Ask = Callable[[str], Any]
RETRY = {"initial_delay": 0.05, "jitter": 0}

# What the conventions of OpenTelemetry call it, and how to open it with the fixtures of a test.
# Another backend is another entry.
BACKENDS: dict[str, tuple[str, Callable[[Ask], Settings]]] = {
    "native": ("qkit", lambda ask: Settings(type="native", retry=RETRY)),
    "native on disk": (
        "qkit",
        lambda ask: Settings(type="native", path=ask("tmp_path") / "data", retry=RETRY),
    ),
    "redis list": (
        "redis",
        lambda ask: Settings(type="redis", mode="list", url=ask("redis_url"), retry=RETRY),
    ),
    "redis pub/sub": (
        "redis",
        lambda ask: Settings(type="redis", mode="pubsub", url=ask("redis_url"), retry=RETRY),
    ),
    "rabbitmq": (
        "rabbitmq",
        lambda ask: Settings(type="rabbitmq", url=ask("rabbitmq_url"), retry=RETRY),
    ),
    "kafka": (
        "kafka",
        lambda ask: Settings(type="kafka", url=ask("kafka_url"), retry=RETRY),
    ),
}

# For ``params=``: no hook sees a fixture that is named only when the test runs.
NAMES = [
    name if system == "qkit" else pytest.param(name, marks=pytest.mark.broker)
    for name, (system, _) in BACKENDS.items()
]
