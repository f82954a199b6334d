"""``create_app``: the ASGI app with probes, metrics, API and dashboard."""

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
from qkit.web.access_control import AccessControl, Tokens, check_hosts
from qkit.web.api import Api, Endpoint, reject_unknown_input
from qkit.web.event_stream import EventStreams
from qkit.web.exposition import CONTENT_TYPE, exposition
from qkit.web.openapi import document as openapi_document
from qkit.web.responses import error_response, from_error
from qkit.web.sampler import Sampler

__all__ = ["create_app"]

Handle = Callable[[Request], Awaitable[Response]]
STATIC = files("qkit.web") / "static"
MEDIA_TYPES = {".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}


def create_app(
    service: QueueService,
    *,
    token: str | None = None,
    read_token: str | None = None,
    hosts: Collection[str] = (),
) -> Starlette:
    """Create the ASGI app of a service: probes, metrics, JSON API and dashboard.

    The app does not start or stop the service; use it with ``lifespan``, or call ``serve``.

    Without tokens, the app is read-only and serves only ``/livez``, ``/readyz`` and ``/metrics``,
    except to a client on the same machine that calls it by a loopback name and without a proxy.

    Args:
        service: Service to show.
        token: Bearer token that permits reading and changes; printable ASCII. Without it (the
            default) all changes are rejected.
        read_token: Bearer token that permits reading only; printable ASCII. Default: none, so that
            reading needs ``token`` if that is set.
        hosts: Host names under which the app may be reached, without scheme and port, in addition
            to loopback and the local address of the connection. ``"*"`` allows every host. Default:
            none.

    Returns:
        A Starlette application, to be mounted or served.

    Raises:
        ConfigError: A token is empty or cannot be sent in a header, both tokens are equal, a host
            is not a host name, or ``service`` is not a ``QueueService``.

    Example:
        >>> from qkit import QueueService, Settings
        >>> app = create_app(QueueService(Settings(type="native")), token="a long random word")
        >>> any(route.path == "/readyz" for route in app.routes)
        True
    """
    if not isinstance(service, QueueService):
        raise ConfigError(
            f"create_app expected a QueueService, got {type(service).__name__}: pass a "
            "QueueService, because the app runs in its event loop"
        )
    tokens = Tokens(token, read_token)
    check_hosts(hosts)
    service.measure_durations()
    sampler = Sampler(service, writable=token is not None)
    endpoints = Api(service, sampler).endpoints()
    pages = _service_pages(service, sampler, endpoints) | _dashboard_files()
    return Starlette(
        routes=[
            *(Route(path, handle, methods=["GET"]) for path, handle in pages.items()),
            *map(_route, endpoints),
        ],
        middleware=[Middleware(AccessControl, tokens=tokens, hosts=hosts)],
        exception_handlers={HTTPException: _http_error, QueueError: _queue_error},
    )


def _service_pages(
    service: QueueService, sampler: Sampler, endpoints: Sequence[Endpoint]
) -> dict[str, Handle]:
    """Return the handlers of probes, metrics, documents and the event stream, by path."""
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
    """Return the handlers of the dashboard's files, by path."""
    pages = {"/": _asset(STATIC / "index.html", "text/html")}
    for file in STATIC.iterdir():
        if (suffix := PurePath(file.name).suffix) in MEDIA_TYPES:
            pages[f"/static/{file.name}"] = _asset(file, MEDIA_TYPES[suffix])
    return pages


def _route(endpoint: Endpoint) -> Route:
    async def handle(request: Request) -> Response:
        await reject_unknown_input(endpoint, request)
        return await endpoint.handle(request)

    return Route(endpoint.path, handle, methods=[endpoint.method])


def _asset(file: Traversable, media_type: str) -> Handle:
    """Return a handler that serves a file of the package from memory."""
    content = file.read_bytes()

    async def asset(request: Request) -> Response:
        return Response(content, media_type=media_type, headers={"Cache-Control": "no-cache"})

    return asset


def _json(document: dict[str, object]) -> Response:
    return Response(json.dumps(document), media_type="application/json")


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    names = {403: "TokenRequired", 404: "NotFound", 405: "MethodNotAllowed"}
    name = names.get(error.status_code, "BadRequest")
    return error_response(error.status_code, name, error.detail)


async def _queue_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, QueueError)
    return from_error(error)
