"""One service, unchanged on every backend, comes to the same outcomes and the same dead letters.

What must happen is written down here once, so that every backend is compared with all others.
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
from tests.support.carriers import Carrier, Site, on
from tests.support.waiting import eventually


class Order(BaseModel):
    name: str


class Outcome(NamedTuple):
    """One call of a handler, or of a batch handler for one of its members."""

    handler: str
    body: str
    attempt: int
    outcome: str


class Letter(NamedTuple):
    """A dead letter without its ids and times."""

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
    """Its handlers, for channels whose names begin with ``prefix``."""

    def __init__(self, prefix: str) -> None:
        self.prefix = prefix
        self.outcomes: list[Outcome] = []

    def came(self, handler: str, body: str, attempt: int, outcome: str) -> None:
        self.outcomes.append(Outcome(handler, body, attempt, outcome))

    def handlers(self, capabilities: Capabilities) -> list[object]:
        """Those that the backend can run: what it cannot, it would refuse at the start."""
        found = [self.orders(), self.timed()]
        if capabilities.batch:
            found.append(self.ticks())
        if capabilities.topics:
            found += self.news()
        return found

    def orders(self) -> object:
        came = self.came

        @channel(f"{self.prefix}.orders")
        class Orders:
            @consume(concurrency=4, group="orders")
            async def place(
                self, order: Order, message: Message, tenant: Annotated[str, Header("tenant")]
            ) -> None:
                assert tenant == "acme"
                name, attempt = order.name, message.attempt
                if name == "refused":
                    came("place", name, attempt, "Reject")
                    raise Reject("nobody sells that")
                if name == "broken" or (name == "flaky" and attempt < 3):
                    came("place", name, attempt, "ValueError")
                    raise ValueError(f"{name} again")
                if name == "patient" and attempt == 1:
                    came("place", name, attempt, "Retry")
                    raise Retry(delay=0.2)
                came("place", name, attempt, "done")

        return Orders()

    def timed(self) -> object:
        @consume(f"{self.prefix}.timed", group="timed")
        def take_time(body: str, message: Message) -> None:
            """One after the other, in a thread: the second waits longer than it may.

            It waits in the broker or, where more is fetched ahead, in the process.
            """
            self.came("take_time", body, message.attempt, "done")
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
                self.came("sum_up", body, message.attempt, "ArithmeticError" if bad else "done")
            if failures:
                raise BatchError(failures)

        return sum_up

    def news(self) -> list[object]:
        def reader(group: str) -> object:
            @consume(f"{self.prefix}.news", broadcast=True, group=group)
            async def read(body: str, message: Message) -> None:
                bad = group == "critics" and body == "bad news"
                self.came(f"read by {group}", body, message.attempt, "OSError" if bad else "done")
                if bad:
                    raise OSError("not printed")

            return read

        return [reader("readers"), reader("critics")]


async def send_all(service: QueueService, site: Site) -> None:
    """Everything that the shop is sent; the carrier's own way for what another program writes."""
    headers = {"tenant": "acme"}
    orders = f"{site.queue}.orders"
    broadcasts = not site.carrier.capabilities.queues
    send = service.publish if broadcasts else service.send
    for name in ("fine", "flaky", "broken", "refused", "patient"):
        await send(orders, Order(name=name), headers=headers, key=f"of {name}")
    foreign = Envelope(new_id(), b"{not JSON", headers=dict(headers), key="foreign")
    await service._backend.publish(orders, [foreign])
    await send(f"{site.queue}.timed", "slow")
    await send(f"{site.queue}.timed", "expired", ttl=0.3, headers=headers)
    if site.carrier.capabilities.batch:
        await service.send_many(
            f"{site.queue}.ticks", ["tick", "tick", "bad tick", "late tick"], headers=headers
        )
    if site.carrier.capabilities.topics:
        for body in ("good news", "bad news"):
            await service.publish(f"{site.queue}.news", body, headers=headers)


# -- what must come of it ----------------------------------------------------------------------


def expected_outcomes(capabilities: Capabilities) -> Counter[Outcome]:
    wanted = [
        Outcome("place", "fine", 1, "done"),
        Outcome("place", "flaky", 1, "ValueError"),
        Outcome("place", "flaky", 2, "ValueError"),
        Outcome("place", "flaky", 3, "done"),
        Outcome("place", "broken", 1, "ValueError"),
        Outcome("place", "broken", 2, "ValueError"),
        Outcome("place", "broken", 3, "ValueError"),
        Outcome("place", "refused", 1, "Reject"),
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


def expected_letters(carrier: Carrier) -> Counter[Letter]:
    headers = (("tenant", "acme"),)
    spent = "MaxRetriesExceeded"

    def group(name: str) -> str | None:
        """A queue has one group, which needs no name; where all is broadcast each is named."""
        return None if carrier.capabilities.queues else name

    wanted = [
        Letter("orders", group("orders"), spent, "ValueError", "broken again", 3,
               b'{"name":"broken"}', headers, "of broken"),
        Letter("orders", group("orders"), "ExplicitNack", "Reject", "nobody sells that", 1,
               b'{"name":"refused"}', headers, "of refused"),
        Letter("orders", group("orders"), "Undecodable", "DecodeError", "…", 1,
               b"{not JSON", headers, "foreign"),
        Letter("timed", group("timed"), "TTLExpired", "TimeToLiveExpired", "…", 0,
               b'"expired"', headers, None),
    ]  # fmt: skip
    if carrier.capabilities.batch:
        wanted.append(
            Letter("ticks", group("ticks"), spent, "ArithmeticError", "bad tick", 3,
                   b'"bad tick"', headers, None)
        )  # fmt: skip
    if carrier.capabilities.topics:
        wanted.append(
            Letter("news", "critics", spent, "OSError", "not printed", 3,
                   b'"bad news"', headers, None)
        )  # fmt: skip
    return Counter(wanted)


def without_ids_and_times(letter: DeadLetter, prefix: str) -> Letter:
    own_words = letter.reason in ("Undecodable", "TTLExpired")  # not the handler's: they may vary
    headers = {name: value for name, value in letter.headers.items() if name != TRACEPARENT}
    return Letter(
        letter.channel.removeprefix(f"{prefix}."),
        letter.group,
        letter.reason,
        letter.error_type,
        "…" if own_words and letter.error else letter.error,
        letter.attempts,
        letter.body,
        tuple(sorted(headers.items())),
        letter.key,
    )


def everywhere(_: Carrier) -> bool:
    return True


@on(everywhere, variants=True)
async def test_the_same_service_has_equal_outcomes(site: Site) -> None:
    shop = Shop(site.queue)
    capabilities = site.carrier.capabilities
    outcomes, letters = expected_outcomes(capabilities), expected_letters(site.carrier)
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
        await asyncio.sleep(0.5)  # for what should not come
        await look()
    assert Counter(shop.outcomes) == outcomes
    assert Counter(found) == letters
