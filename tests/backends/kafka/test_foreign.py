"""Foreign messages: each is handled or dead-lettered, and never blocks the next message."""

from __future__ import annotations

import asyncio
import base64
import json
import types
import uuid
from collections.abc import AsyncGenerator, Generator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import aiokafka.codec
import aiokafka.consumer.fetcher
import aiokafka.producer.message_accumulator
import aiokafka.record._crecords.default_records
import aiokafka.record.memory_records
import pytest
import pytest_asyncio
from aiokafka import AIOKafkaProducer
from aiokafka.record.default_records import _DefaultRecordBatchBuilderPy
from hypothesis import strategies as st

from qkit import ConfigError, Message, QueueService, Settings, consume
from qkit.backend import QueueSpec
from qkit.backends.kafka import driver
from qkit.backends.kafka.backend import KafkaBackend
from qkit.message import DeadLetter
from tests.support.foreign import CASES, assert_encodable, assert_healthy, bodies, examples, facts
from tests.support.kafka import spec, take
from tests.support.waiting import eventually

LATIN = b"caf\xe9"
SPACE = b" " * 500  # JSON prefix that compresses well; the driver compresses only to save bytes
CODECS = ["gzip", "snappy", "lz4", "zstd"]
accumulator: Any = aiokafka.producer.message_accumulator
python_builder: Any = _DefaultRecordBatchBuilderPy

Foreign = tuple[bytes | None, bytes | None, list[tuple[bytes, bytes | None]]]


class RawName(str):
    """Header name that encodes to the given bytes."""

    raw: bytes

    @classmethod
    def of(cls, raw: bytes) -> RawName:
        name = cls(raw.decode("latin-1"))
        name.raw = raw
        return name

    def encode(self, *arguments: Any, **options: Any) -> bytes:
        return self.raw


class Program:
    """Producer of foreign messages, whose header names may be any bytes."""

    def __init__(self, url: str, compression: str | None) -> None:
        self._producer = AIOKafkaProducer(
            bootstrap_servers=url, compression_type=compression, max_batch_size=1 << 20
        )

    async def send_together(self, topic: str, messages: list[Foreign], partition: int = 0) -> None:
        """Send all messages in one batch."""
        batch = self._producer.create_batch()
        for key, value, headers in messages:
            named = [(RawName.of(name), content) for name, content in headers]
            assert batch.append(key=key, value=value, timestamp=None, headers=named) is not None
        batch.close()
        await (await self._producer.send_batch(batch, topic, partition=partition))


@asynccontextmanager
async def program(url: str, compression: str | None = None) -> AsyncGenerator[Program, None]:
    other = Program(url, compression)
    await other._producer.start()
    try:
        yield other
    finally:
        await other._producer.stop()


@pytest.fixture(autouse=True)
def write_raw_names() -> Generator[None, None, None]:
    """Make the driver write batches in Python code, which allows any bytes in a header name."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(accumulator, "DefaultRecordBatchBuilder", python_builder)
        yield


@pytest.fixture
def name() -> str:
    return f"k-{uuid.uuid4().hex[:10]}"


@pytest_asyncio.fixture
async def backend(kafka_url: str) -> AsyncGenerator[KafkaBackend, None]:
    backend = KafkaBackend(kafka_url, heartbeat=0.2)
    await backend.start()
    yield backend
    await backend.aclose()


@pytest.fixture(params=["C", "Python"])
def parser(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the test with both parsers of the driver; its C extension is optional."""
    if request.param == "Python":
        records: Any = aiokafka.record.memory_records
        monkeypatch.setattr(records, "DefaultRecordBatch", driver._BatchParser)

        def in_python(data: bytes) -> Any:
            found = records._MemoryRecordsPy(data)
            found.data = data
            return found

        fetcher: Any = aiokafka.consumer.fetcher
        monkeypatch.setattr(fetcher, "MemoryRecords", in_python)


def without_codec(monkeypatch: pytest.MonkeyPatch, has: str) -> None:
    """Make the driver read as if a codec were not installed; it can still write."""
    parser: Any = aiokafka.record._crecords.default_records
    codecs: dict[str, Any] = {**vars(aiokafka.codec), has: lambda: False}
    monkeypatch.setattr(parser, "codecs", types.SimpleNamespace(**codecs))


def kept(headers: Mapping[str, str]) -> dict[str, bytes]:
    found = json.loads(headers["qkit-raw"])
    return {entry: base64.b64decode(value) for entry, value in found.items()}


