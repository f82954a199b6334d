"""What the jobs in ``spark/`` share: arguments that choose a channel, a session, plain errors."""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Generator
from contextlib import contextmanager
from typing import Final

from py4j.protocol import Py4JJavaError  # type: ignore[import-untyped]  # it has no types
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from qkit.errors import QueueError
from qkit.spark.source import QkitDataSource

__all__ = [
    "add_channel",
    "count",
    "options_of",
    "parser",
    "plain_message",
    "report_errors",
    "session",
]

_TRACE: Final = "Traceback (most recent call last):"
_AFTER_FRAMES: Final = re.compile(r"^\S.*", re.MULTILINE | re.DOTALL)
_END: Final = re.compile(r" *SQLSTATE: | \(SQLSTATE|\n\tat |\n\n")
_OURS: Final = re.compile(r"qkit\.errors\.\w+: ")
_NEWS_OF_JAVA: Final = re.compile(r"An error occurred while calling \S+\n: ([\w.$]+: )?")


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
        type=_pair,
        action="append",
        default=[],
        help="a setting or option, such as type=redis or retry.max_attempts=5; wins over the file",
    )


def _pair(text: str) -> tuple[str, str]:
    name, separator, value = text.partition("=")
    if not name or not separator:
        raise argparse.ArgumentTypeError(f"{text!r}: write it as name=value")
    return name, value


def count(text: str) -> int:
    """The type of an argument that counts something."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: write a whole number, 1 or more")
    return int(text)


def options_of(given: argparse.Namespace, **more: str | None) -> dict[str, str]:
    """The options for ``format("qkit")``; of ``more`` those that are there."""
    options = {**dict(given.set), "channel": given.channel, "config": given.config, **more}
    return {name: value for name, value in options.items() if value is not None}


@contextmanager
def session(name: str) -> Generator[SparkSession]:
    """A session that knows ``format("qkit")``; its workers run the Python that runs this.

    Its log is off: ``report_errors`` reports what fails once, without traces of Java. So are its
    bars of progress: they would stand between the lines of a job.
    """
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    builder = SparkSession.builder.appName(name).config("spark.ui.showConsoleProgress", "false")
    spark = builder.config("spark.log.level", "OFF").getOrCreate()
    spark.dataSource.register(QkitDataSource)
    try:
        yield spark
    finally:
        spark.stop()


@contextmanager
def report_errors() -> Generator[None]:
    """Print an error as plain text: exit code 2 if nothing was begun, 1 if Spark failed."""
    try:
        yield
    except (QueueError, OSError) as error:
        code, words = 2, str(error)
    except (PySparkException, Py4JJavaError) as error:
        code, words = 1, plain_message(str(error))
    except KeyboardInterrupt:
        code, words = 130, "interrupted"
    else:
        return
    print(f"error: {words}", file=sys.stderr)
    raise SystemExit(code)


def plain_message(text: str) -> str:
    """An error of Spark's without its traces: what a worker raised, if one did.

    >>> plain_message("[PATH_NOT_FOUND] Path does not exist: file:/x. SQLSTATE: 42K03")
    '[PATH_NOT_FOUND] Path does not exist: file:/x.'
    >>> plain_message('Failed: Traceback (most recent call last):\\n  File "a.py", line 1, in f\\n'
    ...               "qkit.errors.ConfigError: 1 problem:\\n  - colour\\n SQLSTATE: 38000")
    '1 problem:\\n  - colour'
    """
    _, trace, after = text.rpartition(_TRACE)
    raised = _AFTER_FRAMES.search(after) if trace else None
    words = _NEWS_OF_JAVA.sub("", text.strip()) if raised is None else raised[0]
    return _OURS.sub("", _END.split(words, maxsplit=1)[0]).strip()
