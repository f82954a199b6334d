"""RabbitMQ, Kafka and Redis: qkit beside the raw client and the peers, on real servers.

Prints a table of figures and bars and writes ``benchmarks/brokers.json``; see docs/performance.md.
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
