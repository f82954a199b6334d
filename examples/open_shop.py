"""The shop of ``orders.py``, open until Ctrl-C, with a page that shows its queues.

Run it with ``DEMO_SERVE=1 make demo``. Orders come in all the time. A few failed while the price
list was wrong and the payment gateway down; both are mended by now, so a replay of the dead letters
goes through. Its queues are in ``.demo/``, where the ``qkit`` command finds them.
"""

from __future__ import annotations

import asyncio
import logging
import random
import shutil
import sys
from itertools import count
from pathlib import Path

from rich.console import Console

from examples.orders import Order, Orders, Payment, Payments, Reminders, payments
from qkit import ConfigError, Message, QueueService, Settings, channel, consume
from qkit.web import serve

DIRECTORY = Path(".demo")
TOKEN = "demo"
PORT = 8710
POISON = 3
UNPAID = 2


@channel(payments)
class Gateway(Payments):
    """Payments through a gateway that can be down altogether."""

    down = True

    @consume(concurrency=4)
    async def collect(self, payment: Payment, message: Message) -> None:
        """Collect one payment."""
        if self.down:
            raise ConnectionError("the payment gateway did not answer")
        await super().collect(payment, message)


def chosen_settings() -> Settings:
    """The environment's; where it says nothing, a directory that others can look into."""
    settings = Settings()
    if settings.type != "native" or settings.path is not None:
        return settings
    return Settings(path=DIRECTORY)


def clear_the_shop(settings: Settings) -> None:
    """Away with the orders of the last time; a directory that somebody named is theirs."""
    if settings.path == DIRECTORY and Settings().path is None:
        shutil.rmtree(DIRECTORY, ignore_errors=True)


async def fail_some(service: QueueService, orders: Orders, gateway: Gateway) -> None:
    """Leave dead letters of two kinds, then mend what caused them."""
    for number in range(1, POISON + 1):
        await service.send("orders", Order(id=number, total=-4.0), headers={"tenant": "acme"})
    for number in range(1, UNPAID + 1):
        await service.send(payments, Payment(order_id=number, amount=9.5))
    while service.metrics().messages_dead_lettered < POISON + UNPAID:  # noqa: ASYNC110  # a demo
        await asyncio.sleep(0.1)
    orders.price_list_is_fixed = True
    gateway.down = False


async def customers(service: QueueService) -> None:
    """Orders in waves, an express one now and then, and a letter for later."""
    can = service.capabilities
    for number in count(1_000):
        if service.stopping:
            return
        order = Order(id=number, total=round(random.uniform(5, 90), 2))
        express = can.priority and number % 10 == 0
        await service.send("orders", order, priority=9 if express else None)
        if number % 5 == 0:
            later = random.uniform(5, 60) if can.delay else None
            await service.send("newsletter", {"order": number}, delay=later)
        await asyncio.sleep(random.expovariate(4 + 3 * (number % 200 < 100)))


async def main(console: Console) -> None:
    """Serve until a signal."""
    service = QueueService(chosen_settings())
    orders, gateway = Orders(service), Gateway()
    for desk in (orders, gateway, Reminders()):
        service.register(desk)
    async with serve(service, port=PORT, token=TOKEN) as address:
        clear_the_shop(service.settings)  # not before: who has the port may have the directory
        async with service:
            await fail_some(service, orders, gateway)
            coming = asyncio.create_task(customers(service), name="customers")
            show_the_way(console, service, address)
            await service.run()
            coming.cancel()


def show_the_way(console: Console, service: QueueService, address: str) -> None:
    """Where to look, and what to type in another terminal."""
    settings = service.settings
    where = f"QKIT_PATH={settings.path} "
    if settings.path is None:
        mode = f"QKIT_MODE={settings.mode} " if settings.mode else ""
        where = f"QKIT_TYPE={settings.type} {mode}QKIT_URL={settings.safe_url} "
    console.print(f"\nThe shop is open: [bold]{address}[/]  (token: [bold]{TOKEN}[/])")
    console.print("In another terminal:")
    for command in ("queues", "dlq list orders", "dlq replay orders", "stats --watch"):
        console.print(f"  {where}.venv/bin/qkit {command}", highlight=False)
    console.print("Ctrl-C closes it.\n")


if __name__ == "__main__":
    logging.getLogger("qkit").setLevel(logging.CRITICAL)  # the page tells the same story
    try:
        asyncio.run(main(Console()))
    except ConfigError as error:
        sys.exit(f"{error}. Is the shop open already, in another terminal?")
