"""Channels: names, validation of options, and merging of declarations."""

from __future__ import annotations

import re
from typing import Any

import pytest

from qkit import Channel, Message, RetrySettings
from qkit.errors import ConfigError, InvalidName
from qkit.handlers.channel import CallNext, caller_location


async def passing(message: Message, call_next: CallNext) -> object:
    return await call_next(message)


def test_a_channel_has_its_name_type_options_and_location():
    orders = Channel("orders", dict, prefetch=20, dead_letter=False)
    assert (orders.name, orders.type) == ("orders", dict)
    assert orders.options == {"prefetch": 20, "dead_letter": False}
    assert re.fullmatch(rf"{re.escape(__file__)}:\d+", orders.location)
    assert repr(orders) == "Channel('orders', dict)"
    assert repr(Channel("orders")) == "Channel('orders')"
    assert repr(Channel("x", list[int])) == "Channel('x', list)"


@pytest.mark.parametrize("name", ["", "a b", "ä", "../x", "a/b", "x\n", "x" * 201, ".", "..", 5])
def test_a_name_that_is_invalid_on_some_broker_is_rejected(name):
    with pytest.raises(InvalidName, match="channel name"):
        Channel(name)


def test_lists_become_tuples_so_that_declarations_compare_equal():
    one = Channel("orders", retry_on=[ValueError], middleware=[passing])
    assert one.options == {"retry_on": (ValueError,), "middleware": (passing,)}


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"prefetch": 0}, "prefetch: must be at least 1 and at most 1000"),
        ({"prefetch": 1001}, "at most 1000"),
        ({"prefetch": 2.5}, "prefetch: expected an integer, got 2.5"),
        ({"prefetch": True}, "prefetch: expected a number, got bool"),
        ({"prefetch": "10"}, "prefetch: expected a number, got str"),
        ({"prefetch": None}, "prefetch: expected a number, got NoneType"),
        ({"max_priority": 256}, "at least 0 and at most 255"),
        ({"max_priority": 1.0}, "expected an integer"),
        ({"max_depth": 0}, "max_depth: must be at least 1"),
        ({"max_depth": float("inf")}, "expected an integer"),
        ({"ack_deadline": 0}, "at least 0.001"),
        ({"ack_deadline": float("nan")}, "at least 0.001"),
        ({"ttl": -1}, "ttl: must be at least 0.001"),
        ({"ttl": float("inf")}, "ttl: must be .*, got inf"),
        ({"broadcast": 1}, "broadcast: expected True or False, got int"),
        ({"dead_letter": "yes"}, "expected True or False, got str"),
        ({"ordered": None}, "expected True or False, got NoneType"),
        (
            {"balance": "fair"},
            "balance: expected one of round_robin, least_busy, random, got 'fair'",
        ),
        ({"balance": ["random"]}, r"balance: expected one of .*, got \['random'\]"),
        ({"retry": {"max_attempts": 3}}, "retry: expected RetrySettings"),
        ({"retry_on": ValueError}, "retry_on: expected a list, got <class 'ValueError'>"),
        ({"retry_on": [5]}, "expected an exception class, got 5"),
        ({"dead_on": [KeyboardInterrupt]}, "expected an exception class, got"),
        ({"dead_on": {ValueError}}, "dead_on: expected a list"),
        ({"middleware": passing}, "middleware: expected a list"),
        (
            {"middleware": ["passing"]},
            r"expected an async function\(message, call_next\), got 'passing'",
        ),
        ({"prefetsh": 3}, "prefetsh: unknown option; did you mean 'prefetch'"),
        ({"zzz": 3}, "zzz: unknown option; see ChannelOptions"),
    ],
)
def test_the_error_of_an_invalid_option_names_the_option(options, word):
    with pytest.raises(ConfigError, match=f"channel 'orders': .*{word}"):
        Channel("orders", **options)


def test_an_ordered_channel_rejects_retries_that_wait_in_the_broker():
    with pytest.raises(ConfigError, match="ordered: retries must be inline"):
        Channel("orders", ordered=True, retry=RetrySettings(mode="release"))
    for fine in (RetrySettings(mode="inline"), RetrySettings(max_attempts=5)):
        assert Channel("orders", ordered=True, retry=fine).options["ordered"] is True
    released = Channel("orders", ordered=False, retry=RetrySettings(mode="release"))
    assert released.options["ordered"] is False


def test_merging_two_declarations_keeps_the_options_of_both():
    first: Channel[object] = Channel("orders", prefetch=5)
    second: Channel[Any] = Channel("orders", dict, ttl=60, prefetch=5)
    merged = first.merge(second)
    assert merged.options == {"prefetch": 5, "ttl": 60}
    assert merged.type is dict
    assert merged.location == first.location


def test_merging_a_declaration_that_adds_nothing_returns_the_same_channel():
    first: Channel[Any] = Channel("orders", dict, prefetch=5, retry_on=[ValueError])
    assert first.merge(Channel("orders")) is first
    assert first.merge(Channel("orders", dict, retry_on=(ValueError,))) is first
    assert Channel("orders").merge(first) is not first


@pytest.mark.parametrize(
    ("mine", "theirs", "what"),
    [
        ({"prefetch": 5}, {"prefetch": 6}, "different prefetch: 5 at .*, 6 at "),
        ({"broadcast": True}, {"broadcast": False}, "different broadcast: True at .*, False at "),
        ({"retry_on": [ValueError]}, {"retry_on": []}, "different retry_on"),
        ({"balance": "random"}, {"balance": "least_busy"}, "different balance: 'random' at "),
        ({"retry": RetrySettings(max_attempts=2)}, {"retry": RetrySettings()}, "different retry"),
    ],
)
def test_contradicting_options_raise_an_error_that_names_both_locations(mine, theirs, what):
    first = Channel("orders", **mine)
    second = Channel("orders", **theirs)
    with pytest.raises(ConfigError, match=f"'orders' is declared twice with {what}") as caught:
        first.merge(second)
    assert first.location in str(caught.value)
    assert second.location in str(caught.value)
    assert first.location != second.location


def test_contradicting_types_are_rejected():
    with pytest.raises(ConfigError, match="different type: <class 'int'> at "):
        Channel("orders", int).merge(Channel("orders", str))


def test_incompatible_options_of_two_declarations_are_rejected():
    released = Channel("orders", retry=RetrySettings(mode="release"))
    with pytest.raises(ConfigError, match="ordered: retries must be inline"):
        Channel("orders", ordered=True).merge(released)


def test_the_location_is_that_of_the_caller_outside_qkit():
    assert caller_location().startswith(f"{__file__}:")
    space: dict[str, object] = {"__name__": "qkit.inside", "caller_location": caller_location}
    exec(compile("place = caller_location()", "<inside>", "exec"), space)
    assert str(space["place"]).startswith(f"{__file__}:")
