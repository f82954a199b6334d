"""Generator of the upgrade data: the state that qkit 0.1.0 (d324538) leaves on each backend.

    git worktree add /tmp/old d324538
    python -m tests.upgrade.generate /tmp/old [native redis rabbitmq-classic rabbitmq-quorum kafka]

The data was generated once and is kept in git, because users of that version have such state. The
servers are private and initially empty. Two processes of the old version (``old_service.py``)
produce each state; except for ``native-clean``, the second is killed with SIGKILL while it holds
messages. Then the plain drivers read the state. ``….expected.json`` lists the contents of a state.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from tests.support.private_brokers import private_broker
from tests.upgrade import raw_kafka, raw_rabbitmq, raw_redis
from tests.upgrade.raw import DATA, PREFIX, write

PROGRAM = Path(__file__).with_name("old_service.py")
RETRY = {"initial_delay": 0.05, "jitter": 0}
HELD = 5  # messages in flight: three orders, and a tick in each group

BULK = """
import importlib, sys
inbox = importlib.import_module("qkit.native.inbox")
path, job, committed, *names = sys.argv[1:]
with inbox.BulkWriter(path, job, 0) as part:
    for name in names:
        body = b'{"name": "%s"}' % name.encode()
        headers = {"tenant": "acme"}
        part.put("PREFIXloaded", body, key="k1", headers=headers, message_id=name)
if committed == "yes":
    inbox.commit(path, job)
""".replace("PREFIX", PREFIX)


class Old:
    """Runner of programs with the old version, which collects what they report."""

    def __init__(self, checkout: Path, settings: Mapping[str, object]) -> None:
        self._settings = {**settings, "prefix": PREFIX, "retry": RETRY}
        kept = {name: value for name, value in os.environ.items() if not name.startswith("QKIT_")}
        self._environment = {**kept, "PYTHONPATH": str(checkout / "src")}
        self.reported: list[dict[str, Any]] = []

    def run(self, *arguments: str) -> None:
        subprocess.run([sys.executable, *arguments], env=self._environment, check=True)

    def phase(self, phase: str, *, killed: bool = False) -> None:
        """Run a phase; when the service reports ``ready``, kill it or close its input."""
        arguments = [sys.executable, str(PROGRAM), phase, json.dumps(self._settings)]
        with subprocess.Popen(
            arguments,
            env=self._environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        ) as process:
            assert process.stdin is not None
            assert process.stdout is not None
            for line in process.stdout:
                reported = json.loads(line)
                self.reported.append(reported)
                if "ready" in reported:
                    if killed:
                        process.send_signal(signal.SIGKILL)
                    else:
                        process.stdin.close()
        assert process.returncode == (-signal.SIGKILL if killed else 0)

    def of(self, word: str) -> list[Any]:
        return [reported[word] for reported in self.reported if word in reported]


def expect(name: str, old: Old, more: Iterable[Mapping[str, object]] = (), **facts: object) -> None:
    """Write the expected contents: the messages and dead letters that the old service reported."""
    messages = [*old.of("sent"), *more]
    expected = {**facts, "messages": messages, "letters": old.of("letter")}
    (DATA / f"{name}.expected.json").write_text(json.dumps(expected, indent=1) + "\n")


def native(checkout: Path, name: str, *, killed: bool) -> None:
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory, "data")
        settings = {"type": "native", "path": str(path), "segment_bytes": 4_096}
        old = Old(checkout, settings)
        old.phase("work")
        old.run("-c", BULK, str(path), "imported", "yes", "imported-1", "imported-2")
        old.phase("hold", killed=killed)
        old.run("-c", BULK, str(path), "waiting", "yes", "in-inbox-1", "in-inbox-2")
        old.run("-c", BULK, str(path), "unfinished", "no", "unfinished-1")
        target = DATA / name
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(path, target, ignore=shutil.ignore_patterns("socket"))
    bulk = [
        {"channel": "loaded", "group": None, "name": each, "id": each, "stage": stage}
        | {"key": "k1", "headers": {"tenant": "acme"}}
        for each, stage in (
            *((f"imported-{number}", "waiting") for number in (1, 2)),
            *((f"in-inbox-{number}", "waiting") for number in (1, 2)),
            ("unfinished-1", "handled"),
        )
    ]
    expect(name, old, bulk, held_attempt=2 if killed else 1, order="priority")


def redis(checkout: Path) -> None:
    with private_broker("redis") as broker:
        old = Old(checkout, {"type": "redis", "mode": "list", "url": broker.url})
        old.phase("work")
        old.phase("hold", killed=True)
        write(DATA / "redis.jsonl", asyncio.run(raw_redis.capture(broker.url)))
    expect("redis", old, held_attempt=2, order="priority")


def rabbitmq(checkout: Path, name: str, *, replicas: int) -> None:
    with private_broker("rabbitmq") as broker:
        old = Old(checkout, {"type": "rabbitmq", "url": broker.url, "replicas": replicas})
        old.phase("work")
        old.phase("hold", killed=True)
        declarations = old.of("declaration")
        captured = asyncio.run(raw_rabbitmq.capture(broker.url, declarations, HELD))
        write(DATA / f"{name}.jsonl", captured)
    quorum = replicas > 1
    expect(name, old, held_attempt=2 if quorum else 1, order="sent" if quorum else "priority")


def kafka(checkout: Path) -> None:
    with private_broker("kafka") as broker:
        old = Old(checkout, {"type": "kafka", "url": broker.url, "partitions": 2})
        old.phase("work")
        old.phase("hold", killed=True)
        write(DATA / "kafka.jsonl", asyncio.run(raw_kafka.capture(broker.url, PREFIX)))
    expect("kafka", old, held_attempt=1, order="key")


def main(checkout: Path, names: list[str]) -> None:
    DATA.mkdir(parents=True, exist_ok=True)
    for name in names or ["native", "redis", "rabbitmq-classic", "rabbitmq-quorum", "kafka"]:
        print(name, flush=True)
        match name:
            case "native":
                native(checkout, "native-killed", killed=True)
                native(checkout, "native-clean", killed=False)
            case "redis":
                redis(checkout)
            case "rabbitmq-classic":
                rabbitmq(checkout, name, replicas=1)
            case "rabbitmq-quorum":
                rabbitmq(checkout, name, replicas=3)
            case "kafka":
                kafka(checkout)
            case _:
                sys.exit(f"unknown backend {name!r}")


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve(), sys.argv[2:])
