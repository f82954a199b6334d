"""A message that fails for good is in the dead letters before it is acknowledged."""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Sequence

import pytest
from pydantic import BaseModel

from qkit import DeadLetter, QueueService, consume
from qkit._internal.ids import new_id
from qkit.backend import Backend, Delivery, Subscription
from qkit.conformance.fault_injection import FaultInjectingBackend
from qkit.message import CONTENT_ENCODING, CONTENT_TYPE, Envelope, Sent
from tests.support.carriers import Site, in_other_processes, keeps_dead_letters, on, redelivers
from tests.support.waiting import eventually


class Order(BaseModel):
    id: int


class Recording(FaultInjectingBackend):
    """Writes down, outside the process's own memory of it, what was confirmed and what is asked."""

    def __init__(self, inner: Backend, queue: str, log: int) -> None:
        super().__init__(inner)
        self._queue = queue
        self._log = log

    async def publish(self, queue: str, envelopes: Sequence[Envelope]) -> list[Sent]:
        sent = await super().publish(queue, envelopes)
        if queue != self._queue:
            for envelope in envelopes:
                os.write(self._log, f"confirmed {envelope.id}\n".encode())
        return sent

    async def ack(self, subscription: Subscription, delivery: Delivery) -> None:
        os.write(self._log, f"ack {delivery.envelope.id}\n".encode())
        await super().ack(subscription, delivery)


async def letters_of(service: QueueService, site: Site, count: int) -> list[DeadLetter]:
    found: list[DeadLetter] = []

    async def enough() -> bool:
        found[:] = await service.dead_letters(site.queue).list()
        return len(found) >= count

    await eventually(enough, within=60)
    return found


@on(keeps_dead_letters)
async def test_a_dead_letter_is_confirmed_before_its_source_is_acknowledged(site: Site) -> None:
    """With default settings: nobody has to ask for it."""
    log, out = os.pipe()
    called: list[int] = []

    @consume(site.queue, concurrency=4)
    async def fail(order: Order) -> None:
        called.append(order.id)
        raise ValueError("no")

    poison = {
        "failing handler": Envelope(new_id(), b'{"id": 1}'),
        "not JSON": Envelope(new_id(), b"\xff\xfe{"),
        "another shape": Envelope(new_id(), b'{"name": "x"}'),
        "unknown type": Envelope(new_id(), b"<order/>", headers={CONTENT_TYPE: "text/xml"}),
        "unknown encoding": Envelope(new_id(), b"x", headers={CONTENT_ENCODING: "zstd"}),
    }
    backend = Recording(site.backend(), site.queue, out)
    async with site.service(fail, backend=backend) as service:
        await backend.inner.publish(site.queue, list(poison.values()))
        letters = await letters_of(service, site, len(poison))
        await eventually(lambda: service.metrics().messages_failed == len(poison))
        await eventually(lambda: service.metrics().in_flight == 0)
    order = os.read(log, 65_536).decode().splitlines()
    os.close(log)
    os.close(out)
    assert called == [1, 1, 1], "three attempts for what a handler could take, none for the rest"
    reasons = {letter.message_id: (letter.reason, bool(letter.error)) for letter in letters}
    bodies = {letter.message_id: letter.body for letter in letters}
    for name, envelope in poison.items():
        wanted = "MaxRetriesExceeded" if name == "failing handler" else "Undecodable"
        assert reasons[envelope.id] == (wanted, True), name
        assert bodies[envelope.id] == envelope.body, name
        assert order.index(f"confirmed {envelope.id}") < order.index(f"ack {envelope.id}"), name
    assert Counter(order).most_common(1)[0][1] == 1, "each once"


@pytest.mark.parametrize("dies", ["before", "after"])
@on(keeps_dead_letters, redelivers, in_other_processes)
async def test_a_worker_killed_around_its_dead_letter_loses_nothing(site: Site, dies: str) -> None:
    doomed = site.worker("die_around_a_dead_letter", dies=dies)
    await doomed.said("ready")
    async with site.service() as service:
        sent = await service.send(site.queue, {"n": 1, "do": "reject"})
        assert await doomed.ended() == -signal.SIGKILL
        known = len(await service.dead_letters(site.queue).list())
        assert known == (dies == "after")
        worker = site.worker("serve")
        letters = await letters_of(service, site, known + 1)
        # Between the copy and the ack a crash duplicates; it never loses.
        assert {letter.message_id for letter in letters} == {sent.message_id}
        assert {letter.reason for letter in letters} == {"ExplicitNack"}
        await worker.said("begin")  # what it says may be heard after the letter is seen
        assert worker.numbers("begin") == [1]
