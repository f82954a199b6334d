"""A dead letter is confirmed before its message is acknowledged."""

from __future__ import annotations

import contextlib
import os
import signal
from collections import Counter
from collections.abc import Sequence

import pytest
from pydantic import BaseModel

from qkit import BackendUnavailable, DeadLetter, QueueService, consume
from qkit._internal.ids import new_id
from qkit.backend import Backend, Delivery, Subscription
from qkit.conformance.fault_injection import FaultInjectingBackend
from qkit.message import CONTENT_ENCODING, CONTENT_TYPE, Envelope, Sent
from tests.support.deployments import Site, in_other_processes, keeps_dead_letters, on, redelivers
from tests.support.waiting import eventually


class Order(BaseModel):
    id: int


class Recording(FaultInjectingBackend):
    """Backend that records confirmed dead letters and acks in a pipe, in order."""

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


async def wait_for_letters(service: QueueService, site: Site, count: int) -> list[DeadLetter]:
    """Return at least ``count`` dead letters.

    The killed worker may have owned the native directory; then a list fails until the service has
    noticed and taken over.
    """
    found: list[DeadLetter] = []

    async def enough() -> bool:
        with contextlib.suppress(BackendUnavailable):
            found[:] = await service.dead_letters(site.queue).list()
            return len(found) >= count
        return False

    await eventually(enough, within=60)
    return found


@on(keeps_dead_letters)
async def test_a_dead_letter_is_confirmed_before_its_source_is_acknowledged(site: Site) -> None:
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
        letters = await wait_for_letters(service, site, len(poison))
        await eventually(lambda: service.metrics().messages_failed == len(poison))
        await eventually(lambda: service.metrics().in_flight == 0)
    order = os.read(log, 65_536).decode().splitlines()
    os.close(log)
    os.close(out)
    assert called == [1, 1, 1], (
        "expected three attempts for the decodable message, none for the others"
    )
    reasons = {letter.message_id: (letter.reason, bool(letter.error)) for letter in letters}
    bodies = {letter.message_id: letter.body for letter in letters}
    for name, envelope in poison.items():
        wanted = "MaxRetriesExceeded" if name == "failing handler" else "Undecodable"
        assert reasons[envelope.id] == (wanted, True), name
        assert bodies[envelope.id] == envelope.body, name
        assert order.index(f"confirmed {envelope.id}") < order.index(f"ack {envelope.id}"), name
    assert Counter(order).most_common(1)[0][1] == 1, "an event occurred more than once"


@pytest.mark.parametrize("killed", ["before", "after"])
@on(keeps_dead_letters, redelivers, in_other_processes)
async def test_a_worker_killed_before_or_after_its_dead_letter_loses_nothing(
    site: Site, killed: str
) -> None:
    killed_worker = site.worker("be_killed_around_a_dead_letter", killed=killed)
    await killed_worker.reported("ready")
    async with site.service() as service:
        sent = await service.send(site.queue, {"n": 1, "do": "reject"})
        assert await killed_worker.exited() == -signal.SIGKILL
        known = len(await wait_for_letters(service, site, 0))
        assert known == (killed == "after")
        worker = site.worker("serve")
        letters = await wait_for_letters(service, site, known + 1)
        # A crash between the dead letter and the ack duplicates the dead letter but loses nothing.
        assert {letter.message_id for letter in letters} == {sent.message_id}
        assert {letter.reason for letter in letters} == {"ExplicitNack"}
        await worker.reported("begin")  # the report may arrive after the dead letter
        assert worker.numbers("begin") == [1]
