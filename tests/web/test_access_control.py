"""Who may do what: every route and method, without token, from foreign hosts and origins."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import httpx
import pytest

from qkit import ConfigError, QueueService
from qkit.web import create_app
from qkit.web.access_control import SECURITY_HEADERS, AccessControl
from tests.support.web import AUTHORIZED, TOKEN, buried, client_of, make_shop

CHANGES = ("POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "WHATEVER")


def paths() -> Iterator[str]:
    """Every path that the app has, and one that it has not."""
    for route in create_app(make_shop()).routes:
        yield route.path.replace("{name}", "orders")  # type: ignore[attr-defined]  # all are Routes
    yield "/nowhere"


ROUTES = sorted(set(paths()))


@pytest.mark.parametrize(
    "headers",
    [
        {},
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
        "wrong token",
        "no bearer",
        "bare token",
        "foreign host",
        "foreign address",
        "host that looks like ours",
        "no host",
        "foreign origin",
        "opaque origin",
        "cross-site",
    ],
)
async def test_every_change_is_refused(headers: dict[str, str]) -> None:
    service = make_shop()  # not even started: nothing may reach it
    async with client_of(service) as client:
        for method, path in itertools.product(CHANGES, ROUTES):
            answer = await client.request(method, path, headers=headers, json={"body": 1})
            assert answer.status_code in (401, 403, 421), f"{method} {path}: {answer.text}"
            assert ("WWW-Authenticate" in answer.headers) is (answer.status_code == 401)


async def test_a_refused_change_changes_nothing(service: QueueService) -> None:
    await service.send("orders", -1)
    await buried(service, "orders", 1)
    path = "/api/queues/orders/dead-letters"
    async with client_of(service) as client:
        await client.delete(path, params={"all": "true"})
        await client.post(f"{path}/replay", json={})
        await client.post("/api/queues/orders/pause")
        await client.post("/api/queues/orders/messages", json={"body": 1})
    assert len(await service.dead_letters("orders").list()) == 1
    assert [item.state for item in service.health_check().consumers] == ["consuming"]
    assert service.metrics().messages_sent == 1


async def test_without_a_token_nothing_can_be_changed_and_the_answer_says_why(
    service: QueueService,
) -> None:
    async with client_of(service, token=None) as client:
        answer = await client.post("/api/queues/orders/pause", headers={"Authorization": "Bearer "})
        overview = await client.get("/api/overview")
    assert answer.status_code == 403
    assert "token" in answer.json()["error"]["message"]
    assert overview.json()["writable"] is False


@pytest.mark.parametrize(
    "host", ["localhost", "localhost:9", "127.0.0.1:8710", "[::1]:8710", "qkit.localhost"]
)
async def test_loopback_is_known_by_its_names(client: httpx.AsyncClient, host: str) -> None:
    answer = await client.get("/api/overview", headers={"Host": host, "Origin": f"http://{host}"})
    assert answer.status_code == 200


@pytest.mark.parametrize("host", ["evil.example", "10.1.2.3", "localhost.evil.example", "[", "a b"])
async def test_a_foreign_host_may_not_even_look(client: httpx.AsyncClient, host: str) -> None:
    for path in ("/", "/api/overview", "/metrics", "/health", "/api/events"):
        assert (await client.get(path, headers={"Host": host})).status_code == 421
    for path in ("/livez", "/readyz"):  # a kubelet calls by an address, and learns nothing
        assert (await client.get(path, headers={"Host": host})).status_code == 200


async def test_hosts_can_be_named_and_the_own_address_is_known(service: QueueService) -> None:
    async with client_of(service, hosts=("Queues.Example",)) as client:
        answer = await client.get("/api/overview", headers={"Host": "queues.example:443"})
        assert answer.status_code == 200
    async with client_of(service, hosts=("*",)) as client:
        assert (await client.get("/", headers={"Host": "any.example"})).status_code == 200
    # httpx tells the app the host of the URL as the address that the connection came in at.
    async with client_of(service, base_url="http://10.1.2.3:8710") as client:
        assert (await client.get("/metrics")).status_code == 200


@pytest.mark.parametrize("origin", ["http://[x", "http://[::1", "[", "//", "http://x]y"])
async def test_an_origin_that_is_none_is_foreign_and_no_accident(
    client: httpx.AsyncClient, origin: str
) -> None:
    for method in ("GET", "POST"):
        answer = await client.request(
            method, "/api/queues", headers={**AUTHORIZED, "Origin": origin}
        )
        assert answer.status_code == 403, answer.text
        assert answer.headers["X-Frame-Options"] == "DENY"


async def test_a_refusal_that_fails_is_answered_as_any_failure(
    client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*arguments: object) -> None:
        raise RuntimeError("canary")

    monkeypatch.setattr(AccessControl, "_refusal", broken)
    answer = await client.get("/api/queues")
    assert answer.status_code == 500
    assert answer.headers["X-Frame-Options"] == "DENY"
    assert "canary" not in answer.text


async def test_a_token_is_taken_without_the_blanks_around_it(service: QueueService) -> None:
    async with client_of(service, token=f" {TOKEN}\n") as client:
        answer = await client.post("/api/queues/orders/pause", headers=AUTHORIZED)
        assert answer.status_code == 200, answer.text


async def test_an_address_of_version_6_may_be_named(service: QueueService) -> None:
    for host in ("2001:db8::7", "[2001:DB8::7]"):
        async with client_of(service, hosts=(host,)) as client:
            answer = await client.get("/api/queues", headers={"Host": "[2001:db8::7]:8710"})
            assert answer.status_code == 200, answer.text


async def test_every_answer_carries_the_headers_that_protect_it(client: httpx.AsyncClient) -> None:
    for path in (*ROUTES, "/static/../app.py"):
        if path == "/api/events":
            continue  # endless; see test_stream
        answer = await client.get(path)
        for name, value in SECURITY_HEADERS.items():
            assert answer.headers[name] == value, path
        assert answer.headers["Cache-Control"] in ("no-store", "no-cache")
        assert "server" not in answer.headers
    policy = SECURITY_HEADERS["Content-Security-Policy"]
    assert "unsafe" not in policy
    assert "default-src 'none'" in policy


async def test_what_goes_wrong_inside_is_logged_and_not_shown(
    client: httpx.AsyncClient,
    service: QueueService,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def broken(*arguments: object) -> None:
        raise RuntimeError("canary in the coal mine")

    monkeypatch.setattr(service, "peek", broken)
    answer = await client.get("/api/queues/orders/messages")
    assert answer.status_code == 500
    assert "canary" not in answer.text
    assert "Traceback" not in answer.text
    assert answer.json()["error"]["type"] == "InternalError"
    assert "canary" in caplog.text


async def test_a_websocket_is_closed(service: QueueService) -> None:
    said: list[object] = []

    async def send(message: object) -> None:
        said.append(message)

    async def receive() -> dict[str, object]:
        return {"type": "websocket.connect"}

    scope = {"type": "websocket", "path": "/", "headers": [], "scheme": "ws"}
    await create_app(service)(scope, receive, send)
    assert said == [{"type": "websocket.close", "code": 1008}]


def test_a_token_or_hosts_that_cannot_protect_are_refused() -> None:
    with pytest.raises(ConfigError, match="empty"):
        create_app(make_shop(), token="  ")
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
        create_app("orders")  # type: ignore[arg-type]  # the point
