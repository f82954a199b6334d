"""Conformance suites with one deliberate bug each, in a backend or a policy.

Each fault is registered with the scenarios that must fail because of it. ``test_planted_faults.py``
runs these suites in a separate pytest process, which is expected to fail.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from dataclasses import replace
from typing import Any

import pytest
import pytest_asyncio

from qkit._internal.clock import Clock
from qkit._internal.ids import new_id
from qkit.backend import Delivery, QueueSpec
from qkit.backends.native.backend import NativeBackend
from qkit.backends.native.subscription import NativeSubscription
from qkit.codec.codec import Codec
from qkit.conformance import MATRIX, Conformance, NewBackend
from qkit.consuming.consumer import Consumer
from qkit.consuming.consumer_pool import ConsumerPool
from qkit.consuming.delivery_buffer import DeliveryBuffer
from qkit.consuming.outcome import RetryLater
from qkit.consuming.settlement import Settlement
from qkit.errors import ConfigError, QueueError
from qkit.handlers.retry_policy import RetryPolicy
from qkit.message import DeadLetter, Envelope, Sent
from qkit.native import Engine
from qkit.native.queue.state import QueueState
from qkit.native.queue.topic import Topic
from qkit.observability.connection_state import ConnectionTracker
from qkit.service.runtime import ServiceRuntime

Plant = Callable[[pytest.MonkeyPatch], None]
FAULTS: dict[str, tuple[Plant, tuple[str, ...]]] = {}


def fault(*scenarios: str) -> Callable[[Plant], Plant]:
    """Register a planted fault with the scenarios that must detect it."""

    def add(plant: Plant) -> Plant:
        FAULTS[plant.__name__] = (plant, scenarios)
        return plant

    return add


def wrap(
    patch: pytest.MonkeyPatch, owner: type, name: str, change: Callable[[Any], Callable[..., Any]]
) -> None:
    """Replace a method with ``change(original)``."""
    patch.setattr(owner, name, change(getattr(owner, name)))


# -- declarations --------------------------------------------------------------------------------


@fault("test_a_sender_does_not_change_max_deliveries")
def a_sender_sets_max_deliveries(patch: pytest.MonkeyPatch) -> None:
    def change(original: Any) -> Callable[..., Any]:
        async def declare(self: Any, spec: QueueSpec) -> None:
            if spec.max_deliveries is None and not spec.drop_oldest:
                spec = replace(spec, max_deliveries=10)
            await original(self, spec)

        return declare

    wrap(patch, NativeBackend, "declare", change)


@fault("test_an_expired_message_is_not_dead_lettered_if_dead_letters_are_disabled")
def a_consumer_always_has_dead_letters(patch: pytest.MonkeyPatch) -> None:
    def change(original: Any) -> Callable[..., Any]:
        async def declare(self: Any, spec: QueueSpec) -> None:
            if spec.dead_letter is None and not spec.drop_oldest:
                spec = replace(spec, dead_letter=f"{spec.name}_dlq")
            await original(self, spec)

        return declare

    wrap(patch, NativeBackend, "declare", change)


@fault(
    "test_a_worker_starts_on_a_channel_declared_by_a_sender",
    "test_two_versions_of_a_worker_run_side_by_side",
)
def a_second_declaration_with_other_options_raises(patch: pytest.MonkeyPatch) -> None:
    def change(original: Any) -> Callable[..., Any]:
        async def declare(self: Any, spec: QueueSpec) -> None:
            engine = self._engine
            known = engine.__dict__.setdefault("declared_as", {})
            if known.setdefault(spec.name, spec) != spec:
                raise ConfigError(f"{spec.name} was already declared with other options")
            await original(self, spec)

        return declare

    wrap(patch, NativeBackend, "declare", change)


# -- backends ------------------------------------------------------------------------------------


@fault("test_an_acknowledged_message_is_not_redelivered")
def ack_does_nothing(patch: pytest.MonkeyPatch) -> None:
    async def ack(self: NativeSubscription, delivery: Delivery) -> None: ...

    patch.setattr(NativeSubscription, "ack", ack)


@fault("test_a_cancelled_receive_loses_no_message")
def loses_messages_on_cancel(patch: pytest.MonkeyPatch) -> None:
    def change(original: Any) -> Any:
        async def receive(self: NativeSubscription, limit: int) -> list[Delivery]:
            deliveries = await original(self, limit)
            try:
                await asyncio.sleep(0)  # a cancellation may arrive here, after the claim
            except asyncio.CancelledError:
                for delivery in deliveries:
                    await self.ack(delivery)
                raise
            return deliveries  # type: ignore[no-any-return]

        return receive

    wrap(patch, NativeSubscription, "receive", change)


@fault("test_each_delivery_increments_the_attempt_number")
def does_not_count_attempts(patch: pytest.MonkeyPatch) -> None:
    def change(original: Any) -> Any:
        def release(self: QueueState, now: float, token: int, delay: float = 0.0, **kw: Any) -> Any:
            return original(self, now, token, delay, **{**kw, "count_attempt": False})

        return release

    wrap(patch, QueueState, "release", change)


@fault(
    "test_a_release_without_count_attempt_keeps_the_attempt_number",
    "test_the_shutdown_deadline_cancels_handlers_without_counting_an_attempt",
)
def every_release_counts_an_attempt(patch: pytest.MonkeyPatch) -> None:
    def change(original: Any) -> Any:
        def release(self: QueueState, now: float, token: int, delay: float = 0.0, **kw: Any) -> Any:
            return original(self, now, token, delay, **{**kw, "count_attempt": True})

        return release

    wrap(patch, QueueState, "release", change)


@fault(
    "test_a_message_released_with_a_delay_is_redelivered_on_time",
    "test_backoff_grows_up_to_its_limit_and_no_retry_is_early",
)
def delivers_retries_early(patch: pytest.MonkeyPatch) -> None:
    def change(original: Any) -> Any:
        def release(self: QueueState, now: float, token: int, delay: float = 0.0, **kw: Any) -> Any:
            return original(self, now, token, delay * 0.9, **kw)

        return release

    wrap(patch, QueueState, "release", change)


@fault("test_a_delayed_message_is_delivered_on_time")
def ignores_the_delay_of_a_send(patch: pytest.MonkeyPatch) -> None:
    def change(original: Any) -> Any:
        def put(self: Engine, channel: Any, items: list[Envelope], now: float) -> Any:
            return original(self, channel, [replace(item, not_before=None) for item in items], now)

        return put

    wrap(patch, Engine, "_put_in_memory", change)


@fault("test_release_stores_the_changed_headers", "test_headers_survive_a_retry")
def loses_headers_on_release(patch: pytest.MonkeyPatch) -> None:
    def change(original: Any) -> Any:
        def release(self: QueueState, now: float, token: int, delay: float = 0.0, **kw: Any) -> Any:
            return original(self, now, token, delay, **{**kw, "headers": {}})

        return release

    wrap(patch, QueueState, "release", change)


@fault("test_headers_arrive_unchanged")
def loses_a_header(patch: pytest.MonkeyPatch) -> None:
    def change(original: Any) -> Any:
        def put(self: Engine, channel: Any, items: list[Envelope], now: float) -> Any:
            kept = [replace(item, headers=dict(list(item.headers.items())[1:])) for item in items]
            return original(self, channel, kept, now)

        return put

    wrap(patch, Engine, "_put_in_memory", change)


@fault("test_a_consumer_never_holds_more_than_its_prefetch")
def ignores_prefetch(patch: pytest.MonkeyPatch) -> None:
    def change(original: Any) -> Any:
        def init(self: NativeSubscription, *args: Any) -> None:
            original(self, *args)
            self._prefetch = 1_000

        return init

    wrap(patch, NativeSubscription, "__init__", change)


@fault("test_receive_never_returns_more_than_the_limit")
def exceeds_the_receive_limit(patch: pytest.MonkeyPatch) -> None:
    wrap(
        patch,
        NativeSubscription,
        "receive",
        lambda original: lambda self, limit: original(self, limit + 1),
    )


@fault("test_a_late_ack_raises_and_settles_no_other_delivery")
def accepts_a_late_ack(patch: pytest.MonkeyPatch) -> None:
    def change(original: Any) -> Any:
        def ack(self: QueueState, token: int) -> None:
            if token not in self.leases.regular:
                token = next(iter(self.leases.regular), token)  # settles another delivery
            original(self, token)

        return ack

    wrap(patch, QueueState, "ack", change)


@fault("test_settling_a_delivery_twice_raises")
def accepts_a_second_ack(patch: pytest.MonkeyPatch) -> None:
    def change(original: Any) -> Any:
        async def ack(self: NativeSubscription, delivery: Delivery) -> None:
            try:
                await original(self, delivery)
            except QueueError:
                return

        return ack

    wrap(patch, NativeSubscription, "ack", change)


@fault(
    "test_an_expired_lease_redelivers_the_message_and_counts_an_attempt",
    "test_a_message_whose_lease_expires_too_often_is_dead_lettered",
    "test_a_message_that_crashes_its_consumers_is_dead_lettered",
)
def leases_never_expire(patch: pytest.MonkeyPatch) -> None:
    def change(original: Any) -> Any:
        def claim(self: QueueState, now: float, limit: int, lease: float, *rest: Any) -> Any:
            return original(self, now, limit, 1e9, *rest)

        return claim

    wrap(patch, QueueState, "claim", change)


@fault(
    "test_a_renewed_lease_does_not_expire",
    "test_a_handler_that_runs_longer_than_ten_leases_runs_once",
)
def extend_does_nothing(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(QueueState, "extend", lambda self, now, token, seconds: None)


@fault("test_a_handler_that_blocks_the_loop_past_its_lease_runs_once")
def expiry_does_not_wait_for_renewals(patch: pytest.MonkeyPatch) -> None:
    from qkit.native.queue.queue import Queue

    def fire(self: Queue) -> None:
        self._expire()

    patch.setattr(Queue, "_fire", fire)


@fault("test_stop_wakes_a_parked_receive")
def stop_does_not_wake_a_parked_receive(patch: pytest.MonkeyPatch) -> None:
    async def stop(self: NativeSubscription) -> None:
        self._stopped = True

    patch.setattr(NativeSubscription, "stop", stop)


@fault(
    "test_closing_a_subscription_releases_its_messages_without_counting_an_attempt",
    "test_unsettled_messages_go_to_another_consumer",
)
def a_closed_subscription_keeps_its_messages(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(NativeSubscription, "release_uncharged", lambda self: None)


@fault("test_higher_priorities_are_delivered_first_and_equal_ones_in_order")
def ignores_priority(patch: pytest.MonkeyPatch) -> None:
    def change(original: Any) -> Any:
        async def publish(self: NativeBackend, queue: str, items: list[Envelope]) -> list[Sent]:
            return await original(self, queue, [replace(item, priority=5) for item in items])  # type: ignore[no-any-return]

        return publish

    wrap(patch, NativeBackend, "publish", change)


@fault("test_one_consumer_gets_each_message_once_and_in_order")
def delivers_last_in_first_out(patch: pytest.MonkeyPatch) -> None:
    wrap(
        patch,
        QueueState,
        "claim",
        lambda original: lambda self, *args, **kw: original(self, *args, **kw)[::-1],
    )


@fault("test_a_message_is_on_the_broker_when_send_returns", "test_a_large_batch_arrives_completely")
def confirms_a_message_and_drops_it(patch: pytest.MonkeyPatch) -> None:
    def change(original: Any) -> Any:
        async def publish(self: NativeBackend, queue: str, items: list[Envelope]) -> list[Sent]:
            sent = await original(self, queue, items)
            await self.remove(queue, [items[-1].id])
            return sent  # type: ignore[no-any-return]

        return publish

    wrap(patch, NativeBackend, "publish", change)


@fault("test_each_message_goes_to_one_of_several_competing_consumers")
def delivers_twice(patch: pytest.MonkeyPatch) -> None:
    def change(original: Any) -> Any:
        async def publish(self: NativeBackend, queue: str, items: list[Envelope]) -> list[Sent]:
            await original(self, queue, items)
            return await original(self, queue, items)  # type: ignore[no-any-return]

        return publish

    wrap(patch, NativeBackend, "publish", change)


@fault("test_each_group_gets_a_copy", "test_services_with_different_groups_each_receive_a_copy")
def a_topic_reaches_one_group(patch: pytest.MonkeyPatch) -> None:
    def change(original: Any) -> Any:
        def put(self: Topic, *args: Any, **kw: Any) -> Any:
            groups = dict(self.groups)
            first = next(iter(groups), None)
            self.groups.clear()
            if first is not None:
                self.groups[first] = groups[first]
            try:
                return original(self, *args, **kw)
            finally:
                self.groups.clear()
                self.groups.update(groups)

        return put

    wrap(patch, Topic, "put", change)


@fault("test_peek_does_not_count_an_attempt")
def peek_removes_messages(patch: pytest.MonkeyPatch) -> None:
    def change(original: Any) -> Any:
        async def peek(self: NativeBackend, queue: str, limit: int) -> list[Envelope]:
            found: list[Envelope] = await original(self, queue, limit)
            await self.remove(queue, [item.id for item in found])
            return found

        return peek

    wrap(patch, NativeBackend, "peek", change)


@fault("test_a_full_dead_letter_queue_drops_the_oldest")
def dead_letters_are_unlimited(patch: pytest.MonkeyPatch) -> None:
    def change(original: Any) -> Any:
        def set_limits(self: QueueState, **kw: Any) -> None:
            original(self, **{**kw, "max_depth": 1_000_000})

        return set_limits

    wrap(patch, QueueState, "set_limits", change)


@fault("test_the_backend_declares_exactly_its_capabilities")
def declares_to_be_durable(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(NativeBackend, "capabilities", MATRIX["native-durable"])


# -- policies ------------------------------------------------------------------------------------


@fault(
    "test_a_dead_letter_is_confirmed_before_its_message_is_acknowledged",
    "test_a_failed_dead_letter_write_is_retried_without_calling_the_handler",
)
def acks_before_the_dead_letter_is_written(patch: pytest.MonkeyPatch) -> None:
    def change(original: Any) -> Any:
        async def dead_letter(
            self: Settlement, subscription: Any, delivery: Any, outcome: Any, over: Any
        ) -> None:
            await subscription.ack(delivery)
            if self._write is not None:
                letter = DeadLetter.of(
                    delivery.envelope,
                    channel=self._channel,
                    reason=outcome.reason,
                    error=outcome.error,
                    at=self._clock.time(),
                )
                await self._write(letter)

        return dead_letter

    wrap(patch, Settlement, "_dead_letter", change)


@fault("test_a_failing_handler_is_called_exactly_max_attempts_times")
def makes_one_attempt_too_few(patch: pytest.MonkeyPatch) -> None:
    def change(original: Any) -> Any:
        def wait(self: RetryPolicy, error: Exception, *, attempt: int, asked: Any = None) -> Any:
            return original(self, error, attempt=attempt + 1, asked=asked)

        return wait

    wrap(patch, RetryPolicy, "wait", change)


@fault("test_an_undecodable_body_is_dead_lettered_without_a_retry")
def retries_undecodable_bodies(patch: pytest.MonkeyPatch) -> None:
    def change(original: Any) -> Any:
        def decode(self: Codec[object], body: bytes, headers: dict[str, str]) -> object:
            try:
                return original(self, body, headers)
            except QueueError as error:
                raise RuntimeError(str(error)) from None

        return decode

    wrap(patch, Codec, "decode", change)


@fault("test_messages_with_the_same_key_are_handled_in_order_and_never_concurrently")
def ignores_keys(patch: pytest.MonkeyPatch) -> None:
    def change(original: Any) -> Any:
        def init(self: DeliveryBuffer, *, lanes: bool, **kw: Any) -> None:
            original(self, lanes=False, **kw)

        return init

    wrap(patch, DeliveryBuffer, "__init__", change)


@fault("test_a_paused_channel_starts_no_handler_until_it_is_resumed")
def pause_does_nothing(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Consumer, "pause", lambda self: None)


@fault("test_shutdown_waits_for_running_handlers_and_settles_their_messages")
def shutdown_does_not_wait_for_handlers(patch: pytest.MonkeyPatch) -> None:
    wrap(
        patch,
        ConsumerPool,
        "drain",
        lambda drain: lambda self, timeout, force: drain(self, 0.0, force),
    )


@fault("test_failures_are_counted_by_kind", "test_each_failure_emits_an_event_and_is_counted")
def retries_are_not_counted(patch: pytest.MonkeyPatch) -> None:
    def change(original: Any) -> Any:
        def record_retry(self: Settlement, envelope: Envelope, outcome: RetryLater) -> None:
            before = self._counters.retried
            original(self, envelope, outcome)
            self._counters.retried = before

        return record_retry

    wrap(patch, Settlement, "record_retry", change)


@fault("test_replay_resends_all_dead_letters_unchanged")
def replay_changes_the_id(patch: pytest.MonkeyPatch) -> None:
    wrap(
        patch,
        DeadLetter,
        "to_replay",
        lambda original: lambda self: replace(original(self), id=new_id()),
    )


@fault("test_replay_while_consumers_run_neither_loses_nor_repeats_messages")
def replay_does_not_remove_the_dead_letter(patch: pytest.MonkeyPatch) -> None:
    async def remove(self: NativeBackend, queue: str, ids: list[str]) -> int:
        return len(ids)

    patch.setattr(NativeBackend, "remove", remove)


@fault("test_health_reports_an_unresponsive_broker_and_its_recovery")
def health_ignores_failures(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ConnectionTracker, "record_failure", lambda self, error: None)


@fault("test_a_compressed_body_is_stored_compressed")
def compression_does_nothing(patch: pytest.MonkeyPatch) -> None:
    def change(original: Any) -> Any:
        def init(self: Codec[object], type_: Any, **kw: Any) -> None:
            original(self, type_, **{**kw, "compression": None})

        return init

    wrap(patch, Codec, "__init__", change)


@fault("test_an_asynchronous_send_in_a_synchronous_handler_fails_the_attempt")
def send_does_not_check_the_loop(patch: pytest.MonkeyPatch) -> None:
    def check(self: ServiceRuntime, operation: str) -> None: ...

    patch.setattr(ServiceRuntime, "check_loop", check)


# -- one suite for each fault --------------------------------------------------------------------


def _suite(name: str, plant: Plant, scenarios: tuple[str, ...]) -> type:
    class Planted(Conformance):
        column = MATRIX["native-memory"]
        virtual_time = True

        @pytest_asyncio.fixture
        async def new_backend(  # type: ignore[override]  # fixtures may have more arguments
            self, clock: Clock, monkeypatch: pytest.MonkeyPatch
        ) -> AsyncGenerator[NewBackend, None]:
            plant(monkeypatch)
            async with Engine(clock=clock) as engine:
                yield lambda: NativeBackend(engine=engine)

    for scenario in dir(Conformance):
        if scenario.startswith("test_") and scenario not in scenarios:
            setattr(Planted, scenario, None)  # collect only the given scenarios
    Planted.__name__ = Planted.__qualname__ = f"Test_{name}"
    return Planted


def nothing(patch: pytest.MonkeyPatch) -> None:
    """Plant no fault, so that every scenario must pass."""


_every = tuple(scenario for _, scenarios in FAULTS.values() for scenario in scenarios)
for _name, (_plant, _scenarios) in [*FAULTS.items(), ("nothing", (nothing, _every))]:
    globals()[f"Test_{_name}"] = _suite(_name, _plant, _scenarios)
