"""The command line of scripts/brokers."""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from types import FrameType

from local_brokers.lifecycle import GRACE_SECONDS, Brokers, report
from local_brokers.packages import in_ci
from local_brokers.servers import SERVERS
from local_brokers.state import brokers_directory

NAMES = tuple(server.name for server in SERVERS)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; the exit code is 0 when all the servers asked for are as asked."""
    options = _parser().parse_args(arguments)
    if options.command == "run":
        return run(options.program, options.only or NAMES)
    brokers = Brokers(brokers_directory(), options.brokers)
    match options.command:
        case "up":
            failures = brokers.up()
            report(failures)
            return 1 if failures else 0
        case "stop":
            brokers.stop(grace=0 if options.kill else GRACE_SECONDS)
            return 0
        case "down":
            brokers.down()
            return 0
        case "guard":
            guard(brokers)
            return 0
        case "status":
            return status(brokers)
        case _:
            return urls(brokers)


def guard(brokers: Brokers) -> None:
    """Wait until nobody holds the other end of the input, then leave nothing behind."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's interrupt is for the one guarded
    sys.stdin.read()
    brokers.stop(grace=0)
    shutil.rmtree(brokers_directory(), ignore_errors=True)


def status(brokers: Brokers) -> int:
    """A small table; 0 only if all run."""
    statuses = brokers.status()
    for server in statuses:
        pids = ",".join(map(str, server.pids)) if server.running else "-"
        state = "running" if server.running else "down"
        print(f"{server.name:<9} {state:<8} {pids:<14} {server.url if server.running else '-'}")
    return 0 if all(server.running for server in statuses) else 1


def urls(brokers: Brokers) -> int:
    """Lines for `env` or a shell; a server that does not run has none."""
    statuses = brokers.status()
    for server in statuses:
        if server.running:
            print(f"{server.variable}={server.url}")
        else:
            print(f"{server.name} does not run: scripts/brokers up {server.name}", file=sys.stderr)
    return 0 if all(server.running for server in statuses) else 1


def run(program: Sequence[str], names: Sequence[str] = NAMES) -> int:
    """Run a program with the named brokers up and their addresses in its environment.

    Brokers given by the environment are not started, and those that ran before stay up afterwards.
    """
    directory = brokers_directory()
    given = {server.name for server in SERVERS if os.environ.get(server.variable)}
    wanted = [name for name in names if name not in given]
    before = {server.name for server in Brokers(directory).status() if server.running}
    ours = [name for name in wanted if name not in before]
    environment = dict(os.environ)
    try:
        if wanted:
            brokers = Brokers(directory, wanted)
            failures = brokers.up()
            report(failures)
            if failures and (in_ci() or os.environ.get("QKIT_REQUIRE_BROKERS") == "1"):
                return 1
            environment |= {s.variable: s.url for s in brokers.status() if s.running}
        return _run_to_the_end(program, environment)
    finally:
        if ours:
            Brokers(directory, ours).down()


def _run_to_the_end(program: Sequence[str], environment: dict[str, str]) -> int:
    child = subprocess.Popen(program, env=environment)

    def forward(number: int, _frame: FrameType | None) -> None:
        # A terminal's interrupt has reached the child by itself.
        if number == signal.SIGTERM:
            child.terminate()

    former = {number: signal.signal(number, forward) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        code = child.wait()
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)
    return code if code >= 0 else 128 - code


def _name(text: str) -> str:
    # Not `choices`: argparse holds the empty list of "all of them" against it.
    if text not in NAMES:
        raise argparse.ArgumentTypeError(f"unknown broker {text!r}; there are {', '.join(NAMES)}")
    return text


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="scripts/brokers",
        description="Redis, RabbitMQ and Kafka as local processes on free loopback ports.",
        epilog="Data, logs and state live in .brokers/ (or QKIT_BROKERS_DIR).",
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    for name, text in {
        "up": "start what does not run; returns when all are ready",
        "down": "end what `up` started and remove its data",
        "stop": "end the processes but keep data and ports, for tests of outages",
        "guard": "wait for the end of the input, then kill all and remove the whole directory",
        "status": "show what runs; exit code 0 only if all do",
        "urls": "print QKIT_TEST_*_URL lines",
    }.items():
        command = commands.add_parser(name, help=text)
        command.add_argument(
            "brokers", nargs="*", type=_name, metavar="broker", help=" | ".join(NAMES)
        )
        if name == "stop":
            command.add_argument("--kill", action="store_true", help="no warning, as in a crash")
    command = commands.add_parser("run", help="run a program with all up, and `down` after it")
    command.add_argument(
        "--only", action="append", type=_name, metavar="broker", help="not all of them"
    )
    command.add_argument("program", nargs=argparse.REMAINDER)
    return parser
