"""State of one queue: order, leases, TTL and limits. Tests pass the time as an argument."""

from __future__ import annotations

import pytest

from qkit.errors import AckDeadlineExceeded, InvalidPriority, MessageNotFound, QueueFull
from qkit.message import Reason
from qkit.native.queue.dead_message import LeaseExpired, TimeToLiveExpired
from qkit.native.queue.state import QueueState
from qkit.native.queue.stored_message import REMOVED

LEASE = 30.0


def put(queue: QueueState, *ids: str, now: float = 0.0, **options) -> None:
    for id in ids:
        queue.put(now, id, id.encode(), **options)


def claim(queue: QueueState, limit: int = 100, now: float = 0.0, lease: float = LEASE):
    return queue.claim(now, limit, lease)


def ids(messages) -> list[str]:
    return [message.id for message in messages]


def waiting(queue: QueueState) -> list[str]:
    return [message.id for message, _ in queue.peek(1000)]


# Order


@pytest.mark.proves(
    "000-features-1",
    "000-priority-2",
    "000-publish-4",
    "000-config-3",
    "001-storage-4",
    "004-structures-1",
)
def test_order_is_by_priority_then_by_arrival() -> None:
    queue = QueueState("q")
    put(queue, "a", "b", priority=5)
    put(queue, "low", priority=0)
    put(queue, "high", priority=9)
    put(queue, "c")  # 5 is the default
    assert ids(claim(queue)) == ["high", "a", "b", "c", "low"]


def test_the_default_priority_does_not_exceed_max_priority() -> None:
    queue = QueueState("q", max_priority=2)
    put(queue, "a")
    assert claim(queue)[0].priority == 2


@pytest.mark.proves("001-overview-4")
def test_256_priorities_are_ordered() -> None:
    queue = QueueState("q", max_priority=255)
    for priority in (0, 255, 128, 254):
        put(queue, str(priority), priority=priority)
    assert ids(claim(queue)) == ["255", "254", "128", "0"]


@pytest.mark.proves("000-features-1", "000-errors-4")
@pytest.mark.parametrize("priority", [-1, 10, 1000])
def test_a_priority_out_of_range_is_rejected_with_the_range(priority: int) -> None:
    queue = QueueState("q")
    with pytest.raises(InvalidPriority, match="0–9") as caught:
        put(queue, "a", priority=priority)
    assert caught.value.queue == "q"
    assert caught.value.message_id == "a"
    assert queue.ready == 0


@pytest.mark.proves("000-priority-2", "001-storage-4", "004-structures-1")
def test_a_released_message_keeps_its_order() -> None:
    queue = QueueState("q")
    put(queue, "a", "b", "c", "d")
    a, b, c = claim(queue, 3)
    queue.release(1.0, c.state)
    queue.release(1.0, a.state)
    queue.release(1.0, b.state)
    put(queue, "e", now=2.0)
    assert waiting(queue) == ["a", "b", "c", "d", "e"]
    assert ids(claim(queue)) == ["a", "b", "c", "d", "e"]


@pytest.mark.proves("001-cycle-1", "001-reaper-2", "004-structures-2")
def test_a_delayed_message_is_ordered_by_its_due_time_and_a_delayed_retry_keeps_its_order() -> None:
    queue = QueueState("q")
    put(queue, "first")
    put(queue, "delayed", due=10.0)
    put(queue, "second")
    (first,) = claim(queue, 1)
    queue.release(1.0, first.state, 9.0)
    assert waiting(queue) == ["second", "delayed", "first"]
    assert queue.scheduled == 2
    put(queue, "third", now=5.0)
    assert queue.next_due() == 10.0
    assert ids(claim(queue, now=10.0)) == ["first", "second", "third", "delayed"]


@pytest.mark.proves("001-cycle-1")
def test_a_due_time_in_the_past_does_not_delay() -> None:
    queue = QueueState("q")
    assert queue.put(5.0, "a", b"", due=5.0) == 0


@pytest.mark.proves("000-lifecycle-1", "000-publish-8")
def test_position_counts_the_messages_ahead_with_equal_or_higher_priority() -> None:
    queue = QueueState("q")
    assert queue.put(0.0, "a", b"", priority=5) == 0
    assert queue.put(0.0, "b", b"", priority=5) == 1
    assert queue.put(0.0, "c", b"", priority=9) == 0
    assert queue.put(0.0, "d", b"", priority=5) == 3
    assert queue.put(0.0, "e", b"", priority=0) == 4
    assert queue.put(0.0, "f", b"", due=1.0) is None
    queue.remove(["a"])
    assert queue.put(0.0, "g", b"", priority=5) == 3


