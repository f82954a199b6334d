"""Translation of driver errors into qkit errors."""

from __future__ import annotations

import asyncio

import pytest

from qkit import BackendUnavailable, QueueError, SendTimeout
from qkit.backends.common.error_translation import ErrorTranslator


def meaning(exc: BaseException) -> tuple[type[QueueError], str]:
    return BackendUnavailable, f"failed: {exc}"


translate_errors = ErrorTranslator("some", (OSError, QueueError), meaning)


async def test_a_driver_error_is_translated_across_an_await() -> None:
    error = ConnectionResetError("reset")

    async def call() -> None:
        with translate_errors("publish", "orders"):
            await asyncio.sleep(0)
            raise error

    with pytest.raises(BackendUnavailable) as caught:
        await call()
    found = caught.value
    assert (found.message, found.cause) == ("failed: reset", error)
    assert (found.backend, found.operation, found.queue) == ("some", "publish", "orders")


def test_error_returns_the_translated_error() -> None:
    error = OSError("reset")
    found = translate_errors.error(error, "ack")
    assert (type(found), found.message, found.cause) == (
        BackendUnavailable,
        "failed: reset",
        error,
    )
    assert found.context == {"backend": "some", "operation": "ack"}


@pytest.mark.parametrize("error", [SendTimeout("late"), KeyError("a bug"), KeyboardInterrupt()])
def test_other_errors_propagate_unchanged(error: BaseException) -> None:
    with pytest.raises(type(error)) as caught, translate_errors("publish"):
        raise error
    assert caught.value is error
    assert caught.value.__cause__ is None


def test_a_block_without_an_error_is_unaffected() -> None:
    with translate_errors("publish"):
        done = True
    assert done


@pytest.mark.parametrize("from_driver", [True, False])
async def test_a_cancellation_is_translated_only_if_the_driver_raised_it(
    from_driver: bool,
) -> None:
    translate = ErrorTranslator(
        "some", (OSError,), meaning, is_driver_cancellation=lambda: from_driver
    )
    expected = BackendUnavailable if from_driver else asyncio.CancelledError
    with pytest.raises(expected), translate("publish"):
        raise asyncio.CancelledError
    with pytest.raises(asyncio.CancelledError), translate_errors("publish"):
        raise asyncio.CancelledError
