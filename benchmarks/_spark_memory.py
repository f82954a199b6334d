"""Peak memory of a task that writes rows, measured without Spark.

``python -m benchmarks._spark_memory ROWS DIRECTORY`` prints the peak memory of the process in
bytes.
"""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Iterator

import pyarrow as pa

from qkit.spark.columns import Columns
from qkit.spark.options import parse_options
from qkit.spark.row_encoder import RowEncoder, message_ids
from qkit.spark.sinks import BulkSink
from qkit.spark.task_sender import TaskSender
from qkit.spark.writer import Task

ROWS_PER_BATCH = 10_000


def batches(count: int) -> Iterator[pa.RecordBatch]:
    for start in range(0, count, ROWS_PER_BATCH):
        numbers = list(range(start, start + ROWS_PER_BATCH))
        yield pa.RecordBatch.from_pydict(
            {"id": numbers, "customer": [f"customer-{number}" for number in numbers]}
        )


def main(count: int, directory: str) -> int:
    plan = parse_options({"channel": "orders", "path": directory})
    sender, columns = TaskSender(plan.settings), Columns("row", ())
    route = sender.route(plan.channel)
    sink = BulkSink(plan, route, f"memory-{count}", 0)
    task = Task(plan, columns, RowEncoder(plan, columns, route), sink, 0)
    task.run(batches(count), message_ids("memory", 0, time.time()))
    sink.finish()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


if __name__ == "__main__":
    print(main(int(sys.argv[1]), sys.argv[2]))