def test_position_ignores_expired_messages() -> None:
    queue = QueueState("q")
    put(queue, "a", "c")
    put(queue, "expired", expires=1.0)
    put(queue, "b")
    queue.advance(1.0)
    assert ids(claim(queue, 3, now=1.0)) == ["a", "c", "b"]
    assert [queue.put(2.0, id, b"") for id in "de"] == [0, 1]


# Settlement

SETTLE = {
    "ack": lambda queue, token: queue.ack(token),
    "release": lambda queue, token: queue.release(1.0, token),
    "reject": lambda queue, token: queue.reject(token, Reason.EXPLICIT_NACK),
    "extend": lambda queue, token: queue.extend(1.0, token, LEASE),
}


@pytest.mark.proves("000-ack-2", "000-ack-3", "000-nack-3", "002-pitfalls-3")
@pytest.mark.parametrize("settle", SETTLE.values(), ids=SETTLE.keys())
@pytest.mark.parametrize(
    ("token", "error"),
    [
        ("settled", AckDeadlineExceeded),
        ("expired", AckDeadlineExceeded),
        ("never issued", MessageNotFound),
        ("negative", MessageNotFound),
    ],
)
def test_an_invalid_token_is_rejected_and_changes_nothing(settle, token, error) -> None:
    queue = QueueState("q")
    put(queue, "a")
    (message,) = claim(queue, lease=1.0)
    old = message.state
    if token == "settled":
        queue.release(0.5, old)
    else:
        queue.expire(1.0)
    (again,) = claim(queue, now=1.0)  # another consumer holds the message now
    assert again.attempt == 2
    bad = {"settled": old, "expired": old, "never issued": 10_000, "negative": REMOVED}[token]
    with pytest.raises(error):
        settle(queue, bad)
    assert queue.holds(again.state)
    assert (queue.in_flight, queue.ready, queue.dead) == (1, 0, [])
    queue.ack(again.state)
    assert queue.in_flight == 0


@pytest.mark.proves("000-structures-4", "002-ack-2")
def test_each_delivery_counts_as_an_attempt_unless_it_is_released_uncounted() -> None:
    queue = QueueState("q")
    put(queue, "a")
    for now, count, expected in [(0.0, True, 1), (1.0, False, 2), (2.0, False, 2), (3.0, True, 2)]:
        (message,) = claim(queue, now=now)
        assert message.attempt == expected
        queue.release(now, message.state, count_attempt=count)
    assert claim(queue, now=4.0)[0].attempt == 3


def test_a_message_whose_first_delivery_is_released_uncounted_keeps_its_order() -> None:
    queue = QueueState("q")
    put(queue, "a", "b")
    a, b = claim(queue)
    queue.release(0.0, a.state, count_attempt=False)
    (a,) = claim(queue)
    queue.release(0.0, b.state)
    queue.release(0.0, a.state)
    assert waiting(queue) == ["a", "b"]


def test_release_replaces_the_headers() -> None:
    queue = QueueState("q")
    put(queue, "a", headers={"x": "1"})
    (message,) = claim(queue)
    queue.release(0.0, message.state)
    assert claim(queue)[0].headers == {"x": "1"}
    queue.release(0.0, message.state, headers={"y": "2"})
    assert claim(queue)[0].headers == {"y": "2"}
    queue.release(0.0, message.state, headers={})
    assert claim(queue)[0].headers is None


@pytest.mark.proves("000-ack-3")
def test_two_messages_may_have_the_same_id() -> None:
    queue = QueueState("q")
    put(queue, "a", "a")
    one, two = claim(queue)
    queue.ack(one.state)
    assert queue.holds(two.state)


# Leases


@pytest.mark.proves(
    "000-structures-5",
    "000-deadline-2",
    "001-cycle-3",
    "001-reaper-3",
    "004-states-2",
    "004-structures-3",
)
def test_a_message_with_an_expired_lease_keeps_its_order() -> None:
    queue = QueueState("q")
    put(queue, "a", "b")
    claim(queue, 1)
    assert queue.next_due() == LEASE
    assert queue.expire(LEASE - 0.001) == []
    assert queue.ready == 1
    assert queue.expire(LEASE) == []
    assert waiting(queue) == ["a", "b"]
    assert queue.next_due() is None


