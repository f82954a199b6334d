"""The coalescer: one call in flight; items that arrive meanwhile share the next call."""

from __future__ import annotations

import asyncio

import pytest

from qkit._internal.coalescer import Coalescer


class Recorder:
    """A coalescer whose flushes are recorded and wait for a gate."""

    def __init__(self, *, max_size: int = 100, sized: bool = False) -> None:
        self.groups: list[list[int]] = []
        self.gate = asyncio.Event()
        self.coalescer = Coalescer(
            self._flush, max_size=max_size, size=int if sized else None, name="flush"
        )

    async def _flush(self, items: list[int]) -> None:
        self.groups.append(list(items))
        await self.gate.wait()


async def iterations(count: int = 10) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def test_a_posted_item_is_flushed_in_the_next_loop_iteration() -> None:
    recorder = Recorder()
    recorder.gate.set()
    recorder.coalescer.post(1)
    assert recorder.coalescer.busy
    await iterations()
    assert recorder.groups == [[1]]
    assert not recorder.coalescer.busy


async def test_items_are_collected_while_a_flush_is_in_flight() -> None:
    recorder = Recorder()
    for item in range(5):
        recorder.coalescer.post(item)
        await iterations()
    assert recorder.groups == [[0]]
    assert recorder.coalescer.pending() == [0, 1, 2, 3, 4]
    recorder.gate.set()
    await iterations()
    assert recorder.groups == [[0], [1, 2, 3, 4]]
    assert recorder.coalescer.pending() == []


async def test_run_now_uses_no_task_and_collects_items_meanwhile() -> None:
    recorder = Recorder()
    recorder.gate.set()
    done = asyncio.Event()

    async def call() -> str:
        await done.wait()
        return "result"

    running = asyncio.create_task(recorder.coalescer.run_now(call()))
    await iterations()
    recorder.coalescer.post(1)
    recorder.coalescer.post(2)
    await iterations()
    assert recorder.groups == []
    done.set()
    assert await running == "result"
    await iterations()
    assert recorder.groups == [[1, 2]]


async def test_items_are_flushed_after_a_failed_call() -> None:
    recorder = Recorder()
    recorder.gate.set()

    async def call() -> None:
        recorder.coalescer.post(1)
        raise ValueError

    with pytest.raises(ValueError):  # it has no message to match
        await recorder.coalescer.run_now(call())
    await iterations()
    assert recorder.groups == [[1]]


@pytest.mark.parametrize(
    ("sized", "items", "groups"),
    [
        (False, [1] * 5, [[1, 1], [1, 1], [1]]),
        (True, [1, 1, 2, 5, 1], [[1, 1], [2], [5], [1]]),
    ],
)
async def test_a_group_has_a_maximum_size(
    sized: bool, items: list[int], groups: list[list[int]]
) -> None:
    recorder = Recorder(max_size=2, sized=sized)
    recorder.gate.set()
    for item in items:
        recorder.coalescer.post(item)
    await iterations(20)
    assert recorder.groups == groups


async def test_close_returns_unhandled_items_in_order() -> None:
    recorder = Recorder(max_size=2)
    for item in range(5):
        recorder.coalescer.post(item)
    await iterations()
    assert await recorder.coalescer.close() == [0, 1, 2, 3, 4]
    assert not recorder.coalescer.busy
    assert recorder.coalescer.pending() == []
    assert not [task for task in asyncio.all_tasks() if task.get_name() == "flush"]


async def test_the_coalescer_works_after_close() -> None:
    recorder = Recorder()
    recorder.coalescer.post(1)
    await iterations()
    await recorder.coalescer.close()
    recorder.gate.set()
    recorder.coalescer.post(2)
    await iterations()
    assert recorder.groups == [[1], [2]]
