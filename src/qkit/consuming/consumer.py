"""A handler's consumer: its subscription, opened again whenever it breaks, and its steering.

Stop fetching is not stop working: ``stop`` ends the first and lets running handlers finish,
``abandon`` cancels those that did not. A subscription that breaks is opened again with backoff.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Literal

from qkit._internal.logging import logger
from qkit._internal.retry import Backoff
from qkit._internal.text import error_text
from qkit.backend import SubscriptionSpec
from qkit.consuming.consumer_state import ConsumerState
from qkit.consuming.executor import Executor
from qkit.consuming.session import Session
from qkit.consuming.settlement import Settlement
from qkit.errors import BackendUnavailable, ConfigError, Unsupported
from qkit.handlers.route import Route
from qkit.observability.health import ConsumerHealth
from qkit.wiring import Wiring

__all__ = ["Consumer"]

RESUBSCRIBE_BACKOFF = Backoff(initial=0.1, multiplier=2.0, maximum=5.0, jitter=0.1)
#: A subscription that lasted so long worked: its end begins a new count of failures.
STABLE_AFTER_SECONDS = 5.0


class Consumer:
    """Consumes one handler's share of a channel, for as long as the service runs.

    Args:
        wiring: What the service shares.
        route: The channel.
        spec: What to subscribe with.
        executor: Runs the handler.
        settlement: Settles the deliveries.
        declare: Declares the channel again, before a broken subscription is opened again.
    """

    def __init__(
        self,
        wiring: Wiring,
        route: Route,
        spec: SubscriptionSpec,
        executor: Executor,
        settlement: Settlement,
        declare: Callable[[], Awaitable[None]],
    ) -> None:
        self.channel = route.name
        self.group = spec.group
        self.ready = asyncio.Event()  # subscribed for the first time, or refused
        self.refused: ConfigError | Unsupported | None = None
        self._state = ConsumerState(spec.prefetch)
        self._wiring = wiring
        self._route = route
        self._spec = spec
        self._executor = executor
        self._settlement = settlement
        self._declare = declare
        self._clock = wiring.clock
        self._connection = wiring.connection
        self._session: Session | None = None
        self._opened: float | None = None  # when the subscription was opened
        self._refusal: str | None = None  # why it ended, if opening it again will hardly help

    @property
    def settling(self) -> bool:
        """Whether only settlements are left of its work."""
        return self._session is not None and self._session.settling

    def health(self) -> ConsumerHealth:
        """How this consumer is doing."""
        return ConsumerHealth(
            channel=self.channel,
            group=self.group,
            state=self._health_state(),
            in_flight=len(self._session.held) if self._session else 0,
            last_poll_at=self._state.last_poll_at,
            last_settle_at=self._settlement.last_settle_at,
            failing=self._settlement.failures.lasting() or self._still_refused(),
        )

    def _still_refused(self) -> str | None:
        """Why messages cannot be received, unless a new subscription has proved that they can."""
        opened = self._opened
        proved = opened is not None and self._clock.monotonic() - opened >= STABLE_AFTER_SECONDS
        return None if proved else self._refusal

    def _health_state(
        self,
    ) -> Literal["starting", "consuming", "paused", "reconnecting", "stopped"]:
        if self._state.stopping:
            return "stopped"
        if self._session is None:
            return "reconnecting" if self.ready.is_set() else "starting"
        return "paused" if self._state.is_paused else "consuming"

    async def run(self) -> None:
        """Consume until ``stop``; opens the subscription again whenever it breaks."""
        failures = 0
        while not self._state.stopping:
            opened: float | None = None
            try:
                if failures:
                    await self._declare()  # perhaps the queue itself is gone
                async with self._wiring.backend.subscribe(self._spec) as subscription:
                    opened = self._opened = self._clock.monotonic()
                    self._connection.record_success()
                    self._session = Session(
                        subscription,
                        self._wiring,
                        self._route,
                        self._spec,
                        self._state,
                        self._executor,
                        self._settlement,
                    )
                    self.ready.set()
                    await self._session.run()
            except Exception as error:
                if not self.ready.is_set() and isinstance(error, ConfigError | Unsupported):
                    self.refused = error  # it will never work: start() fails
                    self.ready.set()
                    return
                # One that breaks as soon as it is open has not proved anything.
                if opened is not None and self._clock.monotonic() - opened >= STABLE_AFTER_SECONDS:
                    failures = 0
                failures += 1
                self._opened = None
                self._refusal = None
                if isinstance(error, ConfigError | Unsupported):
                    self._refusal = f"{type(error).__name__}: {error_text(error)}"
                wait = RESUBSCRIBE_BACKOFF.after(failures)
                self._report(error, wait)
                self._session = None
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(wait):
                        await self._state.stopped.wait()
            finally:
                self._session = None

    def _report(self, error: Exception, wait: float) -> None:
        if isinstance(error, BackendUnavailable):
            self._connection.record_failure(error)
        logger.warning(
            "%s: the subscription of %s broke, subscribing again in %.1f s: %s",
            self.channel,
            self.group,
            wait,
            type(error).__name__,
            exc_info=error,
            extra={"queue": self.channel, "consumer": self._spec.consumer, "error": str(error)},
        )

    def stop(self) -> None:
        """Fetch no more. Running handlers go on; deliveries that wait for one are given back."""
        self._state.stop()

    def abandon(self) -> int:
        """Cancel the handlers that still run; return how many. Their messages are given back."""
        return self._session.abandon() if self._session else 0

    def pause(self) -> None:
        """Start no more handlers until ``resume``; running ones go on."""
        self._state.pause()

    def resume(self) -> None:
        """Consume again, also if the channel backs off after ``Unavailable``."""
        self._state.resume()
