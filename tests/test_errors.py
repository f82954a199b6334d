"""Errors and signals: attributes, texts, copies and pickles."""

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


def pickled(error: Exception) -> Exception:
    copy_of_error: Exception = pickle.loads(pickle.dumps(error))
    return copy_of_error


COPIES = [copy.copy, copy.deepcopy, pickled]


@pytest.mark.proves("000-errors-5", "003-errors-1", "003-errors-3", "003-errors-4")
@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
def test_every_error_carries_its_context(kind: type[QueueError]) -> None:
    if kind is PartialSend:
        error: QueueError = PartialSend("failed", [], backend="b", operation="send", queue="q")
    else:
        error = kind("failed", backend="b", operation="send", queue="q", message_id="7")
        assert error.message_id == "7"
    assert (error.backend, error.operation, error.queue) == ("b", "send", "q")
    assert str(error).startswith("failed [backend=b operation=send queue=q")
    assert str(kind("plain")) == "plain"


@pytest.mark.parametrize("duplicate", COPIES, ids=["copy", "deepcopy", "pickle"])
@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
def test_a_copy_of_an_error_is_equal(
    kind: type[QueueError], duplicate: Callable[[Exception], Exception]
) -> None:
    error = kind("failed").located(backend="b", operation="send", queue="q", message_id="7")
    error.__cause__ = OSError(111, "refused")
    copied = duplicate(error)
    assert type(copied) is kind
    assert copied is not error
    assert str(copied) == str(error)
    assert isinstance(copied, QueueError)
    assert copied.context == error.context
    assert copied.message == "failed"
    assert isinstance(copied.cause, OSError)
    assert str(copied.cause) == str(error.cause)


@pytest.mark.parametrize("duplicate", COPIES, ids=["copy", "deepcopy", "pickle"])
def test_a_copy_of_a_partial_send_keeps_its_results(
    duplicate: Callable[[Exception], Exception],
) -> None:
    error = PartialSend("1 of 2", [Sent("a", 3), QueueError("full", message_id="b")])
    copied = duplicate(error)
    assert isinstance(copied, PartialSend)
    assert copied.results[0] == Sent("a", 3)
    assert str(copied.results[1]) == "full [message_id=b]"


@pytest.mark.parametrize("duplicate", COPIES, ids=["copy", "deepcopy", "pickle"])
@pytest.mark.parametrize("signal", SIGNALS, ids=lambda signal: type(signal).__name__)
def test_a_copy_of_a_signal_is_equal(
    signal: Signal, duplicate: Callable[[Exception], Exception]
) -> None:
    copied = duplicate(signal)
    assert type(copied) is type(signal)
    assert str(copied) == str(signal)
    assert {name: str(value) for name, value in vars(copied).items()} == {
        name: str(value) for name, value in vars(signal).items()
    }


@pytest.mark.proves("003-errors-3")
def test_the_cause_is_the_argument_or_the_error_it_was_raised_from() -> None:
    refused = OSError("refused")
    assert QueueError("x", cause=refused).__cause__ is refused
    with pytest.raises(QueueError) as caught:
        raise QueueError("x") from refused
    assert caught.value.cause is refused
    assert QueueError("x").cause is None


@pytest.mark.proves("003-errors-4")
def test_located_fills_in_only_missing_facts() -> None:
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
def test_an_error_is_also_the_matching_builtin_error(
    kind: type[Exception], builtin: type[Exception]
) -> None:
    assert issubclass(kind, builtin)


@pytest.mark.parametrize("seconds", [-1, -0.001, float("nan")])
def test_a_signal_rejects_a_negative_delay(seconds: float) -> None:
    with pytest.raises(ValueError, match="zero or more seconds"):
        Retry(delay=seconds)
    with pytest.raises(ValueError, match="zero or more seconds"):
        Unavailable(retry_after=seconds)


def test_signals_have_a_default_text() -> None:
    assert str(Retry()) == "retry requested by the handler"
    assert str(Reject()) == Reject().reason == "rejected by the handler"
    assert str(Unavailable()) == "a dependency is unavailable"
    assert str(BatchError({"1": KeyError(), "2": KeyError()})) == "2 of the batch failed"


@pytest.mark.proves("003-errors-2", "003-docs-6")
def test_every_error_is_exported_and_in_the_hierarchy_of_the_docstring() -> None:
    for name in errors.__all__:
        assert getattr(qkit, name) is getattr(errors, name)
        assert name in (errors.__doc__ or "")


def test_a_batch_that_failed_for_one_reason_raises_that_error_otherwise_a_partial_send() -> None:
    full, other, large = QueueFull("full"), QueueFull("full too"), PayloadTooLarge("large")
    assert PartialSend.of([full, other], backend="b", queue="q") is full
    several: list[list[Sent | QueueError]] = [[full, large], [full, Sent("a")]]
    for results in several:
        error = PartialSend.of(results, backend="b", queue="q")
        assert isinstance(error, PartialSend)
        assert error.results == results
