"""JSON commands and their replies, including those to invalid requests."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import random
from typing import Any

import pytest

SEED = int(os.environ.get("QKIT_TEST_SEED", "20240501"))
PUBLISH = b'{"command": "queue.publish", "payload": {"queue": "q", "message": 1, %s}}'
VIDEO = {"type": "process_video", "video_id": "vid_123", "user_id": "user_456"}


@pytest.mark.proves("000-publish-1", "000-consume-1", "000-ack-1")
async def test_a_message_is_published_consumed_and_acked(owner: Any) -> None:
    nc = await owner.json_client()
    assert await nc.run("queue.create", queue="tasks") == {"success": True}
    sent = await nc.run(
        "queue.publish", queue="tasks", message=VIDEO, priority=8, headers={"source": "web-app"}
    )
    assert sent == {"message_id": sent["message_id"], "position": 0}
    assert await nc.run("queue.peek", queue="tasks") == {
        "messages": [
            {
                "message_id": sent["message_id"],
                "message": VIDEO,
                "priority": 8,
                "retry_count": 0,
                "headers": {"source": "web-app"},
            }
        ]
    }
    got = await nc.run("queue.consume", queue="tasks", timeout=10, ack_deadline=60)
    assert got == {
        "message_id": sent["message_id"],
        "message": VIDEO,
        "priority": 8,
        "retry_count": 0,
        "headers": {"source": "web-app"},
        "receipt": got["receipt"],
    }
    ack = {"queue": "tasks", "message_id": sent["message_id"]}
    assert await nc.run("queue.ack", **ack) == {"success": True}
    again = await nc.run("queue.ack", **ack)
    assert again["error"]["type"] == "MessageNotFound"
    assert await nc.run("queue.consume", queue="tasks") == {"message_id": None, "message": None}


async def test_queues_are_created_listed_purged_and_deleted(owner: Any) -> None:
    nc = await owner.json_client()
    await nc.run(
        "queue.create", queue="b", max_depth=1, max_retries=None, ack_deadline=5, dead_letter=False
    )
    await nc.run("queue.create", queue="a")
    assert await nc.run("queue.list") == {"queues": ["a", "b"]}
    other = await nc.run("queue.create", queue="a", max_depth=7)
    assert other["error"]["type"] == "ConfigError"
    await nc.run("queue.publish", queue="b", message=1)
    full = await nc.run("queue.publish", queue="b", message=2)
    assert full["error"]["type"] == "QueueFull"
    assert await nc.run("queue.purge", queue="b") == {"purged": 1}
    assert await nc.run("queue.delete", queue="b") == {"success": True}
    for command in ("queue.stats", "queue.delete", "queue.purge", "queue.peek", "queue.consume"):
        answer = await nc.run(command, queue="b")
        assert answer["error"]["type"] == "QueueNotFound"
    assert (await nc.run("queue.create", queue="no spaces"))["error"]["type"] == "InvalidName"


async def test_stats_return_the_figures_of_a_queue(owner: Any) -> None:
    nc = await owner.json_client()
    await nc.run("queue.create", queue="tasks")
    for number in range(4):
        await nc.run("queue.publish", queue="tasks", message=number)
    await nc.run("queue.publish", queue="tasks", message="later", delay=60)
    first = await nc.run("queue.consume", queue="tasks")
    await nc.run("queue.ack", queue="tasks", message_id=first["message_id"])
    second = await nc.run("queue.consume", queue="tasks")
    await nc.run("queue.nack", queue="tasks", message_id=second["message_id"], requeue=False)
    await nc.run("queue.consume", queue="tasks")
    stats = await nc.run("queue.stats", queue="tasks")
    assert stats.pop("avg_wait_time_ms") >= 0
    assert stats.pop("oldest_message_age_secs") >= 0
    assert stats == {
        "queue": "tasks",
        "depth": 1,
        "in_flight": 1,
        "scheduled": 1,
        "consumers": 0,
        "published_total": 5,
        "consumed_total": 3,
        "acked_total": 1,
        "nacked_total": stats["nacked_total"],
        "dead_lettered_total": 1,
        "dropped_total": 0,
    }


@pytest.mark.proves("000-nack-1")
async def test_nacked_messages_are_requeued_or_dead_lettered(
    owner: Any,
) -> None:
    nc = await owner.json_client()
    await nc.run("queue.create", queue="tasks", max_retries=1)
    ids = [
        (await nc.run("queue.publish", queue="tasks", message=n))["message_id"] for n in range(2)
    ]
    for retry, action in ((0, "requeued"), (1, "dead_lettered")):
        got = await nc.run("queue.consume", queue="tasks")
        assert (got["message_id"], got["retry_count"]) == (ids[0], retry)
        nack = await nc.run("queue.nack", queue="tasks", message_id=ids[0])
        assert nack == {"success": True, "action": action}
    await nc.run("queue.consume", queue="tasks")
    nack = await nc.run("queue.nack", queue="tasks", message_id=ids[1], requeue=False)
    assert nack["action"] == "dead_lettered"
    letters = (await nc.run("queue.dead_letters", queue="tasks"))["dead_letters"]
    assert [(item["message_id"], item["reason"], item["message"]) for item in letters] == [
        (ids[0], "MaxRetriesExceeded", 0),
        (ids[1], "ExplicitNack", 1),
    ]
    assert letters[0]["original_queue"] == "tasks"
    assert letters[0]["attempts"] == 2
    retried = await nc.run("queue.retry", queue="tasks", message_id=ids[1])
    assert retried == {"retried": 1}
    assert (await nc.run("queue.consume", queue="tasks"))["message_id"] == ids[1]
    assert await nc.run("queue.purge_dead_letters", queue="tasks") == {"purged": 1}
    assert await nc.run("queue.retry", queue="tasks", message_ids=ids) == {"retried": 0}
    assert await nc.run("queue.retry", queue="tasks") == {"retried": 0}


@pytest.mark.proves("000-prefetch-2")
async def test_prefetch_limits_the_deliveries_of_a_connection(owner: Any) -> None:
    nc = await owner.json_client()
    await nc.run("queue.create", queue="tasks")
    for number in range(5):
        await nc.run("queue.publish", queue="tasks", message=number)
    got = await nc.run("queue.consume", queue="tasks", prefetch=3)
    assert [item["message"] for item in got["messages"]] == [0, 1, 2]
    assert await nc.run("queue.consume", queue="tasks", prefetch=3) == {
        "messages": [],
        "unsettled": 3,
    }
    await nc.run("queue.ack", queue="tasks", message_id=got["messages"][1]["message_id"])
    more = await nc.run("queue.consume", queue="tasks", prefetch=3)
    assert [item["message"] for item in more["messages"]] == [3]
    assert (await nc.run("queue.consume", queue="tasks", prefetch=0))["error"]


@pytest.mark.proves("000-consume-1")
async def test_consume_waits_up_to_its_timeout(owner: Any) -> None:
    nc, other = await owner.json_client(), await owner.json_client()
    await nc.run("queue.create", queue="tasks")
    waiting = asyncio.create_task(nc.run("queue.consume", queue="tasks", timeout=5))
    await asyncio.sleep(0.01)
    await other.run("queue.publish", queue="tasks", message="now")
    assert (await waiting)["message"] == "now"
    none = await nc.run("queue.consume", queue="tasks", timeout=0.01)
    assert none["message_id"] is None


async def test_another_connection_settles_by_receipt(owner: Any) -> None:
    nc, other = await owner.json_client(), await owner.json_client()
    await nc.run("queue.create", queue="tasks")
    await nc.run("queue.publish", queue="tasks", message=1)
    got = await nc.run("queue.consume", queue="tasks")
    await nc.aclose()
    name = {"queue": "tasks", "message_id": got["message_id"]}
    rejected = await other.run("queue.ack", **name)
    assert rejected["error"]["type"] == "MessageNotFound"
    assert "receipt" in rejected["error"]["message"]
    assert (await other.run("queue.ack", **name, receipt="guess"))["error"]
    done = await other.run("queue.ack", **name, receipt=got["receipt"])
    assert done == {"success": True}


@pytest.mark.proves("000-ack-1")
async def test_a_late_ack_is_rejected_unless_the_lease_was_extended(owner: Any) -> None:
    nc = await owner.json_client()
    await nc.run("queue.create", queue="tasks")
    for number in range(2):
        await nc.run("queue.publish", queue="tasks", message=number)
    late = await nc.run("queue.consume", queue="tasks", ack_deadline=0.03)
    kept = await nc.run("queue.consume", queue="tasks", ack_deadline=0.03)
    name = {"queue": "tasks", "message_id": kept["message_id"]}
    assert await nc.run("queue.extend", **name, seconds=30) == {"success": True}
    await asyncio.sleep(0.08)
    rejected = await nc.run("queue.ack", queue="tasks", message_id=late["message_id"])
    assert rejected["error"]["type"] == "AckDeadlineExceeded"
    assert await nc.run("queue.ack", **name) == {"success": True}
    again = await nc.run("queue.consume", queue="tasks")
    assert (again["message_id"], again["retry_count"]) == (late["message_id"], 1)


@pytest.mark.parametrize("value", [None, 0, -1.5, "ü\ud800", [], {"a": [1, {"b": None}]}, True, ""])
async def test_any_json_value_is_a_message(owner: Any, value: object) -> None:
    nc = await owner.json_client()
    await nc.run("queue.create", queue="tasks")
    await nc.run("queue.publish", queue="tasks", message=value)
    assert (await nc.run("queue.consume", queue="tasks"))["message"] == value


async def test_a_body_that_is_not_json_is_returned_as_base64(owner: Any) -> None:
    nc = await owner.json_client()
    await nc.run("queue.create", queue="tasks")
    for body in (b"\xff\x00", b"NaN", b""):
        await owner.engine.publish("tasks", body)
        got = await nc.run("queue.consume", queue="tasks")
        assert base64.b64decode(got["message"]["base64"]) == body


async def test_a_client_consumes_a_message_published_by_json_command(owner: Any) -> None:
    from qkit.backend import QueueSpec, SubscriptionSpec

    nc, client = await owner.json_client(), await owner.client()
    await client.declare(QueueSpec(name="orders"))
    await nc.run("queue.publish", queue="orders", message={"id": 1}, key="k", ttl=60)
    spec = SubscriptionSpec(queue="orders", group="g", consumer="c", prefetch=1)
    async with client.subscribe(spec) as subscription:
        (found,) = await subscription.receive(1)
    assert json.loads(found.envelope.body) == {"id": 1}
    assert found.envelope.key == "k"
    assert found.envelope.expires_at is not None


@pytest.mark.parametrize(
    ("line", "word"),
    [
        (b"help", "invalid JSON"),
        (b"[1]", "an object"),
        (b'{"command": "queue.publsh"}', "use one of queue.create, queue.delete"),
        (b'{"command": 7}', "unknown"),
        (b"{}", "unknown"),
        (b'{"command": "queue.stats", "payload": []}', "expected an object as payload"),
        (b'{"command": "queue.stats"}', "queue.stats: queue: Field required"),
        (
            b'{"command": "queue.stats", "payload": {"queue": 7}}',
            "queue: Input should be a valid string",
        ),
        (b'{"command": "queue.publish", "payload": {"queue": "q"}}', "message: Field required"),
        (
            PUBLISH % b'"prio": 3',
            "prio: Extra inputs are not permitted. Allowed fields: queue, message, priority",
        ),
        (
            PUBLISH % b'"priority": true',
            "priority: Input should be a valid integer",
        ),
        (
            PUBLISH % b'"headers": 3',
            "headers: Input should be a valid dictionary",
        ),
        (
            PUBLISH % b'"headers": {"a": 3}',
            "expected a str",
        ),
        (
            PUBLISH % b'"priority": 99',
            "0–9",
        ),
        (
            PUBLISH % b'"delay": 5, "ttl": 2',
            "must be less",
        ),
        (
            b'{"command": "queue.consume", "payload": {"queue": "q", "timeout": -1}}',
            "timeout: Input should be greater than or equal to 0",
        ),
        (
            b'{"command": "queue.consume", "payload": {"queue": "q", "timeout": %s}}'
            % (b"9" * 400),
            "timeout: Input should be a valid number",
        ),
        (
            b'{"command": "queue.consume", "payload": {"queue": "q", "ack_deadline": 0}}',
            "ack_deadline: Input should be greater than 0",
        ),
        (b'{"command": "queue.retry", "payload": {"queue": "q", "message_ids": 1}}', "list"),
        (
            b'{"command": "queue.retry", "payload": {"queue": "q", "message_ids": ["a", 1]}}',
            "message_ids.1: Input should be a valid string",
        ),
        (b'{"command": "queue.list", "payload": {"queue": "q"}}', "Allowed fields: none"),
        (
            b'{"command": "queue.peek", "payload": {"queue": "q", "limit": 10001}}',
            "limit: Input should be less than or equal to 10000",
        ),
        (
            b'{"command": "queue.create", "payload": {"queue": "q", "max_depth": null}}',
            "max_depth: Input should be a valid integer",
        ),
        (
            b'{"command": "queue.create", "payload": {"queue": "q", "max_depth": 7.0}}',
            "max_depth: Input should be a valid integer",
        ),
        (
            b'{"command": "queue.stats", "payload": {"queue": "q", "%s": 1}}' % (b"x" * 9_000),
            "x" * 80 + ": Extra inputs",
        ),
        (b"[" * 100_000, "invalid JSON"),
        (b'{"command": "queue.peek", "payload": {"queue": "q", "limit": NaN}}', "invalid JSON"),
    ],
)
async def test_an_invalid_request_gets_an_error_and_the_connection_stays_open(
    owner: Any, line: bytes, word: str
) -> None:
    nc = await owner.json_client()
    await nc.run("queue.create", queue="q")
    answer = await nc.line(line)
    assert word in answer["error"]["message"]
    assert answer["error"]["type"]
    assert await nc.run("queue.list") == {"queues": ["q"]}


async def test_null_in_an_optional_field_means_the_default(owner: Any) -> None:
    nc = await owner.json_client()
    await nc.run("queue.create", queue="q", max_retries=None)
    options = dict.fromkeys(("priority", "delay", "ttl", "headers", "key"))
    await nc.run("queue.publish", queue="q", message=1, **options)
    assert len((await nc.run("queue.peek", queue="q", limit=None))["messages"]) == 1
    options = dict.fromkeys(("timeout", "ack_deadline", "prefetch", "group", "consumer"))
    for _ in range(6):  # more than the default max_retries
        got = await nc.run("queue.consume", queue="q", **options)
        assert got["message"] == 1
        name = {"queue": "q", "message_id": got["message_id"], "receipt": None}
        assert await nc.run("queue.extend", **name, seconds=None) == {"success": True}
        assert (await nc.run("queue.nack", **name, requeue=None))["action"] == "requeued"
    retried = await nc.run("queue.retry", queue="q", message_ids=None, message_id=None)
    assert retried == {"retried": 0}


async def test_a_line_above_the_limit_gets_an_error_and_is_skipped(owner: Any) -> None:
    await owner.server.aclose()
    owner.server._max_line = 1_000
    await owner.server.start()
    nc = await owner.json_client()
    for size in (1_001, 5_000, 500_000):
        answer = await nc.line(b"x" * size)
        assert "longer" in answer["error"]["message"]
        assert await nc.run("queue.list") == {"queues": []}


async def test_replies_have_the_request_ids_and_the_order_of_the_requests(owner: Any) -> None:
    nc = await owner.json_client()
    for number in range(200):
        nc.writer.write(json.dumps({"command": "queue.list", "id": number}).encode() + b"\r\n\n")
    assert [await nc.answer() for _ in range(200)] == [
        {"id": number, "queues": []} for number in range(200)
    ]


async def test_replies_are_sent_after_the_end_of_input(owner: Any) -> None:
    """``echo … | nc -U`` closes its write half immediately; the last newline is optional."""
    reader, writer = await asyncio.open_unix_connection(owner.path)
    writer.write(
        b'{"command": "queue.create", "payload": {"queue": "q"}}\n{"command": "queue.list"}'
    )
    writer.write_eof()
    assert (await reader.read()).splitlines() == [b'{"success": true}', b'{"queues": ["q"]}']
    writer.close()


async def test_each_invalid_line_gets_an_error_reply(owner: Any) -> None:
    print("seed", SEED)
    chance = random.Random(SEED)
    nc = await owner.json_client()
    good = b'{"command": "queue.consume", "payload": {"queue": "q", "timeout": 0}, "id": [1]}'
    for _ in range(300):
        line = bytearray(good)
        for _ in range(chance.randrange(1, 5)):
            line[chance.randrange(len(line))] = chance.randrange(32, 127)
        if line.strip():
            answer = await nc.line(bytes(line))
            assert set(answer) <= {"error", "id"}, answer


async def test_closing_does_not_wait_for_a_long_consume(owner: Any) -> None:
    nc = await owner.json_client()
    await nc.run("queue.create", queue="tasks")
    waiting = asyncio.create_task(nc.run("queue.consume", queue="tasks", timeout=1_000))
    await asyncio.sleep(0.02)
    await asyncio.wait_for(owner.server.aclose(), 30)
    with pytest.raises(AssertionError, match="disconnected"):
        await waiting


async def test_a_client_that_disconnects_while_waiting_takes_no_message(owner: Any) -> None:
    nc, other = await owner.json_client(), await owner.json_client()
    await nc.run("queue.create", queue="tasks")
    nc.writer.write(
        b'{"command": "queue.consume", "payload": {"queue": "tasks", "timeout": 1000}}\n'
    )
    await asyncio.sleep(0.02)
    nc.writer.transport.abort()
    await asyncio.sleep(0.02)
    await other.run("queue.publish", queue="tasks", message=1)
    await asyncio.sleep(0.02)
    assert (await other.run("queue.stats", queue="tasks"))["depth"] == 1
