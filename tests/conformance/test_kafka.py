"""Conformance suite on a real Kafka server."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import ClassVar

import pytest_asyncio

from qkit._internal.clock import Clock
from qkit.backends.kafka.backend import KafkaBackend
from qkit.conformance import MATRIX, Conformance, NewBackend
from qkit.settings.model import SettingsValues


class TestKafka(Conformance):
    column = MATRIX["kafka"]
    settings: ClassVar[SettingsValues] = {
        "type": "kafka",
        "url": "localhost:9092",  # unused: the fixture creates the backends
    }

    @pytest_asyncio.fixture
    async def new_backend(  # type: ignore[override]  # fixtures may have more arguments
        self, clock: Clock, kafka_url: str
    ) -> AsyncGenerator[NewBackend, None]:
        yield lambda: KafkaBackend(kafka_url, clock=clock, partitions=4, heartbeat=0.2)
