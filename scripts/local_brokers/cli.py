"""Command line of scripts/brokers."""

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
    """Run a command and return its exit code, which is 0 if it succeeded for all servers."""
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
    """Wait until standard input is closed, then kill the servers and remove their directory."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is meant for the guarded process
    sys.stdin.read()
    brokers.stop(grace=0)
    shutil.rmtree(brokers_directory(), ignore_errors=True)


def status(brokers: Brokers) -> int:
    """Print a table of the servers and return 0 if all are running, otherwise 1."""
    statuses = brokers.status()
    for server in statuses:
        pids = ",".join(map(str, server.pids)) if server.running else "-"
        state = "running" if server.running else "down"
        print(f"{server.name:<9} {state:<8} {pids:<14} {server.url if server.running else '-'}")
    return 0 if all(server.running for server in statuses) else 1


def urls(brokers: Brokers) -> int:
    """Print the URLs of running servers as variable assignments; return 1 if one is missing."""
    statuses = brokers.status()
    for server in statuses:
        if server.running:
            for variable, url in server.urls.items():
                print(f"{variable}={url}")
        else:
            print(
                f"{server.name} is not running; run: scripts/brokers up {server.name}",
                file=sys.stderr,
            )
    return 0 if all(server.running for server in statuses) else 1


def run(program: Sequence[str], names: Sequence[str] = NAMES) -> int:
    """Start brokers, run a program with their URLs in its environment, and return its exit code.

    A broker whose URL is already in the environment is not started. Brokers that were running
    before keep running afterwards.
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
            for server in brokers.status():
                environment |= server.urls if server.running else {}
        return _run_program(program, environment)
    finally:
        if ours:
            Brokers(directory, ours).down()


def _run_program(program: Sequence[str], environment: dict[str, str]) -> int:
    child = subprocess.Popen(program, env=environment)

    def forward(number: int, _frame: FrameType | None) -> None:
        # The terminal sends the SIGINT of Ctrl-C to the child as well.
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
    # Not `choices`, because argparse would then reject an empty list, which means all brokers.
    if text not in NAMES:
        raise argparse.ArgumentTypeError(f"unknown broker {text!r}; use {', '.join(NAMES)}")
    return text


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="scripts/brokers",
        description="Run Redis, RabbitMQ and Kafka as local processes on free loopback ports.",
        epilog="Data, logs and state are in .brokers/ (or QKIT_BROKERS_DIR).",
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    for name, text in {
        "up": "start the brokers that are not running; return when all are ready",
        "down": "stop the brokers that `up` started and remove their data",
        "stop": "stop the brokers but keep their data and ports, to test outages",
        "guard": "wait until standard input ends, then kill the brokers and remove the directory",
        "status": "show the brokers; exit with 0 only if all are running",
        "urls": "print the URLs of running brokers as QKIT_TEST_*_URL=... lines",
    }.items():
        command = commands.add_parser(name, help=text)
        command.add_argument(
            "brokers", nargs="*", type=_name, metavar="broker", help=" | ".join(NAMES)
        )
        if name == "stop":
            command.add_argument("--kill", action="store_true", help="send SIGKILL, like a crash")
    command = commands.add_parser("run", help="start the brokers, run a program, then stop them")
    command.add_argument(
        "--only", action="append", type=_name, metavar="broker", help="start only this broker"
    )
    command.add_argument("program", nargs=argparse.REMAINDER)
    return parser
