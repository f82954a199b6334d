"""A service has the same outcomes and dead letters on every backend.

The expected results are defined once, and each backend is compared with them.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from typing import Annotated, NamedTuple

from pydantic import BaseModel

from qkit import (
    BatchError,
    DeadLetter,
    Header,
    Message,
    QueueService,
    Reject,
    Retry,
    channel,
    consume,
)
from qkit._internal.ids import new_id
from qkit.backend import Capabilities
from qkit.message import TRACEPARENT, Envelope
from tests.support.deployments import Deployment, Site, on
from tests.support.waiting import eventually


class Order(BaseModel):
    name: str


class Outcome(NamedTuple):
    """Outcome of one handler call, or of one message in a batch."""

    handler: str
    body: str
    attempt: int
    outcome: str


class Letter(NamedTuple):
    """Dead letter without ids and times."""

    channel: str
    group: str | None
    reason: str
    error_type: str | None
    error: str | None
    attempts: int
    body: bytes
    headers: tuple[tuple[str, str], ...]
    key: str | None


# -- the service -------------------------------------------------------------------------------


class Shop:
    """Handlers of the service; the names of their channels start with ``prefix``."""

    def __init__(self, prefix: str) -> None:
        self.prefix = prefix
        self.outcomes: list[Outcome] = []

    def record(self, handler: str, body: str, attempt: int, outcome: str) -> None:
        self.outcomes.append(Outcome(handler, body, attempt, outcome))

    def handlers(self, capabilities: Capabilities) -> list[object]:
        """Return the handlers that the backend supports; the others would fail at startup."""
        found = [self.orders(), self.timed()]
        if capabilities.batch:
            found.append(self.ticks())
        if capabilities.topics:
            found += self.news()
        return found

    def orders(self) -> object:
        record = self.record

        @channel(f"{self.prefix}.orders")
        class Orders:
            @consume(concurrency=4, group="orders")
            async def place(
                self, order: Order, message: Message, tenant: Annotated[str, Header("tenant")]
            ) -> None:
                assert tenant == "acme"
                name, attempt = order.name, message.attempt
                if name == "rejected":
                    record("place", name, attempt, "Reject")
                    raise Reject("not for sale")
                if name == "broken" or (name == "flaky" and attempt < 3):
                    record("place", name, attempt, "ValueError")
                    raise ValueError(f"{name} again")
                if name == "patient" and attempt == 1:
                    record("place", name, attempt, "Retry")
                    raise Retry(delay=0.2)
                record("place", name, attempt, "done")

        return Orders()

    def timed(self) -> object:
        @consume(f"{self.prefix}.timed", group="timed")
        def take_time(body: str, message: Message) -> None:
            """Take so long that the second message expires in the queue or the prefetch buffer."""
            self.record("take_time", body, message.attempt, "done")
            time.sleep(1.0)

        return take_time

    def ticks(self) -> object:
        @consume(f"{self.prefix}.ticks", batch_size=4, batch_wait=0.3, group="ticks")
        async def sum_up(bodies: list[str], messages: list[Message]) -> None:
            failures: dict[str, Exception] = {}
            for body, message in zip(bodies, messages, strict=True):
                bad = body == "bad tick" or (body == "late tick" and message.attempt == 1)
                if bad:
                    failures[message.id] = ArithmeticError(body)
                self.record("sum_up", body, message.attempt, "ArithmeticError" if bad else "done")
            if failures:
                raise BatchError(failures)

        return sum_up

    def news(self) -> list[object]:
        def reader(group: str) -> object:
            @consume(f"{self.prefix}.news", broadcast=True, group=group)
            async def read(body: str, message: Message) -> None:
                bad = group == "critics" and body == "bad news"
                self.record(f"read by {group}", body, message.attempt, "OSError" if bad else "done")
                if bad:
                    raise OSError("not printed")

            return read

        return [reader("readers"), reader("critics")]


async def send_all(service: QueueService, site: Site) -> None:
    """Send all messages; publish the undecodable one directly through the backend."""
    headers = {"tenant": "acme"}
    orders = f"{site.queue}.orders"
    broadcasts = not site.deployment.capabilities.queues
    send = service.publish if broadcasts else service.send
    for name in ("fine", "flaky", "broken", "rejected", "patient"):
        await send(orders, Order(name=name), headers=headers, key=f"of {name}")
    foreign = Envelope(new_id(), b"{not JSON", headers=dict(headers), key="foreign")
    await service._backend.publish(orders, [foreign])
    await send(f"{site.queue}.timed", "slow")
    await send(f"{site.queue}.timed", "expired", ttl=0.3, headers=headers)
    if site.deployment.capabilities.batch:
        await service.send_many(
            f"{site.queue}.ticks", ["tick", "tick", "bad tick", "late tick"], headers=headers
        )
    if site.deployment.capabilities.topics:
        for body in ("good news", "bad news"):
            await service.publish(f"{site.queue}.news", body, headers=headers)


# -- expected results --------------------------------------------------------------------------


def expected_outcomes(capabilities: Capabilities) -> Counter[Outcome]:
    wanted = [
        Outcome("place", "fine", 1, "done"),
        Outcome("place", "flaky", 1, "ValueError"),
        Outcome("place", "flaky", 2, "ValueError"),
        Outcome("place", "flaky", 3, "done"),
        Outcome("place", "broken", 1, "ValueError"),
        Outcome("place", "broken", 2, "ValueError"),
        Outcome("place", "broken", 3, "ValueError"),
        Outcome("place", "rejected", 1, "Reject"),
        Outcome("place", "patient", 1, "Retry"),
        Outcome("place", "patient", 2, "done"),
        Outcome("take_time", "slow", 1, "done"),
    ]
    if capabilities.batch:
        wanted += [
            Outcome("sum_up", "tick", 1, "done"),
            Outcome("sum_up", "tick", 1, "done"),
            Outcome("sum_up", "late tick", 1, "ArithmeticError"),
            Outcome("sum_up", "late tick", 2, "done"),
            *(Outcome("sum_up", "bad tick", attempt, "ArithmeticError") for attempt in (1, 2, 3)),
        ]
    if capabilities.topics:
        wanted += [
            Outcome("read by readers", "good news", 1, "done"),
            Outcome("read by readers", "bad news", 1, "done"),
            Outcome("read by critics", "good news", 1, "done"),
            *(Outcome("read by critics", "bad news", attempt, "OSError") for attempt in (1, 2, 3)),
        ]
    return Counter(wanted)


def expected_letters(deployment: Deployment) -> Counter[Letter]:
    headers = (("tenant", "acme"),)
    spent = "MaxRetriesExceeded"

    def group(name: str) -> str | None:
        """Return the group of a dead letter: ``None`` for queues, the name for topics."""
        return None if deployment.capabilities.queues else name

    wanted = [
        Letter("orders", group("orders"), spent, "ValueError", "broken again", 3,
               b'{"name":"broken"}', headers, "of broken"),
        Letter("orders", group("orders"), "ExplicitNack", "Reject", "not for sale", 1,
               b'{"name":"rejected"}', headers, "of rejected"),
        Letter("orders", group("orders"), "Undecodable", "DecodeError", "…", 1,
               b"{not JSON", headers, "foreign"),
        Letter("timed", group("timed"), "TTLExpired", "TimeToLiveExpired", "…", 0,
               b'"expired"', headers, None),
    ]  # fmt: skip
    if deployment.capabilities.batch:
        wanted.append(
            Letter("ticks", group("ticks"), spent, "ArithmeticError", "bad tick", 3,
                   b'"bad tick"', headers, None)
        )  # fmt: skip
    if deployment.capabilities.topics:
        wanted.append(
            Letter("news", "critics", spent, "OSError", "not printed", 3,
                   b'"bad news"', headers, None)
        )  # fmt: skip
    return Counter(wanted)


def without_ids_and_times(letter: DeadLetter, prefix: str) -> Letter:
    varies = letter.reason in ("Undecodable", "TTLExpired")  # the text depends on the backend
    headers = {name: value for name, value in letter.headers.items() if name != TRACEPARENT}
    return Letter(
        letter.channel.removeprefix(f"{prefix}."),
        letter.group,
        letter.reason,
        letter.error_type,
        "…" if varies and letter.error else letter.error,
        letter.attempts,
        letter.body,
        tuple(sorted(headers.items())),
        letter.key,
    )


def everywhere(_: Deployment) -> bool:
    return True


@on(everywhere, variants=True)
async def test_a_service_has_the_same_outcomes_on_every_backend(site: Site) -> None:
    shop = Shop(site.queue)
    capabilities = site.deployment.capabilities
    outcomes, letters = expected_outcomes(capabilities), expected_letters(site.deployment)
    service = site.service(
        *shop.handlers(capabilities),
        retry={"max_attempts": 3, "initial_delay": 0.1, "jitter": 0.0},
    )
    channels = [f"{site.queue}.{name}" for name in sorted({item.channel for item in letters})]
    found: list[Letter] = []

    async def look() -> None:
        found.clear()
        for name in channels:
            for letter in await service.dead_letters(name).list():
                found.append(without_ids_and_times(letter, site.queue))

    async def enough() -> bool:
        await look()
        return len(shop.outcomes) >= outcomes.total() and len(found) >= letters.total()

    async with service:
        await send_all(service, site)
        await eventually(enough, within=60)
        await asyncio.sleep(0.5)  # time for unexpected messages to arrive
        await look()
    assert Counter(shop.outcomes) == outcomes
    assert Counter(found) == letters
