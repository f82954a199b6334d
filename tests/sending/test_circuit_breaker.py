"""The circuit breaker: threshold, rest, one probe, recovery."""

from __future__ import annotations

import pytest

from qkit.errors import CircuitOpen
from qkit.sending.circuit_breaker import BreakerState, CircuitBreaker


class HandClock:
    """A clock that a test sets."""

    now = 100.0

    def monotonic(self) -> float:
        return self.now

    def time(self) -> float:
        return self.now


@pytest.fixture
def clock() -> HandClock:
    return HandClock()


@pytest.fixture
def breaker(clock: HandClock) -> CircuitBreaker:
    return CircuitBreaker(failure_threshold=3, recovery_timeout=30.0, clock=clock)


def fail(breaker: CircuitBreaker, times: int = 1) -> None:
    for _ in range(times):
        breaker.record_failure(probe=breaker.admit())


def test_it_stays_closed_below_the_threshold(breaker: CircuitBreaker) -> None:
    fail(breaker, 2)
    assert breaker.state is BreakerState.CLOSED
    assert breaker.admit() is False


def test_a_success_starts_the_count_anew(breaker: CircuitBreaker) -> None:
    fail(breaker, 2)
    breaker.record_success()
    fail(breaker, 2)
    assert breaker.state is BreakerState.CLOSED


@pytest.mark.proves("003-errors-8")
def test_it_opens_at_the_threshold_and_says_when_to_come_back(
    breaker: CircuitBreaker, clock: HandClock
) -> None:
    fail(breaker, 3)
    clock.now += 10
    assert breaker.state is BreakerState.OPEN
    for refuse in (breaker.admit, breaker.check):
        with pytest.raises(CircuitOpen, match=r"after 3 connection failures.*probe .* in 20\.0 s"):
            refuse()


@pytest.mark.proves("003-errors-10")
def test_half_open_admits_exactly_one(breaker: CircuitBreaker, clock: HandClock) -> None:
    fail(breaker, 3)
    clock.now += 30
    assert breaker.state is BreakerState.HALF_OPEN
    breaker.check()
    breaker.check()  # looking takes no probe
    assert breaker.admit() is True
    for refuse in (breaker.admit, breaker.check):
        with pytest.raises(CircuitOpen, match="another call is probing"):
            refuse()


def test_a_probe_that_succeeds_closes_it(breaker: CircuitBreaker, clock: HandClock) -> None:
    fail(breaker, 3)
    clock.now += 30
    breaker.admit()
    breaker.record_success()
    assert breaker.state is BreakerState.CLOSED
    fail(breaker, 2)
    assert breaker.state is BreakerState.CLOSED


@pytest.mark.proves("003-errors-10")
def test_a_probe_that_fails_opens_it_for_another_rest(
    breaker: CircuitBreaker, clock: HandClock
) -> None:
    fail(breaker, 3)
    clock.now += 30
    fail(breaker)
    clock.now += 29.9
    assert breaker.state is BreakerState.OPEN
    clock.now += 0.1
    assert breaker.admit() is True


def test_a_cancelled_probe_lets_the_next_one_probe(
    breaker: CircuitBreaker, clock: HandClock
) -> None:
    fail(breaker, 3)
    clock.now += 30
    breaker.release_probe(probe=breaker.admit())
    assert breaker.state is BreakerState.HALF_OPEN
    assert breaker.admit() is True


def test_late_news_of_an_earlier_try_frees_no_second_probe(
    breaker: CircuitBreaker, clock: HandClock
) -> None:
    early = [breaker.admit() for _ in range(2)]  # under way since before it opened
    fail(breaker, 3)
    clock.now += 30
    assert breaker.admit() is True
    breaker.release_probe(probe=early[0])
    breaker.record_failure(probe=early[1])
    with pytest.raises(CircuitOpen, match="another call is probing"):
        breaker.admit()


def test_late_failures_do_not_prolong_the_rest(breaker: CircuitBreaker, clock: HandClock) -> None:
    early = breaker.admit()
    fail(breaker, 3)
    clock.now += 20
    breaker.record_failure(probe=early)
    clock.now += 10
    assert breaker.state is BreakerState.HALF_OPEN


def test_a_probe_that_fails_after_others_closed_the_circuit_is_one_failure(
    breaker: CircuitBreaker, clock: HandClock
) -> None:
    early = breaker.admit()
    assert early is False
    fail(breaker, 3)
    clock.now += 30
    probe = breaker.admit()
    breaker.record_success()  # the early one got its answer after all
    breaker.record_failure(probe=probe)
    assert breaker.state is BreakerState.CLOSED
