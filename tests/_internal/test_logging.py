"""JSON logs: one valid line for each record, with its fields and its traceback."""

from __future__ import annotations

import io
import json
import logging
import subprocess
import sys
from datetime import datetime

import pytest

from qkit._internal.logging import JsonFormatter


def line(record: logging.LogRecord) -> dict[str, object]:
    text = JsonFormatter().format(record)
    assert len(text.splitlines()) == 1
    text.encode()
    parsed: dict[str, object] = json.loads(text)
    return parsed


def record(message: str = "retrying %s", *args: object, **extra: object) -> logging.LogRecord:
    return logging.getLogger("qkit").makeRecord(
        "qkit", logging.WARNING, "x.py", 1, message, args, None, extra=extra
    )


@pytest.mark.proves("003-errors-5", "003-errors-6")
def test_a_record_becomes_an_object_with_time_level_message_and_fields() -> None:
    written = line(record("retrying %s", "it", queue="orders", consumer="c", attempt=2))
    moment = datetime.fromisoformat(str(written.pop("timestamp")))
    assert moment.tzinfo is not None
    assert written == {
        "level": "warning",
        "logger": "qkit",
        "message": "retrying it",
        "queue": "orders",
        "consumer": "c",
        "attempt": 2,
    }


@pytest.mark.proves("003-errors-6")
def test_the_record_of_an_error_includes_its_traceback() -> None:
    failed = record("failed")
    try:
        raise ValueError("negative total")
    except ValueError:
        failed.exc_info = sys.exc_info()
    stack = str(line(failed)["stack"])
    assert stack.startswith("Traceback")
    assert stack.endswith("ValueError: negative total")


def test_values_that_json_does_not_support_become_text() -> None:
    assert line(record("x", error=ValueError("bad")))["error"] == "bad"


@pytest.mark.parametrize("text", ["a\r\nINFO forged", "\0\x1b[2J", "caf\udcc3 \u2028", "ünï"])
def test_no_character_breaks_the_line(text: str) -> None:
    parsed = line(record("%s", text, queue=text))
    assert parsed["message"] == parsed["queue"] == text


FAILING = """
import asyncio
from qkit import QueueService, RetrySettings, Settings, consume

@consume("orders", retry=RetrySettings(enabled=False))
async def place(order: int) -> None:
    service.stop()
    raise ZeroDivisionError("no such order")

service = QueueService(Settings(type="native"))
service.register(place)

async def main() -> None:
    await service.start()
    await service.send("orders", 1)
    await service.run()

SERVER
"""
UVICORN = """
import uvicorn

async def app(scope, receive, send):
    assert scope["type"] == "lifespan"
    await receive()
    await main()
    server.should_exit = True
    await send({"type": "lifespan.startup.complete"})
    await receive()
    await send({"type": "lifespan.shutdown.complete"})

server = uvicorn.Server(uvicorn.Config(app, port=0))
server.run()
"""


@pytest.mark.parametrize("server", ["asyncio.run(main())", UVICORN], ids=["asyncio", "uvicorn"])
def test_a_final_failure_is_visible_although_no_logging_is_configured(server: str) -> None:
    program = FAILING.replace("SERVER", server)
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
    )
    assert "failed for good (MaxRetriesExceeded), dead-lettered" in done.stderr
    assert "ZeroDivisionError: no such order" in done.stderr
    assert "Traceback" in done.stderr


def test_the_formatter_works_in_a_log_handler() -> None:
    stream = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonFormatter())
    handler.handle(record("a file named %s", "caf\udce9"))
    stream.seek(0)
    assert json.loads(stream.read())["message"] == "a file named caf\udce9"
