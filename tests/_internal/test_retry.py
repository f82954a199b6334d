"""Backoff, the retry policy of handlers, and retries after connection failures."""

from __future__ import annotations

import asyncio
import random

import pytest

from qkit._internal.retry import Backoff, retry_while_unavailable
from qkit.errors import BackendUnavailable, CircuitOpen, QueueError, QueueFull, Retry
from qkit.handlers.retry_policy import RetryPolicy
from qkit.testing.clock import VirtualClock

PLAIN = Backoff(initial=1.0, multiplier=2.0, maximum=60.0)


@pytest.mark.proves("003-retry-2", "003-retry-9", "003-retry-10")
def test_delays_grow_exponentially_up_to_the_maximum() -> None:
    assert [PLAIN.after(n) for n in range(1, 9)] == [1, 2, 4, 8, 16, 32, 60, 60]


@pytest.mark.parametrize("failures", [100, 5_000, 10**6])
def test_after_very_many_failures_the_delay_is_the_maximum(failures: int) -> None:
    assert PLAIN.after(failures) == 60.0


def test_zero_failures_count_as_one() -> None:
    assert PLAIN.after(0) == PLAIN.after(1) == 1.0


def test_a_multiplier_of_one_gives_equal_delays() -> None:
    assert [Backoff(initial=0.5, multiplier=1.0).after(n) for n in (1, 2, 9)] == [0.5] * 3


def test_an_initial_delay_above_the_maximum_is_limited() -> None:
    assert Backoff(initial=10.0, maximum=3.0).after(1) == 3.0


def test_an_initial_delay_of_zero_gives_no_delay() -> None:
    assert Backoff(initial=0.0).after(5) == 0.0


def test_jitter_adds_at_most_its_fraction() -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    dice = random.Random(seed)
    backoff = Backoff(initial=1.0, maximum=60.0, jitter=0.1, uniform=dice.uniform)
    for failures in range(1, 12):
        plain = PLAIN.after(failures)
        waits = [backoff.after(failures) for _ in range(200)]
        assert plain <= min(waits)
        assert max(waits) <= plain * 1.1
        assert len(set(waits)) > 100


def policy(**options: object) -> RetryPolicy:
    return RetryPolicy(**{"max_attempts": 3, "backoff": PLAIN, **options})  # type: ignore[arg-type]


def test_the_delay_grows_until_the_last_attempt() -> None:
    assert [policy().wait(ValueError(), attempt=n) for n in (1, 2, 3, 4)] == [1, 2, None, None]


def test_only_errors_in_retry_on_are_retried() -> None:
    choosy = policy(retry_on=(OSError,))
    assert choosy.wait(ConnectionError(), attempt=1) == 1
    assert choosy.wait(ValueError(), attempt=1) is None


def test_dead_on_takes_precedence_over_retry_on() -> None:
    strict = policy(retry_on=(Exception,), dead_on=(ConnectionError,))
    assert strict.wait(ConnectionResetError(), attempt=1) is None
    assert strict.wait(OSError(), attempt=1) == 1


def test_a_delay_set_by_the_handler_replaces_the_backoff() -> None:
    assert policy().wait(Retry(), attempt=1, asked=7.5) == 7.5
    assert policy().wait(Retry(), attempt=2, asked=0.0) == 0.0
    assert policy().wait(Retry(), attempt=3, asked=7.5) is None


def test_an_explicit_retry_does_not_need_retry_on() -> None:
    assert policy(retry_on=(OSError,)).wait(Retry(), attempt=2) == 2


async def test_a_call_is_retried_until_the_connection_works(virtual_clock: VirtualClock) -> None:
    outcomes: list[object] = [BackendUnavailable("a"), BackendUnavailable("b"), "done"]
    times: list[float] = []
    noted: list[QueueError] = []

    async def call() -> object:
        times.append(asyncio.get_running_loop().time())
        outcome = outcomes.pop(0)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    assert await retry_while_unavailable(call, backoff=PLAIN, on_failure=noted.append) == "done"
    assert [round(later - times[0], 3) for later in times] == [0, 1, 3]
    assert [error.message for error in noted] == ["a", "b"]


@pytest.mark.parametrize("error", [CircuitOpen("open"), QueueFull("full"), ValueError("no")])
async def test_other_errors_are_not_retried(error: Exception) -> None:
    calls = 0

    async def call() -> None:
        nonlocal calls
        calls += 1
        raise error

    with pytest.raises(type(error)) as caught:
        await retry_while_unavailable(
            call, backoff=PLAIN, on_failure=lambda _: pytest.fail("retried")
        )
    assert caught.value is error
    assert calls == 1


async def test_retries_end_at_the_deadline_of_the_caller(virtual_clock: VirtualClock) -> None:
    async def call() -> None:
        raise BackendUnavailable("down")

    started = virtual_clock.monotonic()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(10):
            await retry_while_unavailable(call, backoff=PLAIN, on_failure=lambda _: None)
    assert virtual_clock.monotonic() - started == pytest.approx(10)
