"""Benchmarks of the native engine: throughput, memory use, recovery and compaction.

Print a table of figures and write ``benchmarks/native.json``; see docs/performance.md.
Run it from the root of the repository: ``python -m benchmarks.native``.
"""

from __future__ import annotations

import logging
import sys
from pathlib import Path

from benchmarks import _durable, _footprint, _in_memory, _measure, _recovery, _socket

SUITES = (
    *_in_memory.SUITES,
    *_durable.SUITES,
    *_socket.SUITES,
    *_footprint.SUITES,
    *_recovery.SUITES,
)

if __name__ == "__main__":
    logging.getLogger("qkit").setLevel(logging.CRITICAL)
    sys.exit(_measure.main(SUITES, Path(__file__).with_suffix(".json"), __doc__ or ""))