@pytest.mark.proves("000-lifecycle-2")
def test_ack_after_the_deadline_succeeds_until_expire_is_called() -> None:
    queue = QueueState("q")
    put(queue, "a")
    (message,) = claim(queue, lease=1.0)
    assert claim(queue, now=100.0) == []  # only expire() ends a lease
    queue.ack(message.state)
    assert queue.acked == 1


@pytest.mark.proves("004-structures-3")
@pytest.mark.parametrize(("seconds", "ends"), [(60.0, 70.0), (5.0, 15.0)])
def test_extend_can_lengthen_and_shorten_a_lease(seconds: float, ends: float) -> None:
    queue = QueueState("q")
    put(queue, "a")
    (message,) = claim(queue)
    queue.extend(10.0, message.state, seconds)
    queue.expire(ends - 1)
    assert queue.holds(message.state)
    queue.expire(ends)
    assert queue.ready == 1


@pytest.mark.proves(
    "000-structures-4", "000-structures-5", "000-deadline-4", "002-dlq-1", "004-dlq-1", "004-dlq-2"
)
def test_the_last_allowed_delivery_is_dead_lettered_when_its_lease_expires() -> None:
    queue = QueueState("q", max_deliveries=2)
    put(queue, "a")
    queue.claim(0.0, 1, 1.0, "worker-1")
    assert queue.expire(1.0) == []
    queue.claim(1.0, 1, 1.0, "worker-2")
    ((message, reason, error),) = queue.expire(2.0)
    assert (message.id, message.attempt, reason) == ("a", 2, Reason.MAX_RETRIES_EXCEEDED)
    assert isinstance(error, LeaseExpired)
    assert "delivery 2 of 2" in str(error)
    assert "worker-2" in str(error)
    assert queue.take_dead() == []
    assert (queue.ready, queue.in_flight) == (0, 0)


@pytest.mark.proves("000-deadline-3")
def test_without_a_limit_a_message_is_redelivered_forever() -> None:
    queue = QueueState("q")
    put(queue, "a")
    for turn in range(50):
        assert claim(queue, now=float(turn), lease=1.0)[0].attempt == turn + 1
        assert queue.expire(turn + 1.0) == []


@pytest.mark.proves("000-dead-2", "004-dlq-5")
def test_reject_dead_letters_with_the_reason() -> None:
    queue = QueueState("q")
    put(queue, "a")
    (message,) = claim(queue)
    queue.reject(message.state, Reason.EXPLICIT_NACK)
    assert queue.dead == [(message, Reason.EXPLICIT_NACK, None)]


# TTL


@pytest.mark.proves("000-features-6")
def test_a_ready_or_scheduled_message_expires() -> None:
    queue = QueueState("q")
    put(queue, "ready", expires=5.0)
    put(queue, "scheduled", due=4.0, expires=6.0)
    put(queue, "stays")
    assert queue.next_due() == 4.0
    assert [dead.message.id for dead in queue.advance(5.0)] == ["ready"]
    ((message, reason, error),) = queue.advance(6.0)
    assert (message.id, message.attempt, reason) == ("scheduled", 0, Reason.TTL_EXPIRED)
    assert isinstance(error, TimeToLiveExpired)
    assert waiting(queue) == ["stays"]


def test_a_scheduled_retry_expires() -> None:
    queue = QueueState("q")
    put(queue, "a", expires=10.0)
    (message,) = claim(queue)
    queue.release(1.0, message.state, 60.0)
    assert queue.next_due() == 10.0
    assert ids(dead.message for dead in queue.expire(10.0)) == ["a"]
    assert queue.scheduled == 0
    assert queue.next_due() is None
    assert queue.expire(100.0) == []


@pytest.mark.proves("002-improvements-7")
def test_an_expired_message_is_never_delivered() -> None:
    queue = QueueState("q")
    put(queue, "a", expires=5.0)
    put(queue, "b")
    assert ids(claim(queue, now=5.0)) == ["b"]
    assert ids(dead.message for dead in queue.take_dead()) == ["a"]


def test_a_message_in_flight_expires_only_when_it_is_released() -> None:
    queue = QueueState("q", max_deliveries=5)
    put(queue, "acked", "released", "lost", expires=5.0)
    acked, released, lost = claim(queue)
    assert queue.expire(6.0) == []
    queue.ack(acked.state)
    assert queue.release(6.0, released.state) is False
    assert ids(dead.message for dead in queue.take_dead()) == ["released"]
    ((message, reason, _),) = queue.expire(LEASE)
    assert (message, reason) == (lost, Reason.TTL_EXPIRED)


