"""The delivery buffer: order, lanes by key, batches and withdrawal."""

from __future__ import annotations

import asyncio

from qkit.backend import Delivery
from qkit.consuming.delivery_buffer import DeliveryBuffer
from qkit.consuming.job import Job
from qkit.message import Envelope


def deliveries(*names: str) -> list[Delivery]:
    """Return a delivery for each name: ``a1`` has the key ``a``, ``-1`` has no key."""
    return [
        Delivery(Envelope(name, b"", key=None if name[0] == "-" else name[0]), "queue", name)
        for name in names
    ]


def names(jobs: list[Job]) -> list[str]:
    return [job.delivery.envelope.id for job in jobs]


def make(*, lanes: bool = False) -> DeliveryBuffer:
    return DeliveryBuffer(lanes=lanes, on_empty=lambda: None)


async def take_all(buffer: DeliveryBuffer) -> list[Job]:
    """Take all jobs that are ready."""
    found = []
    while buffer.ready:
        job = await buffer.next()
        assert job is not None
        found.append(job)
    return found


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_deliveries_are_taken_in_order_and_held_until_finished():
    buffer = make()
    buffer.add(deliveries("-1", "-2"))
    first, second = await take_all(buffer)
    assert names([first, second]) == ["-1", "-2"]
    buffer.finish(first)
    assert buffer.held == {second}


async def test_a_waiting_worker_gets_the_next_delivery_and_none_when_closed():
    buffer = make()
    workers = [asyncio.create_task(buffer.next()) for _ in range(3)]
    await settle()
    buffer.add(deliveries("-1"))
    await settle()
    assert [worker.done() for worker in workers] == [True, False, False]
    buffer.close()
    assert await workers[1] is None
    assert await workers[2] is None


async def test_a_closed_buffer_still_returns_ready_deliveries():
    buffer = make()
    buffer.add(deliveries("-1"))
    buffer.close()
    assert await buffer.next() is not None
    assert await buffer.next() is None


async def test_if_a_woken_worker_is_cancelled_another_is_woken():
    buffer = make()
    first, second = (asyncio.create_task(buffer.next()) for _ in range(2))
    await settle()
    buffer.add(deliveries("-1"))
    first.cancel()  # cancelled after it was woken and before it ran
    job = await asyncio.wait_for(second, 30)
    assert job is not None
    assert names([job]) == ["-1"]


async def test_a_cancelled_worker_is_not_woken():
    buffer = make()
    first, second = (asyncio.create_task(buffer.next()) for _ in range(2))
    await settle()
    first.cancel()
    await settle()
    buffer.add(deliveries("-1"))
    assert await asyncio.wait_for(second, 30) is not None


async def test_on_empty_is_called_when_the_last_delivery_is_taken():
    emptied: list[int] = []
    buffer = DeliveryBuffer(lanes=False, on_empty=lambda: emptied.append(1))
    buffer.add(deliveries("-1", "-2"))
    await buffer.next()
    assert emptied == []
    await buffer.next()
    assert emptied == [1]


# -- lanes -------------------------------------------------------------------------------------


async def test_only_one_delivery_of_a_key_is_ready_at_a_time():
    buffer = make(lanes=True)
    buffer.add(deliveries("a1", "a2", "b1", "-1", "-2", "a3"))
    first = await take_all(buffer)
    assert names(first) == ["a1", "b1", "-1", "-2"]
    buffer.finish(first[1])
    assert await take_all(buffer) == []
    buffer.finish(first[0])
    (second,) = await take_all(buffer)
    assert names([second]) == ["a2"]
    buffer.finish(second)
    (third,) = await take_all(buffer)
    buffer.finish(third)
    buffer.add(deliveries("a4"))
    assert names(await take_all(buffer)) == ["a4"]


async def test_without_lanes_keys_are_ignored():
    buffer = make()
    buffer.add(deliveries("a1", "a2"))
    jobs = await take_all(buffer)
    assert names(jobs) == ["a1", "a2"]
    buffer.finish(jobs[0])
    assert buffer.held == {jobs[1]}


