"""What every scenario stands on: a clock, fresh backends, services, names and ways to wait.

A scenario never asks which backend it runs on. It says with ``@requires`` what it needs, waits
with ``until`` and ``elapse``, and leaves the rest to the fixtures here.
"""

from __future__ import annotations

import asyncio
import inspect
import itertools
import time
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Iterable
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from typing import ClassVar, TypeVar, cast

import pytest
import pytest_asyncio

from qkit._internal.clock import Clock, SystemClock
from qkit._internal.ids import new_id
from qkit.backend import (
    Backend,
    Capabilities,
    DeadLetterSource,
    Delivery,
    QueueSpec,
    Subscription,
    SubscriptionSpec,
)
from qkit.message import DeadLetter, Envelope
from qkit.service import QueueService
from qkit.settings.model import Settings, SettingsValues
from qkit.testing.clock import VirtualClock

__all__ = ["Harness", "NewBackend", "Serve", "case", "requires"]

F = TypeVar("F", bound=Callable[..., object])
NewBackend = Callable[[], Backend]
Serve = Callable[..., Awaitable[QueueService]]

#: How long a scenario waits for what must happen. It is shorter than the default lease (30 s): a
#: message that comes back only because its lease ended is too late.
WITHIN_SECONDS = 25.0
#: How late, in seconds, a busy machine may be in real time. Virtual time is exact.
LATE_SECONDS = 5.0

_REQUIRES = "__qkit_requires__"
_numbers = itertools.count(1)


def requires(*features: str) -> Callable[[F], F]:
    """Run a scenario only on backends that support these features of ``Capabilities``.

    >>> @requires("delay", "priority")
    ... async def test_it(self) -> None: ...
    """

    def mark(function: F) -> F:
        setattr(function, _REQUIRES, features)
        return function

    return mark


@contextmanager
def case(name: str) -> Generator[None, None, None]:
    """Name one of several values that a scenario checks: a failure inside says which it was."""
    try:
        yield
    except (Exception, pytest.fail.Exception) as error:
        error.add_note(f"in the case {name!r}")
        raise


