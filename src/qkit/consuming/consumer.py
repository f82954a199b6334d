"""``Consumer``: the subscription of one handler, reopened with backoff when it is lost.

``stop`` ends fetching and lets running handlers finish; ``abandon`` cancels the handlers that are
still running.
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
#: The loss of a subscription that lasted at least this long resets the backoff.
STABLE_AFTER_SECONDS = 5.0


class Consumer:
    """Consumer of one handler's messages while the service runs.

    Args:
        wiring: Objects shared by all parts of the service.
        route: The channel.
        spec: The options of the subscription.
        executor: Runs the handler.
        settlement: Settles the deliveries.
        declare: Declares the channel again; called before a lost subscription is reopened.

    Attributes:
        channel: The name of the channel.
        group: The group of the handler.
        ready: Set after the first subscription succeeded or was rejected.
        rejected: The error if the first subscription was rejected, otherwise ``None``.
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
        self.channel: str = route.name
        self.group: str = spec.group
        self.ready: asyncio.Event = asyncio.Event()
        self.rejected: ConfigError | Unsupported | None = None
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
        self._rejection: str | None = None  # why it failed, if reopening is unlikely to help

    @property
    def settling(self) -> bool:
        """Whether settlements are in progress and no handler is running."""
        return self._session is not None and self._session.settling

    def health(self) -> ConsumerHealth:
        """Return the health of this consumer."""
        return ConsumerHealth(
            channel=self.channel,
            group=self.group,
            state=self._health_state(),
            in_flight=len(self._session.held) if self._session else 0,
            last_poll_at=self._state.last_poll_at,
            last_settle_at=self._settlement.last_settle_at,
            failing=self._settlement.failures.lasting() or self._current_rejection(),
        )

    def _current_rejection(self) -> str | None:
        """Return why messages cannot be received; ``None`` once a new subscription is stable."""
        opened = self._opened
        stable = opened is not None and self._clock.monotonic() - opened >= STABLE_AFTER_SECONDS
        return None if stable else self._rejection

    def _health_state(
        self,
    ) -> Literal["starting", "consuming", "paused", "reconnecting", "stopped"]:
        if self._state.stopping:
            return "stopped"
        if self._session is None:
            return "reconnecting" if self.ready.is_set() else "starting"
        return "paused" if self._state.is_paused else "consuming"

    async def run(self) -> None:
        """Consume until ``stop``; reopen the subscription when it is lost."""
        failures = 0
        while not self._state.stopping:
            opened: float | None = None
            try:
                if failures:
                    await self._declare()  # the queue may have been deleted
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
                    self.rejected = error  # permanent: start() raises it
                    self.ready.set()
                    return
                if opened is not None and self._clock.monotonic() - opened >= STABLE_AFTER_SECONDS:
                    failures = 0
                failures += 1
                self._opened = None
                self._rejection = None
                if isinstance(error, ConfigError | Unsupported):
                    self._rejection = f"{type(error).__name__}: {error_text(error)}"
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
        text = f"{type(error).__name__}: {error_text(error)}"
        extra = {"queue": self.channel, "consumer": self._spec.consumer, "error": text}
        logger.warning(
            "%s: the subscription of group %s failed, subscribing again in %.1f s: %s",
            self.channel,
            self.group,
            wait,
            text,
            extra=extra,
        )
        logger.debug(
            "%s: traceback of the failed subscription", self.channel, exc_info=error, extra=extra
        )

    def stop(self) -> None:
        """Stop fetching and release deliveries that have not started; running handlers continue."""
        self._state.stop()

    def abandon(self) -> int:
        """Cancel running handlers and release their messages; return the number of handlers."""
        return self._session.abandon() if self._session else 0

    def pause(self) -> None:
        """Stop fetching and starting handlers until ``resume``; running handlers continue."""
        self._state.pause()

    def resume(self) -> None:
        """Resume consuming, and end a backoff after ``Unavailable``."""
        self._state.resume()
