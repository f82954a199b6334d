"""The qkit logger, and a formatter for JSON logs.

Each log record about a message has the attributes ``queue``, ``consumer`` and ``message_id``. A
record about a failure also has ``attempt``, ``error`` and ``exc_info``.

Ids, names, paths and errors may come from other programs. A filter escapes control characters in
them, so that they can neither add a line to the log nor send commands to a terminal.
"""

from __future__ import annotations

import json
import logging
import textwrap
import traceback
from collections.abc import Mapping
from datetime import UTC, datetime

from qkit._internal.text import escape_control

__all__ = ["JsonFormatter", "Lines", "escape_record", "logger"]

_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


class Lines(str):
    """Argument of a log call whose line breaks are kept, such as the stack of a thread."""

    __slots__ = ()


class _Escaped:
    """Argument of a log call whose text is escaped when it is formatted."""

    __slots__ = ("_value",)

    def __init__(self, value: object) -> None:
        self._value = value

    def __str__(self) -> str:
        return escape_control(str(self._value))

    def __repr__(self) -> str:
        return escape_control(repr(self._value))


def _escape(value: object) -> object:
    if value is None or isinstance(value, (int, float)):
        return value
    if isinstance(value, Lines):
        return Lines(escape_control(value, lines=True))  # a handler may escape the record again
    if isinstance(value, str):
        return escape_control(value)
    return _Escaped(value)


def escape_record(record: logging.LogRecord) -> bool:
    """Escape the arguments, extra fields and traceback of a record; return true to log it.

    The lines of a traceback are indented, so that the text of an exception cannot look like another
    record.
    """
    if isinstance(record.args, tuple):
        record.args = tuple(map(_escape, record.args))
    elif isinstance(record.args, Mapping):
        record.args = {name: _escape(value) for name, value in record.args.items()}
    for name, value in vars(record).items():
        if isinstance(value, str) and name not in _STANDARD:
            setattr(record, name, escape_control(value))
    if record.exc_info and record.exc_info[0] is not None and not record.exc_text:
        stack = "".join(traceback.format_exception(*record.exc_info)).rstrip("\n")
        record.exc_text = textwrap.indent(escape_control(stack, lines=True), "  ")
    return True


# Without a NullHandler: in a program that configures no logging, Python's last-resort handler then
# writes warnings and errors to stderr, such as the final failure of a handler.
logger = logging.getLogger("qkit")
for _logger in (logger, logging.getLogger("qkit.native")):
    _logger.addFilter(escape_record)  # a filter applies only to records of its own logger


class JsonFormatter(logging.Formatter):
    """Log formatter that writes each record as one line of JSON.

    A line has ``timestamp``, ``level``, ``logger``, ``message``, the extra fields of the record,
    and ``stack`` if there is an exception.

    Example:
        >>> import logging
        >>> from qkit import JsonFormatter
        >>> handler = logging.StreamHandler()
        >>> handler.setFormatter(JsonFormatter())
    """

    def format(self, record: logging.LogRecord) -> str:
        """Return the record as one line of JSON.

        Args:
            record: The log record.

        Returns:
            The line, in ASCII.

        Example:
            >>> import json, logging
            >>> from qkit import JsonFormatter
            >>> record = logging.makeLogRecord({"msg": "retrying", "queue": "orders"})
            >>> json.loads(JsonFormatter().format(record))["queue"]
            'orders'
        """
        fields: dict[str, object] = {
            "timestamp": datetime.fromtimestamp(record.created, UTC).isoformat(),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        fields |= {name: value for name, value in vars(record).items() if name not in _STANDARD}
        if record.exc_info:
            fields["stack"] = self.formatException(record.exc_info)
        # Write ASCII: some readers treat U+2028 as a line end, and a stream cannot encode a lone
        # surrogate, which a file name may contain.
        return json.dumps(fields, default=str)
