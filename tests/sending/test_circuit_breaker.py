"""The circuit breaker: threshold, recovery timeout and trial calls."""

from __future__ import annotations

import pytest

from qkit.errors import CircuitOpen
from qkit.sending.circuit_breaker import BreakerState, CircuitBreaker


class ManualClock:
    """A clock whose time the test sets."""

    now = 100.0

    def monotonic(self) -> float:
        return self.now

    def time(self) -> float:
        return self.now


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def breaker(clock: ManualClock) -> CircuitBreaker:
    return CircuitBreaker(failure_threshold=3, recovery_timeout=30.0, clock=clock)


def fail(breaker: CircuitBreaker, times: int = 1) -> None:
    for _ in range(times):
        breaker.record_failure(probe=breaker.admit())


def test_the_circuit_stays_closed_below_the_threshold(breaker: CircuitBreaker) -> None:
    fail(breaker, 2)
    assert breaker.state is BreakerState.CLOSED
    assert breaker.admit() is False


def test_a_success_resets_the_failure_count(breaker: CircuitBreaker) -> None:
    fail(breaker, 2)
    breaker.record_success()
    fail(breaker, 2)
    assert breaker.state is BreakerState.CLOSED


@pytest.mark.proves("003-errors-8")
def test_the_circuit_opens_at_the_threshold_and_reports_the_next_trial(
    breaker: CircuitBreaker, clock: ManualClock
) -> None:
    fail(breaker, 3)
    clock.now += 10
    assert breaker.state is BreakerState.OPEN
    for call in (breaker.admit, breaker.check):
        with pytest.raises(CircuitOpen, match=r"after 3 consecutive .*trial call .* in 20\.0 s"):
            call()


@pytest.mark.proves("003-errors-10")
def test_a_half_open_circuit_admits_one_trial_call(
    breaker: CircuitBreaker, clock: ManualClock
) -> None:
    fail(breaker, 3)
    clock.now += 30
    assert breaker.state is BreakerState.HALF_OPEN
    breaker.check()
    breaker.check()  # a check starts no trial call
    assert breaker.admit() is True
    for call in (breaker.admit, breaker.check):
        with pytest.raises(CircuitOpen, match="a trial call is running"):
            call()


def test_a_successful_trial_call_closes_the_circuit(
    breaker: CircuitBreaker, clock: ManualClock
) -> None:
    fail(breaker, 3)
    clock.now += 30
    breaker.admit()
    breaker.record_success()
    assert breaker.state is BreakerState.CLOSED
    fail(breaker, 2)
    assert breaker.state is BreakerState.CLOSED


@pytest.mark.proves("003-errors-10")
def test_a_failed_trial_call_opens_the_circuit_again(
    breaker: CircuitBreaker, clock: ManualClock
) -> None:
    fail(breaker, 3)
    clock.now += 30
    fail(breaker)
    clock.now += 29.9
    assert breaker.state is BreakerState.OPEN
    clock.now += 0.1
    assert breaker.admit() is True


def test_after_a_cancelled_trial_call_another_is_admitted(
    breaker: CircuitBreaker, clock: ManualClock
) -> None:
    fail(breaker, 3)
    clock.now += 30
    breaker.release_probe(probe=breaker.admit())
    assert breaker.state is BreakerState.HALF_OPEN
    assert breaker.admit() is True


def test_a_late_result_of_an_earlier_call_admits_no_second_trial_call(
    breaker: CircuitBreaker, clock: ManualClock
) -> None:
    early = [breaker.admit() for _ in range(2)]  # started before the circuit opened
    fail(breaker, 3)
    clock.now += 30
    assert breaker.admit() is True
    breaker.release_probe(probe=early[0])
    breaker.record_failure(probe=early[1])
    with pytest.raises(CircuitOpen, match="a trial call is running"):
        breaker.admit()


def test_late_failures_do_not_extend_the_recovery_timeout(
    breaker: CircuitBreaker, clock: ManualClock
) -> None:
    early = breaker.admit()
    fail(breaker, 3)
    clock.now += 20
    breaker.record_failure(probe=early)
    clock.now += 10
    assert breaker.state is BreakerState.HALF_OPEN


def test_a_trial_call_that_fails_after_the_circuit_closed_counts_as_one_failure(
    breaker: CircuitBreaker, clock: ManualClock
) -> None:
    early = breaker.admit()
    assert early is False
    fail(breaker, 3)
    clock.now += 30
    probe = breaker.admit()
    breaker.record_success()  # the early call succeeded
    breaker.record_failure(probe=probe)
    assert breaker.state is BreakerState.CLOSED
