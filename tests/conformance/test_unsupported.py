"""Each optional feature raises ``Unsupported`` on a backend that has none of them."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from typing import ClassVar

import pytest_asyncio

from qkit._internal.clock import Clock
from qkit.backend import Backend, Capabilities, Delivery, QueueSpec, Subscription
from qkit.backends.native.backend import NativeBackend
from qkit.conformance import NewBackend
from qkit.conformance.fault_injection import FaultInjectingBackend
from qkit.conformance.unsupported import ROWS, UnsupportedFeatures
from qkit.errors import Unsupported
from qkit.message import Envelope, Sent
from qkit.native import Engine
from qkit.settings.model import SettingsValues


class BareBackend(FaultInjectingBackend):
    """Native backend that declares no optional feature."""

    def __init__(self, inner: Backend) -> None:
        super().__init__(inner)
        self.name = "bare"
        self.capabilities = Capabilities()

    async def declare(self, spec: QueueSpec) -> None:
        used = (spec.broadcast, spec.max_priority, spec.ack_deadline, spec.replicas > 1)
        assert not any(used), f"{spec} uses an unsupported feature"
        await super().declare(spec)

    async def publish(self, queue: str, envelopes: Sequence[Envelope]) -> list[Sent]:
        return [Sent(sent.message_id) for sent in await super().publish(queue, envelopes)]

    async def extend(self, subscription: Subscription, delivery: Delivery, seconds: float) -> None:
        raise Unsupported("this backend has no leases")


class TestBackendWithoutOptionalFeatures(UnsupportedFeatures):
    column = Capabilities()
    virtual_time = True
    # RabbitMQ settings allow every option, so only the capabilities can cause errors.
    settings: ClassVar[SettingsValues] = {"type": "rabbitmq", "url": "amqp://localhost/"}

    @pytest_asyncio.fixture
    async def new_backend(self, clock: Clock) -> AsyncGenerator[NewBackend, None]:
        async with Engine(clock=clock) as engine:
            yield lambda: BareBackend(NativeBackend(engine=engine))


def test_every_feature_that_a_caller_can_request_has_a_row() -> None:
    reported = {"durable", "position"}  # callers read these in Health and Sent
    reported |= {"queues"}  # without queues, every channel is a topic
    guaranteed = {"redelivery", "counts_crashes"}  # properties of every delivery
    guaranteed |= {"key_lock"}  # without it, a service with ordered=True logs the limit and starts
    assert {row.feature for row in ROWS} == set(Capabilities().as_dict()) - reported - guaranteed
