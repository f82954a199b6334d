"""Shared resource that is reopened after a loss."""

from __future__ import annotations

import asyncio
import gc

import pytest

from qkit import BackendUnavailable, ConfigError
from qkit.backends.common.reopened import Reopened


class Resource:
    def __init__(self) -> None:
        self.lost = False
        self.closed = False


class Maker:
    """Opener of resources; each attempt waits until ``proceed`` is set."""

    def __init__(self) -> None:
        self.proceed = asyncio.Event()
        self.proceed.set()
        self.error: BaseException | None = None
        self.made: list[Resource] = []
        self.attempts = 0
        self.reopened = Reopened(self.make, lambda item: item.lost, self.close, backend="some")
        self.reopened.open()

    async def make(self) -> Resource:
        self.attempts += 1
        await self.proceed.wait()
        if self.error is not None:
            raise self.error
        self.made.append(Resource())
        return self.made[-1]

    async def close(self, resource: Resource) -> None:
        resource.closed = True


@pytest.fixture
async def maker() -> Maker:
    return Maker()


async def start(maker: Maker, count: int) -> list[asyncio.Task[Resource]]:
    """Start ``count`` callers that wait for the same attempt to open a resource."""
    maker.proceed.clear()
    callers = [asyncio.create_task(maker.reopened.get()) for _ in range(count)]
    for _ in range(3):  # run the callers, then the attempt up to its wait
        await asyncio.sleep(0)
    assert maker.attempts == 1
    return callers


async def test_all_callers_get_the_same_resource(maker: Maker) -> None:
    callers = await start(maker, 3)
    maker.proceed.set()
    found = await asyncio.gather(*callers)
    assert found == maker.made * 3
    assert await maker.reopened.get() is maker.reopened.value is found[0]
    assert maker.attempts == 1


async def test_a_cancelled_caller_does_not_cancel_the_attempt(maker: Maker) -> None:
    first, second = await start(maker, 2)
    first.cancel()
    await asyncio.wait([first])
    assert first.cancelled()
    maker.proceed.set()
    assert await second is maker.made[0]
    assert maker.attempts == 1


async def test_an_attempt_without_callers_completes_and_its_resource_is_used(maker: Maker) -> None:
    (only,) = await start(maker, 1)
    only.cancel()
    await asyncio.wait([only])
    maker.proceed.set()
    assert await maker.reopened.get() is maker.made[0]
    assert maker.attempts == 1


async def test_a_failure_without_callers_is_not_reported_as_unretrieved(maker: Maker) -> None:
    reported: list[dict[str, object]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: reported.append(context))
    (only,) = await start(maker, 1)
    only.cancel()
    await asyncio.wait([only])
    maker.error = OSError("refused")
    maker.proceed.set()
    for _ in range(3):
        await asyncio.sleep(0)
    del only  # the task refers to the attempt
    gc.collect()
    assert maker.reopened.value is None
    assert reported == []


async def test_a_failure_reaches_all_callers_and_the_next_call_retries(maker: Maker) -> None:
    callers = await start(maker, 3)
    maker.error = OSError("refused")
    maker.proceed.set()
    results = await asyncio.gather(*callers, return_exceptions=True)
    assert results == [maker.error] * 3
    maker.error = None
    assert await maker.reopened.get() is maker.made[0]
    assert maker.attempts == 2


async def test_each_caller_gets_its_own_copy_of_a_queue_error(maker: Maker) -> None:
    """Callers need separate copies because each adds its queue to the error."""
    first, second = await start(maker, 2)
    maker.error = ConfigError("no such file", cause=OSError("reason"))
    maker.proceed.set()
    await asyncio.wait([first, second])
    errors = [first.exception(), second.exception()]
    assert [type(error) for error in errors] == [ConfigError, ConfigError]
    assert [str(error) for error in errors] == ["no such file"] * 2
    assert [error.__cause__ for error in errors if error] == [maker.error.__cause__] * 2
    assert errors[0] is not errors[1]


async def test_a_lost_resource_is_reopened(maker: Maker) -> None:
    first = await maker.reopened.get()
    first.lost = True
    second = await maker.reopened.get()
    assert second is not first
    assert maker.made == [first, second]


async def test_a_resource_that_is_lost_immediately_is_returned_without_a_retry_loop() -> None:
    class Unlucky(Maker):
        async def make(self) -> Resource:
            made = await super().make()
            made.lost = True
            return made

    maker = Unlucky()
    assert await maker.reopened.get() is maker.made[0]
    assert await maker.reopened.get() is maker.made[1]
    assert maker.attempts == 2


async def test_a_discarded_resource_is_reopened_and_not_closed(maker: Maker) -> None:
    first = await maker.reopened.get()
    maker.reopened.forget(first)
    assert maker.reopened.value is None
    second = await maker.reopened.get()
    maker.reopened.forget(first)
    assert await maker.reopened.get() is second
    assert not first.closed


async def test_a_cancelled_attempt_raises_an_error_in_its_callers(maker: Maker) -> None:
    """A driver that closes a connection cancels the tasks that wait for the connection."""
    maker.error = asyncio.CancelledError()
    with pytest.raises(BackendUnavailable, match="closed while it was connecting"):
        await maker.reopened.get()


async def test_aclose_cancels_an_attempt_and_fails_its_callers(maker: Maker) -> None:
    callers = await start(maker, 2)
    await maker.reopened.aclose()
    for caller in callers:
        with pytest.raises(BackendUnavailable, match="closed while it was connecting"):
            await caller
    assert maker.made == []
    assert not [task for task in asyncio.all_tasks() if "connect" in task.get_name()]


async def test_aclose_closes_a_resource_whose_attempt_ignored_the_cancellation() -> None:
    class Stubborn(Maker):
        async def make(self) -> Resource:
            self.attempts += 1
            try:
                await self.proceed.wait()
            except asyncio.CancelledError:
                self.made.append(Resource())
            return self.made[-1]

    maker = Stubborn()
    (caller,) = await start(maker, 1)
    await maker.reopened.aclose()
    assert maker.made[0].closed
    with pytest.raises(BackendUnavailable):
        await caller


async def test_a_closed_resource_can_be_opened_again(maker: Maker) -> None:
    first = await maker.reopened.get()
    for _ in range(2):
        await maker.reopened.aclose()
    assert first.closed
    assert maker.reopened.value is None
    with pytest.raises(BackendUnavailable, match="start the backend first") as caught:
        await maker.reopened.get()
    assert (caught.value.backend, caught.value.operation) == ("some", "connect")
    maker.reopened.open()
    assert await maker.reopened.get() is not first
