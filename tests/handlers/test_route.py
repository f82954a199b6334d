"""Routes: the declaration of a channel combined with the settings and the backend."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import BaseModel

from qkit import Channel, Message, RetrySettings, Settings, consume
from qkit.backend import BALANCES, Capabilities, QueueSpec, Support
from qkit.errors import ConfigError, InvalidBody, Unsupported
from qkit.handlers.channel import CallNext
from qkit.handlers.registry import Handler, Registry
from qkit.handlers.route import RouteTable
from qkit.observability.metrics import Counters
from tests.support.backends import ScriptedBackend, can
from tests.support.services import make_service


class Order(BaseModel):
    id: int


async def passing(message: Message, call_next: CallNext) -> object:
    return await call_next(message)


class DescribedBackend(ScriptedBackend):
    """A backend with a given name and given capabilities."""

    def __init__(self, name: str, capabilities: Capabilities) -> None:
        super().__init__()
        self.name = name
        self.capabilities = capabilities
        if name == "native":
            self.balances = BALANCES


def routes(
    capabilities: Capabilities | None = None,
    *,
    registry: Registry | None = None,
    backend: str = "scripted",
    **settings,
) -> RouteTable:
    return RouteTable(
        Settings(**{"type": "native", **settings}),
        DescribedBackend(backend, can() if capabilities is None else capabilities),
        registry or Registry(),
        Counters(),
    )


def handling(channel: str, **options) -> Registry:
    """Return a registry with a handler for the channel."""

    def handle(body: str) -> None: ...

    registry = Registry()
    registry.add(consume(channel, **options)(handle))
    return registry


def handler(**options) -> Handler:
    def handle(body: list[Order]) -> None: ...

    return Registry().add(consume("orders", **options)(handle))[0]


# -- routes ------------------------------------------------------------------------------------


@pytest.mark.proves("000-config-6", "003-retry-8", "003-compat-2")
def test_a_plain_channel_gets_the_settings_defaults():
    route = routes().resolve(Channel("orders"))
    assert (route.queue, route.broadcast, route.ordered, route.ttl) == (
        "orders",
        False,
        False,
        None,
    )
    assert (route.policy.max_attempts, route.policy.mode) == (3, "release")
    assert route.ack_deadline == 30.0
    assert route.max_priority == 9
    assert route.dead_letter == QueueSpec(name="orders_dlq", max_depth=10_000, drop_oldest=True)


def test_a_sender_declares_only_that_a_channel_exists():
    channel = Channel("orders", ack_deadline=5, balance="round_robin")
    assert routes().resolve(channel).spec == QueueSpec(name="orders", dead_letter="orders_dlq")


def test_a_consumer_declares_how_a_channel_is_consumed():
    spec = routes(registry=handling("orders")).resolve(Channel("orders")).spec
    assert spec == QueueSpec(
        name="orders",
        dead_letter="orders_dlq",
        max_deliveries=3,
        ack_deadline=30.0,
        consumed=True,
    )


def test_a_channel_overrides_single_fields_of_the_retry_settings():
    table = routes(retry={"max_attempts": 7, "initial_delay": 0.25, "jitter": 0})
    policy = table.resolve(Channel("orders", retry=RetrySettings(max_attempts=2))).policy
    assert (policy.max_attempts, policy.backoff.after(1)) == (2, 0.25)


def test_in_a_native_directory_the_owner_limits_priorities(tmp_path):
    assert routes(path=tmp_path).resolve(Channel("orders")).max_priority == 255
    assert routes(path=tmp_path).resolve(Channel("few", max_priority=3)).max_priority == 3
    assert routes(max_priority=20).resolve(Channel("orders")).max_priority == 20


@pytest.mark.proves("003-speed-1")
def test_options_of_a_channel_override_the_settings():
    found = routes(retry={"max_attempts": 7}, registry=handling("orders", broadcast=True)).resolve(
        Channel(
            "orders",
            broadcast=True,
            ordered=True,
            prefetch=4,
            ttl=60,
            max_priority=3,
            max_depth=10,
            ack_deadline=5,
            dead_letter=False,
            retry=RetrySettings(max_attempts=2),
            retry_on=[OSError],
            dead_on=[KeyError],
            middleware=[passing],
        )
    )
    assert (found.broadcast, found.ordered, found.prefetch, found.ttl) == (True, True, 4, 60)
    assert (found.policy.max_attempts, found.policy.mode) == (2, "inline")
    assert (found.policy.retry_on, found.policy.dead_on) == ((OSError,), (KeyError,))
    assert found.middleware == (passing,)
    assert found.dead_letter is None
    assert found.spec == QueueSpec(
        name="orders",
        broadcast=True,
        max_priority=3,
        max_depth=10,
        max_deliveries=2,
        ack_deadline=5,
        consumed=True,
    )


def test_every_name_on_the_broker_has_the_prefix():
    route = routes(prefix="shop.").resolve(Channel("orders"))
    assert (route.name, route.queue, route.spec.name) == ("orders", "shop.orders", "shop.orders")
    assert route.spec.dead_letter == "shop.orders_dlq"
    assert route.dead_letter is not None
    assert route.dead_letter.name == "shop.orders_dlq"


def test_without_queues_every_channel_is_a_topic_except_dead_letter_queues():
    lacking = can(queues=Support.UNSUPPORTED)
    found = routes(lacking)
    plain, letters = found.resolve(Channel("orders")), found.resolve(Channel("orders_dlq"))
    assert (plain.broadcast, plain.spec.broadcast) == (True, True)
    assert plain.dead_letter is not None
    assert not plain.dead_letter.broadcast
    assert (letters.broadcast, letters.spec.broadcast) == (False, False)


def test_a_passive_service_declares_its_queues_as_passive():
    route = routes(declare="passive").resolve(Channel("orders"))
    assert route.spec.passive
    assert route.dead_letter is not None
    assert route.dead_letter.passive


def test_a_channel_has_no_dead_letter_queue_when_disabled():
    assert routes(dead_letter={"enabled": False}).resolve(Channel("orders")).dead_letter is None
    kept = routes(dead_letter={"enabled": False}).resolve(Channel("orders", dead_letter=True))
    assert kept.dead_letter is not None


def test_a_dead_letter_queue_has_no_dead_letter_queue():
    own = routes(dead_letter={"max_size": 50}).resolve(Channel("orders_dlq"))
    assert own.dead_letter is None
    assert own.spec == QueueSpec(name="orders_dlq", max_depth=50, drop_oldest=True)
    assert routes().resolve(Channel("_dlq")).dead_letter is not None  # an ordinary name


def test_with_retries_disabled_the_first_failure_is_final():
    assert routes(retry={"enabled": False}).resolve(Channel("orders")).policy.max_attempts == 1


def test_a_backend_that_cannot_delay_retries_inline():
    assert routes(can(delay=Support.UNSUPPORTED)).resolve(Channel("orders")).policy.mode == "inline"


def test_settings_that_the_backend_does_not_support_are_ignored():
    route = routes(Capabilities()).resolve(Channel("orders"))
    assert (route.max_priority, route.ack_deadline, route.dead_letter) == (None, None, None)
    own = routes(Capabilities()).resolve(Channel("orders_dlq"))
    assert own.spec.max_priority is None


@pytest.mark.parametrize(
    ("option", "value", "advice"),
    [
        ("broadcast", True, "a backend with topics"),
        ("ordered", True, "remove ordered=True"),
        ("prefetch", 5, "omit prefetch"),
        ("max_priority", 5, "one channel per priority"),
        ("ack_deadline", 5.0, "has no leases"),
        ("ttl", 5.0, "omit ttl"),
        ("dead_letter", True, "set dead_letter=False"),
    ],
)
def test_an_option_that_the_backend_does_not_support_is_rejected(option, value, advice):
    found = routes(Capabilities())
    with pytest.raises(Unsupported, match=f"'orders' uses {option}.*scripted.*{advice}") as why:
        found.resolve(Channel("orders", **{option: value}))
    assert (why.value.backend, why.value.queue) == ("scripted", "orders")


@pytest.mark.proves("002-improvements-4")
def test_only_the_native_engine_supports_balances_other_than_round_robin():
    usual = routes(registry=handling("orders")).resolve(Channel("orders", balance="round_robin"))
    assert usual.spec.balance == "round_robin"
    own = routes(backend="native", registry=handling("orders")).resolve(
        Channel("orders", balance="random")
    )
    assert own.spec.balance == "random"
    for balance in ("least_busy", "random"):
        with pytest.raises(Unsupported, match=f"uses balance='{balance}', which scripted"):
            routes().resolve(Channel("orders", balance=balance))


@pytest.mark.proves("000-replication-1", "002-place-3")
def test_replicas_need_a_broker_that_replicates():
    routes(Capabilities()).check_settings()
    settings: dict[str, Any] = {"type": "rabbitmq", "url": "amqp://localhost/", "replicas": 3}
    routes(can(), **settings).check_settings()
    with pytest.raises(ConfigError, match=r"replicas=3: this scripted backend does not support"):
        routes(Capabilities(), **settings).check_settings()


def test_a_disabled_option_needs_no_capability():
    found = routes(Capabilities()).resolve(Channel("orders", dead_letter=False, ordered=False))
    assert found.dead_letter is None


async def test_an_unsupported_option_is_rejected_before_connecting():
    backend = ScriptedBackend(can(topics=Support.UNSUPPORTED))
    service = make_service(consume("prices", broadcast=True)(lambda price: None), backend=backend)
    with pytest.raises(Unsupported, match="broadcast"):
        await service.start()
    assert backend.declared == []
    assert backend.calls == []


async def test_an_unsupported_balance_is_rejected_at_start():
    @consume("audit", balance="least_busy")
    async def audit(entry: dict) -> None: ...

    backend = ScriptedBackend()
    service = make_service(audit, backend=backend)
    with pytest.raises(Unsupported, match="for round-robin delivery"):
        await service.start()
    assert backend.declared == []


# -- one route for each channel ----------------------------------------------------------------


def test_a_route_is_rebuilt_only_when_a_declaration_adds_something():
    found = routes()
    assert found.get("orders") is None
    orders = Channel("orders", prefetch=5)
    first = found.resolve(orders)
    assert found.resolve(orders) is first
    assert found.resolve(Channel("orders")) is first
    assert found.resolve(Channel("orders", prefetch=5)) is first
    assert found.get("orders") is first
    assert found.known() == [first]
    second = found.resolve(Channel("orders", ttl=60))
    assert (second.ttl, second.prefetch) == (60, 5)
    assert found.resolve(Channel("orders", ttl=60)) is second
    assert second.counters is first.counters


def test_a_contradicting_declaration_is_rejected_and_keeps_the_route():
    found = routes()
    first = found.resolve(Channel("orders", prefetch=5))
    with pytest.raises(ConfigError, match="different prefetch"):
        found.resolve(Channel("orders", prefetch=6))
    assert found.resolve(Channel("orders")) is first


async def test_a_type_that_is_declared_later_is_checked_from_then_on(clock):
    async with make_service(clock=clock) as service:
        await service.send("orders", "anything")
        orders: Channel[Order] = Channel("orders", Order)
        await service.send(orders, Order(id=1))
        with pytest.raises(InvalidBody, match=r"expected .*Order"):
            await service.send(orders, "anything")  # type: ignore[misc]  # type checkers also reject it
        with pytest.raises(InvalidBody):
            await service.send("orders", "anything")


# -- handlers ----------------------------------------------------------------------------------


def test_the_default_prefetch_covers_all_concurrent_calls():
    found = routes()
    plain = found.resolve(Channel("plain"))
    assert found.prefetch(plain, handler()) == 10
    assert found.prefetch(plain, handler(concurrency=4, batch_size=50)) == 200
    chosen = found.resolve(Channel("chosen", prefetch=4))
    assert found.prefetch(chosen, handler(concurrency=4)) == 4
    with pytest.raises(ConfigError, match="= 5 messages at once, but prefetch is 4; raise"):
        found.prefetch(chosen, handler(concurrency=5))
    with pytest.raises(ConfigError, match="= 2000 messages at once, but prefetch is 1000"):
        found.prefetch(plain, handler(concurrency=20, batch_size=100))
    configured = routes(prefetch=3)
    with pytest.raises(ConfigError, match="prefetch is 3"):
        configured.prefetch(configured.resolve(Channel("plain")), handler(concurrency=4))


def test_a_batch_handler_needs_a_backend_that_supports_batches():
    found = routes(can(batch=Support.UNSUPPORTED))
    found.check_handler(found.resolve(Channel("orders")), handler())
    with pytest.raises(Unsupported, match=r"batch_size.*handle one message per call"):
        found.check_handler(found.resolve(Channel("orders")), handler(batch_size=5))


def test_a_batch_handler_rejects_ordered_channels_and_middleware():
    found = routes()
    batch = handler(batch_size=5)
    found.check_handler(found.resolve(Channel("plain")), batch)
    with pytest.raises(ConfigError, match="ordered=True handles one message of a key"):
        found.check_handler(found.resolve(Channel("ordered", ordered=True)), batch)
    with pytest.raises(ConfigError, match="middleware wraps a single message"):
        found.check_handler(found.resolve(Channel("wrapped", middleware=[passing])), batch)
