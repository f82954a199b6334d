"""Access control of every route and method: tokens, hosts and origins."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import httpx
import pytest

from qkit import ConfigError, QueueService
from qkit.web import create_app
from qkit.web.access_control import SECURITY_HEADERS, AccessControl
from tests.support.web import (
    AUTHORIZED,
    READ_TOKEN,
    READING,
    TOKEN,
    client_of,
    make_shop,
    wait_for_dead_letters,
)

CHANGES = ("POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "WHATEVER")


def paths() -> Iterator[str]:
    """Yield every path of the app, and one unknown path."""
    for route in create_app(make_shop()).routes:
        yield route.path.replace("{name}", "orders")  # type: ignore[attr-defined]  # all are Routes
    yield "/nowhere"


ROUTES = sorted(set(paths()))


@pytest.mark.parametrize(
    "headers",
    [
        {"Authorization": ""},
        READING,
        {"Authorization": "Bearer wrong"},
        {"Authorization": f"Basic {TOKEN}"},
        {"Authorization": TOKEN},
        {**AUTHORIZED, "Host": "evil.example"},
        {**AUTHORIZED, "Host": "192.0.2.7"},
        {**AUTHORIZED, "Host": "localhost.evil.example"},
        {**AUTHORIZED, "Host": ""},
        {**AUTHORIZED, "Origin": "https://evil.example"},
        {**AUTHORIZED, "Origin": "null"},
        {**AUTHORIZED, "Sec-Fetch-Site": "cross-site"},
    ],
    ids=[
        "no token",
        "read token",
        "wrong token",
        "Basic scheme",
        "bare token",
        "foreign host",
        "foreign address",
        "lookalike host",
        "no host",
        "foreign origin",
        "opaque origin",
        "cross-site",
    ],
)
async def test_every_unauthorized_change_is_rejected(headers: dict[str, str]) -> None:
    service = make_shop()  # not started, because no request may reach it
    async with client_of(service) as client:
        for method, path in itertools.product(CHANGES, ROUTES):
            answer = await client.request(method, path, headers=headers, json={"body": 1})
            assert answer.status_code in (401, 403, 421), f"{method} {path}: {answer.text}"
            assert ("WWW-Authenticate" in answer.headers) is (answer.status_code == 401)


async def test_a_rejected_change_has_no_effect(service: QueueService) -> None:
    await service.send("orders", -1)
    await wait_for_dead_letters(service, "orders", 1)
    path = "/api/queues/orders/dead-letters"
    async with client_of(service) as client:
        await client.delete(path, params={"all": "true"})
        await client.post(f"{path}/replay", json={})
        await client.post("/api/queues/orders/pause")
        await client.post("/api/queues/orders/messages", json={"body": 1})
    assert len(await service.dead_letters("orders").list()) == 1
    assert [item.state for item in service.health_check().consumers] == ["consuming"]
    assert service.metrics().messages_sent == 1


async def test_without_a_token_changes_are_rejected_with_a_reason(
    service: QueueService,
) -> None:
    async with client_of(service, token=None, read_token=None) as client:
        answer = await client.post("/api/queues/orders/pause", headers={"Authorization": "Bearer "})
        overview = await client.get("/api/overview")
    assert answer.status_code == 403
    assert "token" in answer.json()["error"]["message"]
    assert overview.json()["writable"] is False


PUBLIC = ("/livez", "/readyz", "/metrics")
FILES = ("/", "/static/app.js", "/openapi.json")
DATA = tuple(path for path in ROUTES if path.startswith("/api/") and path != "/api/events")
READABLE = (*DATA, "/health", "/asyncapi.json")


async def test_the_read_token_permits_reading_only(service: QueueService) -> None:
    async with client_of(service) as client:
        for headers, access in ((READING, "read"), (AUTHORIZED, "all")):
            for path in (*READABLE, *PUBLIC, *FILES):
                answer = await client.get(path, headers=headers)
                assert answer.status_code in (200, 405), f"{path}: {answer.text}"
            assert (await client.get("/api/token", headers=headers)).json()["access"] == access
        answer = await client.post("/api/queues/orders/pause", headers=READING)
        assert (answer.status_code, answer.json()["error"]["type"]) == (403, "ReadTokenOnly")
        assert (await client.post("/api/queues/orders/pause", headers=AUTHORIZED)).is_success


@pytest.mark.parametrize("tokens", [(TOKEN, None), (None, READ_TOKEN), (TOKEN, READ_TOKEN)])
async def test_with_a_token_nothing_is_readable_without_it(
    service: QueueService, tokens: tuple[str | None, str | None]
) -> None:
    token, read_token = tokens
    async with client_of(service, token=token, read_token=read_token) as client:
        for authorization in ("", "Bearer wrong", f"Basic {TOKEN}"):
            headers = {"Authorization": authorization}
            for path in (*READABLE, "/api/events", "/nowhere"):
                answer = await client.get(path, headers=headers)
                assert answer.status_code == 401, f"{path}: {answer.text}"
            for path in (*PUBLIC, *FILES):  # these contain no messages and no error texts
                assert (await client.get(path, headers=headers)).status_code == 200, path


async def test_with_a_read_token_only_changes_are_rejected(service: QueueService) -> None:
    async with client_of(service, token=None) as client:
        assert (await client.get("/api/overview")).json()["writable"] is False
        answer = await client.post("/api/queues/orders/pause")
        assert (answer.status_code, answer.json()["error"]["type"]) == (403, "ReadOnly")


REMOTE = [
    ("127.0.0.1", {"Forwarded": "for=192.0.2.1"}),
    ("127.0.0.1", {"Via": "1.1 proxy"}),
    ("127.0.0.1", {"X-Forwarded-For": "127.0.0.1"}),
    ("127.0.0.1", {"X-Forwarded-Host": "localhost"}),
    ("127.0.0.1", {"X-Real-IP": "127.0.0.1"}),
    ("127.0.0.1", {"CF-Connecting-IP": "192.0.2.1"}),
    ("192.0.2.1", {}),
    ("192.0.2.1", {"Host": "127.0.0.1"}),
    ("testclient", {}),
    ("", {}),
    ("127.0.0.1", {"Host": "queues.example"}),
]


@pytest.mark.parametrize(("peer", "headers"), REMOTE, ids=str)
async def test_without_tokens_other_machines_and_proxies_get_only_probes_and_metrics(
    service: QueueService, peer: str, headers: dict[str, str]
) -> None:
    hosts = ("queues.example",)
    async with client_of(service, token=None, read_token=None, hosts=hosts, peer=peer) as client:
        for path in (*READABLE, *FILES, "/api/events"):
            answer = await client.get(path, headers=headers)
            assert answer.status_code == 403, f"{path}: {answer.text}"
            assert "read_token=" in answer.json()["error"]["message"]
        for path in PUBLIC:
            assert (await client.get(path, headers=headers)).status_code == 200, path


@pytest.mark.parametrize("peer", ["127.0.0.1", "127.9.9.9", "::1", "::ffff:127.0.0.1"])
async def test_without_tokens_the_same_machine_may_read(service: QueueService, peer: str) -> None:
    async with client_of(service, token=None, read_token=None, peer=peer) as client:
        for path in (*READABLE, *FILES, *PUBLIC):
            assert (await client.get(path)).status_code in (200, 405), path


@pytest.mark.parametrize(
    "host", ["localhost", "localhost:9", "127.0.0.1:8710", "[::1]:8710", "qkit.localhost"]
)
async def test_loopback_hosts_are_allowed(client: httpx.AsyncClient, host: str) -> None:
    answer = await client.get("/api/overview", headers={"Host": host, "Origin": f"http://{host}"})
    assert answer.status_code == 200


@pytest.mark.parametrize("host", ["evil.example", "10.1.2.3", "localhost.evil.example", "[", "a b"])
async def test_a_foreign_host_may_only_call_the_probes(
    client: httpx.AsyncClient, host: str
) -> None:
    for path in ("/", "/api/overview", "/metrics", "/health", "/api/events"):
        assert (await client.get(path, headers={"Host": host})).status_code == 421
    for path in ("/livez", "/readyz"):  # a kubelet calls the probes by IP address
        assert (await client.get(path, headers={"Host": host})).status_code == 200


async def test_configured_hosts_and_the_local_address_are_allowed(service: QueueService) -> None:
    async with client_of(service, hosts=("Queues.Example",)) as client:
        answer = await client.get("/api/overview", headers={"Host": "queues.example:443"})
        assert answer.status_code == 200
    async with client_of(service, hosts=("*",)) as client:
        assert (await client.get("/", headers={"Host": "any.example"})).status_code == 200
    # httpx passes the host of the URL as the local address of the connection.
    async with client_of(service, base_url="http://10.1.2.3:8710") as client:
        assert (await client.get("/metrics")).status_code == 200


@pytest.mark.parametrize("origin", ["http://[x", "http://[::1", "[", "//", "http://x]y"])
async def test_a_malformed_origin_is_rejected(client: httpx.AsyncClient, origin: str) -> None:
    for method in ("GET", "POST"):
        answer = await client.request(
            method, "/api/queues", headers={**AUTHORIZED, "Origin": origin}
        )
        assert answer.status_code == 403, answer.text
        assert answer.headers["X-Frame-Options"] == "DENY"


async def test_an_error_in_access_control_is_a_500_without_details(
    client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*arguments: object) -> None:
        raise RuntimeError("canary")

    monkeypatch.setattr(AccessControl, "_rejection", broken)
    answer = await client.get("/api/queues")
    assert answer.status_code == 500
    assert answer.headers["X-Frame-Options"] == "DENY"
    assert "canary" not in answer.text


async def test_whitespace_around_the_token_is_ignored(service: QueueService) -> None:
    async with client_of(service, token=f" {TOKEN}\n") as client:
        answer = await client.post("/api/queues/orders/pause", headers=AUTHORIZED)
        assert answer.status_code == 200, answer.text


async def test_an_ipv6_address_can_be_an_allowed_host(service: QueueService) -> None:
    for host in ("2001:db8::7", "[2001:DB8::7]"):
        async with client_of(service, hosts=(host,)) as client:
            answer = await client.get("/api/queues", headers={"Host": "[2001:db8::7]:8710"})
            assert answer.status_code == 200, answer.text


async def test_every_response_has_the_security_headers(client: httpx.AsyncClient) -> None:
    for path in (*ROUTES, "/static/../app.py"):
        if path == "/api/events":
            continue  # an endless stream, covered by test_event_stream.py
        answer = await client.get(path)
        for name, value in SECURITY_HEADERS.items():
            assert answer.headers[name] == value, path
        assert answer.headers["Cache-Control"] in ("no-store", "no-cache")
        assert "server" not in answer.headers
    policy = SECURITY_HEADERS["Content-Security-Policy"]
    assert "unsafe" not in policy
    assert "default-src 'none'" in policy


async def test_an_internal_error_is_logged_and_not_shown(
    client: httpx.AsyncClient,
    service: QueueService,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def broken(*arguments: object) -> None:
        raise RuntimeError("canary")

    monkeypatch.setattr(service, "peek", broken)
    answer = await client.get("/api/queues/orders/messages")
    assert answer.status_code == 500
    assert "canary" not in answer.text
    assert "Traceback" not in answer.text
    assert answer.json()["error"]["type"] == "InternalError"
    assert "canary" in caplog.text


async def test_a_websocket_is_rejected(service: QueueService) -> None:
    sent: list[object] = []

    async def send(message: object) -> None:
        sent.append(message)

    async def receive() -> dict[str, object]:
        return {"type": "websocket.connect"}

    scope = {"type": "websocket", "path": "/", "headers": [], "scheme": "ws"}
    await create_app(service)(scope, receive, send)
    assert sent == [{"type": "websocket.close", "code": 1008}]


def test_an_invalid_token_or_host_is_rejected() -> None:
    with pytest.raises(ConfigError, match="empty"):
        create_app(make_shop(), token="  ")
    with pytest.raises(ConfigError, match="read_token is empty"):
        create_app(make_shop(), read_token="")
    with pytest.raises(ConfigError, match="equal"):
        create_app(make_shop(), token="secret", read_token=" secret ")
    with pytest.raises(ConfigError, match="list of names"):
        create_app(make_shop(), hosts="queues.example")
    for token in ("schlüssel", "a\nb", "a\x00b"):
        with pytest.raises(ConfigError, match="ASCII"):
            create_app(make_shop(), token=token)
    for host in (
        "queues.example:8710",
        "https://queues.example",
        "queues.example/",
        "",
        "a b",
        "[",
    ):
        with pytest.raises(ConfigError, match="without scheme"):
            create_app(make_shop(), hosts=[host])
    with pytest.raises(ConfigError, match="QueueService"):
        create_app("orders")  # type: ignore[arg-type]  # must be rejected
