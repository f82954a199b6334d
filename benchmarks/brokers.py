"""Benchmarks of qkit on RabbitMQ, Kafka and Redis servers, against plain clients and peers.

Print a table of figures and write ``benchmarks/brokers.json``; see docs/performance.md.
Run it from the root of the repository: ``scripts/brokers run python -m benchmarks.brokers``.
"""

from __future__ import annotations

import logging
import sys
from pathlib import Path

from benchmarks import _kafka, _measure, _rabbitmq, _redis

SUITES = (*_redis.SUITES, *_rabbitmq.SUITES, *_kafka.SUITES)

if __name__ == "__main__":
    logging.disable(logging.CRITICAL)
    sys.exit(_measure.main(SUITES, Path(__file__).with_suffix(".json"), __doc__ or ""))
