"""Demo shop with priorities, a delay, retries, a dead letter and a replay.

Run it with ``make demo``. It needs no server, because the default backend is the native engine.
``QKIT_TYPE=rabbitmq make demo`` runs the same code on another broker. ``service.capabilities``
shows what a broker supports before anything is sent.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from collections.abc import Callable, Sized
from typing import Annotated

from pydantic import BaseModel
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn
from rich.table import Table

from qkit import (
    Channel,
    DeadLettered,
    Header,
    Message,
    QueueService,
    Reject,
    Retried,
    RetrySettings,
    Settings,
    channel,
    consume,
)

STANDARD, EXPRESS = 290, 10
TOTAL = STANDARD + EXPRESS
FLAKY_EVERY = 60  # the payment gateway fails twice for one order in 60
REMINDER_DELAY = 1.5  # seconds


class Order(BaseModel):
    """A customer's order."""

    id: int
    total: float


class Payment(BaseModel):
    """Payment to collect for an order."""

    order_id: int
    amount: float


# A typed channel: sending anything but a Payment is an error, for mypy and at run time.
payments: Channel[Payment] = Channel(
    "payments", Payment, retry=RetrySettings(max_attempts=4, initial_delay=0.2)
)


@channel("orders", dead_letter=True)
class Orders:
    """Handler that books orders and sends their payments."""

    def __init__(self, service: QueueService) -> None:
        self.service = service
        self.booked: list[int] = []
        self.express_places: list[int] = []  # positions at which express orders were booked
        self.price_list_is_fixed = False

    @consume(concurrency=4)
    async def place(self, order: Order, tenant: Annotated[str, Header("tenant")] = "none") -> None:
        """Book one order; reject a negative total, which no retry can fix."""
        if order.total < 0 and not self.price_list_is_fixed:
            raise Reject(f"negative total {order.total:.2f} for {tenant}")
        await asyncio.sleep(0.005)  # simulated work
        self.booked.append(order.id)
        if order.id > STANDARD:
            self.express_places.append(len(self.booked))
        await self.service.send(payments, Payment(order_id=order.id, amount=abs(order.total)))


@channel(payments)
class Payments:
    """Handler that collects payments through a gateway that sometimes fails."""

    def __init__(self) -> None:
        self.collected: list[float] = []

    @consume(concurrency=4)
    async def collect(self, payment: Payment, message: Message) -> None:
        """Collect one payment; any exception is a failed attempt, which is retried with backoff."""
        if payment.order_id % FLAKY_EVERY == 0 and message.attempt < 3:
            raise ConnectionError("the payment gateway did not respond")
        self.collected.append(payment.amount)


class Reminders:
    """Handler of reminders, which are sent with a delay."""

    def __init__(self) -> None:
        self.waits: list[float] = []

    @consume("reminders")
    def remind(self, text: str, sent_at: Annotated[float, Header("sent-at")]) -> None:
        """Record one reminder; a synchronous handler runs in a thread."""
        self.waits.append(time.time() - sent_at)


async def run_shop(console: Console) -> bool:
    """Send the orders, replay the dead letter, and return whether all checks passed."""
    service = QueueService(Settings())
    can = service.capabilities
    delay = REMINDER_DELAY if can.delay else None
    express = 9 if can.priority else None
    orders, collector, reminders = Orders(service), Payments(), Reminders()
    for handlers in (orders, collector, reminders):
        service.register(handlers)

    progress = Progress(
        TextColumn("{task.description:<18}"), BarColumn(), MofNCompleteColumn(), console=console
    )
    bars: dict[TaskID, Sized] = {
        progress.add_task("orders booked", total=TOTAL): orders.booked,
        progress.add_task("payments collected", total=TOTAL): collector.collected,
        progress.add_task("reminders written", total=1): reminders.waits,
    }

    def print_retry(event: Retried) -> None:
        progress.console.print(
            f"[yellow]retry[/]       {event.channel}: attempt {event.attempt} failed, "
            f"next in {event.delay:.2f} s"
        )

    def print_dead_letter(event: DeadLettered) -> None:
        letter = event.letter
        progress.console.print(
            f"[red]dead letter[/] {letter.channel}: {letter.reason} ({letter.error})"
        )

    async def watch(done: Callable[[], bool]) -> None:
        while True:
            for bar, items in bars.items():
                progress.update(bar, completed=len(items))
            if done():
                return
            await asyncio.sleep(0.05)

    service.on("retry", print_retry)
    service.on("dead_letter", print_dead_letter)
    async with service:
        with progress:
            started = time.perf_counter()
            sent_at = {"sent-at": repr(time.time())}
            await service.send("reminders", "how do you like it?", headers=sent_at, delay=delay)
            batch = [Order(id=number, total=9.5 + number % 7) for number in range(1, STANDARD)]
            await service.send_many("orders", batch, headers={"tenant": "acme"})
            poison = Order(id=STANDARD, total=-4.0)
            await service.send("orders", poison, headers={"tenant": "acme"})
            for number in range(STANDARD + 1, TOTAL + 1):  # sent last, handled first
                await service.send("orders", Order(id=number, total=99.0), priority=express)

            letters = service.dead_letters("orders")
            await watch(lambda: len(collector.collected) == TOTAL - 1 and bool(reminders.waits))
            dead_letters = await letters.list()
            orders.price_list_is_fixed = True
            replayed = await letters.replay(reason="ExplicitNack")
            progress.console.print(f"[green]replay[/]      {replayed} dead letter, same id")
            await watch(lambda: len(collector.collected) == TOTAL)
            seconds = time.perf_counter() - started
        remaining = await letters.list()
        metrics, health = service.metrics(), service.health_check()

    table = Table(title=f"{TOTAL} orders in {seconds:.1f} s on {service.settings.type}")
    for column in ("channel", "sent", "received", "retried", "failed", "dead-lettered"):
        table.add_column(column, justify="left" if column == "channel" else "right")
    for name, figures in metrics.channels.items():
        table.add_row(
            name,
            str(figures.messages_sent),
            str(figures.messages_received),
            str(figures.messages_retried),
            str(figures.messages_failed),
            str(figures.messages_dead_lettered),
        )
    console.print(table)
    places = orders.express_places
    checks = {
        f"every order booked once ({len(orders.booked)})": sorted(orders.booked)
        == list(range(1, TOTAL + 1)),
        f"flaky payments retried ({metrics.messages_retried} attempts)": metrics.messages_retried
        == 2 * (TOTAL // FLAKY_EVERY),
        f"invalid order dead-lettered, then replayed ({replayed})": len(dead_letters)
        == replayed
        == 1
        and not remaining,
        f"service {health.status}": health.status == "healthy",
    }
    if can.priority:
        overtook = f"express orders overtook (positions {min(places)} to {max(places)})"
        checks[overtook] = max(places) < 60
    else:
        console.print("  [dim]– no priorities on this backend: express orders had to wait[/]")
    if can.delay:
        checks[f"reminder waited {reminders.waits[0]:.2f} s"] = reminders.waits[0] >= REMINDER_DELAY
    else:
        console.print("  [dim]– no delays on this backend: the reminder was sent immediately[/]")
    for text, passed in checks.items():
        console.print(f"  {'[green]✓[/]' if passed else '[red]✗[/]'} {text}")
    return all(checks.values())


if __name__ == "__main__":
    logging.getLogger("qkit").setLevel(logging.CRITICAL)  # the display shows the same information
    sys.exit(0 if asyncio.run(run_shop(Console())) else 1)
