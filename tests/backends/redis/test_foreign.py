"""Foreign messages: each is handled or dead-lettered, and never blocks the next message."""

from __future__ import annotations

import json
import uuid
from typing import Any, Literal

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from redis.asyncio import Redis

from qkit import Message, QueueService, Settings, consume
from tests.support.waiting import eventually

anything = st.binary(max_size=60)
words = st.one_of(
    st.binary(max_size=12),
    st.sampled_from([b"-", b"0", b"7", b"%FF", b"%ED%A0%80", b"=%C3", b"99999", b"1!", b"=k"]),
)
lines = st.one_of(
    st.binary(max_size=40),
    st.sampled_from(
        [b"", b"{}", b"[]", b'{"a":1}', b'{"a":"\\ud800"}', b'{"\\udc80":null}', b"[" * 2_000,
         b'{"a":' * 900 + b"1" + b"}" * 900, b'{"qkit-raw":"x"}', b'{"qkit-group":"other"}',
         b'{"content-type":"\\ud800"}']
    ),
)  # fmt: skip


def framed(id: bytes, facts: list[bytes], key: bytes, line: bytes, body: bytes) -> bytes:
    return b" ".join([b"qk1", id, *facts, key]) + b"\n" + line + b"\n" + body


frames = st.builds(
    framed,
    words,
    st.sampled_from(
        [[b"-", b"0", b"0", b"0"], [b"9", b"0", b"0", b"1"], [b"-", b"0", b"1", b"0"],
         [b"999999999", b"0", b"0", b"0"], [b"-", b"0", b"0", b"999999999"],
         [b"-", b"0", b"0", b"3!"]]
    ),
    words.map(lambda word: b"=" + word),
    lines,
    st.one_of(st.just(b"7"), anything),
)  # fmt: skip


@pytest.mark.parametrize("mode", ["list", "pubsub"])
async def test_any_foreign_message_is_handled_or_dead_lettered(
    redis_url: str, mode: Literal["list", "pubsub"]
) -> None:
    name = f"t-{uuid.uuid4().hex[:10]}"
    payloads: list[bytes] = []

    @settings(
        max_examples=80,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list[HealthCheck](HealthCheck),
    )
    @given(st.one_of(anything, frames))
    def make(payload: bytes) -> None:
        payloads.append(payload)

    make()
    got: list[Message] = []

    @consume(name)
    async def handle(number: int, message: Message) -> None:
        got.append(message)

    def arrived() -> bool:
        return any(message.body == b"8" for message in got)

    quick: Any = {"max_attempts": 2, "initial_delay": 0.0, "jitter": 0.0}
    service = QueueService(Settings(type="redis", mode=mode, url=redis_url, retry=quick))
    service.register(handle)
    async with service, Redis.from_url(redis_url) as raw:
        for payload in payloads:
            await (raw.rpush(name, payload) if mode == "list" else raw.publish(name, payload))
        await (raw.rpush(name, b"8") if mode == "list" else raw.publish(name, b"8"))
        await eventually(arrived)
        assert service.ready

        def done() -> bool:
            metrics = service.metrics()
            return metrics.messages_failed + len(got) >= len(payloads) + 1

        if mode == "list":
            await eventually(done)
            letters = await service.dead_letters(name).list(1_000)
            assert len(letters) + len(got) == len(payloads) + 1
            for letter in letters:
                json.dumps(dict(letter.headers), ensure_ascii=False).encode()
                (letter.message_id + (letter.key or "")).encode()
            got.clear()
            await service.dead_letters(name).replay()
            await raw.rpush(name, b"8")
            await eventually(arrived)
        for message in got:
            json.dumps(dict(message.headers), ensure_ascii=False).encode()
            (message.id + (message.key or "")).encode()
        assert service.ready
