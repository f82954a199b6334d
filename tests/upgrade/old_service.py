"""Service that produces the upgrade data; ``generate.py`` runs it with qkit d324538.

    python tests/upgrade/old_service.py work|hold '{"type": "native", "path": "data", …}'

``work`` leaves dead letters and exits cleanly. ``hold`` leaves messages that are waiting, delayed,
retried and in flight, and reports ``ready``; then it is killed, or exits when its standard input is
closed. Each line of output is a JSON object. Messages are sent and handled through the public API.
"""

# This file is never run with the current version, whose types may differ.
# mypy: ignore-errors

from __future__ import annotations

import asyncio
import base64
import dataclasses
import functools
import json
import sys
from collections.abc import Callable
from typing import Any

from pydantic import BaseModel

from qkit import Channel, Message, QueueService, Reject, Retry, RetrySettings, Settings, consume

FAR = 20 * 365 * 86_400.0  # seconds; a delay that never passes in a test
SOON = 3.0  # seconds; delay of a message that is due when the data is used
AGAIN = 6.4  # seconds; delay of a retry that is due when the data is used
WORKERS = 3
ACTIONS = {"held": "hold", "retried": "retry", "dead": "reject"}  # action by resulting stage

#: Options of the channels that are declared with an option; each channel gets two messages.
OPTIONS: dict[str, dict[str, Any]] = {
    "option-attempts": {"retry": RetrySettings(max_attempts=5)},
    "option-deadline": {"ack_deadline": 60.0},
    "option-priority": {"max_priority": 3},
    "option-depth": {"max_depth": 50},
    "option-letters": {"dead_letter": False},
}
NEEDS = {"option-deadline": "lease", "option-priority": "priority"}


class Order(BaseModel):
    """Message of the queue; ``action`` determines what the handler does."""

    name: str
    action: str = "done"


class Tick(BaseModel):
    """Message of the topic; ``actions`` names the action of a group, by default ``done``."""

    name: str
    actions: dict[str, str] = {}


def report(word: str, value: object = True) -> None:
    print(json.dumps({word: value}), flush=True)


def record_declarations() -> None:
    """Report each AMQP declaration and binding that is sent, because AMQP cannot list them."""
    import aiormq

    channel: Any = aiormq.Channel
    for name in ("exchange_declare", "queue_declare", "exchange_bind", "queue_bind"):
        original = getattr(channel, name)

        def wrap(original: Any, name: str) -> Any:
            @functools.wraps(original)
            async def call(self: Any, *arguments: object, **options: Any) -> object:
                if not options.get("passive"):
                    recorded = {k: v for k, v in options.items() if k not in ("nowait", "timeout")}
                    report("declaration", [name, list(arguments), recorded])
                return await original(self, *arguments, **options)

            return call

        setattr(channel, name, wrap(original, name))


