"""JSON API: reading and changing queues, messages and dead letters."""

from __future__ import annotations

import asyncio
import gzip
import json
from dataclasses import replace

import httpx
import pytest
from starlette.applications import Starlette
from starlette.routing import Mount

from qkit import BackendUnavailable, Channel, Message, QueueService, consume
from qkit._internal.ids import new_id
from qkit.backend import QueueStats
from qkit.message import Envelope
from qkit.web import create_app
from qkit.web.sampler import Sampler
from qkit.web.schemas import QueueView
from tests.support.web import (
    AUTHORIZED,
    Orders,
    client_of,
    eventually,
    make_shop,
    wait_for_dead_letters,
)


async def test_queues_are_listed_with_figures_and_without_dead_letter_queues(
    client: httpx.AsyncClient, service: QueueService
) -> None:
    await service.send("orders", -1)
    await wait_for_dead_letters(service, "orders", 1)
    await service.send("audit", "later", delay=60)
    answer = await client.get("/api/queues")
    rows = {row["name"]: row for row in answer.json()}
    assert set(rows) == {"orders", "audit"}
    assert rows["orders"]["state"] == "consuming"
    assert rows["orders"]["dead_letters"] == 1
    assert rows["orders"]["messages_failed"] == 1
    assert rows["audit"]["state"] == "none"
    assert rows["audit"]["scheduled"] == 1
    one = await client.get("/api/queues/audit")
    assert one.json()["scheduled"] == 1


async def test_the_overview_contains_connection_breaker_and_consumers(
    client: httpx.AsyncClient,
) -> None:
    overview = (await client.get("/api/overview")).json()
    assert overview["ready"] is True
    assert overview["writable"] is True
    assert overview["health"]["connection_state"] == "connected"
    assert overview["health"]["breaker"] == "closed"
    assert [item["state"] for item in overview["health"]["consumers"]] == ["consuming"]


async def test_rates_are_differences_between_two_samples(
    client: httpx.AsyncClient, service: QueueService, orders: Orders
) -> None:
    assert (await client.get("/api/queues/orders")).json()["published_per_second"] is None

    async def has_rates() -> bool:
        await service.send("orders", 1)
        row = (await client.get("/api/queues/orders")).json()
        return bool(row["published_per_second"] and row["acked_per_second"])

    await eventually(has_rates, every=0.1)


async def test_peek_does_not_consume(client: httpx.AsyncClient, service: QueueService) -> None:
    sent = await service.send("audit", {"who": "ann"}, key="k", headers={"tenant": "acme"})
    for _ in range(2):
        (message,) = (await client.get("/api/queues/audit/messages")).json()["messages"]
    assert message["id"] == sent.message_id
    assert message["key"] == "k"
    assert message["headers"]["tenant"] == "acme"
    assert json.loads(message["body"]["content"]) == {"who": "ann"}
    assert message["body"]["format"] == "json"


async def test_a_binary_body_is_shown_in_base64(
    client: httpx.AsyncClient, service: QueueService
) -> None:
    await service.send("audit", b"\xff\x00\x01")
    (message,) = (await client.get("/api/queues/audit/messages")).json()["messages"]
    assert message["body"] == {"format": "base64", "content": "/wAB", "size": 3, "truncated": False}


async def test_a_long_text_is_truncated_between_characters(
    client: httpx.AsyncClient, service: QueueService
) -> None:
    await service.send("audit", "x" + "é" * 20_000)
    (message,) = (await client.get("/api/queues/audit/messages")).json()["messages"]
    assert message["body"]["format"] == "text"
    assert message["body"]["truncated"] is True
    assert set(message["body"]["content"]) == {'"', "x", "é"}


async def test_a_message_can_be_sent(
    client: httpx.AsyncClient, service: QueueService, orders: Orders
) -> None:
    request = {"body": 7, "priority": 8, "key": "k", "ttl": 60, "delay": 0, "headers": {"a": "b"}}
    answer = await client.post("/api/queues/orders/messages", json=request, headers=AUTHORIZED)
    assert answer.status_code == 201, answer.text
    assert answer.json()["message_id"]

    async def handled() -> bool:
        return orders.handled == [7]

    await eventually(handled)


