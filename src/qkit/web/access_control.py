"""Who may ask for what: Host and Origin on every request, the token on every change.

It stands around the whole app and goes by the method alone, so that no route can be forgotten:
whatever is not GET or HEAD is a change. The probes answer every Host, for they tell nothing and a
kubelet calls them by an address.
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
from qkit.web.responses import failure

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

Refusal = tuple[int, str, str]


def check(token: str | None, hosts: Collection[str]) -> None:
    """Raise ``ConfigError`` for what would not protect, or let nobody in."""
    if token is not None:
        if not token.strip():
            raise ConfigError("the token is empty: leave it out, and changes are refused")
        if not (token.isascii() and token.strip().isprintable()):
            raise ConfigError(
                "the token has characters that no HTTP header carries: take letters, digits and "
                "punctuation of ASCII"
            )
    if isinstance(hosts, str):
        raise ConfigError(f"hosts is a list of names: write hosts=[{hosts!r}]")
    for host in hosts:
        plain = host.split() == [host] and _name(_bracketed(host)) == host.lower().strip("[]")
        if host != "*" and not plain:
            raise ConfigError(
                f"hosts: {host!r} is no name that a request can have; write it without scheme, "
                "port and path, such as queues.example, or '*' for all"
            )


class AccessControl:
    """ASGI middleware that refuses requests and adds the security headers to every response.

    ``hosts`` are names under which the app may be reached beside loopback and the address that a
    connection really came in at; ``"*"`` allows all.
    """

    def __init__(self, app: ASGIApp, *, token: str | None, hosts: Collection[str]) -> None:
        self._app = app
        self._token = None if token is None else token.strip().encode()
        self._hosts = {host.lower().strip("[]") for host in hosts}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a refusal, or pass the request on."""
        if scope["type"] != "http":
            if scope["type"] == "websocket":
                await send({"type": "websocket.close", "code": 1008})
            else:
                await self._app(scope, receive, send)
            return
        begun = False

        async def protected(message: Message) -> None:
            nonlocal begun
            if message["type"] == "http.response.start":
                begun = True
                headers = MutableHeaders(scope=message)
                for name, value in SECURITY_HEADERS.items():
                    headers.setdefault(name, value)
                headers.setdefault("Cache-Control", "no-store")
            await send(message)

        try:
            refusal = self._refusal(scope)
            app = self._app if refusal is None else failure(*refusal)
            await app(scope, receive, protected)
        except Exception:
            # Here and not by the server or the application around: those may show a traceback.
            logger.exception("%s %s failed", scope["method"], scope["path"])
            if not begun:
                text = "Something went wrong; the service's log tells what."
                await failure(500, "InternalError", text)(scope, receive, protected)

    def _refusal(self, scope: Scope) -> Refusal | None:
        headers = Headers(scope=scope)
        reading = scope["method"] in SAFE_METHODS
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        if reading and path in PROBES:
            return None
        host = headers.get("host", "")
        if not self._is_ours(host, scope):
            return (
                421,
                "ForeignHost",
                "this service is not known by that name; name it in create_app(hosts=[…]), or by "
                "--allow-host",
            )
        origin = headers.get("origin")
        foreign = origin is not None and _netloc(origin) != host.lower()
        if foreign or (headers.get("sec-fetch-site") == "cross-site" and not reading):
            return 403, "ForeignOrigin", "requests from other sites' pages are refused"
        return None if reading else self._unauthorised(headers)

    def _unauthorised(self, headers: Headers) -> Refusal | None:
        if self._token is None:
            return (
                403,
                "ReadOnly",
                "this service was given no token, so nothing can be changed here; "
                "start it with one: create_app(service, token=…) or QKIT_TOKEN",
            )
        kind, _, given = headers.get("authorization", "").partition(" ")
        right = hmac.compare_digest(given.strip().encode(), self._token)
        if kind.lower() != "bearer" or not right:
            return 401, "WrongToken", "a change needs the header 'Authorization: Bearer <token>'"
        return None

    def _is_ours(self, host: str, scope: Scope) -> bool:
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
        # A page of another site can make its name mean our address, but not be called by it.
        return address.is_loopback or (server is not None and server[0] == str(address))


def _netloc(origin: str) -> str | None:
    """Host and port in an Origin header; ``None`` for what is none, and so nobody's."""
    try:
        return urlsplit(origin).netloc.lower()
    except ValueError:
        return None


def _bracketed(host: str) -> str:
    """An address of version 6 as a Host header has it."""
    return f"[{host}]" if host.count(":") > 1 and not host.startswith("[") else host


def _name(host: str) -> str | None:
    """The name or address in a Host header, without its port; ``None`` if it is neither."""
    try:
        return urlsplit(f"//{host}").hostname
    except ValueError:
        return None
