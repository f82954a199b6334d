"""Registration of handlers: discovery, sources of parameters, and rejected definitions."""

from __future__ import annotations

import functools
import types
from collections.abc import Awaitable, Callable
from datetime import datetime
from typing import Annotated, Any, NamedTuple
from unittest import mock

import pytest
from pydantic import BaseModel, Field, model_validator
from typing_extensions import TypedDict  # pydantic needs it before Python 3.12

from qkit import (
    Channel,
    ConsumeMetadata,
    Header,
    Message,
    ParamMetadata,
    QueueMetadata,
    QueueService,
    Settings,
    channel,
    consume,
)
from qkit.errors import ConfigError, HandlerError, InvalidName
from qkit.handlers.registry import Handler, Registry


class Order(BaseModel):
    id: int


def add(target: object) -> list[Handler]:
    return Registry().add(target)


def only(target: object) -> Handler:
    (handler,) = add(target)
    return handler


# -- decorators --------------------------------------------------------------------------------


def test_a_decorated_function_is_unchanged():
    def handle(order: Order) -> None:
        """Handle an order."""

    assert consume("orders")(handle) is handle

    def bare(order: Order) -> None: ...

    assert consume(bare) is bare


@pytest.mark.proves("003-types-1", "003-types-4")
def test_the_metadata_of_a_handler_is_public():
    @consume("orders", group="billing", concurrency=4, timeout=2, batch_size=5, batch_wait=0.1)
    async def handle(orders: list[Order]) -> None: ...

    metadata = ConsumeMetadata.of(handle)
    assert metadata is not None
    assert metadata.channel is not None
    assert metadata.channel.name == "orders"
    assert (metadata.group, metadata.concurrency, metadata.timeout) == ("billing", 4, 2)
    assert (metadata.batch_size, metadata.batch_wait) == (5, 0.1)
    assert metadata.location.startswith(__file__)
    assert ConsumeMetadata.of(len) is None


@pytest.mark.proves("003-types-2")
def test_the_metadata_of_a_class_is_public_and_inherited():
    @channel("orders", prefetch=3)
    class Orders: ...

    class Special(Orders): ...

    for kind in (Orders, Special):
        metadata = QueueMetadata.of(kind)
        assert metadata is not None
        assert metadata.channel.options == {"prefetch": 3}
        assert metadata.owner.endswith("Orders")
        assert metadata.location.startswith(__file__)
    assert QueueMetadata.of(dict) is None


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"concurrency": 0}, "concurrency: must be at least 1"),
        ({"concurrency": 10_001}, "at most 10000"),
        ({"concurrency": 1.5}, "concurrency: expected an integer"),
        ({"concurrency": True}, "concurrency: expected an integer"),
        ({"timeout": 0}, "timeout: must be at least 0.001"),
        ({"timeout": "1"}, "timeout: expected a number"),
        ({"timeout": float("nan")}, "timeout: must be at least"),
        ({"batch_size": 0}, "batch_size: must be at least 1 and at most 1000"),
        ({"batch_size": 1001}, "at most 1000"),
        ({"batch_wait": -1}, "batch_wait: must be at least 0"),
        ({"prefetch": 0}, "prefetch: must be at least 1"),
    ],
)
def test_consume_rejects_invalid_values(options, word):
    with pytest.raises(ConfigError, match=word):
        consume("orders", **options)


def test_a_group_must_be_a_valid_name():
    with pytest.raises(InvalidName, match="group name"):
        consume("orders", group="a b")


def test_channel_options_need_a_channel():
    with pytest.raises(ConfigError, match="sets options of a channel without naming it"):
        consume(prefetch=5)


def test_options_beside_a_channel_object_are_rejected():
    orders = Channel("orders", Order, prefetch=5)
    for decorator in (channel, consume):
        with pytest.raises(ConfigError, match="cannot be combined with ttl"):
            decorator(orders, ttl=5)


def test_channel_requires_a_class_and_consume_a_function():
    with pytest.raises(ConfigError, match=r"@channel\('orders'\): expected a class.*@consume"):
        channel("orders")(lambda order: None)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="@consume: expected a function or method"):
        consume("orders")(Order)
    with pytest.raises(ConfigError, match="@consume: expected a function or method, got 5"):
        consume(5)  # type: ignore[call-overload]


# -- registration targets -----------------------------------------------------------------------


