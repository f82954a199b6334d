"""What the jobs in ``spark/`` share: arguments that choose a channel, and a session."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Generator
from contextlib import contextmanager

from pyspark.sql import SparkSession

from qkit.errors import QueueError
from qkit.spark.options import Plan, plan_of
from qkit.spark.source import QkitDataSource

__all__ = ["add_channel", "options_of", "parser", "plan_from", "session", "told"]


def parser(description: str, example: str) -> argparse.ArgumentParser:
    """A parser whose ``--help`` ends with an example."""
    return argparse.ArgumentParser(
        description=description,
        epilog=f"example:\n  {example}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def add_channel(arguments: argparse.ArgumentParser) -> None:
    """The channel, and where its settings come from."""
    arguments.add_argument("--channel", required=True, help="the queue or topic")
    arguments.add_argument("--config", metavar="FILE", help="settings, such as qkit.toml")
    arguments.add_argument(
        "--set",
        metavar="NAME=VALUE",
        action="append",
        default=[],
        help="a setting or option, such as type=redis or retry.max_attempts=5; wins over the file",
    )


def options_of(given: argparse.Namespace) -> dict[str, str]:
    """The options for ``format("qkit")``."""
    options: dict[str, str] = {"channel": given.channel}
    if given.config:
        options["config"] = given.config
    for pair in given.set:
        name, separator, value = pair.partition("=")
        if not separator:
            raise SystemExit(f"--set {pair}: write it as name=value")
        options[name] = value
    return options


def plan_from(given: argparse.Namespace) -> Plan:
    """The same, checked."""
    return plan_of(options_of(given))


@contextmanager
def session(name: str) -> Generator[SparkSession]:
    """A session that knows ``format("qkit")``; its workers run the Python that runs this."""
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    spark = SparkSession.builder.appName(name).getOrCreate()
    spark.sparkContext.setLogLevel("WARN")
    spark.dataSource.register(QkitDataSource)
    try:
        yield spark
    finally:
        spark.stop()


@contextmanager
def told() -> Generator[None]:
    """What a person can put right is said in a line, and is exit code 2."""
    try:
        yield
    except QueueError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from error
