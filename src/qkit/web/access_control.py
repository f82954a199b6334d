"""Access control: checks the Host, Origin and token of every request.

The middleware wraps the whole app and decides by method and path alone, so that no route can be
forgotten: every method except GET and HEAD is a change, and every path that is not listed here
needs a token. The probes accept any Host, because they reveal no data and a kubelet calls them by
IP address.

Without tokens, only probes and metrics are served, except to a client on the same machine: its
address and the Host are loopback, and no header shows that a proxy has forwarded the request.
"""

from __future__ import annotations

import hmac
from collections.abc import Collection
from dataclasses import dataclass
from ipaddress import IPv6Address, ip_address
from typing import Literal
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from qkit._internal.logging import logger
from qkit.errors import ConfigError
from qkit.web.responses import error_response

__all__ = [
    "ACCESS",
    "SECURITY_HEADERS",
    "Access",
    "AccessControl",
    "Tokens",
    "check_hosts",
    "is_loopback",
]

Access = Literal["none", "read", "all"]
"""What a request may do."""

ACCESS = "qkit.access"
"""Key in the ASGI scope under which the middleware stores the ``Access`` of the request."""

SAFE_METHODS = frozenset({"GET", "HEAD"})
PROBES = frozenset({"/livez", "/readyz"})
PUBLIC = frozenset({"/metrics"})
# The dashboard asks for the token, so its files are served without one. They contain no data.
FILES = frozenset({"/", "/openapi.json"})
FILES_PREFIX = "/static/"
FORWARDING_HEADERS = frozenset(
    {
        "forwarded",
        "via",
        "x-real-ip",
        "x-client-ip",
        "x-cluster-client-ip",
        "true-client-ip",
        "client-ip",
        "cf-connecting-ip",
        "fastly-client-ip",
        "fly-client-ip",
    }
)
FORWARDING_PREFIXES = ("x-forwarded", "x-original", "x-envoy", "x-proxy")
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


@dataclass(frozen=True, slots=True, repr=False)
class Tokens:
    """Tokens of an app, validated.

    Args:
        write: Token that permits everything, or ``None`` to reject all changes.
        read: Token that permits reading only, or ``None``.

    Raises:
        ConfigError: A token is empty or cannot be sent in a header, or both are equal.
    """

    write: str | None = None
    read: str | None = None

    def __post_init__(self) -> None:
        for name, token in (("token", self.write), ("read_token", self.read)):
            if token is not None:
                _check_token(name, token)
        if self.read is not None and _equal(self.read, self.write):
            raise ConfigError(
                "read_token and token are equal, so every reader could make changes: use two "
                "different tokens"
            )

    @property
    def required(self) -> bool:
        """Whether reading needs a token."""
        return self.write is not None or self.read is not None

    def access(self, authorization: str) -> Access:
        """Return what the value of an ``Authorization`` header permits."""
        scheme, _, given = authorization.partition(" ")
        writes, reads = (_equal(given, token) for token in (self.write, self.read))
        if scheme.lower() != "bearer":
            return "none"
        return "all" if writes else "read" if reads else "none"


def _equal(given: str, token: str | None) -> bool:
    """Compare two tokens in constant time."""
    return token is not None and hmac.compare_digest(given.strip().encode(), token.strip().encode())


def _check_token(name: str, token: str) -> None:
    if not token.strip():
        raise ConfigError(f"{name} is empty: set a token, or omit it")
    if not (token.isascii() and token.strip().isprintable()):
        raise ConfigError(
            f"{name} has characters that an HTTP header cannot contain: use printable ASCII"
        )


def check_hosts(hosts: Collection[str]) -> None:
    """Raise ``ConfigError`` for a host name that no request can match."""
    if isinstance(hosts, str):
        raise ConfigError(f"hosts: expected a list of names, got a str: write hosts=[{hosts!r}]")
    for host in hosts:
        plain = host.split() == [host] and _name(_bracketed(host)) == host.lower().strip("[]")
        if host != "*" and not plain:
            raise ConfigError(
                f"hosts: {host!r} is not a host name; write it without scheme, port and path, such "
                "as queues.example, or '*' for all"
            )


def is_loopback(host: str) -> bool:
    """Return whether a host name or address is this machine only.

    >>> is_loopback("127.0.0.1"), is_loopback("localhost"), is_loopback("0.0.0.0")
    (True, True, False)
    """
    name = host.lower()
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        address = ip_address(name)
    except ValueError:
        return False
    mapped = address.ipv4_mapped if isinstance(address, IPv6Address) else None
    return (mapped or address).is_loopback


class AccessControl:
    """ASGI middleware that rejects forbidden requests and adds security headers to responses.

    Args:
        app: Wrapped application.
        tokens: Tokens that permit reading and changes.
        hosts: Allowed host names, in addition to loopback and the local address of the connection;
            ``"*"`` allows all.
    """

    def __init__(self, app: ASGIApp, *, tokens: Tokens, hosts: Collection[str]) -> None:
        self._app = app
        self._tokens = tokens
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
        except ClientDisconnect:
            return  # the client closed the connection before it had sent the whole request
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
        access = scope[ACCESS] = self._access(scope, headers, host)
        if not reading:
            return self._change_rejection(access)
        if access != "none" or path in PUBLIC:
            return None
        if self._tokens.required:
            is_file = path in FILES or path.startswith(FILES_PREFIX)
            return None if is_file else _WRONG_TOKEN
        return _NO_TOKENS

    def _access(self, scope: Scope, headers: Headers, host: str) -> Access:
        """Return what the request may do."""
        if self._tokens.required:
            return self._tokens.access(headers.get("authorization", ""))
        return "read" if _is_local(scope, headers, host) else "none"

    def _change_rejection(self, access: Access) -> Rejection | None:
        if access == "all":
            return None
        if self._tokens.write is None:
            return _READ_ONLY
        return _WRONG_TOKEN if access == "none" else READ_TOKEN_ONLY

    def _is_allowed_host(self, host: str, scope: Scope) -> bool:
        if "*" in self._hosts:
            return True
        name = _name(host)
        if name is None:
            return False
        if name in self._hosts or is_loopback(name):
            return True
        try:
            address = ip_address(name)
        except ValueError:
            return False
        server = scope.get("server")
        # With DNS rebinding, the Host header contains the attacker's name, never an IP address.
        return server is not None and server[0] == str(address)


_NO_TOKENS: Rejection = (
    403,
    "TokenRequired",
    "without a token, only /livez, /readyz and /metrics are served to other machines and through "
    "proxies; set one: create_app(service, token=…, read_token=…), QKIT_TOKEN or QKIT_READ_TOKEN",
)
_WRONG_TOKEN: Rejection = (
    401,
    "WrongToken",
    "send a valid token in the header 'Authorization: Bearer <token>'",
)
_READ_ONLY: Rejection = (
    403,
    "ReadOnly",
    "the service has no token for changes, so changes are rejected; "
    "set one: create_app(service, token=…) or QKIT_TOKEN",
)
READ_TOKEN_ONLY: Rejection = (
    403,
    "ReadTokenOnly",
    "this token permits reading only; use the token for changes",
)


def _is_local(scope: Scope, headers: Headers, host: str) -> bool:
    """Return whether a client on this machine sent the request, without a proxy."""
    client, name = scope.get("client"), _name(host)
    if client is None or name is None or not is_loopback(name) or not is_loopback(client[0]):
        return False
    return not any(
        header in FORWARDING_HEADERS or header.startswith(FORWARDING_PREFIXES) for header in headers
    )


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