async def test_a_message_to_a_topic_is_published() -> None:
    service = make_shop()
    service.declare(Channel("prices", broadcast=True))
    async with service, client_of(service) as client:
        answer = await client.post(
            "/api/queues/prices/messages", json={"body": 1}, headers=AUTHORIZED
        )
        assert answer.status_code == 201, answer.text
        (row,) = (await client.get("/api/queues")).json()
        assert row["broadcast"] is True


@pytest.mark.parametrize(
    ("request_body", "status", "expected"),
    [
        ({"body": 1, "colour": "red"}, 422, "colour"),
        ({"priority": 1}, 422, "body"),
        ({"body": 1, "priority": 99}, 422, "priority"),
        ({"body": 1, "delay": 5, "ttl": 2}, 422, "ttl"),
        ({"body": 1, "headers": {"qkit-group": "x"}}, 422, "qkit-"),
        ({"body": "not a number"}, 422, "orders"),
        ({"body": "x" * 1_100_000}, 422, ""),
        ({"body": "x" * 3_000_000}, 413, "bytes"),
    ],
    ids=["unknown field", "no body", "priority", "ttl", "reserved", "type", "long", "too long"],
)
async def test_an_invalid_message_is_rejected_with_a_reason(
    client: httpx.AsyncClient, request_body: dict[str, object], status: int, expected: str
) -> None:
    answer = await client.post("/api/queues/orders/messages", json=request_body, headers=AUTHORIZED)
    assert answer.status_code == status, answer.text
    assert expected in answer.json()["error"]["message"]


async def test_a_body_beyond_the_limit_is_rejected(client: httpx.AsyncClient) -> None:
    answer = await client.post(
        "/api/queues/audit/messages", json={"body": "x" * 1_100_000}, headers=AUTHORIZED
    )
    assert answer.status_code == 413
    assert answer.json()["error"]["type"] == "PayloadTooLarge"


