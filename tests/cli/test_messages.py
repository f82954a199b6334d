"""``qkit send``, ``qkit peek`` and ``qkit consume``."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from qkit import QueueService
from qkit.errors import PartialSend, QueueFull
from qkit.message import Sent
from tests.support.cli import Shell


def test_an_argument_is_sent_with_its_options(shell: Shell) -> None:
    id = shell.run(
        "send", "orders", '{"id": 1}', "--priority", "8", "--key", "k", "-H", "tenant=a=b",
        "--ttl", "60",
    ).stdout.strip()  # fmt: skip
    (message,) = shell.json("peek", "orders")
    assert message["id"] == id
    assert (message["priority"], message["key"]) == (8, "k")
    assert message["headers"]["tenant"] == "a=b"
    assert json.loads(message["body"]["content"]) == {"id": 1}
    assert message["expires_at"] is not None


def test_each_line_of_stdin_is_one_message(shell: Shell) -> None:
    lines = "".join(f'{{"id": {number}}}\n' for number in range(1_200)) + "\n\n"
    answer = shell.json("send", "orders", stdin=lines)
    assert answer["sent"] == 1_200
    assert len(set(answer["message_ids"])) == 1_200
    (row,) = shell.json("queues")
    assert (row["queue"], row["depth"]) == ("orders", 1_200)


def test_a_file_is_sent_as_one_message_or_line_by_line(shell: Shell, tmp_path: Path) -> None:
    file = tmp_path / "orders.json"
    file.write_text("[\n1,\n2\n]")
    shell.run("send", "whole", "--file", str(file))
    assert json.loads(shell.json("peek", "whole")[0]["body"]["content"]) == [1, 2]
    file.write_text("1\n2\n\n3\n")
    assert "3 messages sent" in shell.run("send", "each", "--lines", str(file)).stderr
    assert shell.json("send", "each", "--lines", "-", stdin="4\n")["sent"] == 1
    assert shell.json("send", "each", "-", stdin="5\n6\n")["sent"] == 2


def test_broadcast_publishes_to_a_topic(shell: Shell) -> None:
    shell.run("send", "prices", "1", "--broadcast")
    assert [row["queue"] for row in shell.json("queues")] == ["prices"]


@pytest.mark.parametrize(
    ("arguments", "stdin", "expected", "code"),
    [
        (["orders", "hello"], None, "not JSON", 2),
        (["orders"], '{"id": 1}\nnonsense\n', "line 2 is not JSON", 2),
        (["orders", "1", "--lines", "x"], None, "give only one of", 2),
        (["orders", "1", "-H", "tenant"], None, "NAME=VALUE", 2),
        (["orders", "1", "--priority", "99"], None, "priority", 1),
        (["orders", "1", "--file", "nowhere.json"], None, "give only one of", 2),
        (["orders", "--file", "nowhere.json"], None, "nowhere.json", 1),
        (["a b", "1"], None, "channel name", 1),
    ],
)
def test_an_invalid_send_is_an_error(
    shell: Shell, arguments: list[str], stdin: str | None, expected: str, code: int
) -> None:
    result = shell.run("send", *arguments, stdin=stdin, code=code)
    assert expected in " ".join(result.stderr.split())
    error = shell.json("send", *arguments, stdin=stdin, code=code)["error"]
    assert set(error) == {"type", "message"}


def test_a_send_that_creates_a_queue_prints_a_note(shell: Shell) -> None:
    assert "this send created it." in shell.run("send", "orders", "1").stderr
    assert shell.run("send", "orders", "1").stderr == ""
    mistyped = " ".join(shell.run("send", "ordres", "1").stderr.split())
    assert "Did you mean orders?" in mistyped


def test_the_error_for_an_invalid_line_reports_how_many_messages_were_sent(shell: Shell) -> None:
    lines = "1\n" * 600 + "nonsense\n"
    result = shell.run("send", "orders", stdin=lines, code=2)
    assert "line 601 is not JSON" in " ".join(result.stderr.split())
    assert "500 messages sent before the error." in result.stderr
    assert shell.json("queues")[0]["depth"] == 500
    result = shell.run("send", "orders", stdin="1\nnonsense\n", code=2)
    assert "0 messages sent before the error." in result.stderr
    assert shell.json("queues")[0]["depth"] == 500


def test_a_partial_send_reports_the_confirmed_messages(
    shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def send_half(
        self: QueueService, queue: str, bodies: list[object], **options: object
    ) -> None:
        raise PartialSend("1 of 2", [Sent("0190"), QueueFull("full")])

    monkeypatch.setattr(QueueService, "send_many", send_half)
    result = shell.run("send", "orders", stdin="1\n2\n", code=1)
    assert "1 message sent before the error." in result.stderr


def test_peek_does_not_consume_and_escapes_control_characters(shell: Shell) -> None:
    shell.run("send", "orders", '"hello \\u001b[2J there"')
    for _ in range(2):
        shown = shell.run("peek", "orders").stdout
    assert "hello" in shown
    assert "\x1b[2J" not in shown
    shell.run("purge", "orders", "--yes")
    assert "no ready messages" in shell.run("peek", "orders").stderr


def test_an_unknown_queue_is_an_error(shell: Shell) -> None:
    shell.run("send", "orders", "1")
    for command in (["peek"], ["stats"], ["purge", "--yes"], ["consume", "--timeout", "0"]):
        result = shell.run(*command, "nowhere", code=1)
        assert "nowhere" in result.stderr


def test_commands_require_a_directory_for_native_queues(
    shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    from typer.testing import CliRunner

    from qkit.cli.app import app

    result = CliRunner().invoke(app, ["queues"], env={"QKIT_PATH": ""})
    assert result.exit_code == 2
    assert "QKIT_PATH=data" in result.stderr


def test_consume_releases_the_messages_that_it_showed(shell: Shell) -> None:
    for number in range(3):
        shell.run("send", "orders", str(number))
    result = shell.run("consume", "orders", "--timeout", "0.5")
    assert [line.split()[-1] for line in result.stdout.splitlines()] == ["0", "1", "2"]
    assert "3 messages shown and released" in result.stderr
    first, *_ = shell.json("peek", "orders")
    assert first["attempt"] == 1
    (row,) = shell.json("queues")
    assert (row["depth"], row["in_flight"]) == (3, 0)


def test_consume_without_ack_stops_at_the_in_flight_limit(
    shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("qkit.cli.messages.MAX_IN_FLIGHT", 2)
    shell.run("send", "orders", stdin="1\n2\n3\n")
    result = shell.run("consume", "orders")
    assert "2 messages shown and released. This is the limit without --ack" in result.stderr
    assert "limit" not in shell.run("consume", "orders", "--limit", "2").stderr
    assert "1,000" in shell.run("consume", "--help").stdout


def test_consume_with_ack_removes_the_messages(shell: Shell) -> None:
    for number in range(3):
        shell.run("send", "orders", str(number))
    result = shell.run("consume", "orders", "--ack", "-n", "2", "--json")
    assert [json.loads(line)["body"]["content"] for line in result.stdout.splitlines()] == [
        "0",
        "1",
    ]
    (row,) = shell.json("queues")
    assert row["depth"] == 1


def test_consume_runs_until_ctrl_c_and_then_releases_the_messages(shell: Shell) -> None:
    shell.run("send", "orders", "1")
    process = subprocess.Popen(
        [sys.executable, "-u", "-m", "qkit.cli", "consume", "orders"],
        env=os.environ | {"QKIT_PATH": str(shell.path)},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        assert process.stdout.readline().split()[-1] == "1"
        time.sleep(0.2)  # by now it usually waits again; the release must not depend on it
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 0, errors
    assert "1 message shown and released" in errors
    assert "Traceback" not in errors
    assert len(shell.json("peek", "orders")) == 1
