"""The JSON API: what can be asked and changed, each on its own path."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from qkit.errors import QueueError, QueueNotFound
from qkit.outgoing import SendOptions
from qkit.service import QueueService
from qkit.views import DeadLetterView, MessageView
from qkit.web.answers import answer
from qkit.web.sampling import Sampler
from qkit.web.shapes import (
    DeadLetterList,
    MessageList,
    Overview,
    Purged,
    QueueView,
    Replayed,
    SentView,
    Steered,
)

__all__ = ["Api", "Endpoint", "ReplayRequest", "SendRequest"]

Model = TypeVar("Model", bound=BaseModel)

DEFAULT_LIMIT = 50
MAX_LIMIT = 1_000
FRAME = 65_536  # bytes of a request around the body of the message in it


class _Request(BaseModel):
    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)


class SendRequest(_Request):
    """A message to send."""

    body: JsonValue
    priority: int | None = None
    delay: float | None = Field(default=None, ge=0)
    ttl: float | None = Field(default=None, gt=0)
    key: str | None = None
    headers: dict[str, str] = Field(default_factory=dict)


class ReplayRequest(_Request):
    """Which dead letters to send again: those that fit all that is said; nothing said, all."""

    ids: list[str] | None = None
    reason: str | None = None
    error: str | None = None
    limit: int | None = Field(default=None, ge=1)


Handle = Callable[[Request], Awaitable[Response]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """One operation: its route, and what OpenAPI says of it."""

    method: str
    path: str
    handle: Handle
    summary: str
    returns: type
    status: int = 200
    takes: type[BaseModel] | None = None
    query: Mapping[str, str] = field(default_factory=dict[str, str])


class Api:
    """The operations on one service."""

    def __init__(self, service: QueueService, sampler: Sampler) -> None:
        self._service = service
        self._sampler = sampler
        self._max_request = 2 * service.settings.max_message_bytes + FRAME

    def endpoints(self) -> list[Endpoint]:
        """Every operation, in the order of the document."""
        queue, letters = "/api/queues/{name}", "/api/queues/{name}/dead-letters"
        limit = {"limit": f"How many at most, {DEFAULT_LIMIT} unless said, {MAX_LIMIT} at most."}
        which = {
            "reason": "Only those with this reason.",
            "error": "Only those whose error is of this type, or has this in its text.",
        }
        return [
            Endpoint(
                method="GET", path="/api/overview", handle=self.overview, returns=Overview,
                summary="How the service and every queue stand.",
            ),
            Endpoint(
                method="GET", path="/api/queues", handle=self.queues, returns=list[QueueView],
                summary="Every queue with its figures.",
            ),
            Endpoint(
                method="GET", path=queue, handle=self.queue, returns=QueueView,
                summary="One queue's figures.",
            ),
            Endpoint(
                method="GET", path=f"{queue}/messages", handle=self.peek, returns=MessageList,
                summary="The next messages, without consuming them.", query=limit,
            ),
            Endpoint(
                method="POST", path=f"{queue}/messages", handle=self.send, returns=SentView,
                summary="Send a message; to a topic, publish it.", status=201, takes=SendRequest,
            ),
            Endpoint(
                method="POST", path=f"{queue}/pause", handle=self.pause, returns=Steered,
                summary="Start no more handlers of this channel in this process.",
            ),
            Endpoint(
                method="POST", path=f"{queue}/resume", handle=self.resume, returns=Steered,
                summary="Consume it again.",
            ),
            Endpoint(
                method="GET", path=letters, handle=self.letters, returns=DeadLetterList,
                summary="The oldest dead letters.", query=limit | which,
            ),
            Endpoint(
                method="POST", path=f"{letters}/replay", handle=self.replay, returns=Replayed,
                summary="Send dead letters to their channel again.", takes=ReplayRequest,
            ),
            Endpoint(
                method="DELETE", path=letters, handle=self.purge, returns=Purged,
                summary="Delete dead letters, all unless a filter says which.",
                query=which | {"id": "Only this one; may be repeated."},
            ),
        ]  # fmt: skip

    async def overview(self, request: Request) -> Response:
        return answer(await self._sampler.look())

    async def queues(self, request: Request) -> Response:
        return answer((await self._sampler.look()).queues, shape=list[QueueView])

    async def queue(self, request: Request) -> Response:
        name = request.path_params["name"]
        for view in (await self._sampler.look()).queues:
            if view.name == name:
                return answer(view)
        raise QueueNotFound(f"no queue {name!r}", operation="stats", queue=name)

    async def peek(self, request: Request) -> Response:
        found = await self._service.peek(request.path_params["name"], _limit(request))
        return answer(MessageList(messages=[MessageView.of(message) for message in found]))

    async def send(self, request: Request) -> Response:
        name = request.path_params["name"]
        wanted = await self._body(request, SendRequest)
        options = SendOptions(headers=wanted.headers)
        if wanted.priority is not None:
            options["priority"] = wanted.priority
        if wanted.delay is not None:
            options["delay"] = wanted.delay
        if wanted.ttl is not None:
            options["ttl"] = wanted.ttl
        if wanted.key is not None:
            options["key"] = wanted.key
        topics = {
            channel.name
            for channel in self._service.channels
            if channel.options.get("broadcast", False)
        }
        send = self._service.publish if name in topics else self._service.send
        try:
            sent = await send(name, wanted.body, **options)
        except QueueError:
            raise  # some of them are ValueErrors too
        except ValueError as error:
            raise HTTPException(422, str(error)) from error
        self._sampler.forget()
        return answer(SentView(message_id=sent.message_id, position=sent.position), 201)

    async def pause(self, request: Request) -> Response:
        self._service.pause(request.path_params["name"])
        return self._steered(request)

    async def resume(self, request: Request) -> Response:
        self._service.resume(request.path_params["name"])
        return self._steered(request)

    def _steered(self, request: Request) -> Response:
        self._sampler.forget()
        name = request.path_params["name"]
        consumers = self._service.health_check().consumers
        return answer(Steered(consumers=[item for item in consumers if item.channel == name]))

    async def letters(self, request: Request) -> Response:
        found = await self._service.dead_letters(request.path_params["name"]).list(
            _limit(request), reason=_filter(request, "reason"), error=_filter(request, "error")
        )
        return answer(DeadLetterList(dead_letters=[DeadLetterView.of(letter) for letter in found]))

    async def replay(self, request: Request) -> Response:
        wanted = await self._body(request, ReplayRequest)
        count = await self._service.dead_letters(request.path_params["name"]).replay(
            wanted.ids, reason=wanted.reason, error=wanted.error, limit=wanted.limit
        )
        self._sampler.forget()
        return answer(Replayed(replayed=count))

    async def purge(self, request: Request) -> Response:
        count = await self._service.dead_letters(request.path_params["name"]).purge(
            request.query_params.getlist("id") or None,
            reason=_filter(request, "reason"),
            error=_filter(request, "error"),
        )
        self._sampler.forget()
        return answer(Purged(purged=count))

    async def _body(self, request: Request, model: type[Model]) -> Model:
        """The request's JSON, bounded and checked; what is wrong with it is said field by field."""
        if request.headers.get("content-type", "").partition(";")[0] != "application/json":
            raise HTTPException(415, "send JSON, with the header 'Content-Type: application/json'")
        parts: list[bytes] = []
        size = 0
        async for part in request.stream():
            size += len(part)
            if size > self._max_request:
                raise HTTPException(413, f"the request has more than {self._max_request} bytes")
            parts.append(part)
        try:
            return model.model_validate_json(b"".join(parts))
        except ValidationError as error:
            problems = [
                f"{'.'.join(map(str, item['loc'])) or 'the request'}: {item['msg']}"
                for item in error.errors(include_url=False, include_input=False)[:5]
            ]
            raise HTTPException(422, "; ".join(problems)) from None


def _filter(request: Request, name: str) -> str | None:
    return request.query_params.get(name) or None


def _limit(request: Request) -> int:
    text = request.query_params.get("limit", str(DEFAULT_LIMIT))
    if not text.isdecimal() or not 1 <= int(text) <= MAX_LIMIT:
        raise HTTPException(422, f"limit: a whole number from 1 to {MAX_LIMIT}, not {text[:20]!r}")
    return int(text)
