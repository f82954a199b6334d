"""Conformance scenarios for unsupported features: each raises an error before a send."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import cast

import pytest

from qkit._internal.clock import Clock
from qkit.backend import Backend, Delivery, QueueSpec, Subscription
from qkit.conformance.fault_injection import FaultInjectingBackend
from qkit.conformance.harness import Harness, NewBackend, Serve
from qkit.errors import ConfigError, Unsupported
from qkit.handlers.channel import Channel
from qkit.handlers.decorators import consume
from qkit.message import Envelope, Sent
from qkit.service import QueueService

__all__ = ["UnsupportedFeatures"]

UNSUPPORTED_ERRORS = (Unsupported, ConfigError)


@dataclass(frozen=True)
class AtStart:
    """Test case: a service that uses an unsupported feature, and must not start."""

    feature: str
    what: str
    channel: Mapping[str, object] = field(default_factory=dict[str, object])
    handler: Mapping[str, object] = field(default_factory=dict[str, object])
    settings: Mapping[str, object] = field(default_factory=dict[str, object])


@dataclass(frozen=True)
class AtCall:
    """Test case: a call on a running service that must raise an error."""

    feature: str
    what: str
    call: Callable[[QueueService, str], Awaitable[object]]


@dataclass(frozen=True)
class AtBoundary:
    """Test case: a call on a subscription that must raise an error."""

    feature: str
    what: str
    call: Callable[[Subscription, Delivery], Awaitable[object]]


ROWS: tuple[AtStart | AtCall | AtBoundary, ...] = (
    AtStart("priority", "max_priority", channel={"max_priority": 5}),
    AtStart("topics", "broadcast", channel={"broadcast": True}),
    AtStart("key_order", "ordered", channel={"ordered": True}),
    AtStart("lease", "ack_deadline", channel={"ack_deadline": 5.0}),
    AtStart("prefetch", "prefetch", channel={"prefetch": 5}),
    AtStart("ttl", "ttl", channel={"ttl": 60.0}),
    AtStart("dead_letters", "dead_letter", channel={"dead_letter": True}),
    AtStart("batch", "batch_size", handler={"batch_size": 5}),
    AtStart("replicas", "replicas", settings={"replicas": 3}),
    AtCall("priority", "send", lambda service, name: service.send(name, "a", priority=1)),
    AtCall("priority", "send_many", lambda service, name: service.send_many(name, "a", priority=1)),
    AtCall("delay", "send", lambda service, name: service.send(name, "a", delay=1)),
    AtCall("ttl", "send", lambda service, name: service.send(name, "a", ttl=1)),
    AtCall("topics", "publish", lambda service, name: service.publish(name, "a")),
    AtCall(
        "key_order",
        "send",
        lambda service, name: service.send(Channel(name, str, ordered=True), "a"),
    ),
    AtCall("depth", "stats", lambda service, name: service.stats(name)),
    AtCall("peek", "peek", lambda service, name: service.peek(name)),
    AtCall("purge", "purge", lambda service, name: service.purge(name)),
    AtCall("delete", "delete", lambda service, name: service.delete(name)),
    AtCall("dead_letters", "list", lambda service, name: service.dead_letters(name).list()),
    AtBoundary("lease", "extend", lambda subscription, delivery: subscription.extend(delivery, 30)),
)


class CallRecorder(FaultInjectingBackend):
    """Backend that records the calls it receives."""

    def __init__(self, inner: Backend) -> None:
        super().__init__(inner)
        self.calls: list[str] = []

    async def start(self) -> None:
        self.calls.append("start")
        await super().start()

    async def declare(self, spec: QueueSpec) -> None:
        self.calls.append("declare")
        await super().declare(spec)

    async def publish(self, queue: str, envelopes: Sequence[Envelope]) -> list[Sent]:
        self.calls.append("publish")
        return await super().publish(queue, envelopes)


class UnsupportedFeatures(Harness):
    """Scenarios for the features that the backend does not support."""

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Generate one test for each feature that the backend does not support."""
        if "row" in metafunc.fixturenames:
            lacking = [row for row in ROWS if not self.column.supports(row.feature)]
            metafunc.parametrize(
                "row", lacking, ids=[f"{row.feature}-{row.what}" for row in lacking]
            )

    async def test_the_backend_declares_exactly_its_capabilities(self, backend: Backend) -> None:
        assert backend.capabilities.as_dict() == self.column.as_dict()

    async def test_an_unsupported_feature_raises_unsupported(
        self, new_backend: NewBackend, clock: Clock, name: str, row: AtStart | AtCall | AtBoundary
    ) -> None:
        match row:
            case AtStart():
                await self._check_start(row, new_backend, clock, name)
            case AtCall():
                await self._check_call(row, new_backend, clock, name)
            case AtBoundary():
                await self._check_subscription_call(row, new_backend, name)

    async def _check_start(
        self, row: AtStart, new_backend: NewBackend, clock: Clock, name: str
    ) -> None:
        backend = CallRecorder(new_backend())
        handler = _handler(name, row)

        async def start() -> None:
            options = {"backend": backend, **row.settings}
            service = self.make_service(new_backend, clock, handler, **options)
            async with service:
                pass

        with pytest.raises(UNSUPPORTED_ERRORS, match=row.what):
            await start()
        assert backend.calls == [], "the error must be raised before the backend is started"

    async def _check_call(
        self, row: AtCall, new_backend: NewBackend, clock: Clock, name: str
    ) -> None:
        backend = CallRecorder(new_backend())
        async with self.make_service(new_backend, clock, backend=backend) as service:
            with pytest.raises(UNSUPPORTED_ERRORS):
                await row.call(service, name)
            assert backend.calls == ["start"], "nothing may be declared or sent"
            assert service.metrics().messages_sent == 0

    async def _check_subscription_call(
        self, row: AtBoundary, new_backend: NewBackend, name: str
    ) -> None:
        backend = new_backend()
        await backend.start()
        try:
            await self.declare(backend, name)
            async with self.subscribe(backend, name) as subscription:
                await self.put(backend, name, "a")
                (delivery,) = await self.take(subscription)
                with pytest.raises(Unsupported):
                    await row.call(subscription, delivery)
                await subscription.ack(delivery)
        finally:
            await backend.aclose()

    async def test_a_position_is_returned_only_if_supported(self, serve: Serve, name: str) -> None:
        service = await serve()
        first, second = await service.send(name, "a"), await service.send(name, "b")
        known = (0, 1) if self.column.position else (None, None)
        assert (first.position, second.position) == known


def _handler(name: str, row: AtStart) -> object:
    """Return a handler that uses the unsupported feature of the test case."""

    async def handle(body: str) -> None: ...

    async def handle_many(bodies: list[str]) -> None: ...

    options = {**row.channel, **row.handler}
    mark = cast("Callable[..., Callable[[object], object]]", consume)(name, **options)
    return mark(handle_many if "batch_size" in options else handle)