@pytest.mark.proves("002-improvements-5")
def test_a_message_keeps_its_key_and_its_expiry_time() -> None:
    queue = QueueState("q")
    put(queue, "a", key="k", expires=5.0)
    put(queue, "b")
    a, b = claim(queue)
    assert (a.key, a.expires, b.key, b.expires) == ("k", 5.0, None, None)


# Limits


def test_a_full_queue_counts_ready_scheduled_and_in_flight_messages() -> None:
    queue = QueueState("q", max_depth=3)
    put(queue, "held", "ready")
    claim(queue, 1)
    put(queue, "scheduled", due=10.0)
    with pytest.raises(QueueFull, match="max_depth") as caught:
        put(queue, "more")
    assert caught.value.queue == "q"
    assert (queue.ready, queue.scheduled, queue.in_flight) == (1, 1, 1)


def test_drop_oldest_frees_capacity() -> None:
    queue = QueueState("q", max_depth=2, drop_oldest=True)
    put(queue, "old", priority=9, now=1.0)
    put(queue, "newer", priority=0, now=2.0)
    put(queue, "newest", now=3.0)
    assert waiting(queue) == ["newest", "newer"]
    assert queue.dropped == 1
    with pytest.raises(InvalidPriority):
        put(queue, "bad", priority=99, now=4.0)
    assert queue.ready == 2


def test_drop_oldest_drops_a_scheduled_message_when_none_is_ready() -> None:
    queue = QueueState("q", max_depth=2, drop_oldest=True)
    put(queue, "later", due=20.0)
    put(queue, "sooner", due=10.0)
    put(queue, "new")
    assert waiting(queue) == ["new", "later"]


def test_drop_oldest_never_drops_a_message_in_flight() -> None:
    queue = QueueState("q", max_depth=1, drop_oldest=True)
    put(queue, "held")
    (held,) = claim(queue)
    put(queue, "one over")
    put(queue, "again")
    assert waiting(queue) == ["again"]
    assert queue.holds(held.state)


# Administration and statistics


def test_purge_keeps_messages_in_flight() -> None:
    queue = QueueState("q")
    put(queue, "held", "a", expires=50.0)
    put(queue, "b", due=5.0)
    (held,) = claim(queue, 1)
    assert len(queue.purge()) == 2
    assert (queue.ready, queue.scheduled, queue.in_flight) == (0, 0, 1)
    queue.release(1.0, held.state)
    assert waiting(queue) == ["held"]
    assert ids(dead.message for dead in queue.expire(50.0)) == ["held"]


@pytest.mark.proves("001-storage-2", "002-index-1")
def test_remove_deletes_by_id_unless_in_flight() -> None:
    queue = QueueState("q")
    put(queue, "held", "a", "b", "a")
    put(queue, "later", due=5.0)
    claim(queue, 1)
    assert len(queue.remove(["held", "a", "later", "unknown"])) == 2
    assert waiting(queue) == ["b", "a"]  # each id removes only the oldest message with that id
    assert len(queue.remove(["a", "a"])) == 1
    assert ids(claim(queue, now=10.0)) == ["b"]


@pytest.mark.proves("004-structures-2")
def test_peek_shows_the_order_of_delivery_with_due_times() -> None:
    queue = QueueState("q")
    put(queue, "a", priority=1)
    put(queue, "b", priority=2)
    put(queue, "later", due=9.0)
    put(queue, "sooner", due=8.0)
    assert [(m.id, due) for m, due in queue.peek(3)] == [("b", None), ("a", None), ("sooner", 8.0)]


@pytest.mark.proves("000-metrics-9")
def test_waiting_time_is_measured_from_ready_to_first_delivery() -> None:
    queue = QueueState("q")
    put(queue, "a", now=10.0)
    put(queue, "b", now=11.0, due=15.0)
    assert queue.oldest_since() == 10.0
    claim(queue, now=12.0)
    queue.advance(15.0)
    (b,) = claim(queue, now=18.0)
    queue.release(18.0, b.state)
    claim(queue, now=30.0)  # a redelivery does not count
    assert (queue.waited, queue.first_claimed) == (5.0, 2)
    assert queue.oldest_since() is None


# Cleanup of internal structures