class Worker:
    """Service whose handler accepts integers."""

    def __init__(self, url: str, queue: str, **more: Any) -> None:
        self.service = QueueService(Settings(type="kafka", url=url, **more))
        self.queue = queue
        self.got: list[Message] = []

        @consume(queue)
        async def handle(number: int, message: Message) -> None:
            self.got.append(message)

        self.service.register(handle)

    def has(self, body: bytes) -> bool:
        return any(message.body == body for message in self.got)

    async def assert_next_is_delivered(self) -> None:
        await self.service.send(self.queue, 8)
        await eventually(lambda: self.has(b"8"))
        self.got[:] = [message for message in self.got if message.body != b"8"]
        assert self.service.ready

    async def letters(self, count: int = 1) -> list[DeadLetter]:
        found: list[DeadLetter] = []

        async def complete() -> bool:
            found[:] = await self.service.dead_letters(self.queue).list(10_000)
            return len(found) >= count

        await eventually(complete)
        return found


@pytest.mark.usefixtures("parser")
@pytest.mark.parametrize("compression", [None, "gzip"])
async def test_a_header_name_that_is_not_utf_8_does_not_stop_the_consumer(
    kafka_url: str, name: str, compression: str | None
) -> None:
    batch: list[Foreign] = [
        (b"k", b"1", [(b"plain", b"a")]),
        (b"k", b"2", [(LATIN, b"b"), (b"empty", None)]),
        (b"k", b"three", [(LATIN, LATIN), (b"\xff\xfe", None)]),
        (b"k", b"4", [(b"plain", b"d")]),
    ]
    worker = Worker(kafka_url, name)
    async with worker.service, program(kafka_url, compression) as other:
        await other.send_together(name, batch)
        await eventually(lambda: worker.has(b"4"))
        assert [message.body for message in worker.got] == [b"1", b"2", b"4"]
        second = worker.got[1]
        assert second.headers[r"caf\xe9"] == "b"
        assert second.headers["empty"] == ""
        assert kept(second.headers) == {r"name:caf\xe9": LATIN}
        (letter,) = await worker.letters()
        assert letter.body == b"three"
        assert kept(letter.headers) == {
            r"name:caf\xe9": LATIN,
            r"header:caf\xe9": LATIN,
            r"name:\xff\xfe": b"\xff\xfe",
        }
        await worker.assert_next_is_delivered()


async def test_peek_and_read_range_return_records_with_header_names_that_are_not_utf_8(
    kafka_url: str, backend: KafkaBackend, name: str
) -> None:
    await backend.declare(QueueSpec(name=name))
    async with program(kafka_url) as other:
        await other.send_together(name, [(None, b"1", []), (b"\xff", b"2", [(LATIN, b"x")])])
        await other.send_together(name, [(None, None, [(LATIN, None)]), (None, b"4", [])])
    for found in (
        await backend.peek(name, 9),
        [envelope for _, envelope in await backend.read_range(name, 0, 0, 4)],
    ):
        assert [envelope.body for envelope in found] == [b"1", b"2", b"", b"4"]
        assert kept(found[1].headers) == {r"name:caf\xe9": LATIN, "key": b"\xff"}
        assert found[1].key == r"\xff"
        assert kept(found[2].headers) == {r"name:caf\xe9": LATIN}
    middle = await backend.read_range(name, 0, 1, 3)
    assert [(offset, envelope.body) for offset, envelope in middle] == [(1, b"2"), (2, b"")]


async def test_bytes_that_are_not_utf_8_are_kept_by_a_retry_and_a_replay(
    kafka_url: str, backend: KafkaBackend, name: str
) -> None:
    await backend.declare(QueueSpec(name=name))
    async with program(kafka_url) as other:
        await other.send_together(name, [(b"\xff\x00", b"1", [(b"h", LATIN), (LATIN, b"x")])])
    async with backend.subscribe(spec(name)) as subscription:
        (first,) = await take(subscription)
        seen = dict(first.envelope.headers)
        await subscription.release(first, 0.0)
        (second,) = await take(subscription)
        assert dict(second.envelope.headers) == seen
        assert second.envelope.key == first.envelope.key == "\\xff\x00"
        await subscription.ack(second)
    again = first.envelope
    again.attempt = 1
    await backend.publish(name, [again])
    (replayed,) = await backend.peek(name, 9)
    assert replayed.headers == seen
    assert kept(seen) == {"key": b"\xff\x00", "header:h": LATIN, r"name:caf\xe9": LATIN}


