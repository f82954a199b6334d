"""Conformance scenarios for send limits: compression, body size, full queues, channel kind."""

from __future__ import annotations

import gzip

import pytest

from qkit._internal.ids import new_id
from qkit.backend import Backend
from qkit.conformance.harness import Harness, NewBackend, Serve, requires
from qkit.conformance.sending import RecordingBackend, collecting
from qkit.errors import PartialSend, PayloadTooLarge, QueueFull, Unsupported
from qkit.handlers.channel import Channel
from qkit.message import CONTENT_ENCODING, Envelope, Reason, Sent

__all__ = ["SendLimits"]


class SendLimits(Harness):
    """Scenarios for compressed and oversized bodies, full queues and the wrong kind of channel."""

    # -- compression and size ----------------------------------------------------------------

    @pytest.mark.parametrize(
        "body", ["long " * 10_000, "", b"\x00" * 50_000], ids=["text", "empty", "bytes"]
    )
    async def test_a_compressed_body_arrives_as_it_was_sent(
        self, serve: Serve, name: str, body: object
    ) -> None:
        """A receiver that does not set ``compression`` decompresses the body too."""
        handler, got = collecting(name, type(body))
        await serve(handler)
        sender = await serve(compression="gzip")
        await sender.send(name, body)
        await self.until(lambda: got)
        assert got == [body]

    @requires("depth")
    async def test_a_compressed_body_is_stored_compressed(
        self, serve: Serve, backend: Backend, name: str
    ) -> None:
        service = await serve(compression="gzip")
        text = "long " * 10_000
        await service.send(name, text)
        async with self.subscribe(backend, name) as subscription:
            (delivery,) = await self.take(subscription)
            assert delivery.envelope.headers[CONTENT_ENCODING] == "gzip"
            assert len(delivery.envelope.body) < 1_000
            assert gzip.decompress(delivery.envelope.body) == f'"{text}"'.encode()
            await subscription.ack(delivery)

    @pytest.mark.parametrize("compression", [None, "gzip"])
    async def test_an_oversized_body_is_rejected_before_anything_is_sent(
        self, serve: Serve, new_backend: NewBackend, name: str, compression: str | None
    ) -> None:
        """The limit applies to the uncompressed body."""
        handler, got = collecting(name, str)
        recording = RecordingBackend(new_backend())
        service = await serve(
            handler, backend=recording, max_message_bytes=1_000, compression=compression
        )
        with pytest.raises(PayloadTooLarge):
            await service.send(name, "x" * 999)
        with pytest.raises(PayloadTooLarge):
            await service.send_many(name, ["fits", "x" * 999])
        assert recording.published == []
        await service.send(name, "x" * 998)  # exactly the limit, including the JSON quotes
        await self.until(lambda: got)
        assert got == ["x" * 998]

    @requires("dead_letters")
    @pytest.mark.parametrize("compressed", [False, True], ids=["plain", "bomb"])
    async def test_an_oversized_body_that_arrives_is_dead_lettered(
        self, serve: Serve, backend: Backend, name: str, compressed: bool
    ) -> None:
        handler, got = collecting(name, str)
        service = await serve(handler, max_message_bytes=50_000)
        body, headers = b'"' + b"x" * 60_000 + b'"', {}
        if compressed:
            body, headers = gzip.compress(b"\x00" * (20 << 20)), {CONTENT_ENCODING: "gzip"}
            assert len(body) < 50_000
        await backend.publish(name, [Envelope(new_id(), body, headers)])
        (letter,) = await self.letters(service, name)
        assert letter.reason == Reason.UNDECODABLE
        assert letter.error_type == "PayloadTooLarge"
        assert letter.body == body
        await service.send(name, "next")
        await self.until(lambda: got)
        assert got == ["next"]

    # -- full queues and the wrong kind of channel -------------------------------------------

    @requires("depth")
    async def test_a_full_queue_rejects_sends_until_it_has_space(
        self, serve: Serve, backend: Backend, name: str
    ) -> None:
        service = await serve()
        small = Channel(name, int, max_depth=3)
        for number in range(3):
            await service.send(small, number)
        with pytest.raises(QueueFull) as caught:
            await service.send(small, 3)
        assert caught.value.queue == name
        assert service.metrics().messages_sent == 3
        assert (await service.stats(name)).depth == 3
        async with self.subscribe(backend, name) as subscription:
            for delivery in await self.take(subscription, 3):
                await subscription.ack(delivery)
            await service.send(small, 4)
            (delivery,) = await self.take(subscription)
            assert delivery.envelope.body == b"4"

    @requires("depth")
    async def test_a_batch_that_does_not_fit_reports_the_accepted_messages(
        self, serve: Serve, name: str
    ) -> None:
        service = await serve()
        small = Channel(name, int, max_depth=3)
        await service.send(small, 0)
        with pytest.raises((PartialSend, QueueFull)) as caught:
            await service.send_many(small, [1, 2, 3, 4])
        results = caught.value.results if isinstance(caught.value, PartialSend) else []
        accepted = [result for result in results if isinstance(result, Sent)]
        assert all(isinstance(result, QueueFull) for result in results if result not in accepted)
        assert (await service.stats(name)).depth == 1 + len(accepted) <= 3
        assert service.metrics().messages_sent == 1 + len(accepted)

    @requires("topics", "queues")
    async def test_send_to_a_topic_raises(self, serve: Serve, name: str) -> None:
        service = await serve()
        topic = Channel(name, str, broadcast=True)
        await service.publish(topic, "a")
        with pytest.raises(Unsupported, match="publish"):
            await service.send(topic, "b")
        with pytest.raises(Unsupported, match="publish"):
            await service.send_many(name, ["b"])
        assert service.metrics().messages_sent == 1

    @requires("queues", "depth")
    async def test_publish_to_a_queue_raises(self, serve: Serve, name: str) -> None:
        service = await serve()
        await service.send(name, "a")
        with pytest.raises(Unsupported):
            await service.publish(name, "b")
        assert (await service.stats(name)).depth == 1