def test_a_function_is_registered_under_its_qualified_name():
    @consume("orders")
    async def place(order: Order) -> None: ...

    handler = only(place)
    assert handler.channel == "orders"
    assert handler.call is place
    assert handler.is_async
    # "<locals>" is left out, because some brokers do not allow its characters.
    assert handler.group == "test_a_function_is_registered_under_its_qualified_name.place"
    assert handler.body_type is Order


def test_a_lambda_has_a_group():
    assert only(consume("orders")(lambda order: None)).group.endswith("_has_a_group.lambda")


def test_an_explicit_group_is_used_unchanged():
    assert only(consume("orders", group="billing")(lambda order: None)).group == "billing"


def test_every_decorated_method_of_an_instance_is_a_handler():
    @channel("orders", prefetch=7)
    class Orders:
        def __init__(self) -> None:
            self.seen: list[object] = []

        @consume
        def place(self, order: Order) -> None:
            self.seen.append(order)

        @consume("returns")
        async def take_back(self, order: Order) -> None: ...

        def helper(self) -> None: ...

    orders = Orders()
    place, take_back = add(orders)
    assert (place.channel, place.is_async) == ("orders", False)
    assert (take_back.channel, take_back.is_async) == ("returns", True)
    place.call("it")
    assert orders.seen == ["it"]  # bound to this instance


def test_handlers_can_be_inherited_overridden_and_disabled():
    @channel("orders")
    class Base:
        @consume("a")
        def first(self, body: dict) -> None: ...

        @consume("b")
        def second(self, body: dict) -> None: ...

        @consume
        def third(self, body: dict) -> None: ...

    class Special(Base):
        @consume("b2")
        def second(self, body: dict) -> None: ...

        def first(self, body: dict) -> None: ...  # no longer a handler

    assert {handler.channel for handler in add(Special())} == {"b2", "orders"}
    assert {handler.channel for handler in add(Base())} == {"a", "b", "orders"}


def test_a_subclass_may_move_its_handlers_to_another_channel():
    @channel("orders")
    class Orders:
        @consume
        def place(self, order: Order) -> None: ...

    @channel("orders.eu")
    class European(Orders): ...

    assert only(European()).channel == "orders.eu"


def test_static_and_class_methods_are_handlers_in_either_order_of_decorators():
    @channel("orders")
    class Orders:
        @staticmethod
        @consume("a")
        def a(order: Order) -> None: ...

        @consume("b")
        @staticmethod
        def b(order: Order) -> None: ...

        @classmethod
        @consume("c")
        def c(cls, order: Order) -> None: ...

        @consume("d")
        @classmethod
        def d(cls, order: Order) -> None: ...

    handlers = add(Orders())
    assert [handler.channel for handler in handlers] == ["a", "b", "c", "d"]
    assert all([param.name for param in handler.params] == ["order"] for handler in handlers)


def test_a_callable_object_is_a_handler_with_a_stable_name():
    class Audit:
        async def __call__(self, entry: Order) -> None: ...

    handler = only(consume("audit")(Audit()))
    assert handler.is_async
    assert handler.body_type is Order
    assert handler.group.endswith("Audit.__call__")
    assert "0x" not in handler.name

    @channel("audit")
    class Decorated:
        @consume
        def __call__(self, entry: Order) -> None: ...

    assert only(Decorated()).channel == "audit"


def test_a_partial_has_the_name_of_its_function():
    async def handle(ledger: dict, order: Order) -> None: ...

    handler = only(consume("orders")(functools.partial(handle, {})))
    assert handler.is_async
    assert handler.body_type is Order
    assert handler.group.endswith("its_function.handle")


def test_a_method_of_an_instance_can_be_registered_alone():
    @channel("orders")
    class Orders:
        @consume
        def place(self, order: Order) -> None: ...

        @consume("returns")
        def take_back(self, order: Order) -> None: ...

    assert only(Orders().place).channel == "orders"


def logged(function: Callable[..., object]) -> Callable[..., object]:
    @functools.wraps(function)
    def wrapper(*args: object, **kwargs: object) -> object:
        return function(*args, **kwargs)

    return wrapper


def awaited(function: Callable[..., object]) -> Callable[..., Awaitable[object]]:
    @functools.wraps(function)
    async def wrapper(*args: object, **kwargs: object) -> object:
        return function(*args, **kwargs)

    return wrapper