@pytest.mark.parametrize("compression", CODECS)
async def test_batches_with_any_compression_are_read(
    kafka_url: str, name: str, compression: str
) -> None:
    worker = Worker(kafka_url, name)
    async with worker.service, program(kafka_url, compression) as other:
        numbers = [SPACE + b"%d" % number for number in range(100, 120)]
        await other.send_together(name, [(None, number, []) for number in numbers])
        await eventually(lambda: len(worker.got) >= 20)
        assert [message.body for message in worker.got] == numbers
        await worker.assert_next_is_delivered()


async def test_a_missing_codec_is_reported_and_no_message_is_skipped(
    kafka_url: str, name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The service reports the missing codec until it is installed, then handles all messages."""
    worker = Worker(kafka_url, name)
    async with program(kafka_url, "lz4") as packed, program(kafka_url) as plain:
        async with worker.service:
            without_codec(monkeypatch, "has_lz4")
            await plain.send_together(name, [(None, b"1", [])])
            await packed.send_together(name, [(None, SPACE + b"2", []), (None, b"3", [])])
            await plain.send_together(name, [(None, b"4", [])])
            await eventually(lambda: not worker.service.ready)
            await eventually(lambda: worker.service.health_check().consumers[0].failing)
            for _ in range(30):  # long enough for several subscriptions to open and fail
                await asyncio.sleep(0.1)
                health = worker.service.health_check()
                assert (health.status, worker.service.ready) == ("unhealthy", False)
                assert "cramjam" in (health.last_error or "")
                assert "'kafka'" in (health.last_error or "")
            assert {message.body for message in worker.got} <= {b"1"}
            attempts = caplog.text.count("subscribing again in")
            assert 1 <= attempts <= 10, "subscribed in a tight loop"
            monkeypatch.undo()
            await eventually(lambda: worker.has(b"4"))
            bodies = [message.body for message in worker.got]
            assert sorted(body.strip() for body in set(bodies)) == [b"1", b"2", b"3", b"4"]
            await eventually(lambda: worker.service.ready)


async def test_peek_names_the_missing_codec(
    kafka_url: str, backend: KafkaBackend, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    await backend.declare(QueueSpec(name=name))
    async with program(kafka_url, "zstd") as other:
        await other.send_together(name, [(None, SPACE + b"2", [])])
    without_codec(monkeypatch, "has_zstd")
    with pytest.raises(ConfigError, match="cramjam"):
        await backend.peek(name, 9)
    with pytest.raises(ConfigError, match="cramjam"):
        await backend.read_range(name, 0, 0, 1)
    monkeypatch.undo()
    assert [envelope.body for envelope in await backend.peek(name, 9)] == [SPACE + b"2"]


records = st.tuples(
    st.none() | st.binary(max_size=20),
    st.none() | bodies,
    st.lists(
        st.tuples(
            st.one_of(
                st.binary(max_size=30),
                st.sampled_from(
                    [b"qkit-id", b"qkit-raw", b"qkit-attempt", b"qkit-expires-at", b"qkit-group",
                     b"qkit-original-topic", b"qkit-original-partition", b"qkit-original-offset",
                     b"qkit-not-before", b"qkit-dead-reason", b"qkit-dead-headers", b"traceparent",
                     b"content-type", b"content-encoding"]
                ),
            ),
            st.none() | facts,
        ),
        max_size=5,
    ),
)  # fmt: skip


@pytest.mark.parametrize(("seed", "count"), CASES)
async def test_any_foreign_record_is_handled_or_dead_lettered(
    kafka_url: str, name: str, seed: int, count: int, caplog: pytest.LogCaptureFixture
) -> None:
    messages = examples(st.tuples(st.sampled_from([None, *CODECS]), records), seed, count)
    quick = {"max_attempts": 2, "initial_delay": 0.01, "jitter": 0.0}
    worker = Worker(kafka_url, name, retry=quick)
    async with worker.service:
        for compression in (None, *CODECS):
            chosen = [record for codec, record in messages if codec == compression]
            async with program(kafka_url, compression) as other:
                for start in range(0, len(chosen), 5):
                    await other.send_together(name, chosen[start : start + 5])
        await worker.assert_next_is_delivered()
        letters = await worker.letters(len(messages) - len(worker.got))
        assert len(letters) + len(worker.got) == len(messages)
        assert_encodable([*letters, *worker.got], [item.message_id for item in letters])
        assert_healthy(worker.service, caplog)
        assert await worker.service.dead_letters(name).replay() == len(letters)
        await worker.assert_next_is_delivered()
        assert_healthy(worker.service, caplog)
