"""JSON logs: one valid line for each record, with its fields and its traceback."""

from __future__ import annotations

import io
import json
import logging
import subprocess
import sys
from datetime import datetime

import pytest

from qkit._internal.logging import JsonFormatter, Lines, escape_record, logger


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


ATTACK = "7\n2026-01-01 ERROR forged\r\x1b[2J\x9b31m\u202e\x00"
UNSAFE = set("\n\r\x1b\x9b\u202e\x00")


@pytest.mark.parametrize("name", ["qkit", "qkit.native"])
def test_foreign_text_cannot_add_a_line_or_send_a_terminal_command(name: str) -> None:
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(logging.Formatter("%(levelname)s %(message)s %(message_id)s"))
    log = logging.getLogger(name)
    log.addHandler(handler)
    try:
        foreign = {"message_id": ATTACK}
        log.warning("message %s of %r: %s", ATTACK, [ATTACK], ValueError(ATTACK), extra=foreign)
        log.warning("%d of %.1f s", 3, 0.25, extra=foreign)
        log.warning("%(path)s", {"path": ATTACK}, extra=foreign)
        try:
            raise ValueError(ATTACK)
        except ValueError:
            log.exception("failed", extra=foreign)
    finally:
        log.removeHandler(handler)
    text = stream.getvalue()
    assert not (UNSAFE - {"\n"}) & set(text)
    lines = text.splitlines()
    assert [line for line in lines if line.startswith(("WARNING", "ERROR"))] == lines[:4]
    assert all(line.startswith("  ") for line in lines[4:])  # the traceback
    assert lines[1].startswith("WARNING 3 of 0.2 s")


def test_line_breaks_of_a_stack_are_kept(caplog: pytest.LogCaptureFixture) -> None:
    caplog.handler.addFilter(escape_record)  # as the handler of ``qkit run`` does
    logger.warning("blocked here:\n%s", Lines("one\ntwo\x1b"))
    assert caplog.messages == ["blocked here:\none\ntwo\\x1b"]
    caplog.handler.removeFilter(escape_record)
