"""Structured logs: one logger, facts as fields, and a formatter that writes them as JSON.

Every record about a message carries ``queue``, ``consumer``, ``message_id`` and, for a failure,
``attempt`` and ``error`` as attributes, with the stack in the usual place.
"""

from __future__ import annotations

import json
import logging
from datetime import UTC, datetime

__all__ = ["JsonFormatter", "logger"]

logger = logging.getLogger("qkit")
logger.addHandler(logging.NullHandler())

_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


class JsonFormatter(logging.Formatter):
    """One JSON object a line: timestamp, level, message, the record's own fields, the stack.

    >>> record = logging.makeLogRecord({"msg": "retrying", "levelname": "WARNING", "queue": "q"})
    >>> '"queue": "q"' in JsonFormatter().format(record)
    True
    """

    def format(self, record: logging.LogRecord) -> str:
        """The record as one line of JSON."""
        fields: dict[str, object] = {
            "timestamp": datetime.fromtimestamp(record.created, UTC).isoformat(),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        fields |= {name: value for name, value in vars(record).items() if name not in _STANDARD}
        if record.exc_info:
            fields["stack"] = self.formatException(record.exc_info)
        # ASCII: a separator such as U+2028 would end the line for some readers, and a lone
        # surrogate (from a file name, say) would make the stream refuse it.
        return json.dumps(fields, default=str)