@pytest.mark.parametrize(
    ("content", "kind", "status"),
    [
        (b"body=1", "application/x-www-form-urlencoded", 415),
        (b"{", "application/json", 422),
        (b'{"body": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "application/json", 422),
        (b'{"body": ' + b"1" * 5_000 + b"}", "application/json", 422),
        (b'{"body": "\xff"}', "application/json", 422),
        ('{"body": 1}'.encode("utf-16"), "application/json", 422),
    ],
    ids=["form", "not JSON", "nested", "5,000 digits", "not UTF-8", "UTF-16"],
)
async def test_malformed_json_is_rejected(
    client: httpx.AsyncClient, content: bytes, kind: str, status: int
) -> None:
    answer = await client.post(
        "/api/queues/orders/messages",
        content=content,
        headers={**AUTHORIZED, "Content-Type": kind},
    )
    assert answer.status_code == status, answer.text
    assert (await client.get("/readyz")).status_code == 200


async def test_too_many_headers_are_rejected(client: httpx.AsyncClient) -> None:
    headers = {f"h{number}": "x" for number in range(10_000)}
    answer = await client.post(
        "/api/queues/orders/messages", json={"body": 1, "headers": headers}, headers=AUTHORIZED
    )
    assert answer.status_code == 422
    assert "128 headers, got 10000" in answer.json()["error"]["message"]


async def test_a_compression_bomb_in_a_dead_letter_is_truncated(
    client: httpx.AsyncClient, service: QueueService, orders: Orders
) -> None:
    bomb = gzip.compress(b"[" * 100_000_000)
    envelope = Envelope(new_id(), bomb, {"content-encoding": "gzip"})
    await service._backend.publish("orders", [envelope])  # as if by another program
    await wait_for_dead_letters(service, "orders", 1)
    answer = await client.get("/api/queues/orders/dead-letters")
    (letter,) = answer.json()["dead_letters"]
    assert letter["reason"] == "Undecodable"
    assert letter["body"]["truncated"] is True
    assert len(answer.content) < 40_000
    await service.send("orders", 5)

    async def still_consumes() -> bool:
        return orders.handled == [5]

    await eventually(still_consumes)


async def test_a_channel_is_paused_and_resumed(
    client: httpx.AsyncClient, service: QueueService, orders: Orders
) -> None:
    paused = await client.post("/api/queues/orders/pause", headers=AUTHORIZED)
    assert [item["state"] for item in paused.json()["consumers"]] == ["paused"]
    await service.send("orders", 1)
    row = (await client.get("/api/queues/orders")).json()
    assert (row["state"], row["depth"]) == ("paused", 1)
    assert (await client.get("/readyz")).status_code == 200  # a paused consumer is ready
    resumed = await client.post("/api/queues/orders/resume", headers=AUTHORIZED)
    assert [item["state"] for item in resumed.json()["consumers"]] == ["consuming"]

    async def handled() -> bool:
        return orders.handled == [1]

    await eventually(handled)


async def test_dead_letters_are_listed_filtered_and_replayed(
    client: httpx.AsyncClient, service: QueueService, orders: Orders
) -> None:
    for number in (-1, -2, -3):
        await service.send("orders", number)
    await wait_for_dead_letters(service, "orders", 3)
    path = "/api/queues/orders/dead-letters"
    letters = (await client.get(path)).json()["dead_letters"]
    assert {letter["reason"] for letter in letters} == {"ExplicitNack"}
    assert len((await client.get(path, params={"error": "total -2"})).json()["dead_letters"]) == 1
    assert (await client.get(path, params={"reason": "TTLExpired"})).json()["dead_letters"] == []
    assert len((await client.get(path, params={"limit": 2})).json()["dead_letters"]) == 2
    orders.accept_all = True
    one = next(letter for letter in letters if letter["error"].endswith("-2"))
    answer = await client.post(f"{path}/replay", json={"ids": [one["id"]]}, headers=AUTHORIZED)
    assert answer.json() == {"replayed": 1}
    answer = await client.post(f"{path}/replay", json={}, headers=AUTHORIZED)
    assert answer.json() == {"replayed": 2}
    assert (await client.get(path)).json()["dead_letters"] == []


async def test_dead_letters_are_purged_by_filter_by_id_or_all(
    client: httpx.AsyncClient, service: QueueService
) -> None:
    for number in (-1, -2, -3):
        await service.send("orders", number)
    await wait_for_dead_letters(service, "orders", 3)
    path = "/api/queues/orders/dead-letters"
    answer = await client.delete(path, params={"error": "total -2"}, headers=AUTHORIZED)
    assert answer.json() == {"purged": 1}
    id = (await client.get(path)).json()["dead_letters"][0]["id"]
    answer = await client.delete(path, params={"id": id}, headers=AUTHORIZED)
    assert answer.json() == {"purged": 1}
    everything = {"all": "true"}
    answer = await client.delete(path, params=everything, headers=AUTHORIZED)
    assert answer.json() == {"purged": 1}
    answer = await client.delete(path, params=everything, headers=AUTHORIZED)
    assert answer.json() == {"purged": 0}


async def test_a_purge_with_failed_before_keeps_later_failures(
    client: httpx.AsyncClient, service: QueueService
) -> None:
    path = "/api/queues/orders/dead-letters"
    await service.send("orders", -1)
    await wait_for_dead_letters(service, "orders", 1)
    (seen,) = await service.dead_letters("orders").list()
    await service.send("orders", -2)
    await wait_for_dead_letters(service, "orders", 2)
    parameters = {"all": "true", "failed_before": repr(seen.last_failed_at)}
    answer = await client.delete(path, params=parameters, headers=AUTHORIZED)
    assert answer.json() == {"purged": 1}
    (left,) = await service.dead_letters("orders").list()
    assert left.error == "negative total -2"


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        ("", "all=true"),
        ("?ids=x", "'ids'"),
        ("?reason=", "empty"),
        ("?id=", "empty"),
        ("?reason=Explicit", "MaxRetriesExceeded"),
        ("?reason=ExplicitNack&reason=TTLExpired", "more than once"),
        ("?all=yes", "expected true"),
        ("?all=true&id=x", "cannot be combined"),
        ("?all=true&failed_before=nan", "seconds"),
        ("?failed_before=9999999999", "all=true"),
    ],
)
async def test_an_invalid_or_ambiguous_purge_is_rejected(
    client: httpx.AsyncClient, service: QueueService, query: str, expected: str
) -> None:
    await service.send("orders", -1)
    await wait_for_dead_letters(service, "orders", 1)
    path = "/api/queues/orders/dead-letters"
    answer = await client.delete(f"{path}{query}", headers=AUTHORIZED)
    assert answer.status_code == 422, answer.text
    assert expected in answer.json()["error"]["message"]
    assert len(await service.dead_letters("orders").list()) == 1


