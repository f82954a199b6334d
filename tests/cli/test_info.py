"""``qkit health``, ``capabilities``, ``config`` and ``asyncapi``; help, version and completion."""

from __future__ import annotations

import http.server
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from qkit.backends.capability_matrix import COLUMNS
from qkit.cli.app import app
from tests.support.cli import Shell

CANARY = "c4n4ry"


def test_health_exits_with_0_if_the_broker_responds(shell: Shell) -> None:
    assert "ready" in shell.run("health").stdout
    assert shell.json("health")["connection_state"] == "connected"


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def test_an_error_about_an_unreachable_broker_hides_the_password(
    shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QKIT_TYPE", "redis")
    monkeypatch.setenv("QKIT_MODE", "list")
    monkeypatch.setenv("QKIT_URL", f"redis://user:{CANARY}@127.0.0.1:{free_port()}/0")
    monkeypatch.setenv("QKIT_SEND_TIMEOUT", "1")
    runner = CliRunner()
    for words in (["health"], ["queues"], ["send", "orders", "1"], ["health", "--json"]):
        result = runner.invoke(app, words)
        assert result.exit_code == 1, result.output
        assert "127.0.0.1" in result.output
        assert CANARY not in result.output
        assert "Traceback" not in result.output
    shown = runner.invoke(app, ["config", "show"])
    assert "***" in shown.output
    assert CANARY not in shown.output + runner.invoke(app, ["config", "show", "--json"]).output
    assert CANARY not in runner.invoke(app, ["config", "show", "--all"]).output


class Probe(http.server.BaseHTTPRequestHandler):
    status = 200
    content = b'{"status": "ready", "reason": null}'

    def do_GET(self) -> None:
        self.send_response(self.status)
        self.end_headers()
        self.wfile.write(self.content)

    def log_message(self, *arguments: object) -> None: ...


@pytest.fixture
def worker() -> Iterator[str]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Probe)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_health_checks_a_worker_by_url(
    shell: Shell, worker: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "ready" in shell.run("health", "--url", worker).stdout
    monkeypatch.setattr(Probe, "status", 503)
    monkeypatch.setattr(Probe, "content", b'{"status": "not ready", "reason": "shutting down"}')
    assert "shutting down" in shell.run("health", "--url", f"{worker}/", code=1).stdout
    monkeypatch.setattr(Probe, "content", b"<html>")
    assert "503" in shell.run("health", "--url", worker, code=1).stdout
    unreachable = shell.run("health", "--url", f"http://127.0.0.1:{free_port()}", code=1)
    assert "no response" in unreachable.stdout
    assert "http://" in shell.run("health", "--url", "file:///etc/passwd", code=2).stderr


def test_capabilities_shows_one_backend_or_all(shell: Shell) -> None:
    assert shell.json("capabilities")["durable"] == "native"
    assert "native-durable" in shell.run("capabilities").stdout
    assert set(shell.json("capabilities", "--all")) == set(COLUMNS)
    narrow = CliRunner().invoke(app, ["capabilities", "--all"], env={"COLUMNS": "80"})
    words = narrow.stdout.split()
    for name in COLUMNS:
        assert set(name.split("-")) <= set(words), name  # names are wrapped only at hyphens
    assert max(map(len, narrow.stdout.splitlines())) <= 80


def test_settings_come_from_a_file_and_the_environment(
    shell: Shell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "other.toml"
    file.write_text('type = "native"\nprefetch = 20\n[retry]\nmax_attempts = 7\n')
    values = shell.json("config", "show", "--config", str(file))
    assert values["prefetch"] == 20
    assert values["retry"]["max_attempts"] == 7
    assert values["path"] == str(shell.path)
    monkeypatch.setenv("QKIT_CONFIG", str(file))
    assert shell.json("config", "show")["prefetch"] == 20
    shown = shell.run("config", "show", "--all").stdout
    assert "retry.max_attempts" in shown
    assert "valid" in shell.run("config", "check").stderr
    assert shell.json("config", "check") == {"valid": True, "backend": "native-durable"}


def test_a_file_in_the_working_directory_is_read_only_if_it_is_named(
    shell: Shell, tmp_path: Path
) -> None:
    (tmp_path / "qkit.toml").write_text("prefetch = 30\n")
    assert "prefetch" not in shell.json("config", "show")
    assert shell.json("config", "show", "--config", "qkit.toml")["prefetch"] == 30
    in_memory = CliRunner().invoke(app, ["queues"])
    assert in_memory.exit_code == 2
    assert "./qkit.toml was not read: pass --config qkit.toml" in " ".join(in_memory.stderr.split())


def test_each_invalid_setting_is_reported(shell: Shell, tmp_path: Path) -> None:
    (tmp_path / "bad.toml").write_text('prefetch = "many"\ncolour = "red"\n')
    result = shell.run("config", "check", "-c", "bad.toml", code=2)
    assert "prefetch" in result.stderr
    assert "colour" in result.stderr
    failed = shell.json("config", "check", "-c", "bad.toml", code=2)
    assert failed["error"]["type"] == "ConfigError"
    assert "nowhere.toml" in shell.run("queues", "-c", "nowhere.toml", code=2).stderr


SHOP = """
from qkit import QueueService, Settings, consume

@consume("orders")
async def place(order: dict) -> None:
    "Book one order."

service = QueueService(Settings(type="native"))
service.register(place)
number = 1

def make():
    return service

def fail():
    raise KeyError("no such register")

def needs(register):
    return service

async def make_later():
    return service
"""


@pytest.fixture
def shop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    name = f"shop_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(SHOP)
    monkeypatch.syspath_prepend(str(tmp_path))
    return name


def test_the_asyncapi_document_is_printed_or_written(
    shell: Shell, shop: str, tmp_path: Path
) -> None:
    document = json.loads(shell.run("asyncapi", f"{shop}:service", "--title", "Shop").stdout)
    assert document["info"]["title"] == "Shop"
    assert "orders" in document["channels"]
    shell.run("asyncapi", f"{shop}:make", "-o", "api.json")
    assert json.loads((tmp_path / "api.json").read_text())["asyncapi"] == "3.0.0"


def test_a_synchronous_service_has_an_asyncapi_document(
    shell: Shell, shop: str, tmp_path: Path
) -> None:
    (tmp_path / f"{shop}_sync.py").write_text(
        "from qkit import Settings, SyncQueueService, consume\n"
        "@consume('audit')\ndef audit(entry: dict) -> None: ...\n"
        "service = SyncQueueService(Settings(type='native'))\nservice.register(audit)\n"
    )
    document = shell.json("asyncapi", f"{shop}_sync:service")
    assert list(document["channels"]) == ["audit"]
    assert "did you mean" in shell.run("asyncapi", f"{shop}_sync:servise", code=2).stderr


def test_an_imported_service_reads_the_settings_of_the_command(
    shell: Shell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = f"shop_{tmp_path.name.replace('-', '_')}_plain"
    (tmp_path / f"{name}.py").write_text(
        "from qkit import Channel, QueueService\n"
        "def make():\n"
        "    service = QueueService()\n"
        "    service.declare(Channel('orders'))\n"
        "    return service\n"
    )

    def address(*words: str) -> str:
        document = json.loads(shell.run("asyncapi", f"{name}:make", *words).stdout)
        return str(document["channels"]["orders"]["address"])

    assert address() == "orders"
    (tmp_path / "qkit.toml").write_text("prefix = 'here.'\n")
    assert address() == "orders"
    monkeypatch.setenv("QKIT_CONFIG", "qkit.toml")
    assert address() == "here.orders"
    monkeypatch.setenv("QKIT_CONFIG", "")
    (tmp_path / "other.toml").write_text("prefix = 'other.'\n")
    assert address("--config", "other.toml") == "other.orders"
    result = shell.run("asyncapi", f"{name}:make", "-c", "nowhere.toml", code=2)
    assert "no such file" in result.stderr


def test_an_invalid_target_is_explained(shell: Shell, shop: str, tmp_path: Path) -> None:
    (tmp_path / f"{shop}_broken.py").write_text("import json\n\njson.loads('{')\n")
    (tmp_path / f"{shop}_lacking.py").write_text("import a_library_that_is_not_there\n")
    cases = {
        "shop": "MODULE:SERVICE",
        "no_such_shop:service": "no module 'no_such_shop'",
        f"{shop}:servise": f"did you mean {shop}:service?",
        f"{shop}:number": "expected a QueueService or SyncQueueService",
        f"{shop}_broken:service": "JSONDecodeError",
        f"{shop}_lacking:service": "a_library_that_is_not_there",
        f"{shop}:fail": "KeyError: 'no such register'",
        f"{shop}:needs": "cannot be called without arguments",
        f"{shop}:make_later": "async function",
    }
    for target, expected in cases.items():
        result = shell.run("asyncapi", target, code=2)
        assert expected in " ".join(result.stderr.split()), target


def test_help_version_and_completion_work() -> None:
    runner = CliRunner()
    help_text = runner.invoke(app, ["--help"]).output
    for command in ("run", "send", "consume", "queues", "stats", "peek", "purge", "dlq", "health"):
        assert command in help_text
    assert runner.invoke(app, ["--version"]).output.startswith("qkit ")
    environment = os.environ | {
        "_QKIT_COMPLETE": "complete_bash",
        "COMP_WORDS": "qkit dl",
        "COMP_CWORD": "1",
    }
    words = subprocess.run(
        [sys.executable, "-m", "qkit.cli"], env=environment, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert "dlq" in words.stdout


@pytest.mark.parametrize("missing", ["typer", "rich"])
def test_the_error_for_a_missing_extra_names_it(missing: str) -> None:
    code = f"import sys; sys.modules[{missing!r}] = None; from qkit.cli import main; main()"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    assert result.returncode == 1
    assert "install the extra 'cli'" in result.stderr
    assert "Traceback" not in result.stderr
