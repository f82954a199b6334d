"""Lenient decoding: properties that the driver cannot decode do not close the connection."""

from __future__ import annotations

import asyncio
import datetime
import struct
from collections.abc import Callable
from typing import Any

import aiormq
import pamqp.encode
import pytest
from pamqp.commands import Basic

from qkit import Message, QueueService, Settings, consume

MICROSECONDS = struct.pack(">Q", 1_794_833_356_607_721)
LATIN = b"\x04caf\xe9"

encoders: Any = pamqp.encode.METHODS


@pytest.mark.parametrize(
    ("kind", "bytes_", "properties"),
    [
        ("timestamp", MICROSECONDS, {"timestamp": datetime.datetime.now(datetime.UTC)}),
        ("shortstr", LATIN, {"message_id": "odd"}),
        ("table", b"\x00\x00\x00\x08\x02\xff\xfeI\x00\x00\x00\x01", {"headers": {"a": 1}}),
    ],
)
async def test_a_message_with_an_undecodable_property_is_handled_once(
    rabbitmq_url: str,
    raw: aiormq.Channel,
    name: str,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    bytes_: bytes,
    properties: dict[str, Any],
) -> None:
    got: asyncio.Queue[Message] = asyncio.Queue()

    @consume(name)
    async def handle(number: int, message: Message) -> None:
        got.put_nowait(message)

    service = QueueService(Settings(type="rabbitmq", url=rabbitmq_url))
    service.register(handle)
    async with service, asyncio.timeout(60):
        with monkeypatch.context() as patch:
            encode: Callable[[Any], bytes] = encoders[kind]
            replaced = set(map(id, properties.values()))
            patch.setitem(encoders, kind, lambda v: bytes_ if id(v) in replaced else encode(v))
            await raw.basic_publish(
                b"7", routing_key=name, properties=Basic.Properties(**properties)
            )
        message = await got.get()
        assert message.body == b"7"
        assert message.attempt == 1
        await service.send(name, 8)
        assert (await got.get()).body == b"8"
        assert service.ready
    for queue in (name, f"{name}.dlq"):
        await raw.queue_delete(queue)
