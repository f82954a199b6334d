"""Helpers for the jobs in ``spark/``: channel arguments, Spark session, error messages."""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Generator
from contextlib import contextmanager
from typing import Final

from py4j.protocol import Py4JJavaError  # type: ignore[import-untyped]  # no type information
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

_TRACEBACK: Final = "Traceback (most recent call last):"
_RAISED_ERROR: Final = re.compile(r"^\S.*", re.MULTILINE | re.DOTALL)
_MESSAGE_END: Final = re.compile(r" *SQLSTATE: | \(SQLSTATE|\n\tat |\n\n")
_QKIT_ERROR: Final = re.compile(r"qkit\.errors\.\w+: ")
_JAVA_PREFIX: Final = re.compile(r"An error occurred while calling \S+\n: ([\w.$]+: )?")


def parser(description: str, example: str) -> argparse.ArgumentParser:
    """Return an argument parser whose ``--help`` ends with an example."""
    return argparse.ArgumentParser(
        description=description,
        epilog=f"example:\n  {example}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def add_channel(arguments: argparse.ArgumentParser) -> None:
    """Add the arguments for a channel and its settings."""
    arguments.add_argument("--channel", required=True, help="name of the queue or topic")
    arguments.add_argument("--config", metavar="FILE", help="settings file, such as qkit.toml")
    arguments.add_argument(
        "--set",
        metavar="NAME=VALUE",
        type=_pair,
        action="append",
        default=[],
        help="setting or option, such as type=redis or retry.max_attempts=5; overrides the file",
    )


def _pair(text: str) -> tuple[str, str]:
    name, separator, value = text.partition("=")
    if not name or not separator:
        raise argparse.ArgumentTypeError(f"expected name=value, got {text!r}")
    return name, value


def count(text: str) -> int:
    """Parse a command-line argument that must be an integer of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected an integer of at least 1, got {text!r}")
    return int(text)


def options_of(given: argparse.Namespace, **more: str | None) -> dict[str, str]:
    """Return the options for ``format("qkit")``, without ``None`` values."""
    options = {**dict(given.set), "channel": given.channel, "config": given.config, **more}
    return {name: value for name, value in options.items() if value is not None}


@contextmanager
def session(name: str) -> Generator[SparkSession]:
    """Open a Spark session with ``format("qkit")``; its workers use this Python interpreter.

    Spark's log is off, because ``report_errors`` prints each failure once, without Java stack
    traces. Spark's progress bars are off, because they would mix with the output of the job.
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
    """Print an error as plain text and exit: 1 if Spark failed, 130 if interrupted, else 2."""
    try:
        yield
    except (QueueError, OSError) as error:
        code, message = 2, str(error)
    except (PySparkException, Py4JJavaError) as error:
        code, message = 1, plain_message(str(error))
    except KeyboardInterrupt:
        code, message = 130, "interrupted"
    else:
        return
    print(f"error: {message}", file=sys.stderr)
    raise SystemExit(code)


def plain_message(text: str) -> str:
    """Return a Spark error without stack traces: the error of the Python worker, if there is one.

    >>> plain_message("[PATH_NOT_FOUND] Path does not exist: file:/x. SQLSTATE: 42K03")
    '[PATH_NOT_FOUND] Path does not exist: file:/x.'
    >>> plain_message('Failed: Traceback (most recent call last):\\n  File "a.py", line 1, in f\\n'
    ...               "qkit.errors.ConfigError: 1 problem:\\n  - colour\\n SQLSTATE: 38000")
    '1 problem:\\n  - colour'
    """
    _, found, after = text.rpartition(_TRACEBACK)
    raised = _RAISED_ERROR.search(after) if found else None
    message = _JAVA_PREFIX.sub("", text.strip()) if raised is None else raised[0]
    return _QKIT_ERROR.sub("", _MESSAGE_END.split(message, maxsplit=1)[0]).strip()
