"""The JSON API: what can be asked and changed, each on its own path."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from math import isfinite
from typing import TypeVar

from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from qkit._internal.validation import describe_errors
from qkit.admin.dead_letters import MAX_LISTED, DeadLetters
from qkit.admin.views import DeadLetterView, MessageView
from qkit.errors import QueueError, QueueNotFound
from qkit.message import Reason
from qkit.queue_lookup import require_queue
from qkit.sending.envelope_builder import SendOptions
from qkit.service import QueueService
from qkit.web.responses import answer
from qkit.web.sampler import Sampler
from qkit.web.schemas import (
    DeadLetterList,
    MessageList,
    Overview,
    Purged,
    QueueView,
    Replayed,
    SentView,
    Steered,
    TokenCheck,
)

__all__ = [
    "Api",
    "Endpoint",
    "Parameter",
    "ReplayRequest",
    "SendRequest",
    "reject_unknown_input",
]

Model = TypeVar("Model", bound=BaseModel)

DEFAULT_LIMIT = 50
MAX_LIMIT = 1_000
REQUEST_OVERHEAD_BYTES = 65_536  # of a request, beside the body of the message in it


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


@dataclass(frozen=True, slots=True)
class Parameter:
    """A word of the query: what it means, and its JSON schema; an array's word may repeat."""

    text: str
    schema: Mapping[str, object] = field(default_factory=lambda: {"type": "string"})


LIMIT = Parameter(
    "How many at most.",
    {"type": "integer", "minimum": 1, "maximum": MAX_LIMIT, "default": DEFAULT_LIMIT},
)
FILTERS = {
    "reason": Parameter(
        "Only those with this reason.", {"type": "string", "enum": [str(item) for item in Reason]}
    ),
    "error": Parameter("Only those whose error is of this type, or has this in its text."),
}
DELETED = {
    **FILTERS,
    "id": Parameter("Only these; may be repeated.", {"type": "array", "items": {"type": "string"}}),
    "failed_before": Parameter(
        "Only what had failed by then, in seconds since 1970: what fails meanwhile stays.",
        {"type": "number"},
    ),
    "all": Parameter(
        "Says that all are meant; needed where neither id nor reason nor error says which.",
        {"type": "boolean", "const": True},
    ),
}


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
    query: Mapping[str, Parameter] = field(default_factory=dict[str, "Parameter"])