class Harness:
    """Fixtures and helpers of the suite; a backend's author overrides the first four members."""

    column: ClassVar[Capabilities]
    """What the backend must declare: ``MATRIX["…"]``, or a third party's own."""

    virtual_time: ClassVar[bool] = False
    """Whether nothing of the backend lies outside the process, so that time may be virtual."""

    settings: ClassVar[SettingsValues] = {}
    """Settings of the services that the scenarios start."""

    @pytest_asyncio.fixture
    async def new_backend(self, clock: Clock) -> AsyncGenerator[NewBackend, None]:
        """A factory of backends, not started, that all reach the same broker."""
        raise NotImplementedError("override the fixture new_backend")
        yield  # pragma: no cover

    # -- fixtures ----------------------------------------------------------------------------

    @pytest_asyncio.fixture
    async def clock(self) -> AsyncGenerator[Clock, None]:
        """Virtual time where the backend allows it, real time otherwise."""
        if not self.virtual_time:
            yield SystemClock()
            return
        with VirtualClock() as clock:
            yield clock

    @pytest.fixture(autouse=True)
    def _gate(self, request: pytest.FixtureRequest) -> None:
        function = cast("Callable[..., object]", request.function)
        wanted: tuple[str, ...] = getattr(inspect.unwrap(function), _REQUIRES, ())
        missing = [feature for feature in wanted if not self.column.supports(feature)]
        if missing:
            pytest.skip(f"the backend declares {', '.join(missing)} as unsupported")

    @pytest.fixture
    def name(self) -> str:
        """A channel's name that no other scenario uses."""
        return f"t{next(_numbers)}-{uuid.uuid4().hex[:8]}"

    @pytest_asyncio.fixture
    async def backend(self, new_backend: NewBackend) -> AsyncGenerator[Backend, None]:
        """A started backend."""
        backend = new_backend()
        await backend.start()
        yield backend
        await backend.aclose()

    @pytest_asyncio.fixture
    async def serve(
        self, new_backend: NewBackend, clock: Clock
    ) -> AsyncGenerator[Callable[..., Awaitable[QueueService]], None]:
        """Start a service with handlers: ``await serve(handler, …, retry=…, backend=…)``."""
        async with AsyncExitStack() as stack:

            async def start(*handlers: object, **options: object) -> QueueService:
                service = self.make_service(new_backend, clock, *handlers, **options)
                return await stack.enter_async_context(service)

            yield start

    def make_service(
        self, new_backend: NewBackend, clock: Clock, *handlers: object, **options: object
    ) -> QueueService:
        """A service that is not started; ``backend`` replaces the one it would get."""
        backend = cast("Backend | None", options.pop("backend", None))
        values = cast("SettingsValues", {**self.settings, **options})
        service = QueueService(Settings(**values), backend=backend or new_backend(), clock=clock)
        for handler in handlers:
            service.register(handler)
        return service

    # -- waiting -----------------------------------------------------------------------------

    async def until(self, condition: Callable[[], object], within: float = WITHIN_SECONDS) -> None:
        """Wait until ``condition`` holds; fail after ``within`` seconds."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + within
        while not condition():
            assert loop.time() < deadline, f"{_source(condition)}: not within {within:g} s"
            await asyncio.sleep(0.01)

    async def until_threads(
        self, condition: Callable[[], object], within: float = WITHIN_SECONDS
    ) -> None:
        """As ``until``, for what happens in threads: they need real time, not virtual."""
        deadline = time.monotonic() + within
        while not condition():
            assert time.monotonic() < deadline, f"{_source(condition)}: not within {within:g} s"
            await asyncio.to_thread(time.sleep, 0.01)

    async def elapse(self, seconds: float) -> None:
        """Let time pass, to see that something does *not* happen."""
        await asyncio.sleep(seconds)

    def on_time(self, waited: float, wanted: float) -> bool:
        """Whether a wait was not early, and not later than a busy machine explains."""
        return wanted - 0.002 <= waited <= wanted + self.late(0.05)

    def late(self, virtual: float) -> float:
        """Seconds by which something may be late: ``virtual`` in virtual time, more otherwise."""
        return virtual if self.virtual_time else LATE_SECONDS

    async def letters(
        self, service: QueueService, name: str, count: int = 1, within: float = WITHIN_SECONDS
    ) -> list[DeadLetter]:
        """The dead letters of a channel, once there are ``count``; fail if there are more."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + within
        while len(found := await service.dead_letters(name).list(1_000)) < count:
            late = loop.time() >= deadline
            assert not late, f"{len(found)} of {count} dead letters within {within:g} s"
            await asyncio.sleep(0.02)
        assert len(found) == count, f"{len(found)} dead letters instead of {count}: {found}"
        return found

    # -- the boundary itself -----------------------------------------------------------------

    def require_dead_letter_source(self, backend: Backend) -> None:
        """Skip unless the backend writes dead letters itself.

        Any other backend delivers what expired or crashed too often, and the service writes the
        dead letter: scenarios with a service check that.
        """
        if not isinstance(backend, DeadLetterSource):
            pytest.skip("the backend is no DeadLetterSource: the service writes its dead letters")

    async def declare(self, backend: Backend, name: str, **options: object) -> QueueSpec:
        """Declare a channel with its dead-letter queue, as a service would."""
        letters = QueueSpec(name=f"{name}.dead", max_depth=10_000, drop_oldest=True)
        values: dict[str, object] = {"dead_letter": letters.name, "max_deliveries": 3}
        values["broadcast"] = not self.column.queues
        spec = QueueSpec(name=name, **values | options)  # type: ignore[arg-type]  # any field
        if spec.dead_letter is not None:
            await backend.declare(letters)
        await backend.declare(spec)
        return spec

    @asynccontextmanager
    async def subscribe(
        self, backend: Backend, name: str, *, prefetch: int = 10, **options: object
    ) -> AsyncGenerator[Subscription, None]:
        """A subscription on a declared channel."""
        values: dict[str, object] = {"group": "g", "consumer": f"c{next(_numbers)}"}
        values["broadcast"] = not self.column.queues
        spec = SubscriptionSpec(queue=name, prefetch=prefetch, **values | options)  # type: ignore[arg-type]  # any field
        async with backend.subscribe(spec) as subscription:
            yield subscription

    async def put(self, backend: Backend, name: str, *bodies: str, **fields: object) -> list[str]:
        """Publish bodies; return their ids."""
        envelopes = [
            Envelope(new_id(), body.encode(), **fields)  # type: ignore[arg-type]  # any field
            for body in bodies
        ]
        await backend.publish(name, envelopes)
        return [envelope.id for envelope in envelopes]

    async def take(
        self, subscription: Subscription, count: int = 1, within: float = WITHIN_SECONDS
    ) -> list[Delivery]:
        """Exactly ``count`` deliveries, in the order in which they came."""
        found: list[Delivery] = []
        try:
            async with asyncio.timeout(within):
                while len(found) < count:
                    found += await subscription.receive(count - len(found))
        except TimeoutError:
            raise AssertionError(
                f"{len(found)} of {count} deliveries within {within:g} s"
            ) from None
        assert len(found) == count, f"asked for {count} deliveries and got {len(found)}"
        return found

    async def nothing(self, subscription: Subscription, for_seconds: float = 0.5) -> None:
        """Nothing is delivered for that long."""
        try:
            async with asyncio.timeout(for_seconds):
                while not (found := await subscription.receive(10)):
                    pass
        except TimeoutError:
            return
        raise AssertionError(f"delivered {found} and nothing was due")


def bodies(deliveries: Iterable[Delivery]) -> list[str]:
    """The bodies of deliveries, as text."""
    return [delivery.envelope.body.decode() for delivery in deliveries]


def _source(condition: Callable[[], object]) -> str:
    try:
        return inspect.getsource(condition).strip()
    except (OSError, TypeError):
        return repr(condition)
