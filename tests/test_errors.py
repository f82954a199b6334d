"""Errors: what they carry, how they read, and that they survive being copied and pickled."""

from __future__ import annotations

import copy
import inspect
import pickle
from collections.abc import Callable

import pytest

import qkit
from qkit import errors
from qkit.errors import (
    BackendUnavailable,
    BatchError,
    CircuitOpen,
    ConfigError,
    HandlerError,
    PartialSend,
    PayloadTooLarge,
    QueueError,
    QueueFull,
    Reject,
    Retry,
    SendTimeout,
    Signal,
    SubscriptionLost,
    Unavailable,
)
from qkit.message import Sent

CLASSES = [
    value
    for value in vars(errors).values()
    if inspect.isclass(value) and issubclass(value, QueueError)
]
SIGNALS = [
    Retry("later", delay=2.5),
    Reject("negative total"),
    Unavailable("the bank is closed", retry_after=30),
    BatchError({"0190": ValueError("bad total")}),
]


def over_the_wire(error: Exception) -> Exception:
    copied: Exception = pickle.loads(pickle.dumps(error))
    return copied


COPIES = [copy.copy, copy.deepcopy, over_the_wire]


@pytest.mark.proves("000-errors-5", "003-errors-1", "003-errors-3", "003-errors-4")
@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
def test_every_error_says_where_it_happened(kind: type[QueueError]) -> None:
    if kind is PartialSend:
        error: QueueError = PartialSend("gone", [], backend="b", operation="send", queue="q")
    else:
        error = kind("gone", backend="b", operation="send", queue="q", message_id="7")
        assert error.message_id == "7"
    assert (error.backend, error.operation, error.queue) == ("b", "send", "q")
    assert str(error).startswith("gone [backend=b operation=send queue=q")
    assert str(kind("plain")) == "plain"


@pytest.mark.parametrize("duplicate", COPIES, ids=["copy", "deepcopy", "pickle"])
@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
def test_a_copy_of_an_error_tells_the_same(
    kind: type[QueueError], duplicate: Callable[[Exception], Exception]
) -> None:
    error = kind("gone").located(backend="b", operation="send", queue="q", message_id="7")
    error.__cause__ = OSError(111, "refused")
    again = duplicate(error)
    assert type(again) is kind
    assert again is not error
    assert str(again) == str(error)
    assert isinstance(again, QueueError)
    assert again.context == error.context
    assert again.message == "gone"
    assert isinstance(again.cause, OSError)
    assert str(again.cause) == str(error.cause)


@pytest.mark.parametrize("duplicate", COPIES, ids=["copy", "deepcopy", "pickle"])
def test_a_copy_of_a_partial_send_keeps_its_results(
    duplicate: Callable[[Exception], Exception],
) -> None:
    error = PartialSend("1 of 2", [Sent("a", 3), QueueError("full", message_id="b")])
    again = duplicate(error)
    assert isinstance(again, PartialSend)
    assert again.results[0] == Sent("a", 3)
    assert str(again.results[1]) == "full [message_id=b]"


@pytest.mark.parametrize("duplicate", COPIES, ids=["copy", "deepcopy", "pickle"])
@pytest.mark.parametrize("signal", SIGNALS, ids=lambda signal: type(signal).__name__)
def test_a_copy_of_a_signal_asks_for_the_same(
    signal: Signal, duplicate: Callable[[Exception], Exception]
) -> None:
    again = duplicate(signal)
    assert type(again) is type(signal)
    assert str(again) == str(signal)
    assert {name: str(value) for name, value in vars(again).items()} == {
        name: str(value) for name, value in vars(signal).items()
    }


@pytest.mark.proves("003-errors-3")
def test_the_cause_is_what_was_given_or_what_the_error_was_raised_from() -> None:
    refused = OSError("refused")
    assert QueueError("x", cause=refused).__cause__ is refused
    with pytest.raises(QueueError) as caught:
        raise QueueError("x") from refused
    assert caught.value.cause is refused
    assert QueueError("x").cause is None


@pytest.mark.proves("003-errors-4")
def test_located_fills_in_only_what_is_unknown() -> None:
    error = QueueError("x", queue="orders")
    assert error.located(backend="native", queue="other", message_id="1") is error
    assert error.context == {"backend": "native", "queue": "orders", "message_id": "1"}


@pytest.mark.parametrize(
    ("kind", "builtin"),
    [
        (ConfigError, ValueError),
        (HandlerError, TypeError),
        (SendTimeout, TimeoutError),
        (BackendUnavailable, ConnectionError),
        (CircuitOpen, BackendUnavailable),
        (SubscriptionLost, BackendUnavailable),
        (errors.QueueNotFound, LookupError),
        (errors.LifecycleError, RuntimeError),
    ],
)
def test_an_error_is_also_what_python_would_raise(
    kind: type[Exception], builtin: type[Exception]
) -> None:
    assert issubclass(kind, builtin)


@pytest.mark.parametrize("seconds", [-1, -0.001, float("nan")])
def test_a_signal_refuses_a_time_in_the_past(seconds: float) -> None:
    with pytest.raises(ValueError, match="zero or more seconds"):
        Retry(delay=seconds)
    with pytest.raises(ValueError, match="zero or more seconds"):
        Unavailable(retry_after=seconds)


def test_signals_have_a_text_without_being_given_one() -> None:
    assert str(Retry()) == "the handler asked for a retry"
    assert str(Reject()) == Reject().reason == "rejected by the handler"
    assert str(Unavailable()) == "a dependency is unavailable"
    assert str(BatchError({"1": KeyError(), "2": KeyError()})) == "2 of the batch failed"


@pytest.mark.proves("003-errors-2", "003-docs-6")
def test_every_error_is_exported_and_in_the_tree_of_the_docstring() -> None:
    for name in errors.__all__:
        assert getattr(qkit, name) is getattr(errors, name)
        assert name in (errors.__doc__ or "")


def test_a_batch_that_failed_for_one_reason_says_it_and_for_several_each_of_them() -> None:
    full, other, large = QueueFull("full"), QueueFull("full too"), PayloadTooLarge("large")
    assert PartialSend.of([full, other], backend="b", queue="q") is full
    several: list[list[Sent | QueueError]] = [[full, large], [full, Sent("a")]]
    for results in several:
        error = PartialSend.of(results, backend="b", queue="q")
        assert isinstance(error, PartialSend)
        assert error.results == results
