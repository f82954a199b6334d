"""The qkit logger, and a formatter for JSON logs.

Each log record about a message has the attributes ``queue``, ``consumer`` and ``message_id``. A
record about a failure also has ``attempt``, ``error`` and ``exc_info``.
"""

from __future__ import annotations

import json
import logging
from datetime import UTC, datetime

__all__ = ["JsonFormatter", "logger"]

# Without a NullHandler: in a program that configures no logging, Python's last-resort handler then
# writes warnings and errors to stderr, such as the final failure of a handler.
logger = logging.getLogger("qkit")

_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


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