async def test_an_unexpected_request_body_is_rejected(
    client: httpx.AsyncClient, service: QueueService
) -> None:
    await service.send("orders", -1)
    await wait_for_dead_letters(service, "orders", 1)
    path = "/api/queues/orders/dead-letters?all=true"
    answer = await client.request("DELETE", path, json={"ids": ["x"]}, headers=AUTHORIZED)
    assert answer.status_code == 422
    assert "no request body" in answer.json()["error"]["message"]
    assert len(await service.dead_letters("orders").list()) == 1


async def test_a_token_can_be_checked(client: httpx.AsyncClient) -> None:
    answer = await client.post("/api/token", headers=AUTHORIZED)
    assert answer.json() == {"valid": True, "access": "all"}
    assert (await client.get("/api/token")).json() == {"valid": True, "access": "read"}
    wrong = {"Authorization": "Bearer wrong"}
    assert (await client.post("/api/token", headers=wrong)).status_code == 401


async def test_a_replay_for_an_unknown_queue_suggests_a_name(
    client: httpx.AsyncClient, service: QueueService
) -> None:
    path = "/api/queues/ordres/dead-letters/replay"
    answer = await client.post(path, json={}, headers=AUTHORIZED)
    assert answer.status_code == 404
    assert "did you mean 'orders'?" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("method", "path", "status", "kind"),
    [
        ("GET", "/api/queues/nowhere", 404, "QueueNotFound"),
        ("GET", "/api/queues/nowhere/messages", 404, "QueueNotFound"),
        ("POST", "/api/queues/nowhere/pause", 404, "QueueNotFound"),
        ("GET", "/api/queues/nowhere/dead-letters", 404, "QueueNotFound"),
        ("DELETE", "/api/queues/nowhere/dead-letters?all=true", 404, "QueueNotFound"),
        ("GET", "/api/queues/a%20b/messages", 422, "InvalidName"),
        ("GET", "/api/queues/orders/messages?limit=0", 422, "BadRequest"),
        ("GET", "/api/queues/orders/messages?limit=many", 422, "BadRequest"),
        ("GET", f"/api/queues/orders/messages?limit={'9' * 5_000}", 422, "BadRequest"),
        ("GET", f"/api/queues/orders/dead-letters?limit={'9' * 5_000}", 422, "BadRequest"),
        ("GET", "/api/queues/orders/messages?limit=٣", 422, "BadRequest"),
        ("GET", "/api/queues/orders/dead-letters?order=random", 422, "BadRequest"),
        ("GET", "/api/queues/orders/dead-letters?reasons=TTLExpired", 422, "BadRequest"),
        ("GET", "/api/queues/orders/dead-letters?reason=Expired", 422, "BadRequest"),
        ("GET", "/nowhere", 404, "NotFound"),
        ("PUT", "/api/queues", 405, "MethodNotAllowed"),
    ],
)
async def test_errors_are_json(
    client: httpx.AsyncClient, method: str, path: str, status: int, kind: str
) -> None:
    answer = await client.request(method, path, headers=AUTHORIZED)
    assert answer.status_code == status, answer.text
    assert answer.json()["error"]["type"] == kind


@pytest.mark.parametrize("path", ["/api/overview", "/api/queues", "/api/queues/orders", "/readyz"])
async def test_head_responds_like_get_without_a_body(client: httpx.AsyncClient, path: str) -> None:
    answer = await client.head(path)
    assert (answer.status_code, answer.content) == (200, b"")
    assert answer.headers["content-type"] == "application/json"


