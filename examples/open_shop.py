"""The shop of ``orders.py`` with a dashboard, running until Ctrl-C.

Run it with ``DEMO_SERVE=1 make demo``. New orders arrive continuously. The first few fail, because
the price list is wrong and the payment gateway is down. Both are then fixed, so that a replay of
the dead letters succeeds. The queues are stored in ``.demo/``, where the ``qkit`` command
can reach them.
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
INVALID_ORDERS = 3
FAILED_PAYMENTS = 2


@channel(payments)
class Gateway(Payments):
    """Payment handler whose gateway is down at first."""

    down = True

    @consume(concurrency=4)
    async def collect(self, payment: Payment, message: Message) -> None:
        """Collect one payment."""
        if self.down:
            raise ConnectionError("the payment gateway did not respond")
        await super().collect(payment, message)


def chosen_settings() -> Settings:
    """Return the settings from the environment; the default directory is ``.demo``."""
    settings = Settings()
    if settings.type != "native" or settings.path is not None:
        return settings
    return Settings(path=DIRECTORY)


def clear_directory(settings: Settings) -> None:
    """Delete the orders of the previous run, unless the user chose the directory."""
    if settings.path == DIRECTORY and Settings().path is None:
        shutil.rmtree(DIRECTORY, ignore_errors=True)


async def create_dead_letters(service: QueueService, orders: Orders, gateway: Gateway) -> None:
    """Create dead letters of two kinds, then fix their causes."""
    for number in range(1, INVALID_ORDERS + 1):
        await service.send("orders", Order(id=number, total=-4.0), headers={"tenant": "acme"})
    for number in range(1, FAILED_PAYMENTS + 1):
        await service.send(payments, Payment(order_id=number, amount=9.5))
    total = INVALID_ORDERS + FAILED_PAYMENTS
    while service.metrics().messages_dead_lettered < total:  # noqa: ASYNC110  # polling is good enough for a demo
        await asyncio.sleep(0.1)
    orders.price_list_is_fixed = True
    gateway.down = False


async def customers(service: QueueService) -> None:
    """Send orders in waves, with some express orders and delayed newsletters."""
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
    """Run the shop until it receives a signal."""
    service = QueueService(chosen_settings())
    orders, gateway = Orders(service), Gateway()
    for handlers in (orders, gateway, Reminders()):
        service.register(handlers)
    async with serve(service, port=PORT, token=TOKEN) as address:
        # Bind the port first: if another demo holds the port, it also uses the directory.
        clear_directory(service.settings)
        async with service:
            await create_dead_letters(service, orders, gateway)
            customer_task = asyncio.create_task(customers(service), name="customers")
            print_instructions(console, service, address)
            await service.run()
            customer_task.cancel()


def print_instructions(console: Console, service: QueueService, address: str) -> None:
    """Print the address of the dashboard, and commands to try in another terminal."""
    settings = service.settings
    environment = f"QKIT_PATH={settings.path} "
    if settings.path is None:
        mode = f"QKIT_MODE={settings.mode} " if settings.mode else ""
        environment = f"QKIT_TYPE={settings.type} {mode}QKIT_URL={settings.safe_url} "
    console.print(f"\nDashboard: [bold]{address}[/]  (token: [bold]{TOKEN}[/])")
    console.print("In another terminal:")
    for command in ("queues", "dlq list orders", "dlq replay orders", "stats --watch"):
        console.print(f"  {environment}.venv/bin/qkit {command}", highlight=False)
    console.print("Press Ctrl-C to stop.\n")


if __name__ == "__main__":
    logging.getLogger("qkit").setLevel(logging.CRITICAL)  # the dashboard shows the same information
    try:
        asyncio.run(main(Console()))
    except ConfigError as error:
        sys.exit(f"{error}. Is the demo already running in another terminal?")