@pytest.mark.proves(
    "000-lifecycle-3", "001-cycle-4", "002-index-4", "002-compaction-6", "004-structures-4"
)
def test_settled_deliveries_leave_no_garbage() -> None:
    queue = QueueState("q", max_depth=10**6)
    for n in range(5_000):
        put(queue, str(n), expires=1e9)
        (message,) = claim(queue)
        if n % 2:
            queue.extend(0.0, message.state, 60.0)
        queue.ack(message.state)
    assert len(queue.leases.custom_ends) < 200
    assert len(queue._expiries.heap) < 300
    assert queue.next_due() is None
    assert not queue.leases.regular
    assert not queue.leases.custom
    assert not queue.leases.holders


@pytest.mark.proves("001-storage-3", "002-index-4")
def test_extended_leases_leave_no_garbage() -> None:
    queue = QueueState("q")
    put(queue, "a")
    (message,) = claim(queue)
    put(queue, "b")
    (long,) = queue.claim(0.0, 1, 1e6)
    for n in range(5_000):
        queue.extend(n * 10.0, message.state, LEASE)
    assert len(queue.leases.custom_ends) < 200
    queue.expire(5_000 * 10.0)
    assert queue.holds(message.state)
    assert queue.holds(long.state)


@pytest.mark.proves("001-storage-3")
def test_leases_of_different_lengths_expire_in_order() -> None:
    queue = QueueState("q")
    leases = [30.0, 5.0, 60.0, 1.0, 30.0, 90.0]
    for n, lease in enumerate(leases):
        put(queue, str(n))
        queue.claim(0.0, 1, lease)
    ended: list[float] = []
    while (due := queue.leases.next_end()) is not None:
        before = queue.in_flight
        queue.expire(due)
        ended += [due] * (before - queue.in_flight)
    assert ended == sorted(leases)


def test_messages_of_a_lost_consumer_are_released_or_dead_lettered_immediately() -> None:
    queue = QueueState("q", max_deliveries=2)
    put(queue, "once")
    put(queue, "twice")
    first, second = queue.claim(0.0, 2, LEASE, "worker")
    queue.ack(first.state)
    assert queue.abandon(1.0, [first.state, second.state]) == []
    (again,) = queue.claim(1.0, 1, LEASE, "worker")
    (dead,) = queue.abandon(1.0, [again.state])
    assert (dead.message.id, dead.reason) == ("twice", Reason.MAX_RETRIES_EXCEEDED)
    assert "ended with its consumer (consumer worker)" in str(dead.error)
    assert queue.next_due() is None


def test_messages_that_expire_in_the_middle_leave_no_garbage() -> None:
    queue = QueueState("q")
    put(queue, "head")
    put(queue, *(f"x{n}" for n in range(1_000)), expires=5.0)
    put(queue, "tail")
    claimed = claim(queue, 101)
    for message in claimed[1:]:
        queue.release(1.0, message.state, 1e6)  # delayed past their expiry
    assert len(queue.expire(5.0)) == 1_000
    bucket = queue._ready._buckets[5]
    assert len(bucket.fresh) < 200
    assert len(queue._scheduled.heap) < 200
    assert waiting(queue) == ["tail"]


def test_a_bucket_with_only_expired_messages_becomes_empty() -> None:
    queue = QueueState("q")
    put(queue, *(str(n) for n in range(200)), priority=9, expires=5.0)
    put(queue, "low", priority=1)
    queue.advance(5.0)
    assert len(queue._ready._buckets[9].fresh) < 100
    assert queue.put(6.0, "next", b"", priority=0) == 1
    assert ids(claim(queue, now=6.0)) == ["low", "next"]


def test_a_bucket_whose_messages_were_all_removed_is_skipped() -> None:
    queue = QueueState("q")
    removed_ids = [str(n) for n in range(65)]  # just enough to trigger a rebuild
    put(queue, *removed_ids, priority=9)
    put(queue, "low", priority=1)
    assert len(queue.remove(removed_ids)) == 65
    assert not queue._ready._buckets[9].fresh
    assert ids(claim(queue)) == ["low"]


@pytest.mark.proves("000-deadline-2", "001-storage-3", "004-actors-4")
def test_stale_entries_do_not_set_the_timer() -> None:
    queue = QueueState("q")
    put(queue, "a", expires=5.0)
    put(queue, "b", due=6.0)
    queue.remove(["a", "b"])
    assert queue.next_due() is None
