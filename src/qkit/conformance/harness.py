"""Fixtures and helpers shared by all conformance scenarios.

A scenario does not depend on the backend it runs on. It names the features it needs with
``@requires``, waits with ``until`` and ``elapse``, and gets services, backends and channel names
from the fixtures of ``Harness``.
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
#: Type of the ``new_backend`` fixture: returns a backend that is not started.
NewBackend = Callable[[], Backend]
#: Type of the ``serve`` fixture: starts a service with handlers and settings.
Serve = Callable[..., Awaitable[QueueService]]

#: Time limit in seconds for an expected event. It is shorter than the default lease (30 s), so a
#: scenario fails if a message is redelivered only because its lease expired.
WITHIN_SECONDS = 25.0
#: How late an event may be in real time, in seconds, because the machine may be busy.
LATE_SECONDS = 5.0

_REQUIRES = "__qkit_requires__"
_numbers = itertools.count(1)


def requires(*features: str) -> Callable[[F], F]:
    """Run a scenario only on backends that support the given features.

    Args:
        features: Names of fields of ``Capabilities``. On a backend that lacks one of them the
            scenario is skipped.

    Returns:
        The decorator for the scenario.

    Example:
        >>> from qkit.conformance import Harness, requires
        >>> class TestDelays(Harness):
        ...     @requires("delay", "priority")
        ...     async def test_a_delay_keeps_the_priority(self) -> None: ...
    """

    def mark(function: F) -> F:
        setattr(function, _REQUIRES, features)
        return function

    return mark


@contextmanager
def case(name: str) -> Generator[None, None, None]:
    """Add the name of the case to any error raised inside the block.

    It identifies the failing value in a scenario that checks several.
    """
    try:
        yield
    except (Exception, pytest.fail.Exception) as error:
        error.add_note(f"in the case {name!r}")
        raise


class Harness:
    """Base class of all scenarios, with shared fixtures and helpers.

    To test a backend, override the attributes below and the ``new_backend`` fixture.

    Attributes:
        column: The capabilities that the backend must declare: ``MATRIX[...]`` for a built-in
            backend, otherwise the backend's own ``Capabilities``.
        virtual_time: Whether the scenarios run in virtual time. Set it only for a backend that
            does all its work in this process. Default: false.
        settings: Settings for the services that the scenarios start. Default: none.

    Example:
        >>> from qkit.conformance import MATRIX, Harness
        >>> class TestMyBackend(Harness):
        ...     column = MATRIX["native-memory"]
        ...     virtual_time = True
        ...     settings = {"type": "native"}
    """

    column: ClassVar[Capabilities]
    """The capabilities that the backend must declare."""

    virtual_time: ClassVar[bool] = False
    """Whether the scenarios run in virtual time."""

    settings: ClassVar[SettingsValues] = {}
    """Settings for the services that the scenarios start."""

    @pytest_asyncio.fixture
    async def new_backend(self, clock: Clock) -> AsyncGenerator[NewBackend, None]:
        """Factory for unstarted backends that share one broker; override this fixture.

        Args:
            clock: Clock of the test, for backends that accept one.

        Yields:
            A function that returns a new backend.

        Example:
            >>> import pytest_asyncio
            >>> from qkit.backends.native.backend import NativeBackend
            >>> from qkit.conformance import Harness
            >>> from qkit.native import Engine
            >>> class TestNative(Harness):
            ...     @pytest_asyncio.fixture
            ...     async def new_backend(self, clock):
            ...         async with Engine(clock=clock) as engine:
            ...             yield lambda: NativeBackend(engine=engine)
        """
        raise NotImplementedError("override the new_backend fixture")
        yield  # pragma: no cover

    # -- fixtures ----------------------------------------------------------------------------

    @pytest_asyncio.fixture
    async def clock(self) -> AsyncGenerator[Clock, None]:
        """Clock of the test: virtual if ``virtual_time`` is true, otherwise the system clock.

        Yields:
            The clock.

        Example:
            >>> from qkit.conformance import Harness
            >>> class TestClock(Harness):
            ...     async def test_time_passes(self, clock) -> None:
            ...         before = clock.time()
            ...         await self.elapse(0.5)
            ...         assert clock.time() > before
        """
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
            pytest.skip(f"the backend does not support {', '.join(missing)}")

    @pytest.fixture
    def name(self) -> str:
        """Channel name that no other test uses.

        Returns:
            The name.

        Example:
            >>> from qkit.conformance import Harness
            >>> class TestSend(Harness):
            ...     async def test_a_send_is_confirmed(self, serve, name) -> None:
            ...         service = await serve()
            ...         assert (await service.send(name, "hello")).message_id
        """
        return f"t{next(_numbers)}-{uuid.uuid4().hex[:8]}"

    @pytest_asyncio.fixture
    async def backend(self, new_backend: NewBackend) -> AsyncGenerator[Backend, None]:
        """Backend that is started before the test and closed after it.

        Args:
            new_backend: The ``new_backend`` fixture.

        Yields:
            The backend.

        Example:
            >>> from qkit.conformance import Harness
            >>> class TestPing(Harness):
            ...     async def test_the_broker_responds(self, backend) -> None:
            ...         await backend.ping()
        """
        backend = new_backend()
        await backend.start()
        yield backend
        await backend.aclose()

    @pytest_asyncio.fixture
    async def serve(
        self, new_backend: NewBackend, clock: Clock
    ) -> AsyncGenerator[Callable[..., Awaitable[QueueService]], None]:
        """Function that starts a service, which is shut down after the test.

        Args:
            new_backend: The ``new_backend`` fixture.
            clock: The ``clock`` fixture.

        Yields:
            The function, called as ``await serve(*handlers, **options)`` with the handlers and
            options of ``make_service``.

        Example:
            >>> from qkit import consume
            >>> from qkit.conformance import Harness
            >>> class TestHandler(Harness):
            ...     async def test_a_message_is_handled(self, serve, name) -> None:
            ...         got = []
            ...         @consume(name)
            ...         async def handle(body: str) -> None:
            ...             got.append(body)
            ...         service = await serve(handle)
            ...         await service.send(name, "hello")
            ...         await self.until(lambda: got == ["hello"])
        """
        async with AsyncExitStack() as stack:

            async def start(*handlers: object, **options: object) -> QueueService:
                service = self.make_service(new_backend, clock, *handlers, **options)
                return await stack.enter_async_context(service)

            yield start

    def make_service(
        self, new_backend: NewBackend, clock: Clock, *handlers: object, **options: object
    ) -> QueueService:
        """Return a service that is not started.

        Args:
            new_backend: Factory for the service's backend.
            clock: Clock of the service.
            handlers: Handlers to register.
            options: Settings that extend or override the ``settings`` attribute. ``backend`` is
                not a setting but an existing backend to use instead of a new one.

        Returns:
            The service.

        Example:
            >>> from qkit._internal.clock import SystemClock
            >>> from qkit.backends.native.backend import NativeBackend
            >>> from qkit.conformance import Harness
            >>> service = Harness().make_service(NativeBackend, SystemClock(), type="native")
            >>> service.ready
            False
        """
        backend = cast("Backend | None", options.pop("backend", None))
        values = cast("SettingsValues", {**self.settings, **options})
        service = QueueService(Settings(**values), backend=backend or new_backend(), clock=clock)
        for handler in handlers:
            service.register(handler)
        return service

    # -- waiting -----------------------------------------------------------------------------

    async def until(self, condition: Callable[[], object], within: float = WITHIN_SECONDS) -> None:
        """Wait until a condition is true.

        Args:
            condition: Function that returns a true value once the condition holds.
            within: Time limit in seconds, on the event loop's clock. Default: 25.

        Raises:
            AssertionError: The condition did not become true in time.

        Example:
            >>> import asyncio
            >>> from qkit.conformance import Harness
            >>> asyncio.run(Harness().until(lambda: True))
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + within
        while not condition():
            assert loop.time() < deadline, f"{_source(condition)}: not true within {within:g} s"
            await asyncio.sleep(0.01)

    async def until_threads(
        self, condition: Callable[[], object], within: float = WITHIN_SECONDS
    ) -> None:
        """Wait in real time until a condition is true, for events in other threads.

        Args:
            condition: Function that returns a true value once the condition holds.
            within: Time limit in seconds, in real time. Default: 25.

        Raises:
            AssertionError: The condition did not become true in time.

        Example:
            >>> import asyncio
            >>> from qkit.conformance import Harness
            >>> asyncio.run(Harness().until_threads(lambda: True))
        """
        deadline = time.monotonic() + within
        while not condition():
            in_time = time.monotonic() < deadline
            assert in_time, f"{_source(condition)}: not true within {within:g} s"
            await asyncio.to_thread(time.sleep, 0.01)

    async def elapse(self, seconds: float) -> None:
        """Let time pass, to check that something does *not* happen.

        Args:
            seconds: Time to wait, in seconds.

        Example:
            >>> import asyncio
            >>> from qkit.conformance import Harness
            >>> asyncio.run(Harness().elapse(0))
        """
        await asyncio.sleep(seconds)

    def on_time(self, waited: float, wanted: float) -> bool:
        """Return whether a measured wait matches the expected wait within the tolerance.

        Args:
            waited: Measured time in seconds.
            wanted: Expected time in seconds.

        Returns:
            True if the wait was at most 2 ms too short and not later than ``late`` allows.

        Example:
            >>> from qkit.conformance import Harness
            >>> Harness().on_time(1.2, 1.0), Harness().on_time(0.9, 1.0)
            (True, False)
        """
        return wanted - 0.002 <= waited <= wanted + self.late(0.05)

    def late(self, virtual: float) -> float:
        """Return how late an event may be, in seconds.

        Args:
            virtual: Tolerance in virtual time, in seconds.

        Returns:
            ``virtual`` in virtual time; 5 seconds in real time, because the machine may be busy.

        Example:
            >>> from qkit.conformance import Harness
            >>> Harness().late(0.1)
            5.0
        """
        return virtual if self.virtual_time else LATE_SECONDS

    async def letters(
        self, service: QueueService, name: str, count: int = 1, within: float = WITHIN_SECONDS
    ) -> list[DeadLetter]:
        """Wait for dead letters and return them.

        Args:
            service: A running service.
            name: Channel whose dead letters are expected.
            count: Expected number. Default: 1.
            within: Time limit in seconds. Default: 25.

        Returns:
            The dead letters, oldest first.

        Raises:
            AssertionError: Fewer than ``count`` dead letters arrived in time, or there are more.

        Example:
            >>> from qkit.conformance import Harness
            >>> class TestReject(Harness):
            ...     async def check(self, service, name) -> None:
            ...         (letter,) = await self.letters(service, name)
            ...         assert letter.attempts == 1
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + within
        while len(found := await service.dead_letters(name).list(1_000)) < count:
            late = loop.time() >= deadline
            assert not late, f"got {len(found)} of {count} dead letters within {within:g} s"
            await asyncio.sleep(0.02)
        assert len(found) == count, f"expected {count} dead letters, got {len(found)}: {found}"
        return found

    # -- the boundary itself -----------------------------------------------------------------

    def require_dead_letter_source(self, backend: Backend) -> None:
        """Skip the test unless the backend writes dead letters itself.

        Other backends deliver a message that has expired or exceeded its delivery limit, and the
        service writes its dead letter. Scenarios that start a service cover those backends.

        Args:
            backend: The backend of the test.

        Example:
            >>> from qkit.backends.native.backend import NativeBackend
            >>> from qkit.conformance import Harness
            >>> Harness().require_dead_letter_source(NativeBackend())
        """
        if not isinstance(backend, DeadLetterSource):
            pytest.skip("not a DeadLetterSource: the service writes the dead letters")

    async def declare(self, backend: Backend, name: str, **options: object) -> QueueSpec:
        """Declare a channel and its dead-letter queue, ``<name>.dead``, as a service would.

        Args:
            backend: A started backend.
            name: Name of the channel.
            options: Fields of ``QueueSpec``. Defaults: ``max_deliveries=3``, and a topic on a
                backend without queues. ``dead_letter=None`` declares no dead-letter queue.

        Returns:
            The declaration of the channel.

        Example:
            >>> import asyncio
            >>> from qkit.backends.native.backend import NativeBackend
            >>> from qkit.conformance import MATRIX, Harness
            >>> class Native(Harness):
            ...     column = MATRIX["native-memory"]
            >>> async def main() -> None:
            ...     backend = NativeBackend()
            ...     await backend.start()
            ...     print((await Native().declare(backend, "orders")).dead_letter)
            ...     await backend.aclose()
            >>> asyncio.run(main())
            orders.dead
        """
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
        """Open a subscription on a declared channel.

        Args:
            backend: A started backend.
            name: Name of the channel.
            prefetch: How many unsettled deliveries the subscription may hold. Default: 10.
            options: Fields of ``SubscriptionSpec``. Defaults: the group ``g`` and a new consumer
                name.

        Yields:
            The subscription.

        Example:
            >>> from qkit.conformance import Harness
            >>> class TestAck(Harness):
            ...     async def test_an_ack_is_accepted(self, backend, name) -> None:
            ...         await self.declare(backend, name)
            ...         await self.put(backend, name, "hello")
            ...         async with self.subscribe(backend, name, prefetch=1) as subscription:
            ...             (delivery,) = await self.take(subscription)
            ...             await subscription.ack(delivery)
        """
        values: dict[str, object] = {"group": "g", "consumer": f"c{next(_numbers)}"}
        values["broadcast"] = not self.column.queues
        spec = SubscriptionSpec(queue=name, prefetch=prefetch, **values | options)  # type: ignore[arg-type]  # any field
        async with backend.subscribe(spec) as subscription:
            yield subscription

    async def put(self, backend: Backend, name: str, *bodies: str, **fields: object) -> list[str]:
        """Publish one message for each body.

        Args:
            backend: A started backend.
            name: Name of a declared channel.
            bodies: Bodies, as text.
            fields: Fields of ``Envelope`` that all messages share.

        Returns:
            The ids of the messages.

        Example:
            >>> from qkit.conformance import Harness
            >>> class TestPublish(Harness):
            ...     async def test_messages_have_different_ids(self, backend, name) -> None:
            ...         await self.declare(backend, name)
            ...         first, second = await self.put(backend, name, "a", "b", priority=5)
            ...         assert first != second
        """
        envelopes = [
            Envelope(new_id(), body.encode(), **fields)  # type: ignore[arg-type]  # any field
            for body in bodies
        ]
        await backend.publish(name, envelopes)
        return [envelope.id for envelope in envelopes]

    async def take(
        self, subscription: Subscription, count: int = 1, within: float = WITHIN_SECONDS
    ) -> list[Delivery]:
        """Receive an exact number of deliveries.

        Args:
            subscription: An open subscription.
            count: Expected number. Default: 1.
            within: Time limit in seconds. Default: 25.

        Returns:
            The deliveries, in the order in which they arrived.

        Raises:
            AssertionError: Fewer than ``count`` deliveries arrived in time, or more were returned.

        Example:
            >>> from qkit.conformance import Harness
            >>> class TestOrder(Harness):
            ...     async def check(self, subscription) -> None:
            ...         first, second = await self.take(subscription, 2)
            ...         assert first.envelope.id < second.envelope.id
        """
        found: list[Delivery] = []
        try:
            async with asyncio.timeout(within):
                while len(found) < count:
                    found += await subscription.receive(count - len(found))
        except TimeoutError:
            raise AssertionError(
                f"got {len(found)} of {count} deliveries within {within:g} s"
            ) from None
        assert len(found) == count, f"expected {count} deliveries, got {len(found)}"
        return found

    async def nothing(self, subscription: Subscription, for_seconds: float = 0.5) -> None:
        """Check that no message is delivered for some time.

        Args:
            subscription: An open subscription.
            for_seconds: How long to wait, in seconds. Default: 0.5.

        Raises:
            AssertionError: A message was delivered.

        Example:
            >>> from qkit.conformance import Harness
            >>> class TestEmpty(Harness):
            ...     async def test_an_empty_queue_delivers_nothing(self, backend, name) -> None:
            ...         await self.declare(backend, name)
            ...         async with self.subscribe(backend, name) as subscription:
            ...             await self.nothing(subscription, for_seconds=0.1)
        """
        try:
            async with asyncio.timeout(for_seconds):
                while not (found := await subscription.receive(10)):
                    pass
        except TimeoutError:
            return
        raise AssertionError(f"expected no delivery, got {found}")


def bodies(deliveries: Iterable[Delivery]) -> list[str]:
    """Return the bodies of deliveries as text."""
    return [delivery.envelope.body.decode() for delivery in deliveries]


def _source(condition: Callable[[], object]) -> str:
    try:
        return inspect.getsource(condition).strip()
    except (OSError, TypeError):
        return repr(condition)
