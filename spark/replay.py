"""Replay matching dead letters to their channel, at a limited rate."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence

from qkit import Settings, SyncQueueService
from qkit.spark.job import add_channel, count, options_of, parser, report_errors, session
from qkit.spark.options import parse_options, with_absolute_paths

EXAMPLE = (
    "spark-submit spark/replay.py --channel orders --config qkit.toml --error ConnectionError "
    "--where \"first_failed_at > '2026-11-16'\" --rate 200"
)


def main(arguments: Sequence[str] | None = None) -> None:
    """Parse the arguments and run the job."""
    options = parser(__doc__ or "", EXAMPLE)
    add_channel(options)
    options.add_argument(
        "--reason", help="replay only this reason: MaxRetriesExceeded, ExplicitNack, TTLExpired, …"
    )
    options.add_argument(
        "--error", metavar="TYPE", help="replay only this error type, such as KeyError"
    )
    options.add_argument(
        "--where", metavar="SQL", help="replay only dead letters that match this condition"
    )
    options.add_argument(
        "--limit", type=count, metavar="COUNT", help="replay at most this many, oldest first"
    )
    options.add_argument(
        "--rate",
        type=float,
        default=100.0,
        metavar="NUMBER",
        help="replay this many messages per second (default: 100)",
    )
    options.add_argument("--dry-run", action="store_true", help="only count matching dead letters")
    given = options.parse_args(arguments)
    if not given.rate > 0:
        options.error(f"argument --rate: expected a number above 0, got {given.rate:g}")
    chosen = options_of(given, dead_letters="true")
    with report_errors():
        plan = parse_options(chosen)
        chosen = with_absolute_paths(chosen, plan)
        with session(f"replay {given.channel}") as spark:
            letters = spark.read.format("qkit").options(**chosen).load()
            if given.reason:
                letters = letters.where(letters.reason == given.reason)
            if given.error:
                letters = letters.where(letters.error_type == given.error)
            if given.where:
                letters = letters.where(given.where)
            letters = letters.orderBy("last_failed_at", "id")
            if given.limit:
                letters = letters.limit(given.limit)
            ids = [row[0] for row in letters.select("id").collect()]
        if given.dry_run:
            print(f"{len(ids)} dead letters of {given.channel} match")
        else:
            replayed = replay(plan.settings, plan.channel, ids, given.rate)
            print(f"{replayed} dead letters of {given.channel} replayed")


def replay(settings: Settings, channel: str, ids: Sequence[str], rate: float) -> int:
    """Replay dead letters by id at ``rate`` messages per second; return how many were replayed.

    Each message is sent before its dead letter is removed, so a crash loses nothing.
    """
    batch_size = max(1, min(500, round(rate)))
    replayed, started = 0, time.monotonic()
    with SyncQueueService(settings) as service:
        letters = service.dead_letters(channel)
        for start in range(0, len(ids), batch_size):
            due = started + start / rate
            time.sleep(max(0.0, due - time.monotonic()))
            replayed += letters.replay(ids[start : start + batch_size])
            print(f"{replayed} of {len(ids)}", flush=True)
    return replayed


if __name__ == "__main__":
    main(sys.argv[1:])
