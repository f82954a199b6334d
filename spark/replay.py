"""Replay dead letters: those that match go to their channel again, so many in a second."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence

from qkit import Settings, SyncQueueService
from qkit.spark.job import add_channel, count, options_of, parser, report_errors, session
from qkit.spark.options import absolute, plan_of

EXAMPLE = (
    "spark-submit spark/replay.py --channel orders --config qkit.toml --error ConnectionError "
    "--where \"first_failed_at > '2026-11-16'\" --rate 200"
)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the job."""
    options = parser(__doc__ or "", EXAMPLE)
    add_channel(options)
    options.add_argument("--reason", help="MaxRetriesExceeded, ExplicitNack, TTLExpired, …")
    options.add_argument("--error", metavar="TYPE", help="the error's type, such as KeyError")
    options.add_argument(
        "--where", metavar="SQL", help="any condition on the columns of a dead letter"
    )
    options.add_argument(
        "--limit", type=count, metavar="COUNT", help="at most so many, the oldest first"
    )
    options.add_argument(
        "--rate", type=float, default=100.0, metavar="NUMBER", help="messages in a second (100)"
    )
    options.add_argument("--dry-run", action="store_true", help="only say how many there are")
    given = options.parse_args(arguments)
    if not given.rate > 0:
        options.error("argument --rate: write a number above 0")
    chosen = options_of(given, dead_letters="true")
    with report_errors():
        plan = plan_of(chosen)
        chosen = absolute(chosen, plan)
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
            done = replay(plan.settings, plan.channel, ids, given.rate)
            print(f"{done} dead letters of {given.channel} replayed")


def replay(settings: Settings, channel: str, ids: Sequence[str], rate: float) -> int:
    """Each is sent before it is removed from the dead letters, so a crash here loses nothing."""
    at_once = max(1, min(500, round(rate)))
    done, started = 0, time.monotonic()
    with SyncQueueService(settings) as service:
        letters = service.dead_letters(channel)
        for start in range(0, len(ids), at_once):
            due = started + start / rate
            time.sleep(max(0.0, due - time.monotonic()))
            done += letters.replay(ids[start : start + at_once])
            print(f"{done} of {len(ids)}", flush=True)
    return done


if __name__ == "__main__":
    main(sys.argv[1:])
