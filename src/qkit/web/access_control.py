"""Access control: checks the Host and Origin of every request, and the token of every change.

The middleware wraps the whole app and decides by the method alone, so that no route can be
forgotten: every method except GET and HEAD is a change. The probes accept any Host, because they
reveal no data and a kubelet calls them by IP address.
"""

from __future__ import annotations

import hmac
from collections.abc import Collection
from ipaddress import ip_address
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from qkit._internal.logging import logger
from qkit.errors import ConfigError
from qkit.web.responses import error_response

__all__ = ["SECURITY_HEADERS", "AccessControl", "check"]

SAFE_METHODS = frozenset({"GET", "HEAD"})
PROBES = frozenset({"/livez", "/readyz"})
SECURITY_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
        "connect-src 'self'; manifest-src 'self'; base-uri 'none'; form-action 'none'; "
        "frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
    ),
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}

Rejection = tuple[int, str, str]


def check(token: str | None, hosts: Collection[str]) -> None:
    """Raise ``ConfigError`` for a token or a host name that no request can match."""
    if token is not None:
        if not token.strip():
            raise ConfigError("the token is empty: set a token, or omit it to reject all changes")
        if not (token.isascii() and token.strip().isprintable()):
            raise ConfigError(
                "the token has characters that an HTTP header cannot contain: use printable ASCII"
            )
    if isinstance(hosts, str):
        raise ConfigError(f"hosts: expected a list of names, got a str: write hosts=[{hosts!r}]")
    for host in hosts:
        plain = host.split() == [host] and _name(_bracketed(host)) == host.lower().strip("[]")
        if host != "*" and not plain:
            raise ConfigError(
                f"hosts: {host!r} is not a host name; write it without scheme, port and path, such "
                "as queues.example, or '*' for all"
            )


class AccessControl:
    """ASGI middleware that rejects forbidden requests and adds security headers to responses.

    Args:
        app: Wrapped application.
        token: Bearer token that changes require; ``None`` rejects all changes.
        hosts: Allowed host names, in addition to loopback and the local address of the connection;
            ``"*"`` allows all.
    """

    def __init__(self, app: ASGIApp, *, token: str | None, hosts: Collection[str]) -> None:
        self._app = app
        self._token = None if token is None else token.strip().encode()
        self._hosts = {host.lower().strip("[]") for host in hosts}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Reject the request, or pass it to the wrapped application."""
        if scope["type"] != "http":
            if scope["type"] == "websocket":
                await send({"type": "websocket.close", "code": 1008})
            else:
                await self._app(scope, receive, send)
            return
        started = False

        async def protected(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                headers = MutableHeaders(scope=message)
                for name, value in SECURITY_HEADERS.items():
                    headers.setdefault(name, value)
                headers.setdefault("Cache-Control", "no-store")
            await send(message)

        try:
            rejection = self._rejection(scope)
            app = self._app if rejection is None else error_response(*rejection)
            await app(scope, receive, protected)
        except Exception:
            # Handle errors here, because the server or an outer application may show a traceback.
            logger.exception("%s %s failed", scope["method"], scope["path"])
            if not started:
                text = "The request failed; see the log of the service."
                await error_response(500, "InternalError", text)(scope, receive, protected)

    def _rejection(self, scope: Scope) -> Rejection | None:
        headers = Headers(scope=scope)
        reading = scope["method"] in SAFE_METHODS
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        if reading and path in PROBES:
            return None
        host = headers.get("host", "")
        if not self._is_allowed_host(host, scope):
            return (
                421,
                "ForeignHost",
                "this host name is not allowed; add it to create_app(hosts=[…]) or --allow-host",
            )
        origin = headers.get("origin")
        foreign = origin is not None and _netloc(origin) != host.lower()
        if foreign or (headers.get("sec-fetch-site") == "cross-site" and not reading):
            return 403, "ForeignOrigin", "requests from pages of other origins are rejected"
        return None if reading else self._unauthorised(headers)

    def _unauthorised(self, headers: Headers) -> Rejection | None:
        if self._token is None:
            return (
                403,
                "ReadOnly",
                "the service has no token, so changes are rejected; "
                "set one: create_app(service, token=…) or QKIT_TOKEN",
            )
        scheme, _, given = headers.get("authorization", "").partition(" ")
        valid = hmac.compare_digest(given.strip().encode(), self._token)
        if scheme.lower() != "bearer" or not valid:
            return 401, "WrongToken", "a change needs the header 'Authorization: Bearer <token>'"
        return None

    def _is_allowed_host(self, host: str, scope: Scope) -> bool:
        if "*" in self._hosts:
            return True
        name = _name(host)
        if name is None:
            return False
        if name in self._hosts or name == "localhost" or name.endswith(".localhost"):
            return True
        try:
            address = ip_address(name)
        except ValueError:
            return False
        server = scope.get("server")
        # With DNS rebinding, the Host header contains the attacker's name, never an IP address.
        return address.is_loopback or (server is not None and server[0] == str(address))


def _netloc(origin: str) -> str | None:
    """Return the host and port of an Origin header, or ``None`` if it is malformed."""
    try:
        return urlsplit(origin).netloc.lower()
    except ValueError:
        return None


def _bracketed(host: str) -> str:
    """Return an IPv6 address in brackets, as in a Host header, and other names unchanged."""
    return f"[{host}]" if host.count(":") > 1 and not host.startswith("[") else host


def _name(host: str) -> str | None:
    """Return the name or address in a Host header without the port, or ``None`` if malformed."""
    try:
        return urlsplit(f"//{host}").hostname
    except ValueError:
        return None