async def test_an_unavailable_broker_is_reported_in_the_overview(
    client: httpx.AsyncClient, service: QueueService, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def unavailable(*arguments: object) -> None:
        raise BackendUnavailable("unreachable")

    monkeypatch.setattr(service, "stats", unavailable)
    overview = (await client.get("/api/overview")).json()
    (row,) = overview["queues"]
    assert "unreachable" in row["error"]
    assert (row["depth"], row["published_per_second"], row["acked_per_second"]) == (None,) * 3
    totals = overview["totals"]
    assert (totals["depth"], totals["dead_letters"], totals["published_per_second"]) == (None,) * 3


async def test_totals_are_unknown_without_a_broker_and_zero_without_queues(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def unavailable(*arguments: object) -> None:
        raise BackendUnavailable("unreachable")

    async with make_shop() as service:
        async with client_of(service) as client:
            totals = (await client.get("/api/overview")).json()["totals"]
            assert (totals["depth"], totals["published_per_second"]) == (0, 0)
        async with client_of(service) as client:
            monkeypatch.setattr(service, "queues", unavailable)
            overview = (await client.get("/api/overview")).json()
            assert overview["error"]
            assert overview["totals"]["depth"] is None
            assert overview["totals"]["dead_letters"] is None


async def test_rates_cover_the_service_only_if_the_broker_does_not_count(
    service: QueueService, orders: Orders, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stats without totals, as on Redis, which does not count messages."""
    real = service.stats

    async def without_totals(name: str) -> QueueStats:
        return replace(await real(name), published_total=None, acked_total=None)

    monkeypatch.setattr(service, "stats", without_totals)
    foreign = Envelope(new_id(), b"1")
    await service._backend.publish("orders", [foreign])  # as if by another process
    sampler = Sampler(service, writable=False, min_interval=0)

    async def row() -> QueueView:
        return next(view for view in (await sampler.sample()).queues if view.name == "orders")

    await row()

    async def consumed() -> bool:
        return (await row()).acked_total == 1

    await eventually(consumed)
    view = await row()
    assert view.counted_by_service
    assert view.published_per_second is None  # this service has sent nothing
    assert view.acked_per_second is not None  # it has consumed a message
    await service.send("orders", 2)
    assert (await row()).published_per_second


async def test_rates_cover_all_processes_if_the_broker_counts(service: QueueService) -> None:
    sampler = Sampler(service, writable=False, min_interval=0)
    await sampler.sample()
    await service._backend.publish("orders", [Envelope(new_id(), b"1")])  # as if by another process
    (row,) = (await sampler.sample()).queues
    assert row.published_per_second
    assert not row.counted_by_service


async def test_an_unresponsive_broker_is_reported_after_the_sample_timeout(
    service: QueueService, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def never(*arguments: object) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr("qkit.web.sampler.SAMPLE_TIMEOUT_SECONDS", 0.05)
    async with client_of(service) as client:
        monkeypatch.setattr(service, "stats", never)
        overview = (await client.get("/api/overview")).json()
        assert "did not respond" in overview["queues"][0]["error"]
    async with client_of(service) as client:
        monkeypatch.setattr(service, "queues", never)
        overview = (await client.get("/api/overview")).json()
        assert "did not respond" in overview["error"]
        assert [row["name"] for row in overview["queues"]] == ["orders"]


async def test_queues_beyond_the_limit_are_omitted_and_counted(
    service: QueueService, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("qkit.web.sampler.MAX_QUEUES", 3)
    for number in range(9):
        await service.send(f"a-queue-{number}", 1)
    async with client_of(service) as client:
        overview = (await client.get("/api/overview")).json()
    # Queues that this service consumes are never omitted.
    assert [row["name"] for row in overview["queues"]] == ["a-queue-0", "a-queue-1", "orders"]
    assert overview["queues_omitted"] == 7


async def test_the_overview_of_a_stopped_service_has_an_error() -> None:
    @consume("orders")
    async def handle(body: int) -> None: ...

    service = make_shop(handle)
    async with client_of(service) as client:
        for _ in range(2):
            overview = (await client.get("/api/overview")).json()
            assert overview["ready"] is False
            assert overview["error"] == "The service is not running."
            answer = await client.get("/api/queues/orders/messages")
            assert answer.status_code == 503
            if service.connection_state == "disconnected":
                async with service:
                    pass


async def test_the_openapi_document_describes_every_operation(client: httpx.AsyncClient) -> None:
    document = (await client.get("/openapi.json")).json()
    assert document["openapi"] == "3.1.0"
    assert set(document["paths"]["/api/queues/{name}/dead-letters"]) == {"get", "delete"}
    operations = [item for path in document["paths"].values() for item in path.items()]
    for method, item in operations:
        schemes = ["token", "readToken"] if method == "get" else ["token"]
        assert item["security"] == [{scheme: []} for scheme in schemes]
    assert document["servers"] == [{"url": "/"}]
    deleting = document["paths"]["/api/queues/{name}/dead-letters"]["delete"]["parameters"]
    assert {item["name"] for item in deleting} == {
        *("name", "id", "reason", "error", "failed_before", "all"),
    }
    text = json.dumps(document)
    for name in {part.split('"')[0] for part in text.split("#/components/schemas/")[1:]}:
        assert name in document["components"]["schemas"], name


async def test_the_openapi_document_has_the_mount_path_and_parameter_types(
    service: QueueService,
) -> None:
    outer = Starlette(routes=[Mount("/queues", create_app(service))])
    transport = httpx.ASGITransport(app=outer)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        document = (await client.get("/queues/openapi.json")).json()
        assert document["servers"] == [{"url": "/queues"}]
        path = document["servers"][0]["url"] + "/api/queues"
        assert (await client.get(path)).status_code == 200
    letters = document["paths"]["/api/queues/{name}/dead-letters"]
    schemas = {
        item["name"]: item["schema"] for method in letters.values() for item in method["parameters"]
    }
    assert (schemas["limit"]["type"], schemas["limit"]["maximum"]) == ("integer", 1_000)
    assert schemas["id"] == {"type": "array", "items": {"type": "string"}}
    assert "ExplicitNack" in schemas["reason"]["enum"]


async def test_the_asyncapi_document_is_served(client: httpx.AsyncClient) -> None:
    assert "orders" in (await client.get("/asyncapi.json")).json()["channels"]


async def test_a_number_with_thousands_of_digits_is_rejected(client: httpx.AsyncClient) -> None:
    digits = "9" * 5_000
    for path, body in (
        ("messages", f'{{"body": {digits}}}'),
        ("messages", f'{{"body": 1, "priority": {digits}}}'),
        ("dead-letters/replay", f'{{"limit": {digits}}}'),
    ):
        answer = await client.post(
            f"/api/queues/orders/{path}",
            content=body,
            headers={**AUTHORIZED, "Content-Type": "application/json"},
        )
        assert answer.status_code == 422, answer.text


async def test_dead_letters_are_listed_newest_first_on_request(
    client: httpx.AsyncClient, service: QueueService, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in (-1, -2, -3):
        await service.send("orders", number)
        await wait_for_dead_letters(service, "orders", -number)

    async def listed(**parameters: object) -> tuple[list[str], str]:
        path = "/api/queues/orders/dead-letters"
        answer = (await client.get(path, params={"limit": 2, **parameters})).json()  # type: ignore[dict-item]
        return [item["body"]["content"] for item in answer["dead_letters"]], answer["order"]

    assert await listed() == (["-1", "-2"], "oldest")
    assert await listed(order="newest") == (["-3", "-2"], "newest")
    assert await listed(order="newest", error="total -2") == (["-2"], "newest")
    monkeypatch.setattr("qkit.web.api.MAX_SORTED", 3)  # there may be more
    assert await listed(order="newest") == (["-1", "-2"], "oldest")


async def test_a_peek_is_limited_by_size(
    client: httpx.AsyncClient, service: QueueService, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("qkit.web.api.MAX_PEEK_BYTES", 10_000)
    read: list[int] = []
    real = service.peek

    async def counted(name: str, limit: int) -> list[Message]:
        found = await real(name, limit)
        read.append(sum(len(message.body) for message in found))
        return found

    monkeypatch.setattr(service, "peek", counted)
    path = "/api/queues/{}/messages?limit=1000"
    await service.send_many("small", list(range(300)))
    answer = (await client.get(path.format("small"))).json()
    assert (len(answer["messages"]), answer["truncated"]) == (300, False)
    await service.send_many("large", ["x" * 998] * 100)  # 1,000 bytes each, with the quotes
    read.clear()
    answer = (await client.get(path.format("large"))).json()
    assert (len(answer["messages"]), answer["truncated"]) == (10, True)
    assert max(read) <= 25_000  # the first step; a second one would exceed the limit
    await service.send("huge", "x" * 50_000)
    answer = (await client.get(path.format("huge"))).json()
    assert (len(answer["messages"]), answer["truncated"]) == (1, False)


async def test_a_peek_that_affects_the_queue_needs_the_token_for_changes(
    service: QueueService, monkeypatch: pytest.MonkeyPatch
) -> None:
    await service.send("audit", 1)
    monkeypatch.setattr(QueueService, "peek_affects_queue", True)
    async with client_of(service) as client:
        answer = await client.get("/api/queues/audit/messages")
        assert (answer.status_code, answer.json()["error"]["type"]) == (403, "TokenRequired")
        assert (await client.get("/api/queues/audit/messages", headers=AUTHORIZED)).is_success
        assert (await client.get("/api/queues/audit/dead-letters")).is_success
    async with client_of(service, token=None, read_token=None) as client:
        assert (await client.get("/api/queues/audit/messages")).status_code == 403
