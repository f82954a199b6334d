"""Foreign messages: each is handled or dead-lettered, and never blocks the next message."""

from __future__ import annotations

import uuid
from typing import Any, Literal

import pytest
from hypothesis import strategies as st
from redis.asyncio import Redis

from qkit import Message, QueueService, Settings, consume
from tests.support.foreign import CASES, assert_encodable, assert_healthy, bodies, examples
from tests.support.waiting import eventually

anything = st.binary(max_size=60).filter(lambda body: body != b"8")
words = st.one_of(
    st.binary(max_size=12),
    st.sampled_from([b"-", b"0", b"7", b"%FF", b"%ED%A0%80", b"=%C3", b"99999", b"1!", b"=k"]),
)
lines = st.one_of(
    st.binary(max_size=40),
    st.sampled_from(
        [b"", b"{}", b"[]", b'{"a":1}', b'{"a":"\\ud800"}', b'{"\\udc80":null}', b"[" * 2_000,
         b'{"a":' * 900 + b"1" + b"}" * 900, b'{"qkit-raw":"x"}', b'{"qkit-group":"other"}',
         b'{"content-type":"\\ud800"}', b'{"content-encoding":"gzip"}',
         b'{"content-type":"text/plain","content-encoding":"br"}']
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
    bodies,
)  # fmt: skip


@pytest.mark.parametrize(("seed", "count"), CASES)
@pytest.mark.parametrize("mode", ["list", "pubsub"])
async def test_any_foreign_message_is_handled_or_dead_lettered(
    redis_url: str,
    mode: Literal["list", "pubsub"],
    seed: int,
    count: int,
    caplog: pytest.LogCaptureFixture,
) -> None:
    name = f"t-{uuid.uuid4().hex[:10]}"
    payloads = examples(st.one_of(anything, bodies, frames), seed, count)
    if mode == "pubsub":  # where every group receives a message and skips those of other groups
        payloads = [payload for payload in payloads if b"qkit-group" not in payload]
    got: list[Message] = []

    @consume(name)
    async def handle(number: int, message: Message) -> None:
        got.append(message)

    quick: Any = {"max_attempts": 2, "initial_delay": 0.0, "jitter": 0.0}
    service = QueueService(Settings(type="redis", mode=mode, url=redis_url, retry=quick))
    service.register(handle)
    async with service, Redis.from_url(redis_url) as raw:

        async def push(payload: bytes) -> None:
            await (raw.rpush(name, payload) if mode == "list" else raw.publish(name, payload))

        async def assert_next_is_delivered() -> None:
            await push(b"8")
            await eventually(lambda: any(message.body == b"8" for message in got))
            got[:] = [message for message in got if message.body != b"8"]
            assert_healthy(service, caplog)

        for payload in payloads:
            await push(payload)
        await assert_next_is_delivered()
        await eventually(lambda: service.metrics().messages_failed + len(got) >= len(payloads))
        letters = await service.dead_letters(name).list(10_000)
        assert len(letters) + len(got) == len(payloads)
        assert_encodable([*letters, *got], [item.message_id for item in letters])
        assert_encodable([], [message.id for message in got])
        assert await service.dead_letters(name).replay() == len(letters)
        await assert_next_is_delivered()