class Api:
    """The operations on one service."""

    def __init__(self, service: QueueService, sampler: Sampler) -> None:
        self._service = service
        self._sampler = sampler
        self._max_request = 2 * service.settings.max_message_bytes + REQUEST_OVERHEAD_BYTES

    def endpoints(self) -> list[Endpoint]:
        """Every operation, in the order of the document."""
        queue, letters = "/api/queues/{name}", "/api/queues/{name}/dead-letters"
        return [
            Endpoint(
                method="GET", path="/api/overview", handle=self.overview, returns=Overview,
                summary="How the service and every queue stand.",
            ),
            Endpoint(
                method="POST", path="/api/token", handle=self.token, returns=TokenCheck,
                summary="Whether the token is the right one: 401 if it is not.",
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
                summary="The next messages, without consuming them.", query={"limit": LIMIT},
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
                summary="The oldest dead letters.", query={"limit": LIMIT, **FILTERS},
            ),
            Endpoint(
                method="POST", path=f"{letters}/replay", handle=self.replay, returns=Replayed,
                summary="Send dead letters to their channel again.", takes=ReplayRequest,
            ),
            Endpoint(
                method="DELETE", path=letters, handle=self.purge, returns=Purged,
                summary="Delete dead letters: those that are meant, or all=true.", query=DELETED,
            ),
        ]  # fmt: skip

    async def overview(self, request: Request) -> Response:
        return answer(await self._sampler.sample())

    async def token(self, request: Request) -> Response:
        return answer(TokenCheck(valid=True))  # a wrong one did not come so far

    async def queues(self, request: Request) -> Response:
        return answer((await self._sampler.sample()).queues, shape=list[QueueView])

    async def queue(self, request: Request) -> Response:
        name = request.path_params["name"]
        for view in (await self._sampler.sample()).queues:
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
        self._sampler.invalidate()
        return answer(SentView(message_id=sent.message_id, position=sent.position), 201)

    async def pause(self, request: Request) -> Response:
        self._service.pause(request.path_params["name"])
        return self._steered(request)

    async def resume(self, request: Request) -> Response:
        self._service.resume(request.path_params["name"])
        return self._steered(request)

    def _steered(self, request: Request) -> Response:
        self._sampler.invalidate()
        name = request.path_params["name"]
        consumers = self._service.health_check().consumers
        return answer(Steered(consumers=[item for item in consumers if item.channel == name]))

    async def _letters(self, request: Request) -> DeadLetters:
        """The dead letters of a queue that is there; of one that is not, none would be a lie."""
        await require_queue(self._service, request.path_params["name"])
        return self._service.dead_letters(request.path_params["name"])

    async def letters(self, request: Request) -> Response:
        found = await (await self._letters(request)).list(
            _limit(request), reason=_reason(request), error=request.query_params.get("error")
        )
        return answer(DeadLetterList(dead_letters=[DeadLetterView.of(letter) for letter in found]))

    async def replay(self, request: Request) -> Response:
        wanted = await self._body(request, ReplayRequest)
        count = await (await self._letters(request)).replay(
            wanted.ids, reason=wanted.reason, error=wanted.error, limit=wanted.limit
        )
        self._sampler.invalidate()
        return answer(Replayed(replayed=count))

    async def purge(self, request: Request) -> Response:
        letters = await self._letters(request)
        ids = request.query_params.getlist("id") or None
        reason, error = _reason(request), request.query_params.get("error")
        _require_confirmation(request, chosen=bool(ids or reason or error))
        before = _moment(request, "failed_before")
        if before is not None:
            found = await letters.list(MAX_LISTED, reason=reason, error=error, ids=ids)
            ids = [item.message_id for item in found if item.last_failed_at <= before]
        count = await letters.purge(ids, reason=reason, error=error)
        self._sampler.invalidate()
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
            raise HTTPException(422, describe_errors(error, "the request")) from None


async def reject_unknown_input(endpoint: Endpoint, request: Request) -> None:
    """Answer 422 to a query parameter or a body that would be ignored."""
    for name, value in request.query_params.multi_items():
        if name not in endpoint.query:
            known = ", ".join(endpoint.query) or "none"
            raise HTTPException(422, f"{name[:40]!r} is no parameter of this; it has: {known}")
        if not value:
            raise HTTPException(422, f"{name}: it is empty; leave it out if it says nothing")
        repeats = endpoint.query[name].schema["type"] == "array"
        if not repeats and len(request.query_params.getlist(name)) > 1:
            raise HTTPException(422, f"{name}: say it once")
    if endpoint.takes is None:
        async for part in request.stream():
            if part:
                raise HTTPException(422, "this takes no body; what is meant stands in the query")


def _require_confirmation(request: Request, *, chosen: bool) -> None:
    """Require ``all=true`` for deleting everything, so that it never happens by mistake."""
    everything = request.query_params.get("all")
    if everything not in (None, "true"):
        raise HTTPException(422, f"all: write all=true, not {everything[:20]!r}")
    if chosen and everything:
        raise HTTPException(422, "all: it goes with neither id nor reason nor error")
    if not chosen and not everything:
        raise HTTPException(422, "say which by id, reason or error, or that all=true are meant")


def _reason(request: Request) -> str | None:
    text = request.query_params.get("reason")
    if text is not None and text not in set(Reason):
        raise HTTPException(422, f"reason: one of {', '.join(Reason)}, not {text[:40]!r}")
    return text


def _moment(request: Request, name: str) -> float | None:
    text = request.query_params.get(name)
    if text is None:
        return None
    with suppress(ValueError):
        if isfinite(number := float(text)):
            return number
    raise HTTPException(422, f"{name}: seconds since 1970, not {text[:20]!r}")


def _limit(request: Request) -> int:
    text = request.query_params.get("limit", str(DEFAULT_LIMIT))
    if not text.isdecimal() or not 1 <= int(text) <= MAX_LIMIT:
        raise HTTPException(422, f"limit: a whole number from 1 to {MAX_LIMIT}, not {text[:20]!r}")
    return int(text)