class Old:
    """Service of the old version with handlers that record their calls."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.service = QueueService(settings)
        self.done: list[str] = []
        self.fixed = False
        self.changed = asyncio.Event()

    async def until(self, condition: Callable[[], object]) -> None:
        async with asyncio.timeout(60):
            while not condition():
                self.changed.clear()
                await self.changed.wait()

    async def act(self, name: str, action: str, message: Message) -> None:
        try:
            match action:
                case "fail":
                    raise RuntimeError(f"could not book {name}")
                case "reject":
                    raise Reject("negative total")
                case "once" if not self.fixed:
                    raise Reject("fixed later")
                case "retry" if message.attempt == 1:
                    raise Retry("the ledger is busy", delay=AGAIN)
                case "hold":
                    self.done.append(f"hold {name}")
                    self.changed.set()
                    await asyncio.Event().wait()
        except Exception:
            self.done.append(f"{action} {name}")
            raise
        else:
            self.done.append(f"done {name}")
        finally:
            self.changed.set()

    def register(self) -> None:
        @consume("orders", concurrency=WORKERS, prefetch=WORKERS)
        async def orders(order: Order, message: Message) -> None:
            await self.act(order.name, order.action, message)

        self.service.register(orders)
        for group in ("mail", "sms"):
            self.service.register(self.subscriber(group))

    def subscriber(self, group: str) -> Callable[..., Any]:
        @consume("prices", broadcast=True, group=group, concurrency=1, prefetch=1)
        async def prices(tick: Tick, message: Message) -> None:
            await self.act(f"{tick.name}/{group}", tick.actions.get(group, "done"), message)

        return prices

    # The following methods send a message and report its expected stage.

    async def order(self, name: str, stage: str, action: str = "done", **options: Any) -> str:
        body: object = Order(name=name, action=action)
        if action == "undecodable":
            body = f"{name} is no order"
        sent = await self.service.send("orders", body, **options)
        self.report_sent("orders", None, name, stage, sent.message_id, options)
        return sent.message_id

    async def tick(self, name: str, stages: dict[str, str], **options: Any) -> None:
        actions = {group: ACTIONS[stage] for group, stage in stages.items() if stage in ACTIONS}
        body = Tick(name=name, actions=actions)
        sent = await self.service.publish("prices", body, **options)
        for group, stage in stages.items():
            self.report_sent("prices", group, name, stage, sent.message_id, options)

    def report_sent(
        self,
        channel: str,
        group: str | None,
        name: str,
        stage: str,
        id: str,
        options: dict[str, Any],
    ) -> None:
        recorded = {k: v for k, v in options.items() if k in ("key", "priority", "headers")}
        recorded |= {"channel": channel, "group": group, "name": name, "stage": stage, "id": id}
        report("sent", recorded)

    async def wait_for_letters(self, **counts: int) -> None:
        async with asyncio.timeout(60):
            for channel, count in counts.items():
                while len(await self.service.dead_letters(channel).list()) < count:  # noqa: ASYNC110
                    await asyncio.sleep(0.1)  # for some dead letters RabbitMQ emits no event

    async def report_letters(self) -> None:
        for channel in ("orders", "prices"):
            for letter in await self.service.dead_letters(channel).list():
                facts = dataclasses.asdict(letter)
                facts["body"] = letter.body.decode()
                facts["headers"] = dict(letter.headers)
                report("letter", {"queue": channel, **facts})


async def work(settings: Settings) -> None:
    """Leave handled messages, and dead letters with every reason."""
    sender = Old(settings)
    sender.service.declare(Channel("prices", broadcast=True))
    async with sender.service:
        await sender.order("expired", "dead", ttl=0.05)
        await sender.order("undecodable", "dead", "undecodable")
        await sender.order("handled", "handled", headers={"tenant": "acme"}, key="k1")
        await send_to_options(sender)
        await send_bytes(sender, "bytes", bytes(range(256)))
    squeezing = Old(settings.model_copy(update={"compression": "gzip"}))
    async with squeezing.service:
        await send_bytes(squeezing, "squeezed", b"0123456789" * 200)
    await asyncio.sleep(0.2)
    worker = Old(settings)
    worker.register()
    async with worker.service:
        await worker.order("rejected", "dead", "reject", headers={"tenant": "acme"}, key="k1")
        await worker.order("failed", "dead", "fail", key="k2")
        replayed = await worker.order("replayed", "handled", "once")
        await worker.tick("tick-handled", {"mail": "handled", "sms": "handled"})
        await worker.tick("tick-rejected", {"mail": "handled", "sms": "dead"})
        await worker.wait_for_letters(orders=5, prices=1)
        worker.fixed = True
        assert await worker.service.dead_letters("orders").replay([replayed]) == 1
        await worker.until(lambda: "done replayed" in worker.done)
        await worker.until(lambda: worker.done.count("done tick-handled/sms") == 1)
        await worker.until(lambda: worker.done.count("done tick-rejected/mail") == 1)
        await worker.report_letters()


async def send_to_options(sender: Old) -> None:
    capabilities = sender.service.capabilities
    for name, options in OPTIONS.items():
        if name in NEEDS and not capabilities.supports(NEEDS[name]):
            continue
        channel: Channel[Any] = Channel(name, dict, **options)
        for number in (1, 2):
            sent = await sender.service.send(channel, {"name": f"{name}-{number}"})
            sender.report_sent(name, None, f"{name}-{number}", "waiting", sent.message_id, {})


async def send_bytes(sender: Old, name: str, body: bytes) -> None:
    sent = await sender.service.send("blobs", body)
    recorded = {"channel": "blobs", "group": None, "name": name, "stage": "waiting"}
    report("sent", {**recorded, "id": sent.message_id, "base64": base64.b64encode(body).decode()})


async def hold(settings: Settings) -> None:
    """Leave messages in every stage that is not final."""
    old = Old(settings)
    old.register()
    service = old.service
    priorities = bool(service.capabilities.supports("priority"))
    retried: list[str] = []
    service.on("retry", lambda event: (retried.append(event.message_id), old.changed.set()))
    async with service:
        await old.order("held-1", "held", "hold", key="k1")
        await old.until(lambda: "hold held-1" in old.done)
        # Settled behind an unsettled message: on Kafka, the committed offset does not cover them.
        for number in (1, 2, 3):
            await old.order(f"overtaking-{number}", "handled", key="k1")
        await old.until(lambda: "done overtaking-3" in old.done)
        await old.tick("tick-held", {"mail": "held", "sms": "handled"}, key="k1")
        await old.until(lambda: "hold tick-held/mail" in old.done)
        await old.until(lambda: "done tick-held/sms" in old.done)
        await asyncio.sleep(1.5)  # wait until the broker has processed acks and commits
        await old.order("retried", "retried", "retry", headers={"tenant": "acme"})
        await old.until(lambda: len(retried) == 1)
        await old.tick("tick-retried", {"mail": "waiting", "sms": "retried"})
        await old.until(lambda: len(retried) == 2)
        await old.order("held-2", "held", "hold")
        await old.order("held-3", "held", "hold", headers={"tenant": "acme"})
        await old.until(lambda: {"hold held-2", "hold held-3"} <= set(old.done))
        await old.tick("tick-held-too", {"mail": "waiting", "sms": "held"})
        await old.until(lambda: "hold tick-held-too/sms" in old.done)
        for number in range(1, 9):
            key = ("k1", "k3")[number % 2]  # on Kafka, these keys are in different partitions
            options: dict[str, Any] = {"key": key, "headers": {"n": str(number)}}
            if priorities and number % 3:
                options["priority"] = {1: 1, 2: 9}[number % 3]
            await old.order(f"waiting-{number}", "waiting", **options)
        # On quorum queues the TTL is also an `expiration`, and RabbitMQ rejects such a long one.
        if settings.replicas == 1:
            await old.order("lasting", "waiting", ttl=FAR)
        await old.order("short-lived", "expired", ttl=30.0)
        for number in (1, 2):
            groups = {"mail": "waiting", "sms": "waiting"}
            await old.tick(f"tick-waiting-{number}", groups, key="k1")
        await old.order("far", "far", delay=FAR, headers={"tenant": "acme"})
        await old.order("soon", "delayed", delay=SOON, key="k1", headers={"tenant": "acme"})
        await old.tick("tick-soon", {"mail": "delayed", "sms": "delayed"}, delay=SOON)
        report("ready")
        await asyncio.to_thread(sys.stdin.read)
        await service.shutdown(timeout=0)


def main(phase: str, options: dict[str, Any]) -> None:
    segment_bytes = options.pop("segment_bytes", None)
    if segment_bytes is not None:  # to get several segments from a few messages
        import importlib

        storage: Any = importlib.import_module("qkit.native.storage")
        storage.Storage.__init__.__kwdefaults__["segment_bytes"] = segment_bytes
    settings = Settings(**options)
    if settings.type == "rabbitmq":
        record_declarations()
    asyncio.run({"work": work, "hold": hold}[phase](settings))


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))