def test_the_signature_of_a_wrapped_handler_is_used():
    @consume("a")
    @logged
    async def inner_async(order: Order, *, tenant: Annotated[str, Header()]) -> None: ...

    @consume("b")
    @awaited
    def inner_sync(order: Order) -> None: ...

    @logged
    @consume("c")
    def decorated_before(order: Order) -> None: ...

    assert only(inner_async).is_async
    assert [param.name for param in only(inner_async).params] == ["order", "tenant"]
    assert only(inner_sync).is_async  # otherwise its coroutine would never be awaited
    assert only(inner_sync).body_type is Order
    assert not only(decorated_before).is_async


def test_the_signature_of_a_wrapped_method_is_used():
    @channel("orders")
    class Orders:
        @consume
        @logged
        def place(self, order: Order) -> None: ...

    assert [param.name for param in only(Orders()).params] == ["order"]


def module_of(**members: object) -> types.ModuleType:
    module = types.ModuleType("handlers")
    vars(module).update(members)
    return module


def test_registering_a_module_registers_its_functions_and_instances(caplog):
    @channel("orders")
    class Orders:
        @consume
        def place(self, order: Order) -> None: ...

    Orders.__module__ = "handlers"

    @consume("audit")
    def audit(entry: dict) -> None: ...

    def helper() -> None: ...

    module = module_of(
        Orders=Orders, orders=Orders(), audit=audit, helper=helper, number=5, Other=Order
    )
    registry = Registry()
    assert {handler.channel for handler in registry.add(module)} == {"orders", "audit"}
    registry.warn_about_classes()
    assert not caplog.records


@pytest.mark.parametrize("later", [False, True])
def test_a_class_of_a_registered_module_without_a_registered_instance_is_logged(caplog, later):
    @channel("orders")
    class Orders:
        @consume
        def place(self, order: Order) -> None: ...

    Orders.__module__ = "handlers"

    @consume("audit")
    def audit(entry: dict) -> None: ...

    registry = Registry()
    registry.add(module_of(Orders=Orders, audit=audit))
    if later:
        registry.add(Orders())
    registry.warn_about_classes()
    warned = ["Orders is a class and is not registered" in text for text in caplog.messages]
    assert warned == ([] if later else [True])


def test_mocks_are_not_handlers():
    @consume("audit")
    def audit(entry: dict) -> None: ...

    module = module_of(audit=audit, call=mock.call, double=mock.MagicMock())
    assert only(module).channel == "audit"


def test_registering_a_class_raises_an_error_that_suggests_an_instance():
    @channel("orders")
    class Orders: ...

    with pytest.raises(ConfigError, match=r"Orders is a class; register an instance.*Orders\(…\)"):
        add(Orders)


@pytest.mark.parametrize("target", [object(), 5, "orders", None, len, module_of(number=5)])
def test_a_target_without_handlers_is_rejected(target):
    with pytest.raises(ConfigError, match="has no handlers: decorate functions or methods"):
        add(target)


def test_a_handler_without_a_channel_is_rejected_with_its_location():
    @consume
    def handle(order: Order) -> None: ...

    with pytest.raises(ConfigError, match=r"handle at .*:\d+ has no channel") as caught:
        add(handle)
    assert __file__ in str(caught.value)


# -- several handlers --------------------------------------------------------------------------


def test_a_queue_rejects_a_second_handler():
    registry = Registry()
    registry.add(consume("orders", group="a")(lambda order: None))
    with pytest.raises(ConfigError, match="queue 'orders' has two handlers") as caught:
        registry.add(consume("orders", group="b")(lambda order: None))
    assert str(caught.value).count(__file__) == 2


def test_a_topic_rejects_a_second_handler_of_a_group():
    registry = Registry()
    prices = Channel("prices", broadcast=True)
    registry.add(consume(prices, group="a")(lambda price: None))
    registry.add(consume(prices, group="b")(lambda price: None))
    with pytest.raises(ConfigError, match="group 'a' of topic 'prices' has two handlers"):
        registry.add(consume(prices, group="a")(lambda price: None))


def test_a_rejected_target_registers_nothing():
    registry = Registry()

    class Mixed:
        @consume("fine")
        def fine(self, body: dict) -> None: ...

        @consume("broken")
        def broken(self, *body: dict) -> None: ...

    class Unnamed:
        @consume("fine")
        def fine(self, body: dict) -> None: ...

        @consume("unnamed")
        def unnamed(self, body: dict) -> None: ...

    Unnamed.unnamed.__qualname__ = "処理"  # contains no character that is valid in a group name
    with pytest.raises(HandlerError):
        registry.add(Mixed())
    with pytest.raises(InvalidName):
        registry.add(Unnamed())
    assert (registry.channels, registry.handlers) == ({}, [])


