"""Twenty and more backends and policies with one deliberate bug each, for test_planted_faults.py.

Each fault is a class of the suite with one thing broken, and the names of scenarios that must turn
red for it. It is run by a pytest of its own, which is expected to fail.
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
    """Register a planted fault with the scenarios that must catch it."""

    def add(plant: Plant) -> Plant:
        FAULTS[plant.__name__] = (plant, scenarios)
        return plant

    return add


def wrap(
    patch: pytest.MonkeyPatch, owner: type, name: str, change: Callable[[Any], Callable[..., Any]]
) -> None:
    """Replace a method by ``change(original)``."""
    patch.setattr(owner, name, change(getattr(owner, name)))


# -- declarations --------------------------------------------------------------------------------


@fault("test_a_sender_does_not_change_how_often_a_message_may_crash")
def a_sender_sets_how_often_a_message_may_crash(patch: pytest.MonkeyPatch) -> None:
    def change(original: Any) -> Callable[..., Any]:
        async def declare(self: Any, spec: QueueSpec) -> None:
            if spec.max_deliveries is None and not spec.drop_oldest:
                spec = replace(spec, max_deliveries=10)
            await original(self, spec)

        return declare

    wrap(patch, NativeBackend, "declare", change)


@fault("test_what_expires_is_no_dead_letter_where_the_consumer_keeps_none")
def a_consumer_cannot_do_without_dead_letters(patch: pytest.MonkeyPatch) -> None:
    def change(original: Any) -> Callable[..., Any]:
        async def declare(self: Any, spec: QueueSpec) -> None:
            if spec.dead_letter is None and not spec.drop_oldest:
                spec = replace(spec, dead_letter=f"{spec.name}_dlq")
            await original(self, spec)

        return declare

    wrap(patch, NativeBackend, "declare", change)


@fault(
    "test_a_worker_starts_on_what_a_plain_sender_declared",
    "test_two_versions_of_a_worker_run_side_by_side",
)
def a_second_declaration_with_other_options_is_refused(patch: pytest.MonkeyPatch) -> None:
    def change(original: Any) -> Callable[..., Any]:
        async def declare(self: Any, spec: QueueSpec) -> None:
            engine = self._engine
            known = engine.__dict__.setdefault("declared_as", {})
            if known.setdefault(spec.name, spec) != spec:
                raise ConfigError(f"{spec.name} was declared otherwise")
            await original(self, spec)

        return declare

    wrap(patch, NativeBackend, "declare", change)


# -- backends ------------------------------------------------------------------------------------


@fault("test_an_acknowledged_message_does_not_come_back")
def ack_is_forgotten(patch: pytest.MonkeyPatch) -> None:
    async def ack(self: NativeSubscription, delivery: Delivery) -> None: ...

    patch.setattr(NativeSubscription, "ack", ack)


@fault("test_a_cancelled_receive_loses_nothing")
def drops_on_cancel(patch: pytest.MonkeyPatch) -> None:
    def change(original: Any) -> Any:
        async def receive(self: NativeSubscription, limit: int) -> list[Delivery]:
            deliveries = await original(self, limit)
            try:
                await asyncio.sleep(0)  # the reply is on its way
            except asyncio.CancelledError:
                for delivery in deliveries:
                    await self.ack(delivery)
                raise
            return deliveries  # type: ignore[no-any-return]

        return receive

    wrap(patch, NativeSubscription, "receive", change)


@fault("test_each_delivery_has_the_next_attempt_number")
def forgets_to_count_an_attempt(patch: pytest.MonkeyPatch) -> None:
    def change(original: Any) -> Any:
        def release(self: QueueState, now: float, token: int, delay: float = 0.0, **kw: Any) -> Any:
            return original(self, now, token, delay, **{**kw, "count_attempt": False})

        return release

    wrap(patch, QueueState, "release", change)


@fault(
    "test_a_release_that_is_not_charged_repeats_the_attempt_number",
    "test_the_deadline_cancels_and_gives_back_without_a_charge",
)
def charges_every_release(patch: pytest.MonkeyPatch) -> None:
    def change(original: Any) -> Any:
        def release(self: QueueState, now: float, token: int, delay: float = 0.0, **kw: Any) -> Any:
            return original(self, now, token, delay, **{**kw, "count_attempt": True})

        return release

    wrap(patch, QueueState, "release", change)


@fault(
    "test_a_delayed_release_is_never_early_and_not_late",
    "test_backoff_grows_up_to_its_limit_and_is_never_early",
)
def delivers_a_retry_early(patch: pytest.MonkeyPatch) -> None:
    def change(original: Any) -> Any:
        def release(self: QueueState, now: float, token: int, delay: float = 0.0, **kw: Any) -> Any:
            return original(self, now, token, delay * 0.9, **kw)

        return release

    wrap(patch, QueueState, "release", change)


@fault("test_a_delayed_message_is_never_early_and_not_late")
def ignores_the_delay_of_a_send(patch: pytest.MonkeyPatch) -> None:
    def change(original: Any) -> Any:
        async def publish(self: NativeBackend, queue: str, items: list[Envelope]) -> list[Sent]:
            return await original(self, queue, [replace(item, not_before=None) for item in items])  # type: ignore[no-any-return]

        return publish

    wrap(patch, NativeBackend, "publish", change)


@fault("test_release_writes_the_headers_back", "test_headers_survive_a_retry")
def loses_headers_on_release(patch: pytest.MonkeyPatch) -> None:
    def change(original: Any) -> Any:
        def release(self: QueueState, now: float, token: int, delay: float = 0.0, **kw: Any) -> Any:
            return original(self, now, token, delay, **{**kw, "headers": {}})

        return release

    wrap(patch, QueueState, "release", change)


@fault("test_headers_arrive_unchanged")
def loses_a_header(patch: pytest.MonkeyPatch) -> None:
    def change(original: Any) -> Any:
        async def publish(self: NativeBackend, queue: str, items: list[Envelope]) -> list[Sent]:
            kept = [replace(item, headers=dict(list(item.headers.items())[1:])) for item in items]
            return await original(self, queue, kept)  # type: ignore[no-any-return]

        return publish

    wrap(patch, NativeBackend, "publish", change)


@fault("test_a_consumer_never_holds_more_than_its_prefetch")
def ignores_prefetch(patch: pytest.MonkeyPatch) -> None:
    def change(original: Any) -> Any:
        def init(self: NativeSubscription, *args: Any) -> None:
            original(self, *args)
            self._prefetch = 1_000

        return init

    wrap(patch, NativeSubscription, "__init__", change)


@fault("test_receive_never_returns_more_than_the_limit")
def ignores_the_limit(patch: pytest.MonkeyPatch) -> None:
    wrap(
        patch,
        NativeSubscription,
        "receive",
        lambda original: lambda self, limit: original(self, limit + 1),
    )


@fault("test_a_late_ack_is_refused_and_settles_nobody_elses_delivery")
def settles_a_late_ack(patch: pytest.MonkeyPatch) -> None:
    def change(original: Any) -> Any:
        def ack(self: QueueState, token: int) -> None:
            if token not in self._leases:
                token = next(iter(self._leases), token)  # by message instead of by delivery
            original(self, token)

        return ack

    wrap(patch, QueueState, "ack", change)


@fault("test_settling_twice_is_refused")
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
    "test_an_expired_lease_brings_the_message_back_and_counts",
    "test_a_message_whose_leases_run_out_too_often_is_a_dead_letter",
    "test_a_message_that_kills_its_consumers_ends_in_the_dead_letters",
)
def leases_never_expire(patch: pytest.MonkeyPatch) -> None:
    def change(original: Any) -> Any:
        def claim(self: QueueState, now: float, limit: int, lease: float, *rest: Any) -> Any:
            return original(self, now, limit, 1e9, *rest)

        return claim

    wrap(patch, QueueState, "claim", change)


@fault("test_a_renewed_lease_does_not_expire", "test_a_handler_longer_than_ten_leases_runs_once")
def extend_does_nothing(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(QueueState, "extend", lambda self, now, token, seconds: None)


@fault("test_a_handler_that_blocks_the_loop_past_its_lease_runs_once")
def expiry_does_not_wait_for_renewals(patch: pytest.MonkeyPatch) -> None:
    from qkit.native.queue.actor import QueueActor

    def fire(self: QueueActor) -> None:
        self._expire()

    patch.setattr(QueueActor, "_fire", fire)


@fault("test_stop_wakes_a_parked_receive")
def stop_leaves_the_parked_asleep(patch: pytest.MonkeyPatch) -> None:
    async def stop(self: NativeSubscription) -> None:
        self._stopped = True

    patch.setattr(NativeSubscription, "stop", stop)


@fault(
    "test_leaving_a_subscription_gives_back_what_it_holds_uncharged",
    "test_what_a_consumer_left_unsettled_goes_to_another",
)
def keeps_what_a_dead_consumer_held(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(NativeSubscription, "release_uncharged", lambda self: None)


@fault("test_a_higher_priority_comes_first_and_equals_keep_their_order")
def ignores_priority(patch: pytest.MonkeyPatch) -> None:
    def change(original: Any) -> Any:
        async def publish(self: NativeBackend, queue: str, items: list[Envelope]) -> list[Sent]:
            return await original(self, queue, [replace(item, priority=5) for item in items])  # type: ignore[no-any-return]

        return publish

    wrap(patch, NativeBackend, "publish", change)


@fault("test_one_consumer_gets_each_message_once_and_in_order")
def last_in_first_out(patch: pytest.MonkeyPatch) -> None:
    wrap(
        patch,
        QueueState,
        "claim",
        lambda original: lambda self, *args, **kw: original(self, *args, **kw)[::-1],
    )


@fault("test_a_message_is_there_when_send_returns", "test_a_large_batch_arrives_whole")
def confirms_and_drops(patch: pytest.MonkeyPatch) -> None:
    def change(original: Any) -> Any:
        async def publish(self: NativeBackend, queue: str, items: list[Envelope]) -> list[Sent]:
            sent = await original(self, queue, items)
            await self.remove(queue, [items[-1].id])
            return sent  # type: ignore[no-any-return]

        return publish

    wrap(patch, NativeBackend, "publish", change)


@fault("test_competing_consumers_share_and_each_message_goes_to_one")
def delivers_twice(patch: pytest.MonkeyPatch) -> None:
    def change(original: Any) -> Any:
        async def publish(self: NativeBackend, queue: str, items: list[Envelope]) -> list[Sent]:
            await original(self, queue, items)
            return await original(self, queue, items)  # type: ignore[no-any-return]

        return publish

    wrap(patch, NativeBackend, "publish", change)


@fault("test_each_group_gets_a_copy", "test_services_with_different_groups_both_get_it")
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


@fault("test_peek_takes_no_attempt")
def peek_consumes(patch: pytest.MonkeyPatch) -> None:
    def change(original: Any) -> Any:
        async def peek(self: NativeBackend, queue: str, limit: int) -> list[Envelope]:
            found: list[Envelope] = await original(self, queue, limit)
            await self.remove(queue, [item.id for item in found])
            return found

        return peek

    wrap(patch, NativeBackend, "peek", change)


@fault("test_when_there_are_too_many_the_oldest_go")
def dead_letters_without_a_cap(patch: pytest.MonkeyPatch) -> None:
    def change(original: Any) -> Any:
        def set_limits(self: QueueState, **kw: Any) -> None:
            original(self, **{**kw, "max_depth": 1_000_000})

        return set_limits

    wrap(patch, QueueState, "set_limits", change)


@fault("test_the_backend_declares_exactly_its_column")
def claims_to_be_durable(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(NativeBackend, "capabilities", MATRIX["native-durable"])


# -- policies ------------------------------------------------------------------------------------


@fault(
    "test_a_dead_letter_is_confirmed_before_its_message_is_acknowledged",
    "test_a_dead_letter_that_cannot_be_written_is_tried_again_and_its_handler_is_not",
)
def acks_before_the_dead_letter_is_written(patch: pytest.MonkeyPatch) -> None:
    def change(original: Any) -> Any:
        async def bury(
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

        return bury

    wrap(patch, Settlement, "_dead_letter", change)


@fault("test_a_failing_handler_is_called_max_attempts_times_and_no_more")
def one_attempt_too_few(patch: pytest.MonkeyPatch) -> None:
    def change(original: Any) -> Any:
        def wait(self: RetryPolicy, error: Exception, *, attempt: int, asked: Any = None) -> Any:
            return original(self, error, attempt=attempt + 1, asked=asked)

        return wait

    wrap(patch, RetryPolicy, "wait", change)


@fault("test_bytes_that_cannot_be_decoded_are_a_dead_letter_at_once")
def retries_what_cannot_be_decoded(patch: pytest.MonkeyPatch) -> None:
    def change(original: Any) -> Any:
        def decode(self: Codec[object], body: bytes, headers: dict[str, str]) -> object:
            try:
                return original(self, body, headers)
            except QueueError as error:
                raise RuntimeError(str(error)) from None

        return decode

    wrap(patch, Codec, "decode", change)


@fault("test_messages_of_one_key_are_handled_one_after_the_other")
def no_key_lanes(patch: pytest.MonkeyPatch) -> None:
    def change(original: Any) -> Any:
        def init(self: DeliveryBuffer, *, lanes: bool, **kw: Any) -> None:
            original(self, lanes=False, **kw)

        return init

    wrap(patch, DeliveryBuffer, "__init__", change)


@fault("test_a_paused_channel_starts_no_handler_until_it_is_resumed")
def pause_does_nothing(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Consumer, "pause", lambda self: None)


@fault("test_shutdown_waits_for_running_handlers_and_settles_them")
def shutdown_waits_for_nobody(patch: pytest.MonkeyPatch) -> None:
    wrap(
        patch,
        ConsumerPool,
        "drain",
        lambda drain: lambda self, timeout, force: drain(self, 0.0, force),
    )


@fault("test_failures_are_counted_by_their_kind", "test_each_failure_is_told_and_counted")
def retries_are_not_counted(patch: pytest.MonkeyPatch) -> None:
    def change(original: Any) -> Any:
        def record_retry(self: Settlement, envelope: Envelope, outcome: RetryLater) -> None:
            before = self._counters.retried
            original(self, envelope, outcome)
            self._counters.retried = before

        return record_retry

    wrap(patch, Settlement, "record_retry", change)


@fault("test_replay_sends_all_of_them_again_as_they_were")
def replay_gives_a_new_id(patch: pytest.MonkeyPatch) -> None:
    wrap(
        patch,
        DeadLetter,
        "to_replay",
        lambda original: lambda self: replace(original(self), id=new_id()),
    )


@fault("test_replay_while_consumers_run_loses_and_repeats_nothing")
def replay_leaves_the_letter_behind(patch: pytest.MonkeyPatch) -> None:
    async def remove(self: NativeBackend, queue: str, ids: list[str]) -> int:
        return len(ids)

    patch.setattr(NativeBackend, "remove", remove)


@fault("test_a_broker_that_does_not_answer_is_noticed_and_its_return_too")
def health_never_notices(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ConnectionTracker, "record_failure", lambda self, error: None)


@fault("test_a_compressed_body_is_small_on_the_broker")
def compression_is_forgotten(patch: pytest.MonkeyPatch) -> None:
    def change(original: Any) -> Any:
        def init(self: Codec[object], type_: Any, **kw: Any) -> None:
            original(self, type_, **{**kw, "compression": None})

        return init

    wrap(patch, Codec, "__init__", change)


@fault("test_a_send_that_a_synchronous_handler_does_not_await_fails_the_attempt")
def send_checks_no_loop(patch: pytest.MonkeyPatch) -> None:
    def check(self: ServiceRuntime, operation: str) -> None: ...

    patch.setattr(ServiceRuntime, "check_loop", check)


# -- the suite, once for each --------------------------------------------------------------------


def _suite(name: str, plant: Plant, scenarios: tuple[str, ...]) -> type:
    class Planted(Conformance):
        column = MATRIX["native-memory"]
        virtual_time = True

        @pytest_asyncio.fixture
        async def new_backend(  # type: ignore[override]  # a fixture may ask for more
            self, clock: Clock, monkeypatch: pytest.MonkeyPatch
        ) -> AsyncGenerator[NewBackend, None]:
            plant(monkeypatch)
            async with Engine(clock=clock) as engine:
                yield lambda: NativeBackend(engine=engine)

    for scenario in dir(Conformance):
        if scenario.startswith("test_") and scenario not in scenarios:
            setattr(Planted, scenario, None)  # not collected: thousands that nobody runs
    Planted.__name__ = Planted.__qualname__ = f"Test_{name}"
    return Planted


def nothing(patch: pytest.MonkeyPatch) -> None:
    """No fault: every scenario must pass."""


_every = tuple(scenario for _, scenarios in FAULTS.values() for scenario in scenarios)
for _name, (_plant, _scenarios) in [*FAULTS.items(), ("nothing", (nothing, _every))]:
    globals()[f"Test_{_name}"] = _suite(_name, _plant, _scenarios)