async def test_withdraw_returns_all_deliveries_that_have_not_started():
    buffer = make(lanes=True)
    buffer.add(deliveries("a1", "a2", "b1", "b2", "-1"))
    started = await buffer.next()
    assert started is not None
    back = buffer.withdraw()
    assert sorted(names(back)) == ["-1", "a2", "b1", "b2"]
    assert len(buffer.held) == 5  # each is held until it is released
    assert not buffer.ready
    for job in back:
        buffer.finish(job)
    assert buffer.held == {started}
    assert await take_all(buffer) == []


async def test_a_lane_stays_blocked_by_its_running_delivery_when_others_are_withdrawn():
    buffer = make(lanes=True)
    buffer.add(deliveries("a1", "a2"))
    running = await buffer.next()
    assert running is not None
    for job in buffer.withdraw():
        buffer.finish(job)
    buffer.add(deliveries("a2"))  # delivered again while a1 is running
    assert await take_all(buffer) == []
    buffer.finish(running)
    assert names(await take_all(buffer)) == ["a2"]


async def test_finishing_withdrawn_deliveries_makes_no_delivery_ready():
    buffer = make(lanes=True)
    buffer.add(deliveries("a1", "a2"))
    running = await buffer.next()
    assert running is not None
    (withdrawn,) = buffer.withdraw()
    buffer.finish(running)
    buffer.finish(withdrawn)
    assert not buffer.ready
    assert buffer.held == set()


# -- batches -----------------------------------------------------------------------------------


async def test_a_full_batch_does_not_wait(clock):
    buffer = make()
    buffer.add(deliveries("-1", "-2", "-3"))
    before = clock.monotonic()
    assert names(await buffer.next_batch(2, 5.0)) == ["-1", "-2"]
    assert clock.monotonic() == before


async def test_the_wait_of_a_batch_starts_at_its_first_delivery(clock):
    buffer = make()
    gathering = asyncio.create_task(buffer.next_batch(10, 5.0))
    await clock.advance(100)
    start = clock.monotonic()
    buffer.add(deliveries("-1"))
    await clock.advance(4)
    buffer.add(deliveries("-2"))
    assert names(await gathering) == ["-1", "-2"]
    assert clock.monotonic() - start == 5.0


async def test_a_batch_without_a_wait_takes_the_ready_deliveries():
    buffer = make()
    buffer.add(deliveries("-1", "-2"))
    assert names(await buffer.next_batch(10, 0)) == ["-1", "-2"]


async def test_closing_ends_the_wait_of_a_batch(clock):
    buffer = make()
    buffer.add(deliveries("-1"))
    gathering = asyncio.create_task(buffer.next_batch(10, 5.0))
    await settle()
    before = clock.monotonic()
    buffer.close()
    assert names(await gathering) == ["-1"]
    assert clock.monotonic() == before
    assert await buffer.next_batch(10, 5.0) == []


async def test_a_partial_batch_can_be_withdrawn_and_starts_again(clock):
    buffer = make()
    buffer.add(deliveries("-1", "-2"))
    gathering = asyncio.create_task(buffer.next_batch(10, 5.0))
    other = asyncio.create_task(buffer.next_batch(10, 5.0))
    await settle()
    back = buffer.withdraw()
    assert names(back) == ["-1", "-2"]
    await clock.advance(10)
    assert not gathering.done()
    assert not other.done()
    buffer.add(deliveries("-3", "-4"))
    done, _ = await asyncio.wait({gathering, other}, timeout=20)
    assert sorted(name for task in done for name in names(task.result())) == ["-3", "-4"]
    buffer.close()
    await asyncio.wait({gathering, other})


async def test_a_message_that_is_delivered_again_is_not_lost_with_its_first_delivery():
    buffer = make(lanes=True)
    buffer.add(deliveries("a1", "a2", "b1"))
    first = (await take_all(buffer))[0]
    buffer.add(deliveries("a1", "a2", "a3"))  # the leases expired, so the messages came again
    assert names(buffer.same_key(first)) == ["a1", "a2"]
    again = next(job for job in buffer.held if job is not first and names([job]) == ["a1"])
    assert buffer.same_key(again) == [again]
