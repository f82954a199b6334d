"""Counters and connection state."""

from __future__ import annotations

import logging
from dataclasses import asdict

import pytest

from qkit.observability.connection_state import ConnectionState, ConnectionTracker
from qkit.observability.events import Event, Events, Reconnected, StateChanged
from qkit.observability.metrics import MAX_CHANNELS, OVERFLOW_CHANNEL, Counters


class ManualClock:
    """Clock that the test sets; its wall time differs from its monotonic time."""

    now = 100.0

    def monotonic(self) -> float:
        return self.now

    def time(self) -> float:
        return 1_700_000_000 + self.now


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def events() -> list[Event]:
    return []


@pytest.fixture
def connection(clock: ManualClock, events: list[Event]) -> ConnectionTracker:
    emitter = Events()
    emitter.on("state_change", events.append)
    emitter.on("reconnected", events.append)
    return ConnectionTracker(emitter, clock, "faulty")


# -- counters --------------------------------------------------------------------------------


@pytest.mark.proves("003-health-13")
def test_totals_are_the_sums_over_all_channels() -> None:
    counters = Counters()
    for name, number in (("orders", 1), ("audit", 10)):
        for field in ("sent", "received", "failed", "retried", "dead_lettered", "in_flight"):
            setattr(counters.for_channel(name), field, number)
    metrics = counters.snapshot()
    totals = {name: value for name, value in asdict(metrics).items() if "channels" not in name}
    assert totals == dict.fromkeys(totals, 11)
    assert len(totals) == 6
    assert metrics.channels["audit"].messages_dead_lettered == 10


@pytest.mark.proves("003-health-12")
def test_a_snapshot_does_not_change() -> None:
    counters = Counters()
    before = counters.snapshot()
    counters.for_channel("orders").sent += 1
    assert before.messages_sent == 0
    assert counters.snapshot().messages_sent == 1


def test_channels_beyond_the_limit_are_counted_together() -> None:
    counters = Counters()
    for number in range(MAX_CHANNELS + 500):
        counters.for_channel(f"channel-{number}").sent += 1
    counters.for_channel("channel-0").sent += 1
    metrics = counters.snapshot()
    assert len(metrics.channels) == MAX_CHANNELS + 1
    assert metrics.channels["channel-0"].messages_sent == 2
    assert metrics.channels[OVERFLOW_CHANNEL].messages_sent == 500
    assert metrics.messages_sent == MAX_CHANNELS + 501


# -- connection state ------------------------------------------------------------------------


@pytest.mark.proves("003-health-6")
def test_a_failure_sets_the_state_to_disconnected_with_its_time_and_error(
    connection: ConnectionTracker, clock: ManualClock, events: list[Event]
) -> None:
    connection.transition_to(ConnectionState.CONNECTED)
    events.clear()
    connection.record_failure(ConnectionError("refused"))
    assert connection.state is ConnectionState.DISCONNECTED
    assert connection.last_error == "ConnectionError: refused"
    assert connection.disconnected_at == clock.time()
    assert events == [StateChanged("connected", "disconnected", "ConnectionError: refused")]


@pytest.mark.proves("003-health-7")
def test_further_failures_change_the_error_but_not_the_time_of_disconnection(
    connection: ConnectionTracker, clock: ManualClock, events: list[Event]
) -> None:
    connection.transition_to(ConnectionState.CONNECTED)
    connection.record_failure(ConnectionError("refused"))
    since = clock.time()
    clock.now += 5
    connection.record_failure(ConnectionError("still refused"))
    assert connection.last_error == "ConnectionError: still refused"
    assert connection.disconnected_at == since
    assert len(events) == 2


def test_a_success_after_a_failure_emits_reconnected_with_the_duration(
    connection: ConnectionTracker, clock: ManualClock, events: list[Event]
) -> None:
    connection.transition_to(ConnectionState.CONNECTED)
    connection.record_failure(ConnectionError("refused"))
    events.clear()
    clock.now += 12.5
    connection.record_success()
    connection.record_success()
    assert events == [StateChanged("disconnected", "connected"), Reconnected(12.5)]
    assert connection.disconnected_at is None


def test_the_first_connection_does_not_emit_reconnected(
    connection: ConnectionTracker, events: list[Event]
) -> None:
    connection.transition_to(ConnectionState.CONNECTING)
    connection.record_failure(ConnectionError("refused"))
    assert connection.disconnected_at is not None
    connection.transition_to(ConnectionState.CONNECTING)
    connection.transition_to(ConnectionState.CONNECTED)
    assert not any(isinstance(event, Reconnected) for event in events)


def test_a_success_while_closing_does_not_reconnect(
    connection: ConnectionTracker, events: list[Event]
) -> None:
    connection.transition_to(ConnectionState.CONNECTED)
    connection.transition_to(ConnectionState.CLOSING)
    connection.record_failure(ConnectionError("refused"))
    connection.record_success()
    assert connection.state is ConnectionState.CLOSING


@pytest.mark.proves("003-health-10")
def test_every_transition_is_logged_with_its_fields(
    connection: ConnectionTracker, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "qkit")
    connection.transition_to(ConnectionState.CONNECTED)
    connection.transition_to(ConnectionState.CONNECTED)
    connection.record_failure(ConnectionError("refused"))
    assert [record.getMessage() for record in caplog.records] == [
        "connection to faulty: disconnected -> connected",
        "connection to faulty: connected -> disconnected",
    ]
    assert [record.levelno for record in caplog.records] == [logging.INFO, logging.WARNING]
    fields = vars(caplog.records[1])
    assert (fields["old"], fields["new"]) == ("connected", "disconnected")
    assert fields["error"] == "ConnectionError: refused"


@pytest.mark.proves("003-health-4")
def test_recording_a_message_sets_the_last_success(
    connection: ConnectionTracker, clock: ManualClock
) -> None:
    connection.record_message()
    assert connection.last_success_at == clock.time()
