"""Conformance scenarios for foreign messages, which another program wrote."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import BaseModel

from qkit._internal.ids import new_id
from qkit.backend import Backend
from qkit.conformance.harness import Harness, Serve, requires
from qkit.conformance.sending import collecting
from qkit.handlers.decorators import consume
from qkit.message import CONTENT_ENCODING, CONTENT_TYPE, Envelope, Message, Reason

__all__ = ["Foreign"]

UNUSUAL_HEADERS = {"X-Odd Header": "space in name", "qkit-unknown": "1", "empty": "", "ü": "ü"}
LATIN = {CONTENT_TYPE: "text/plain; charset=iso-8859-1"}
JSON = {CONTENT_TYPE: "Application/JSON; charset=utf-8"}
EVENT = {CONTENT_TYPE: "application/cloudevents+json"}
XML = {CONTENT_TYPE: "application/xml"}
PICKLE = {CONTENT_TYPE: "application/x-python-serialize"}
PRETTY = b' {\n "name":"x", "id":1, "more":[]}\r\n'


class Item(BaseModel):
    """Body type that the handlers expect."""

    id: int
    name: str = "none"


GOOD = [
    pytest.param(Item, b'{"id": 1}', {}, Item(id=1), id="bare"),
    pytest.param(Item, PRETTY, {}, Item(id=1, name="x"), id="pretty"),
    pytest.param(Item, b'\xef\xbb\xbf{"id": 1}', {}, Item(id=1), id="byte-order-mark"),
    pytest.param(Item, b'{"id": 1}', UNUSUAL_HEADERS, Item(id=1), id="unusual-headers"),
    pytest.param(Item, b'{"id": 1}', JSON, Item(id=1), id="json-type"),
    pytest.param(Item, b'{"id": 1}', EVENT, Item(id=1), id="json-suffix"),
    pytest.param(Item, b'{"id": 1}', {CONTENT_ENCODING: "identity"}, Item(id=1), id="identity"),
    pytest.param(str, b"just text", {CONTENT_TYPE: "text/plain"}, "just text", id="text"),
    pytest.param(str, b"Gr\xfc\xdfe", LATIN, "Grüße", id="latin-1"),
    pytest.param(str, b'"quoted"', {}, "quoted", id="json-str"),
    pytest.param(dict, b'{"NaN": "-Infinity"}', {}, {"NaN": "-Infinity"}, id="nan-in-text"),
    pytest.param(bytes, b"\xff\x00\xfe", {}, b"\xff\x00\xfe", id="bytes"),
    pytest.param(bytes, b"<a/>", XML, b"<a/>", id="bytes-of-any-type"),
]

BAD = [
    pytest.param(Item, b'{"id": 1', {}, id="invalid-json"),
    pytest.param(Item, b"", {}, id="empty"),
    pytest.param(Item, b'{"id": "one"}', {}, id="wrong-field"),
    pytest.param(Item, b"[1, 2]", {}, id="wrong-type"),
    pytest.param(list, b"[" * 100_000 + b"]" * 100_000, {}, id="deep"),
    pytest.param(dict, b'{"a":' * 100_000 + b"1" + b"}" * 100_000, {}, id="deep-dict"),
    pytest.param(float, b"NaN", {}, id="nan"),
    pytest.param(Item, b'{"id": 1, "more": NaN}', {}, id="nan-in-unknown-field"),
    pytest.param(dict, b'{"a": [{"b": -Infinity}]}', {}, id="nested-infinity"),
    pytest.param(Any, b"\xef\xbb\xbf[1.5, Infinity]", {}, id="infinity-in-any-value"),
    pytest.param(str, b"\xff\xfe\xfa", {}, id="not-utf-8"),
    pytest.param(str, b"\xff\xfe\xfa", {CONTENT_TYPE: "text/plain"}, id="text-not-utf-8"),
    pytest.param(str, b"a", {CONTENT_TYPE: "text/plain; charset=punycode"}, id="unknown-charset"),
    pytest.param(Item, b'{"id": 1}', {CONTENT_ENCODING: "br"}, id="unknown-encoding"),
    pytest.param(Item, b'{"id": 1}', {CONTENT_ENCODING: "gzip"}, id="not-gzip"),
    pytest.param(Item, b"<id>1</id>", XML, id="xml"),
    pytest.param(Item, b"!!python/object/apply:os.system [id]", {}, id="yaml"),
    pytest.param(Item, b"\x80\x04\x95\x00.", PICKLE, id="pickle"),
]


class Foreign(Harness):
    """Scenarios for valid and invalid messages from other programs."""

    @pytest.mark.parametrize(("kind", "body", "headers", "wanted"), GOOD)
    async def test_a_foreign_message_reaches_a_typed_handler(
        self,
        serve: Serve,
        backend: Backend,
        name: str,
        kind: object,
        body: bytes,
        headers: dict[str, str],
        wanted: object,
    ) -> None:
        handler, got = collecting(name, kind)
        await serve(handler)
        await backend.publish(name, [Envelope("abc", body, dict(headers))])
        await self.until(lambda: got)
        assert got == [wanted]

    @requires("dead_letters")
    @pytest.mark.parametrize(("kind", "body", "headers"), BAD)
    async def test_an_undecodable_message_is_dead_lettered_with_its_body_unchanged(
        self,
        serve: Serve,
        backend: Backend,
        name: str,
        kind: object,
        body: bytes,
        headers: dict[str, str],
    ) -> None:
        handler, got = collecting(name, kind)
        service = await serve(handler)
        await backend.publish(name, [Envelope("abc", body, dict(headers))])
        (letter,) = await self.letters(service, name)
        assert letter.message_id == "abc"
        assert letter.reason == Reason.UNDECODABLE
        assert letter.error_type == "DecodeError"
        assert letter.attempts == 1
        assert letter.body == body
        assert dict(letter.headers) == headers
        assert len(letter.error or "") < 1_000
        assert got == []
        assert service.metrics().messages_retried == 0

    @requires("dead_letters")
    async def test_a_worker_continues_after_undecodable_messages(
        self, serve: Serve, backend: Backend, name: str
    ) -> None:
        handler, got = collecting(name, int)
        service = await serve(handler)
        for number in range(10):
            await backend.publish(name, [Envelope(new_id(), b"\xff{", {}, key="one")])
            await backend.publish(name, [Envelope(new_id(), str(number).encode(), {}, key="one")])
        await self.until(lambda: len(got) >= 10)
        assert got == list(range(10))
        await self.letters(service, name, 10)
        assert service.health_check().status == "healthy"

    @requires("dead_letters", "batch")
    async def test_an_undecodable_message_is_removed_from_its_batch_and_the_others_are_handled(
        self, serve: Serve, backend: Backend, name: str
    ) -> None:
        got: list[int] = []

        @consume(name, batch_size=3, batch_wait=60)
        async def handle(numbers: list[int]) -> None:
            got.extend(numbers)

        service = await serve(handle)
        bad = Envelope(new_id(), b"two", {}, key="one")
        good = [Envelope(new_id(), body, {}, key="one") for body in (b"1", b"3")]
        await backend.publish(name, [good[0], bad, good[1]])
        await self.until(lambda: len(got) == 2, within=30)
        assert got == [1, 3]
        (letter,) = await self.letters(service, name)
        assert (letter.message_id, letter.body) == (bad.id, b"two")

    @pytest.mark.parametrize(
        "foreign", ["abc", "12345", "550e8400-e29b-41d4-a716-446655440000", "7" * 32 + "z", "ü/ 1"]
    )
    async def test_a_message_with_a_foreign_id_keeps_it_and_has_no_send_time(
        self, serve: Serve, backend: Backend, name: str, foreign: str
    ) -> None:
        seen: list[Message] = []

        @consume(name)
        async def handle(body: dict[str, Any], message: Message) -> None:
            seen.append(message)

        await serve(handle)
        await backend.publish(name, [Envelope(foreign, b"{}")])
        await self.until(lambda: seen)
        (message,) = seen
        assert (message.id, message.sent_at) == (foreign, None)
        assert (message.attempt, message.key, dict(message.headers)) == (1, None, {})
        assert message.trace_id is None

    async def test_messages_that_share_an_id_are_all_handled(
        self, serve: Serve, backend: Backend, name: str
    ) -> None:
        """qkit does not deduplicate by id, so it must not drop any of them."""
        handler, got = collecting(name, int)
        await serve(handler)
        for number in range(5):
            await backend.publish(name, [Envelope("same", str(number).encode(), {}, key="one")])
        await self.until(lambda: len(got) >= 5)
        assert got == list(range(5))

    @requires("dead_letters")
    async def test_dead_letters_that_share_an_id_are_all_kept(
        self, serve: Serve, backend: Backend, name: str
    ) -> None:
        handler, _ = collecting(name, int)
        service = await serve(handler)
        for body in (b"one", b"two", b"three"):
            await backend.publish(name, [Envelope("same", body)])
        letters = await self.letters(service, name, 3)
        assert sorted(letter.body for letter in letters) == [b"one", b"three", b"two"]

    @requires("dead_letters")
    async def test_headers_of_any_size_are_dead_lettered_and_replayed_unchanged(
        self, serve: Serve, backend: Backend, name: str
    ) -> None:
        """A dead letter has additional headers, and a broker may limit header names and sizes."""
        headers = {
            "x" * 199 + "1": "long name",
            "x" * 199 + "2": "another",
            "wide": "\\xff" * 10_000,
            "text": "ü" * 30_000,
            **{f"n{number}": str(number) for number in range(300)},
        }
        handler, got = collecting(name, int)
        service = await serve(handler)
        await backend.publish(name, [Envelope("abc", b"one", dict(headers))])
        for _ in range(2):
            (letter,) = await self.letters(service, name)
            assert (letter.message_id, letter.body) == ("abc", b"one")
            assert dict(letter.headers) == headers
            assert service.health_check().status == "healthy"
            assert await service.dead_letters(name).replay() == 1
        await backend.publish(name, [Envelope("next", b"2")])
        await self.until(lambda: got == [2])

    @requires("dead_letters")
    async def test_a_foreign_dead_letter_can_be_replayed(
        self, serve: Serve, backend: Backend, name: str
    ) -> None:
        fixed = False
        seen: list[Message] = []

        @consume(name)
        async def handle(body: dict[str, Any], message: Message) -> None:
            seen.append(message)
            if not fixed:
                raise RuntimeError("no")

        service = await serve(handle, retry={"enabled": False})
        await backend.publish(name, [Envelope("abc", b'{"a": 1}', {"from": "elsewhere"})])
        (letter,) = await self.letters(service, name)
        assert (letter.message_id, letter.reason) == ("abc", Reason.MAX_RETRIES_EXCEEDED)
        fixed = True
        assert await service.dead_letters(name).replay() == 1
        await self.until(lambda: len(seen) == 2)
        assert seen[1].id == "abc"
        assert seen[1].body == b'{"a": 1}'
        assert dict(seen[1].headers) == {"from": "elsewhere"}
        assert await service.dead_letters(name).list() == []
