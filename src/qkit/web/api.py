"""Endpoints of the JSON API, and the requests that they accept."""

from __future__ import annotations

import functools
import re
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import accumulate
from math import isfinite
from typing import ClassVar, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from qkit._internal.validation import describe_errors
from qkit.admin.dead_letters import MAX_LISTED, DeadLetters
from qkit.admin.views import DeadLetterView, MessageView
from qkit.backend import Support
from qkit.errors import QueueError, QueueNotFound
from qkit.message import DeadLetter, Message, Reason
from qkit.queue_lookup import require_queue
from qkit.sending.envelope_builder import SendOptions
from qkit.service import QueueService
from qkit.web.access_control import ACCESS
from qkit.web.responses import json_response
from qkit.web.sampler import Sampler
from qkit.web.schemas import (
    ConsumerList,
    DeadLetterList,
    MessageList,
    Overview,
    PurgeResult,
    QueueView,
    ReplayResult,
    SendResult,
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
Item = TypeVar("Item", Message, DeadLetter)

DEFAULT_LIMIT = 50
MAX_LIMIT = 1_000
FIRST_PEEK = 25  # messages
MAX_PEEK_BYTES = 8 << 20  # bodies of the messages in one response
MAX_SORTED = 10_000  # dead letters that are read to find the newest
MAX_SORTED_EMULATED = 1_000  # the same where the backend has to receive them
REQUEST_OVERHEAD_BYTES = 65_536  # allowed in a request besides the message body


class _Request(BaseModel):
    model_config: ClassVar[ConfigDict] = ConfigDict(extra="forbid", allow_inf_nan=False)


class SendRequest(_Request):
    """Message to send: a JSON body and the options of ``QueueService.send``."""

    body: JsonValue
    priority: int | None = None
    delay: float | None = Field(default=None, ge=0)
    ttl: float | None = Field(default=None, gt=0)
    key: str | None = None
    headers: dict[str, str] = Field(default_factory=dict)


class ReplayRequest(_Request):
    """Dead letters to replay: those that match all given filters, or all without a filter."""

    ids: list[str] | None = None
    reason: str | None = None
    error: str | None = None
    limit: int | None = Field(default=None, ge=1)


Handle = Callable[[Request], Awaitable[Response]]


@dataclass(frozen=True, slots=True)
class Parameter:
    """Query parameter: description and JSON schema. An array parameter may be repeated."""

    description: str
    schema: Mapping[str, object] = field(default_factory=lambda: {"type": "string"})


LIMIT = Parameter(
    "Maximum number of results.",
    {"type": "integer", "minimum": 1, "maximum": MAX_LIMIT, "default": DEFAULT_LIMIT},
)
ORDER = Parameter(
    "Which dead letters are listed first. If there are too many to sort, the oldest are.",
    {"type": "string", "enum": ["oldest", "newest"], "default": "oldest"},
)
FILTERS = {
    "reason": Parameter(
        "Only dead letters with this reason.",
        {"type": "string", "enum": [str(item) for item in Reason]},
    ),
    "error": Parameter("Only dead letters with this error type, or this text in the error."),
}
PURGE_FILTERS = {
    **FILTERS,
    "id": Parameter(
        "Only the dead letter with this id; may be repeated.",
        {"type": "array", "items": {"type": "string"}},
    ),
    "failed_before": Parameter(
        "Only dead letters that last failed at or before this time (seconds since the epoch).",
        {"type": "number"},
    ),
    "all": Parameter(
        "Delete all dead letters; required if id, reason and error are all omitted.",
        {"type": "boolean", "const": True},
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """Route of an operation and its description for OpenAPI."""

    method: str
    path: str
    handle: Handle
    summary: str
    returns: type
    status: int = 200
    takes: type[BaseModel] | None = None
    query: Mapping[str, Parameter] = field(default_factory=dict[str, "Parameter"])


class Api:
    """Operations of the JSON API on one service."""

    def __init__(self, service: QueueService, sampler: Sampler) -> None:
        self._service = service
        self._sampler = sampler
        self._max_request = 2 * service.settings.max_message_bytes + REQUEST_OVERHEAD_BYTES

    def endpoints(self) -> list[Endpoint]:
        """Return all operations, in the order of the OpenAPI document."""
        queue, dead_letters = "/api/queues/{name}", "/api/queues/{name}/dead-letters"
        return [
            Endpoint(
                method="GET", path="/api/overview", handle=self.overview, returns=Overview,
                summary="Return the state of the service and its queues.",
            ),
            Endpoint(
                method="GET", path="/api/token", handle=self.token, returns=TokenCheck,
                summary="Return what the token permits; the response is 401 if it is invalid.",
            ),
            Endpoint(
                method="POST", path="/api/token", handle=self.write_token, returns=TokenCheck,
                summary="Check that the token permits changes; the response is 401 or 403 if not.",
            ),
            Endpoint(
                method="GET", path="/api/queues", handle=self.queues, returns=list[QueueView],
                summary="List queues with their statistics.",
            ),
            Endpoint(
                method="GET", path=queue, handle=self.queue, returns=QueueView,
                summary="Return the statistics of a queue.",
            ),
            Endpoint(
                method="GET", path=f"{queue}/messages", handle=self.peek, returns=MessageList,
                summary="Return the next messages without consuming them.", query={"limit": LIMIT},
            ),
            Endpoint(
                method="POST", path=f"{queue}/messages", handle=self.send, returns=SendResult,
                summary="Send a message to a queue, or publish it to a topic.",
                status=201, takes=SendRequest,
            ),
            Endpoint(
                method="POST", path=f"{queue}/pause", handle=self.pause, returns=ConsumerList,
                summary="Pause the consumers of a channel in this process.",
            ),
            Endpoint(
                method="POST", path=f"{queue}/resume", handle=self.resume, returns=ConsumerList,
                summary="Resume the consumers of a channel in this process.",
            ),
            Endpoint(
                method="GET", path=dead_letters, handle=self.dead_letters, returns=DeadLetterList,
                summary="Return dead letters, oldest first or newest first.",
                query={"limit": LIMIT, "order": ORDER, **FILTERS},
            ),
            Endpoint(
                method="POST", path=f"{dead_letters}/replay", handle=self.replay,
                returns=ReplayResult, takes=ReplayRequest,
                summary="Replay dead letters to their channel.",
            ),
            Endpoint(
                method="DELETE", path=dead_letters, handle=self.purge, returns=PurgeResult,
                summary="Delete the dead letters that match, or all of them (all=true).",
                query=PURGE_FILTERS,
            ),
        ]  # fmt: skip

    async def overview(self, request: Request) -> Response:
        return json_response(await self._sampler.sample())

    async def token(self, request: Request) -> Response:
        return json_response(TokenCheck(valid=True, access=_access(request)))

    async def write_token(self, request: Request) -> Response:
        return json_response(TokenCheck(valid=True, access="all"))  # checked by AccessControl

    async def queues(self, request: Request) -> Response:
        return json_response((await self._sampler.sample()).queues, shape=list[QueueView])

    async def queue(self, request: Request) -> Response:
        name = request.path_params["name"]
        for view in (await self._sampler.sample()).queues:
            if view.name == name:
                return json_response(view)
        raise QueueNotFound(f"no queue {name!r}", operation="stats", queue=name)

    async def peek(self, request: Request) -> Response:
        if self._service.peek_affects_queue and request.scope[ACCESS] != "all":
            raise HTTPException(
                403,
                f"showing messages of {self._service.backend_name} affects the queue, because it "
                "receives and returns them; it needs the token for changes",
            )
        read = functools.partial(self._service.peek, request.path_params["name"])
        found, truncated = await self._read_limited(read, _limit(request))
        views = [MessageView.of(message) for message in found]
        return json_response(MessageList(messages=views, truncated=truncated))

    async def _read_limited(
        self, read: Callable[[int], Awaitable[list[Item]]], limit: int
    ) -> tuple[list[Item], bool]:
        """Return at most ``limit`` messages, and whether ``MAX_PEEK_BYTES`` left some of them out.

        Not every backend limits a read by size, so the number grows step by step, as the size of
        the messages so far allows. A read that affects the queue is not repeated.

        Args:
            read: Reads at most the given number of messages, always from the first on.
            limit: Largest number of messages.
        """
        count = limit if self._service.peek_affects_queue else min(limit, FIRST_PEEK)
        while True:
            found = await read(count)
            size = sum(len(item.body) for item in found)
            if len(found) < count or count == limit or size >= MAX_PEEK_BYTES:
                break
            largest = max(1, *(len(item.body) for item in found))
            count = min(limit, 2 * count, count + max(1, (MAX_PEEK_BYTES - size) // largest))
        sizes = accumulate(len(item.body) for item in found)
        fitting = max(1, sum(total <= MAX_PEEK_BYTES for total in sizes))
        return found[:fitting], fitting < len(found) or len(found) == count < limit

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
            raise  # some of these are also ValueErrors
        except ValueError as error:
            raise HTTPException(422, str(error)) from error
        self._sampler.invalidate()
        return json_response(SendResult(message_id=sent.message_id, position=sent.position), 201)

    async def pause(self, request: Request) -> Response:
        self._service.pause(request.path_params["name"])
        return self._consumers(request)

    async def resume(self, request: Request) -> Response:
        self._service.resume(request.path_params["name"])
        return self._consumers(request)

    def _consumers(self, request: Request) -> Response:
        self._sampler.invalidate()
        name = request.path_params["name"]
        consumers = self._service.health_check().consumers
        return json_response(
            ConsumerList(consumers=[item for item in consumers if item.channel == name])
        )

    async def _dead_letters(self, request: Request) -> DeadLetters:
        """Return the dead letters of a queue; raise ``QueueNotFound`` if there is no such queue."""
        await require_queue(self._service, request.path_params["name"])
        return self._service.dead_letters(request.path_params["name"])

    async def dead_letters(self, request: Request) -> Response:
        dead_letters = await self._dead_letters(request)
        limit, order = _limit(request), _order(request)
        # Backends read from the oldest on, so that the newest are known only after reading all.
        native = self._service.capabilities.peek is Support.NATIVE
        scanned = limit if order == "oldest" else MAX_SORTED if native else MAX_SORTED_EMULATED
        reason, error = _reason(request), request.query_params.get("error")

        async def read(count: int) -> list[DeadLetter]:
            return await dead_letters.list(count, reason=reason, error=error)

        found, truncated = await self._read_limited(read, max(limit, scanned))
        if order == "newest" and len(found) < scanned and not truncated:
            found.sort(key=lambda letter: letter.last_failed_at, reverse=True)
        else:
            order = "oldest"
        views = [DeadLetterView.of(letter) for letter in found[:limit]]
        return json_response(DeadLetterList(dead_letters=views, order=order))

    async def replay(self, request: Request) -> Response:
        wanted = await self._body(request, ReplayRequest)
        count = await (await self._dead_letters(request)).replay(
            wanted.ids, reason=wanted.reason, error=wanted.error, limit=wanted.limit
        )
        self._sampler.invalidate()
        return json_response(ReplayResult(replayed=count))

    async def purge(self, request: Request) -> Response:
        dead_letters = await self._dead_letters(request)
        ids = request.query_params.getlist("id") or None
        reason, error = _reason(request), request.query_params.get("error")
        _require_confirmation(request, filtered=bool(ids or reason or error))
        before = _timestamp(request, "failed_before")
        if before is not None:
            found = await dead_letters.list(MAX_LISTED, reason=reason, error=error, ids=ids)
            ids = [item.message_id for item in found if item.last_failed_at <= before]
        count = await dead_letters.purge(ids, reason=reason, error=error)
        self._sampler.invalidate()
        return json_response(PurgeResult(purged=count))

    async def _body(self, request: Request, model: type[Model]) -> Model:
        """Parse the request body; raise if it is too large, not JSON or invalid."""
        if request.headers.get("content-type", "").partition(";")[0] != "application/json":
            raise HTTPException(415, "send JSON with the header 'Content-Type: application/json'")
        parts: list[bytes] = []
        size = 0
        async for part in request.stream():
            size += len(part)
            if size > self._max_request:
                raise HTTPException(413, f"the request is larger than {self._max_request} bytes")
            parts.append(part)
        try:
            return model.model_validate_json(b"".join(parts))
        except ValidationError as error:
            raise HTTPException(422, describe_errors(error, "the request")) from None


async def reject_unknown_input(endpoint: Endpoint, request: Request) -> None:
    """Raise a 422 error for a query parameter or a body that would be ignored."""
    for name, value in request.query_params.multi_items():
        if name not in endpoint.query:
            known = ", ".join(endpoint.query) or "none"
            raise HTTPException(422, f"unknown parameter {name[:40]!r}; known parameters: {known}")
        if not value:
            raise HTTPException(422, f"{name}: empty value; give a value or omit the parameter")
        repeats = endpoint.query[name].schema["type"] == "array"
        if not repeats and len(request.query_params.getlist(name)) > 1:
            raise HTTPException(422, f"{name}: given more than once")
    if endpoint.takes is None:
        async for part in request.stream():
            if part:
                raise HTTPException(
                    422, "this operation takes no request body; use query parameters"
                )


def _require_confirmation(request: Request, *, filtered: bool) -> None:
    """Require ``all=true`` to delete all dead letters, to prevent accidental deletion."""
    everything = request.query_params.get("all")
    if everything not in (None, "true"):
        raise HTTPException(422, f"all: expected true, got {everything[:20]!r}")
    if filtered and everything:
        raise HTTPException(422, "all=true cannot be combined with id, reason or error")
    if not filtered and not everything:
        raise HTTPException(
            422, "select dead letters by id, reason or error, or delete all with all=true"
        )


def _access(request: Request) -> Literal["read", "all"]:
    """Return what the request may do, which is at least reading."""
    return "all" if request.scope[ACCESS] == "all" else "read"


def _reason(request: Request) -> str | None:
    text = request.query_params.get("reason")
    if text is not None and text not in set(Reason):
        raise HTTPException(422, f"reason: expected one of {', '.join(Reason)}, got {text[:40]!r}")
    return text


def _order(request: Request) -> Literal["oldest", "newest"]:
    text = request.query_params.get("order", "oldest")
    if text not in ("oldest", "newest"):
        raise HTTPException(422, f"order: expected oldest or newest, got {text[:20]!r}")
    return "newest" if text == "newest" else "oldest"


def _timestamp(request: Request, name: str) -> float | None:
    text = request.query_params.get(name)
    if text is None:
        return None
    with suppress(ValueError):
        if isfinite(number := float(text)):
            return number
    raise HTTPException(422, f"{name}: expected seconds since the epoch, got {text[:20]!r}")


def _limit(request: Request) -> int:
    text = request.query_params.get("limit", str(DEFAULT_LIMIT))
    if not re.fullmatch("[0-9]{1,4}", text) or not 1 <= int(text) <= MAX_LIMIT:
        raise HTTPException(
            422, f"limit: expected an integer from 1 to {MAX_LIMIT}, got {text[:20]!r}"
        )
    return int(text)
