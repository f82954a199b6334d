"""``qkit send``, ``peek`` and ``consume``."""

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


def test_lines_of_stdin_are_sent_each(shell: Shell) -> None:
    lines = "".join(f'{{"id": {number}}}\n' for number in range(1_200)) + "\n\n"
    answer = shell.json("send", "orders", stdin=lines)
    assert answer["sent"] == 1_200
    assert len(set(answer["message_ids"])) == 1_200
    (row,) = shell.json("queues")
    assert (row["queue"], row["depth"]) == ("orders", 1_200)


def test_files_are_sent_whole_or_by_lines(shell: Shell, tmp_path: Path) -> None:
    file = tmp_path / "orders.json"
    file.write_text("[\n1,\n2\n]")
    shell.run("send", "whole", "--file", str(file))
    assert json.loads(shell.json("peek", "whole")[0]["body"]["content"]) == [1, 2]
    file.write_text("1\n2\n\n3\n")
    assert "3 messages sent" in shell.run("send", "each", "--lines", str(file)).stderr
    assert shell.json("send", "each", "--lines", "-", stdin="4\n")["sent"] == 1
    assert shell.json("send", "each", "-", stdin="5\n6\n")["sent"] == 2


def test_a_topic_is_published_to(shell: Shell) -> None:
    shell.run("send", "prices", "1", "--broadcast")
    assert [row["queue"] for row in shell.json("queues")] == ["prices"]


@pytest.mark.parametrize(
    ("words", "stdin", "said", "code"),
    [
        (["orders", "hello"], None, "no JSON", 2),
        (["orders"], '{"id": 1}\nnonsense\n', "line 2 is no JSON", 2),
        (["orders", "1", "--lines", "x"], None, "say once what to send", 2),
        (["orders", "1", "-H", "tenant"], None, "NAME=VALUE", 2),
        (["orders", "1", "--priority", "99"], None, "priority", 1),
        (["orders", "1", "--file", "nowhere.json"], None, "say once", 2),
        (["orders", "--file", "nowhere.json"], None, "nowhere.json", 1),
        (["a b", "1"], None, "channel name", 1),
    ],
)
def test_what_cannot_be_sent_is_said(
    shell: Shell, words: list[str], stdin: str | None, said: str, code: int
) -> None:
    result = shell.run("send", *words, stdin=stdin, code=code)
    assert said in " ".join(result.stderr.split())
    error = shell.json("send", *words, stdin=stdin, code=code)["error"]
    assert set(error) == {"type", "message"}


def test_a_send_that_makes_a_queue_says_so(shell: Shell) -> None:
    assert "this send made it." in shell.run("send", "orders", "1").stderr
    assert shell.run("send", "orders", "1").stderr == ""
    mistyped = " ".join(shell.run("send", "ordres", "1").stderr.split())
    assert "Did you mean orders?" in mistyped


def test_a_line_that_cannot_be_sent_does_not_hide_what_was(shell: Shell) -> None:
    lines = "1\n" * 600 + "nonsense\n"
    result = shell.run("send", "orders", stdin=lines, code=2)
    assert "line 601 is no JSON" in " ".join(result.stderr.split())
    assert "500 messages had been sent before." in result.stderr
    assert shell.json("queues")[0]["depth"] == 500
    result = shell.run("send", "orders", stdin="1\nnonsense\n", code=2)
    assert "0 messages had been sent before." in result.stderr
    assert shell.json("queues")[0]["depth"] == 500


def test_what_a_broker_accepted_of_a_group_is_counted(
    shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def half(self: QueueService, queue: str, bodies: list[object], **options: object) -> None:
        raise PartialSend("1 of 2", [Sent("0190"), QueueFull("full")])

    monkeypatch.setattr(QueueService, "send_many", half)
    result = shell.run("send", "orders", stdin="1\n2\n", code=1)
    assert "1 message had been sent before." in result.stderr


def test_peek_shows_and_takes_nothing(shell: Shell) -> None:
    shell.run("send", "orders", '"hello \\u001b[2J there"')
    for _ in range(2):
        shown = shell.run("peek", "orders").stdout
    assert "hello" in shown
    assert "\x1b[2J" not in shown
    assert "Nothing waits" in shell.run("peek", "orders", "-n", "1", code=0).stderr or shown


def test_a_queue_that_is_not_there_is_said(shell: Shell) -> None:
    shell.run("send", "orders", "1")
    for command in (["peek"], ["stats"], ["purge", "--yes"], ["consume", "--timeout", "0"]):
        result = shell.run(*command, "nowhere", code=1)
        assert "nowhere" in result.stderr


def test_a_directory_in_memory_cannot_be_looked_into(
    shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    from typer.testing import CliRunner

    from qkit.cli.app import app

    result = CliRunner().invoke(app, ["queues"], env={"QKIT_PATH": ""})
    assert result.exit_code == 2
    assert "QKIT_PATH=data" in result.stderr


def test_consume_gives_back_what_it_showed(shell: Shell) -> None:
    for number in range(3):
        shell.run("send", "orders", str(number))
    result = shell.run("consume", "orders", "--timeout", "0.5")
    assert [line.split()[-1] for line in result.stdout.splitlines()] == ["0", "1", "2"]
    assert "3 messages shown and given back" in result.stderr
    first, *_ = shell.json("peek", "orders")
    assert first["attempt"] == 1
    (row,) = shell.json("queues")
    assert (row["depth"], row["in_flight"]) == (3, 0)


def test_consume_says_that_it_holds_no_more(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("qkit.cli.messages.MAX_HELD", 2)
    shell.run("send", "orders", stdin="1\n2\n3\n")
    result = shell.run("consume", "orders")
    assert "2 messages shown and given back. It holds no more" in result.stderr
    assert "holds no more" not in shell.run("consume", "orders", "--limit", "2").stderr
    assert "1,000" in shell.run("consume", "--help").stdout


def test_consume_takes_them_away_only_if_asked(shell: Shell) -> None:
    for number in range(3):
        shell.run("send", "orders", str(number))
    result = shell.run("consume", "orders", "--ack", "-n", "2", "--json")
    assert [json.loads(line)["body"]["content"] for line in result.stdout.splitlines()] == [
        "0",
        "1",
    ]
    (row,) = shell.json("queues")
    assert row["depth"] == 1


def test_consume_goes_on_until_ctrl_c_and_then_gives_back(shell: Shell) -> None:
    shell.run("send", "orders", "1")
    process = subprocess.Popen(
        [sys.executable, "-u", "-m", "qkit.cli", "consume", "orders"],
        env=os.environ | {"QKIT_PATH": str(shell.path)},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        assert process.stdout.readline().split()[-1] == "1"
        time.sleep(0.2)  # until it waits again; either way it must give back
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 0, errors
    assert "1 message shown and given back" in errors
    assert "Traceback" not in errors
    assert len(shell.json("peek", "orders")) == 1
