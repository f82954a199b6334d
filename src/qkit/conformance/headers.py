"""Conformance scenarios for headers: user headers, header parameters and trace context."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

import pytest

from qkit.backend import Backend
from qkit.conformance.harness import Harness, NewBackend, Serve, case, requires
from qkit.conformance.sending import RecordingBackend
from qkit.errors import InvalidHeader, Reject
from qkit.handlers.decorators import consume
from qkit.handlers.signature import Header
from qkit.message import CONTENT_TYPE, TRACEPARENT, Message, Reason

__all__ = ["Headers"]

TRACE = "0af7651916cd43dd8448eb211c80319c"
PARENT = f"00-{TRACE}-b7ad6b7169203331-01"
OWN = {
    "tenant": "acme",
    "Mixed-Case_and.dots": "kept",
    "unicode": "Grüße, 世界 🌍",
    "empty": "",
    "spaces": "  two  ",
    "number": "007",
    "json": '{"a": [1, "two"]}',
}

INVALID: dict[str, dict[str, str]] = {
    "qkit": {"qkit-attempt": "1"},
    "upper": {"QKIT-Dead-Reason": "x"},
    "empty": {"": "x"},
    "space": {"a b": "x"},
    "crlf-name": {"a\r\nb": "x"},
    "umlaut": {"ä": "x"},
    "crlf": {"a": "x\r\ny: z"},
    "nul": {"a": "\x00"},
    "int": {"a": 1},  # type: ignore[dict-item]  # invalid header on purpose
    "129": {f"h{number}": "x" for number in range(129)},
    "40000": {"a": "x" * 40_000},
}


def own(headers: Mapping[str, str]) -> dict[str, str]:
    """Return the headers of a message without those that qkit adds."""
    return {name: value for name, value in headers.items() if not name.startswith("qkit-")}


class Headers(Harness):
    """Scenarios for headers, which must reach the handler unchanged."""

    @pytest.mark.parametrize("compression", [None, "gzip"])
    async def test_headers_arrive_unchanged(
        self, serve: Serve, name: str, compression: str | None
    ) -> None:
        seen: list[Message] = []

        @consume(name)
        async def handle(text: str, message: Message) -> None:
            seen.append(message)

        service = await serve(handle, compression=compression)
        await service.send(name, "a", headers=OWN)
        await service.send(name, "b")
        await self.until(lambda: len(seen) == 2)
        assert dict(seen[0].headers) == OWN
        assert dict(seen[1].headers) == {}

    async def test_many_headers_arrive_unchanged(self, serve: Serve, name: str) -> None:
        seen: list[Message] = []

        @consume(name)
        async def handle(text: str, message: Message) -> None:
            seen.append(message)

        service = await serve(handle)
        many = {f"header-{number}": "x" * 200 + str(number) for number in range(100)}
        await service.send_many(name, ["a", "b"], headers=many)
        await self.until(lambda: len(seen) == 2)
        assert [dict(message.headers) for message in seen] == [many, many]

    async def test_a_header_fills_a_parameter_and_is_converted(
        self, serve: Serve, name: str
    ) -> None:
        got: list[tuple[str, int, bool, float]] = []

        @consume(name)
        async def handle(
            text: str,
            retry_limit: Annotated[int, Header()],
            urgent: Annotated[bool, Header("X-Urgent")],
            weight: Annotated[float, Header()] = 1.5,
        ) -> None:
            got.append((text, retry_limit, urgent, weight))

        service = await serve(handle)
        await service.send(name, "a", headers={"retry-limit": "7", "X-Urgent": "true"})
        await service.send(
            name, "b", headers={"retry-limit": "-1", "X-Urgent": "0", "weight": "2.25"}
        )
        await self.until(lambda: len(got) == 2)
        assert sorted(got) == [("a", 7, True, 1.5), ("b", -1, False, 2.25)]

    @requires("dead_letters")
    @pytest.mark.parametrize(
        "headers", [{}, {"count": "many"}, {"Count": "1"}], ids=["missing", "wrong", "other-case"]
    )
    async def test_a_message_without_a_valid_header_parameter_is_dead_lettered(
        self, serve: Serve, name: str, headers: dict[str, str]
    ) -> None:
        got: list[int] = []

        @consume(name)
        async def handle(text: str, count: Annotated[int, Header()]) -> None:
            got.append(count)

        service = await serve(handle)
        await service.send(name, "a", headers=headers)
        (letter,) = await self.letters(service, name)
        assert letter.reason == Reason.UNDECODABLE
        assert letter.attempts == 1
        assert "count" in (letter.error or "")
        assert letter.body == b'"a"'
        await service.send(name, "b", headers={"count": "1"})
        await self.until(lambda: got)
        assert got == [1]

    @requires("depth")
    async def test_a_content_type_is_written_only_if_the_body_is_not_json(
        self, serve: Serve, backend: Backend, name: str
    ) -> None:
        service = await serve()
        await service.send(name, {"a": 1}, key="one")
        await service.send(name, b"raw", key="one")
        async with self.subscribe(backend, name) as subscription:
            plain, raw = await self.take(subscription, 2)
            assert plain.envelope.headers == {}
            assert raw.envelope.headers == {CONTENT_TYPE: "application/octet-stream"}

    async def test_invalid_headers_are_rejected_before_anything_is_sent(
        self, serve: Serve, new_backend: NewBackend, name: str
    ) -> None:
        recording = RecordingBackend(new_backend())
        service = await serve(backend=recording)
        for which, headers in INVALID.items():
            with case(which):
                with pytest.raises(InvalidHeader) as caught:
                    await service.send(name, "a", headers=headers)
                assert "\r" not in str(caught.value)
                assert recording.published == []

    async def test_headers_survive_a_retry(self, serve: Serve, name: str) -> None:
        seen: list[Message] = []

        @consume(name)
        async def handle(text: str, message: Message) -> None:
            seen.append(message)
            if message.attempt < 3:
                raise RuntimeError("not yet")

        service = await serve(handle, retry={"initial_delay": 0.1})
        await service.send(name, "a", headers=OWN, key="k")
        await self.until(lambda: len(seen) == 3)
        assert [own(message.headers) for message in seen] == [OWN] * 3
        assert [message.key for message in seen] == ["k"] * 3

    @requires("dead_letters")
    async def test_headers_survive_a_dead_letter_and_its_replay(
        self, serve: Serve, name: str
    ) -> None:
        seen: list[Message] = []

        @consume(name)
        async def handle(text: str, message: Message) -> None:
            seen.append(message)
            if len(seen) == 1:
                raise Reject("later")

        service = await serve(handle)
        await service.send(name, "a", headers=OWN, key="k")
        (letter,) = await self.letters(service, name)
        assert own(letter.headers) == OWN
        assert letter.key == "k"
        await service.dead_letters(name).replay()
        await self.until(lambda: len(seen) == 2)
        assert [own(message.headers) for message in seen] == [OWN] * 2
        assert seen[1].key == "k"

    # -- trace context -----------------------------------------------------------------------

    @requires("dead_letters")
    async def test_trace_context_headers_pass_through_without_tracing(
        self, serve: Serve, name: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("opentelemetry.trace._TRACER_PROVIDER", None)
        seen: list[Message] = []

        @consume(name)
        async def handle(text: str, message: Message) -> None:
            seen.append(message)
            raise Reject("no")

        service = await serve(handle)
        await service.send(name, "a", headers={TRACEPARENT: PARENT, "tracestate": "a=1"})
        (letter,) = await self.letters(service, name)
        assert seen[0].trace_id == letter.trace_id == TRACE
        assert dict(seen[0].headers) == {TRACEPARENT: PARENT, "tracestate": "a=1"}

    @requires("dead_letters")
    async def test_the_senders_trace_reaches_the_handler_and_the_dead_letter(
        self, serve: Serve, name: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        pytest.importorskip("opentelemetry.sdk.trace")
        from opentelemetry import trace
        from opentelemetry.sdk.trace import TracerProvider

        provider = TracerProvider()
        monkeypatch.setattr("opentelemetry.trace._TRACER_PROVIDER", provider)
        seen: list[Message] = []
        inside: list[int] = []

        @consume(name)
        async def handle(text: str, message: Message) -> None:
            seen.append(message)
            inside.append(trace.get_current_span().get_span_context().trace_id)
            if message.attempt == 2:
                raise Reject("no")
            raise RuntimeError("not yet")

        service = await serve(handle, retry={"initial_delay": 0.1})
        with provider.get_tracer("test").start_as_current_span("request") as span:
            await service.send(name, "a", headers={"tenant": "acme"})
        wanted = span.get_span_context().trace_id
        (letter,) = await self.letters(service, name)
        assert inside == [wanted, wanted]
        assert [message.trace_id for message in seen] == [f"{wanted:032x}"] * 2
        assert letter.trace_id == f"{wanted:032x}"
        assert seen[0].headers["tenant"] == "acme"

    async def test_a_trace_context_header_overrides_the_current_span(
        self, serve: Serve, name: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        pytest.importorskip("opentelemetry.sdk.trace")
        from opentelemetry import trace
        from opentelemetry.sdk.trace import TracerProvider

        provider = TracerProvider()
        monkeypatch.setattr("opentelemetry.trace._TRACER_PROVIDER", provider)
        inside: list[str] = []

        @consume(name)
        async def handle(text: str) -> None:
            inside.append(f"{trace.get_current_span().get_span_context().trace_id:032x}")

        service = await serve(handle)
        with provider.get_tracer("test").start_as_current_span("request"):
            await service.send(name, "a", headers={TRACEPARENT: PARENT})
        await self.until(lambda: inside)
        assert inside == [TRACE]