def test_equal_declarations_are_merged_and_contradicting_ones_are_rejected():
    registry = Registry()
    registry.add(consume("prices", broadcast=True, prefetch=5, group="a")(lambda price: None))
    registry.add(consume("prices", broadcast=True, ttl=60, group="b")(lambda price: None))
    assert registry.channels["prices"].options == {"broadcast": True, "prefetch": 5, "ttl": 60}
    with pytest.raises(ConfigError, match="declared twice with different prefetch") as caught:
        registry.add(consume("prices", prefetch=6, group="c")(lambda price: None))
    assert str(caught.value).count(__file__) == 2
    assert len(registry.handlers) == 2


def test_a_service_registers_and_lists_its_handlers():
    service = QueueService(Settings(type="native"))
    service.register(consume("orders", group="billing")(lambda order: None))
    assert [(item.channel, item.group) for item in service.handlers] == [("orders", "billing")]


# -- the type of a channel ---------------------------------------------------------------------


def test_the_body_type_is_the_declared_type_or_that_of_the_handlers():
    def handler_of(kind: object) -> Callable[..., None]:
        def handle(body: object) -> None: ...

        handle.__annotations__["body"] = kind
        return handle

    registry = Registry()
    assert registry.body_type("prices") is None
    registry.add(consume("prices", broadcast=True, group="a")(handler_of(Order)))
    assert registry.body_type("prices") is Order
    registry.add(consume("prices", broadcast=True, group="b")(handler_of(dict)))
    assert registry.body_type("prices") is None  # its handlers take different types
    registry.declare(Channel("prices", OrderRow))
    assert registry.body_type("prices") is OrderRow
    registry.add(consume("raw")(lambda body: None))
    assert registry.body_type("raw") is None
    registry.add(consume("many", batch_size=5)(handler_of(list[Order])))
    assert registry.body_type("many") is Order


# -- parameters --------------------------------------------------------------------------------


@pytest.mark.proves("003-types-5")
def test_each_parameter_has_its_source():
    @consume("orders")
    def handle(
        order: Order,
        /,
        message: Message,
        tenant: Annotated[str, Header("x-tenant")],
        *,
        retry_budget: Annotated[int, Header] = 3,
    ) -> None: ...

    handler = only(handle)
    assert handler.params == (
        ParamMetadata("order", "body", Order),
        ParamMetadata("message", "message", Message),
        ParamMetadata("tenant", "header", str, header="x-tenant"),
        ParamMetadata(
            "retry_budget", "header", int, keyword_only=True, header="retry-budget", default=3
        ),
    )
    assert handler.body == handler.params[0]


def test_constraints_of_a_header_are_kept():
    @consume("orders")
    def handle(order: Order, n: Annotated[int, "positive", Header("n")]) -> None: ...

    param = only(handle).params[1]
    assert param.header == "n"
    assert param.type == Annotated[int, "positive"]


def test_an_annotated_body_is_still_the_body():
    @consume("orders")
    def handle(order: Annotated[int, Field(gt=0)]) -> None: ...

    assert only(handle).params[0].kind == "body"


def test_a_handler_without_a_body_accepts_any_body():
    @consume("orders")
    def handle(message: Message) -> None: ...

    handler = only(handle)
    assert handler.body is None
    assert handler.body_type is object


def test_a_batch_handler_takes_lists():
    @consume("orders", batch_size=10)
    def handle(orders: list[Order], messages: list[Message]) -> None: ...

    handler = only(handle)
    assert [param.kind for param in handler.params] == ["body", "message"]
    assert handler.body_type is Order


def splat(*bodies: Order) -> None: ...
def keywords(**body: Order) -> None: ...
def two_bodies(first: Order, second: Order) -> None: ...
def with_default(order: Order, dry_run: bool = False) -> None: ...
def generator(order: Order) -> Any:
    yield order


async def async_generator(order: Order) -> Any:
    yield order


def unknown_type(order: Nowhere) -> None: ...  # type: ignore[name-defined] # noqa: F821
def unknown_attribute(order: mock.Nowhere) -> None: ...  # type: ignore[name-defined]
def not_a_list(orders: Order) -> None: ...
def bare_list(orders: list) -> None: ...
def one_message(orders: list[Order], message: Message) -> None: ...
def batch_header(orders: list[Order], tenant: Annotated[str, Header()]) -> None: ...


