"""``create_app``: one ASGI app with everything, to be served or mounted."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Collection, Sequence
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import PurePath

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from qkit.asyncapi import document as asyncapi_document
from qkit.errors import ConfigError, QueueError
from qkit.service import QueueService
from qkit.web import probes
from qkit.web.access_control import AccessControl, check
from qkit.web.api import Api, Endpoint, reject_unknown_input
from qkit.web.event_stream import EventStreams
from qkit.web.exposition import CONTENT_TYPE, exposition
from qkit.web.openapi import document as openapi_document
from qkit.web.responses import failure, from_error
from qkit.web.sampler import Sampler

__all__ = ["create_app"]

Handle = Callable[[Request], Awaitable[Response]]
STATIC = files("qkit.web") / "static"
KINDS = {".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}


def create_app(
    service: QueueService, *, token: str | None = None, hosts: Collection[str] = ()
) -> Starlette:
    """The ASGI app: probes, metrics, API and dashboard of one service.

    Whoever reaches it may look; every change needs ``token``, and without one none is allowed.
    ``hosts`` are the names it is reached by, beside loopback and its own address. It neither starts
    nor stops the service: ``serve`` and ``lifespan`` go with that.

    >>> from qkit import QueueService, Settings
    >>> app = create_app(QueueService(Settings(type="native")), token="a long random word")

    Raises ``ConfigError`` for a token that is empty or no header can carry, and for ``hosts`` that
    no request can have.
    """
    if not isinstance(service, QueueService):
        raise ConfigError(
            f"create_app takes a QueueService, not {type(service).__name__}: the pages live in "
            "the service's event loop"
        )
    check(token, hosts)
    sampler = Sampler(service, writable=token is not None)
    endpoints = Api(service, sampler).endpoints()
    pages = _service_pages(service, sampler, endpoints) | _dashboard_files()
    return Starlette(
        routes=[
            *(Route(path, handle, methods=["GET"]) for path, handle in pages.items()),
            *map(_route, endpoints),
        ],
        middleware=[Middleware(AccessControl, token=token, hosts=hosts)],
        exception_handlers={HTTPException: _http_error, QueueError: _queue_error},
    )


def _service_pages(
    service: QueueService, sampler: Sampler, endpoints: Sequence[Endpoint]
) -> dict[str, Handle]:
    """Return probes, metrics, documents and the event stream, by path."""
    streams = EventStreams(service, sampler)

    async def live(request: Request) -> Response:
        return probes.liveness(service)

    async def ready(request: Request) -> Response:
        return probes.readiness(service)

    async def health(request: Request) -> Response:
        return probes.health(service)

    async def metrics(request: Request) -> Response:
        return Response(exposition(service, await sampler.sample()), media_type=CONTENT_TYPE)

    async def events(request: Request) -> Response:
        return streams.response()

    async def openapi(request: Request) -> Response:
        return _json(openapi_document(endpoints, mounted_at=request.scope.get("root_path", "")))

    async def asyncapi(request: Request) -> Response:
        return _json(asyncapi_document(service))

    return {
        "/livez": live,
        "/readyz": ready,
        "/health": health,
        "/metrics": metrics,
        "/openapi.json": openapi,
        "/asyncapi.json": asyncapi,
        "/api/events": events,
    }


def _dashboard_files() -> dict[str, Handle]:
    """Return the files of the dashboard, by path."""
    pages = {"/": _asset(STATIC / "index.html", "text/html")}
    for file in STATIC.iterdir():
        if (suffix := PurePath(file.name).suffix) in KINDS:
            pages[f"/static/{file.name}"] = _asset(file, KINDS[suffix])
    return pages


def _route(endpoint: Endpoint) -> Route:
    async def handle(request: Request) -> Response:
        await reject_unknown_input(endpoint, request)
        return await endpoint.handle(request)

    return Route(endpoint.path, handle, methods=[endpoint.method])


def _asset(file: Traversable, kind: str) -> Handle:
    """A file of the package, read once: there are few, and they are small."""
    content = file.read_bytes()

    async def asset(request: Request) -> Response:
        return Response(content, media_type=kind, headers={"Cache-Control": "no-cache"})

    return asset


def _json(document: dict[str, object]) -> Response:
    return Response(json.dumps(document), media_type="application/json")


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    names = {404: "NotFound", 405: "MethodNotAllowed"}
    return failure(error.status_code, names.get(error.status_code, "BadRequest"), error.detail)


async def _queue_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, QueueError)
    return from_error(error)
