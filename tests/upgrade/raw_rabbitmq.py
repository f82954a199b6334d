"""Capture and replay of qkit's state on RabbitMQ, as AMQP commands, with plain aiormq.

Declarations are those that the old version sent. A message is published to the queue in which it
was found. A delayed message is published with its old routing key to its level of the delay
cascade, where its delay starts again. An unacknowledged message is published, and fetched without
an ack, so that the broker marks it as redelivered and a quorum queue counts the delivery; no
property of a published message has that effect.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any

import aiormq
from pamqp.commands import Basic

from tests.upgrade.raw import as_bytes, as_text

__all__ = ["capture", "remove", "replay"]

CASCADE = "qkit.delay"
BROKERS_OWN = ("x-delivery-count",)


async def capture(url: str, declarations: list[list[Any]], held: int) -> list[Any]:
    """Return the declarations and all messages, of which ``held`` must be unacknowledged."""
    unique: list[Any] = []
    for declaration in declarations:
        if declaration not in unique:
            unique.append(declaration)
    queues = [arguments[0] for name, arguments, _ in unique if name == "queue_declare"]
    connection = await aiormq.connect(url)
    try:
        # Fetch delayed messages first, and do not ack them: otherwise they move to the next level.
        channel = await connection.channel()
        found: list[dict[str, Any]] = []
        for queue in queues:
            if queue.startswith(CASCADE):
                found += await _messages(channel, queue)
        await asyncio.sleep(1)  # until the broker notices that the worker was killed
        for queue in queues:
            if not queue.startswith(CASCADE):
                found += await _messages(channel, queue)
    finally:
        await connection.close()
    # Dead letters are also marked as redelivered, because listing them fetched them.
    again = [m for m in found if m["redelivered"] and not m["routing_key"].endswith(".dlq")]
    assert len(again) == held, again
    return [*({"declare": each} for each in unique), *({"publish": each} for each in found)]


async def _messages(channel: Any, queue: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    while (message := await channel.basic_get(queue)).delivery_tag is not None:
        waits = queue.startswith(CASCADE)
        properties = message.header.properties
        facts = {
            name: _to_json(value)
            for name in Basic.Properties.attributes()
            if (value := getattr(properties, name, None)) not in (None, "")
        }
        headers = facts.get("headers", {})
        for name in BROKERS_OWN:
            headers.pop(name, None)
        # With this header, the cascade would drop the replayed message as a cycle.
        assert not waits or "x-death" not in headers, "captured too late: at the second level"
        found.append(
            {
                "exchange": queue if waits else "",
                "routing_key": message.routing_key if waits else queue,
                "properties": facts,
                "body": as_text(message.body),
                "redelivered": bool(message.delivery.redelivered),
            }
        )
    return found


def _to_json(value: Any) -> Any:
    match value:
        case datetime():
            return {"$time": value.timestamp()}
        case bytes() | bytearray():
            return {"$bytes": as_text(bytes(value))}
        case list():
            return [_to_json(item) for item in value]
        case dict():
            return {name: _to_json(item) for name, item in value.items()}
        case _:
            return value


def _from_json(value: Any) -> Any:
    match value:
        case {"$time": seconds}:
            return datetime.fromtimestamp(seconds, UTC)
        case {"$bytes": content}:
            return bytearray(as_bytes(content))
        case list():
            return [_from_json(item) for item in value]
        case dict():
            return {name: _from_json(item) for name, item in value.items()}
        case _:
            return value


async def replay(url: str, commands: Iterable[Any]) -> None:
    """Run the declarations and publish the messages; fetch the unacknowledged ones first."""
    declarations = [command["declare"] for command in commands if "declare" in command]
    messages = [command["publish"] for command in commands if "publish" in command]
    connection = await aiormq.connect(url)
    try:
        channel = await connection.channel()
        for name, arguments, options in declarations:
            await getattr(channel, name)(*arguments, **options)
        unacknowledged = [message for message in messages if message["redelivered"]]
        for message in unacknowledged:
            await _publish(channel, message)
        holding = await connection.channel()
        for message in unacknowledged:
            fetched = await holding.basic_get(message["routing_key"])
            assert fetched.delivery_tag is not None
        await holding.close()
        for message in messages:
            if not message["redelivered"]:
                await _publish(channel, message)
    finally:
        await connection.close()


async def _publish(channel: Any, message: dict[str, Any]) -> None:
    facts = {name: _from_json(value) for name, value in message["properties"].items()}
    await channel.basic_publish(
        as_bytes(message["body"]),
        exchange=message["exchange"],
        routing_key=message["routing_key"],
        properties=Basic.Properties(**facts),
        mandatory=True,
    )


async def remove(url: str, commands: Iterable[Any], prefix: str) -> None:
    """Delete the queues and exchanges with the prefix, but not the shared delay cascade."""
    connection = await aiormq.connect(url)
    try:
        for command in commands:
            name, arguments, _ = command.get("declare", ("", [""], {}))
            delete = {"queue_declare": "queue_delete", "exchange_declare": "exchange_delete"}
            if name in delete and arguments[0].startswith(prefix):
                channel = await connection.channel()
                with suppress(aiormq.exceptions.AMQPError):
                    await getattr(channel, delete[name])(arguments[0])
    finally:
        await connection.close()
