"""Every JSON command, as somebody types it into ``nc -U``."""

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
async def test_a_message_s_whole_life(owner: Any) -> None:
    nc = await owner.typist()
    assert await nc.say("queue.create", queue="tasks") == {"success": True}
    sent = await nc.say(
        "queue.publish", queue="tasks", message=VIDEO, priority=8, headers={"source": "web-app"}
    )
    assert sent == {"message_id": sent["message_id"], "position": 0}
    assert await nc.say("queue.peek", queue="tasks") == {
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
    got = await nc.say("queue.consume", queue="tasks", timeout=10, ack_deadline=60)
    assert got == {
        "message_id": sent["message_id"],
        "message": VIDEO,
        "priority": 8,
        "retry_count": 0,
        "headers": {"source": "web-app"},
        "receipt": got["receipt"],
    }
    ack = {"queue": "tasks", "message_id": sent["message_id"]}
    assert await nc.say("queue.ack", **ack) == {"success": True}
    again = await nc.say("queue.ack", **ack)
    assert again["error"]["type"] == "MessageNotFound"
    assert await nc.say("queue.consume", queue="tasks") == {"message_id": None, "message": None}


async def test_queues(owner: Any) -> None:
    nc = await owner.typist()
    await nc.say(
        "queue.create", queue="b", max_depth=1, max_retries=None, ack_deadline=5, dead_letter=False
    )
    await nc.say("queue.create", queue="a")
    assert await nc.say("queue.list") == {"queues": ["a", "b"]}
    other = await nc.say("queue.create", queue="a", max_depth=7)
    assert other["error"]["type"] == "ConfigError"
    await nc.say("queue.publish", queue="b", message=1)
    full = await nc.say("queue.publish", queue="b", message=2)
    assert full["error"]["type"] == "QueueFull"
    assert await nc.say("queue.purge", queue="b") == {"purged": 1}
    assert await nc.say("queue.delete", queue="b") == {"success": True}
    for command in ("queue.stats", "queue.delete", "queue.purge", "queue.peek", "queue.consume"):
        gone = await nc.say(command, queue="b")
        assert gone["error"]["type"] == "QueueNotFound"
    assert (await nc.say("queue.create", queue="no spaces"))["error"]["type"] == "InvalidName"


async def test_the_figures_of_a_queue(owner: Any) -> None:
    nc = await owner.typist()
    await nc.say("queue.create", queue="tasks")
    for number in range(4):
        await nc.say("queue.publish", queue="tasks", message=number)
    await nc.say("queue.publish", queue="tasks", message="later", delay=60)
    first = await nc.say("queue.consume", queue="tasks")
    await nc.say("queue.ack", queue="tasks", message_id=first["message_id"])
    second = await nc.say("queue.consume", queue="tasks")
    await nc.say("queue.nack", queue="tasks", message_id=second["message_id"], requeue=False)
    await nc.say("queue.consume", queue="tasks")
    stats = await nc.say("queue.stats", queue="tasks")
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
async def test_nack_requeues_or_buries_and_the_dead_are_listed_retried_and_purged(
    owner: Any,
) -> None:
    nc = await owner.typist()
    await nc.say("queue.create", queue="tasks", max_retries=1)
    ids = [
        (await nc.say("queue.publish", queue="tasks", message=n))["message_id"] for n in range(2)
    ]
    for retry, action in ((0, "requeued"), (1, "dead_lettered")):
        got = await nc.say("queue.consume", queue="tasks")
        assert (got["message_id"], got["retry_count"]) == (ids[0], retry)
        nack = await nc.say("queue.nack", queue="tasks", message_id=ids[0])
        assert nack == {"success": True, "action": action}
    await nc.say("queue.consume", queue="tasks")
    nack = await nc.say("queue.nack", queue="tasks", message_id=ids[1], requeue=False)
    assert nack["action"] == "dead_lettered"
    letters = (await nc.say("queue.dead_letters", queue="tasks"))["dead_letters"]
    assert [(item["message_id"], item["reason"], item["message"]) for item in letters] == [
        (ids[0], "MaxRetriesExceeded", 0),
        (ids[1], "ExplicitNack", 1),
    ]
    assert letters[0]["original_queue"] == "tasks"
    assert letters[0]["attempts"] == 2
    retried = await nc.say("queue.retry", queue="tasks", message_id=ids[1])
    assert retried == {"retried": 1}
    assert (await nc.say("queue.consume", queue="tasks"))["message_id"] == ids[1]
    assert await nc.say("queue.purge_dead_letters", queue="tasks") == {"purged": 1}
    assert await nc.say("queue.retry", queue="tasks", message_ids=ids) == {"retried": 0}
    assert await nc.say("queue.retry", queue="tasks") == {"retried": 0}


@pytest.mark.proves("000-prefetch-2")
async def test_prefetch_bounds_what_a_connection_holds(owner: Any) -> None:
    nc = await owner.typist()
    await nc.say("queue.create", queue="tasks")
    for number in range(5):
        await nc.say("queue.publish", queue="tasks", message=number)
    got = await nc.say("queue.consume", queue="tasks", prefetch=3)
    assert [item["message"] for item in got["messages"]] == [0, 1, 2]
    assert await nc.say("queue.consume", queue="tasks", prefetch=3) == {
        "messages": [],
        "unsettled": 3,
    }
    await nc.say("queue.ack", queue="tasks", message_id=got["messages"][1]["message_id"])
    more = await nc.say("queue.consume", queue="tasks", prefetch=3)
    assert [item["message"] for item in more["messages"]] == [3]
    assert (await nc.say("queue.consume", queue="tasks", prefetch=0))["error"]


@pytest.mark.proves("000-consume-1")
async def test_consume_waits_as_long_as_it_was_told(owner: Any) -> None:
    nc, other = await owner.typist(), await owner.typist()
    await nc.say("queue.create", queue="tasks")
    waiting = asyncio.create_task(nc.say("queue.consume", queue="tasks", timeout=5))
    await asyncio.sleep(0.01)
    await other.say("queue.publish", queue="tasks", message="now")
    assert (await waiting)["message"] == "now"
    none = await nc.say("queue.consume", queue="tasks", timeout=0.01)
    assert none["message_id"] is None


async def test_one_shot_connections_settle_by_receipt(owner: Any) -> None:
    nc, other = await owner.typist(), await owner.typist()
    await nc.say("queue.create", queue="tasks")
    await nc.say("queue.publish", queue="tasks", message=1)
    got = await nc.say("queue.consume", queue="tasks")
    await nc.aclose()
    name = {"queue": "tasks", "message_id": got["message_id"]}
    refused = await other.say("queue.ack", **name)
    assert refused["error"]["type"] == "MessageNotFound"
    assert "receipt" in refused["error"]["message"]
    assert (await other.say("queue.ack", **name, receipt="guess"))["error"]
    done = await other.say("queue.ack", **name, receipt=got["receipt"])
    assert done == {"success": True}


@pytest.mark.proves("000-ack-1")
async def test_a_late_ack_is_refused_and_an_extended_one_is_not(owner: Any) -> None:
    nc = await owner.typist()
    await nc.say("queue.create", queue="tasks")
    for number in range(2):
        await nc.say("queue.publish", queue="tasks", message=number)
    late = await nc.say("queue.consume", queue="tasks", ack_deadline=0.03)
    kept = await nc.say("queue.consume", queue="tasks", ack_deadline=0.03)
    name = {"queue": "tasks", "message_id": kept["message_id"]}
    assert await nc.say("queue.extend", **name, seconds=30) == {"success": True}
    await asyncio.sleep(0.08)
    refused = await nc.say("queue.ack", queue="tasks", message_id=late["message_id"])
    assert refused["error"]["type"] == "AckDeadlineExceeded"
    assert await nc.say("queue.ack", **name) == {"success": True}
    again = await nc.say("queue.consume", queue="tasks")
    assert (again["message_id"], again["retry_count"]) == (late["message_id"], 1)


@pytest.mark.parametrize("value", [None, 0, -1.5, "ü\ud800", [], {"a": [1, {"b": None}]}, True, ""])
async def test_any_json_value_is_a_message(owner: Any, value: object) -> None:
    nc = await owner.typist()
    await nc.say("queue.create", queue="tasks")
    await nc.say("queue.publish", queue="tasks", message=value)
    assert (await nc.say("queue.consume", queue="tasks"))["message"] == value


async def test_bytes_that_are_no_json_come_as_base64(owner: Any) -> None:
    nc = await owner.typist()
    await nc.say("queue.create", queue="tasks")
    for body in (b"\xff\x00", b"NaN", b""):
        await owner.engine.publish("tasks", body)
        got = await nc.say("queue.consume", queue="tasks")
        assert base64.b64decode(got["message"]["base64"]) == body


async def test_what_one_publishes_by_hand_a_client_consumes(owner: Any) -> None:
    from qkit.backend import QueueSpec, SubscriptionSpec

    nc, client = await owner.typist(), await owner.client()
    await client.declare(QueueSpec(name="orders"))
    await nc.say("queue.publish", queue="orders", message={"id": 1}, key="k", ttl=60)
    spec = SubscriptionSpec(queue="orders", group="g", consumer="c", prefetch=1)
    async with client.subscribe(spec) as subscription:
        (found,) = await subscription.receive(1)
    assert json.loads(found.envelope.body) == {"id": 1}
    assert found.envelope.key == "k"
    assert found.envelope.expires_at is not None


@pytest.mark.parametrize(
    ("line", "word"),
    [
        (b"help", "no JSON"),
        (b"[1]", "an object"),
        (b'{"command": "queue.publsh"}', "use one of queue.create, queue.delete"),
        (b'{"command": 7}', "unknown"),
        (b"{}", "unknown"),
        (b'{"command": "queue.stats", "payload": []}', "payload is an object"),
        (b'{"command": "queue.stats"}', "queue.stats: queue: Field required"),
        (
            b'{"command": "queue.stats", "payload": {"queue": 7}}',
            "queue: Input should be a valid string",
        ),
        (b'{"command": "queue.publish", "payload": {"queue": "q"}}', "message: Field required"),
        (
            PUBLISH % b'"prio": 3',
            "prio: Extra inputs are not permitted. It takes queue, message, priority",
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
            "pass a str",
        ),
        (
            PUBLISH % b'"priority": 99',
            "0–9",
        ),
        (
            PUBLISH % b'"delay": 5, "ttl": 2',
            "not shorter",
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
        (b'{"command": "queue.list", "payload": {"queue": "q"}}', "It takes no fields"),
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
        (b"[" * 100_000, "no JSON"),
        (b'{"command": "queue.peek", "payload": {"queue": "q", "limit": NaN}}', "no JSON"),
    ],
)
async def test_mistakes_get_a_helpful_word_and_the_connection_lives_on(
    owner: Any, line: bytes, word: str
) -> None:
    nc = await owner.typist()
    await nc.say("queue.create", queue="q")
    answer = await nc.line(line)
    assert word in answer["error"]["message"]
    assert answer["error"]["type"]
    assert await nc.say("queue.list") == {"queues": ["q"]}


async def test_null_in_an_optional_field_is_as_if_it_were_absent(owner: Any) -> None:
    nc = await owner.typist()
    await nc.say("queue.create", queue="q", max_retries=None)
    options = dict.fromkeys(("priority", "delay", "ttl", "headers", "key"))
    await nc.say("queue.publish", queue="q", message=1, **options)
    assert len((await nc.say("queue.peek", queue="q", limit=None))["messages"]) == 1
    options = dict.fromkeys(("timeout", "ack_deadline", "prefetch", "group", "consumer"))
    for _ in range(6):  # above the default of max_retries
        got = await nc.say("queue.consume", queue="q", **options)
        assert got["message"] == 1
        name = {"queue": "q", "message_id": got["message_id"], "receipt": None}
        assert await nc.say("queue.extend", **name, seconds=None) == {"success": True}
        assert (await nc.say("queue.nack", **name, requeue=None))["action"] == "requeued"
    retried = await nc.say("queue.retry", queue="q", message_ids=None, message_id=None)
    assert retried == {"retried": 0}


async def test_a_line_beyond_the_limit_is_answered_and_skipped(owner: Any) -> None:
    await owner.server.aclose()
    owner.server._max_line = 1_000
    await owner.server.start()
    nc = await owner.typist()
    for size in (1_001, 5_000, 500_000):
        answer = await nc.line(b"x" * size)
        assert "longer" in answer["error"]["message"]
        assert await nc.say("queue.list") == {"queues": []}


async def test_ids_come_back_and_lines_are_answered_in_order(owner: Any) -> None:
    nc = await owner.typist()
    for number in range(200):
        nc.writer.write(json.dumps({"command": "queue.list", "id": number}).encode() + b"\r\n\n")
    assert [await nc.answer() for _ in range(200)] == [
        {"id": number, "queues": []} for number in range(200)
    ]


async def test_after_the_end_of_input_the_answers_still_come(owner: Any) -> None:
    """``echo … | nc -U`` closes its writing half at once, and needs no last newline."""
    reader, writer = await asyncio.open_unix_connection(owner.path)
    writer.write(
        b'{"command": "queue.create", "payload": {"queue": "q"}}\n{"command": "queue.list"}'
    )
    writer.write_eof()
    assert (await reader.read()).splitlines() == [b'{"success": true}', b'{"queues": ["q"]}']
    writer.close()


async def test_garbage_lines_are_answered_one_by_one(owner: Any) -> None:
    print("seed", SEED)
    chance = random.Random(SEED)
    nc = await owner.typist()
    good = b'{"command": "queue.consume", "payload": {"queue": "q", "timeout": 0}, "id": [1]}'
    for _ in range(300):
        line = bytearray(good)
        for _ in range(chance.randrange(1, 5)):
            line[chance.randrange(len(line))] = chance.randrange(32, 127)
        if line.strip():
            answer = await nc.line(bytes(line))
            assert set(answer) <= {"error", "id"}, answer


async def test_closing_does_not_wait_for_a_consume_without_end(owner: Any) -> None:
    nc = await owner.typist()
    await nc.say("queue.create", queue="tasks")
    waiting = asyncio.create_task(nc.say("queue.consume", queue="tasks", timeout=1_000))
    await asyncio.sleep(0.02)
    await asyncio.wait_for(owner.server.aclose(), 30)
    with pytest.raises(AssertionError, match="hung up"):
        await waiting


async def test_who_hangs_up_while_it_waits_takes_no_message(owner: Any) -> None:
    nc, other = await owner.typist(), await owner.typist()
    await nc.say("queue.create", queue="tasks")
    nc.writer.write(
        b'{"command": "queue.consume", "payload": {"queue": "tasks", "timeout": 1000}}\n'
    )
    await asyncio.sleep(0.02)
    nc.writer.transport.abort()
    await asyncio.sleep(0.02)
    await other.say("queue.publish", queue="tasks", message=1)
    await asyncio.sleep(0.02)
    assert (await other.say("queue.stats", queue="tasks"))["depth"] == 1