@pytest.mark.parametrize(
    ("function", "batch_size", "word"),
    [
        (splat, None, r"splat: parameter \*bodies: .* is variadic"),
        (keywords, None, r"keywords: parameter \*\*body: .* is variadic"),
        (two_bodies, None, "'first' and 'second' would both receive the body"),
        (with_default, None, "'dry_run' has a default, so it cannot be the body"),
        (generator, None, "generator is a generator"),
        (async_generator, None, "async_generator is a generator"),
        (unknown_type, None, "unknown_type: cannot evaluate its annotations: .*Nowhere"),
        (unknown_attribute, None, "cannot evaluate its annotations: .*Nowhere"),
        (not_a_list, 5, r"'orders' takes a batch; annotate it as list\[…\]"),
        (bare_list, 5, r"'orders' takes a batch; annotate it as list\[…\]"),
        (one_message, 5, "'message' is a Message, but the handler takes batches"),
        (batch_header, 5, "'tenant' is a header, but the handler takes batches"),
    ],
)
def test_an_unsupported_signature_is_rejected_with_the_parameter_and_the_reason(
    function, batch_size, word
):
    with pytest.raises(HandlerError, match=word):
        add(consume("orders", batch_size=batch_size)(function))


# -- two decorators ----------------------------------------------------------------------------


def test_stacked_consume_decorators_are_rejected_with_both_places():
    with pytest.raises(ConfigError, match=r"handle has two different .*:\d+ and .*:\d+; a"):

        @consume("a")
        @consume("b")
        def handle(order: Order) -> None: ...


def test_a_function_cannot_be_decorated_again_for_another_channel():
    def handle(order: Order) -> None: ...

    consume("b")(handle)
    with pytest.raises(ConfigError, match="two different @consume decorators"):
        consume("a")(handle)
    assert only(handle).channel == "b"
    consume("b")(handle)  # the same again changes nothing


def test_a_decorator_between_two_consume_decorators_does_not_hide_the_first():
    def traced(function: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(function)
        def call(*args: Any) -> None:
            function(*args)

        return call

    with pytest.raises(ConfigError, match="two different @consume decorators"):

        @consume("a")
        @traced
        @consume("b")
        def handle(order: Order) -> None: ...


# -- the type of the channel and the type of the handler ---------------------------------------


class Invoice(BaseModel):
    number: str


class PaidOrder(Order):
    paid: bool = False


class OrderRow(TypedDict):
    id: int


class Point(NamedTuple):
    x: int
    y: int


class Lenient(BaseModel):
    id: int

    @model_validator(mode="before")
    @classmethod
    def _from_number(cls, value: object) -> object:
        return {"id": value} if isinstance(value, int) else value


@pytest.mark.parametrize(
    ("sent", "taken"),
    [
        (int, dict),
        (int, str),
        (int, Order),
        (str, list[int]),
        (Order, int),
        (Order, Invoice),
        (list[int], list[Order]),
        (list[int], dict[str, int]),
        (int | None, dict),
    ],
)
def test_a_handler_that_can_decode_no_message_of_its_channel_is_rejected(sent, taken):
    def handle(body) -> None: ...

    handle.__annotations__ = {"body": taken}
    with pytest.raises(ConfigError, match=r"handle at .* takes .*, but Channel\('orders'"):
        add(consume(Channel("orders", sent))(handle))
    # The channel may also be declared after the handler.
    registry = Registry()
    handle.__dict__.clear()
    registry.add(consume("orders")(handle))
    with pytest.raises(ConfigError, match="no message could be decoded"):
        registry.declare(Channel("orders", sent))
    assert registry.channels["orders"].type is None


@pytest.mark.parametrize(
    ("sent", "taken"),
    [
        (Order, Order),
        (Order, dict),
        (Order, OrderRow),
        (Order, PaidOrder),
        (PaidOrder, Order),
        (dict, Order),
        (Order, Invoice | Order),
        (Order, object),
        (Order, bytes),
        (bytes, Order),
        (int, Lenient),
        (str, int),
        (int, float),
        (int, datetime),
        (list[int], tuple[int, ...]),
        (dict[str, int], Point),
        (int, complex),
        (list[Order], list[dict]),
        (int, Any),
    ],
)
def test_a_handler_that_can_decode_messages_of_its_channel_is_accepted(sent, taken):
    def handle(body) -> None: ...

    handle.__annotations__ = {"body": taken}
    add(consume(Channel("orders", sent))(handle))


def test_a_batch_handler_is_compared_by_its_members():
    @consume(Channel("orders", int), batch_size=3)
    def handle(bodies: list[dict]) -> None: ...

    with pytest.raises(ConfigError, match="takes dict"):
        add(handle)
