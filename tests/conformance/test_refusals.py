"""A backend that can do nothing beyond the boundary: every refusal of the contract is proven."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from typing import ClassVar

import pytest_asyncio

from qkit._internal.clock import Clock
from qkit.backend import Backend, Capabilities, Delivery, QueueSpec, Subscription
from qkit.backends.native.backend import NativeBackend
from qkit.conformance import NewBackend
from qkit.conformance.fault_injection import FaultInjectingBackend
from qkit.conformance.refusals import ROWS, Refusals
from qkit.errors import Unsupported
from qkit.message import Envelope, Sent
from qkit.native import Engine
from qkit.settings.model import SettingsValues


class Bare(FaultInjectingBackend):
    """The native engine with every feature taken away."""

    def __init__(self, inner: Backend) -> None:
        super().__init__(inner)
        self.name = "bare"
        self.capabilities = Capabilities()

    async def declare(self, spec: QueueSpec) -> None:
        asked = (spec.broadcast, spec.max_priority, spec.ack_deadline, spec.replicas > 1)
        assert not any(asked), f"{spec} asks for what the backend cannot do"
        await super().declare(spec)

    async def publish(self, queue: str, envelopes: Sequence[Envelope]) -> list[Sent]:
        return [Sent(sent.message_id) for sent in await super().publish(queue, envelopes)]

    async def extend(self, subscription: Subscription, delivery: Delivery, seconds: float) -> None:
        raise Unsupported("there are no leases")


class TestABackendThatLacksEverything(Refusals):
    column = Capabilities()
    virtual_time = True
    # A type whose settings allow everything: what is refused is refused for the capabilities.
    settings: ClassVar[SettingsValues] = {"type": "rabbitmq", "url": "amqp://localhost/"}

    @pytest_asyncio.fixture
    async def new_backend(self, clock: Clock) -> AsyncGenerator[NewBackend, None]:
        async with Engine(clock=clock) as engine:
            yield lambda: Bare(NativeBackend(engine=engine))


def test_every_feature_that_can_be_asked_for_has_a_row() -> None:
    told = {"durable", "position"}  # in health and in Sent: there is nothing to ask for
    told |= {"queues"}  # without them every channel is a topic, and both verbs work
    promised = {"redelivery", "counts_crashes"}  # what a delivery is worth
    assert {row.feature for row in ROWS} == set(Capabilities().as_dict()) - told - promised
