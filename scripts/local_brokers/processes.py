"""Processes that outlive the script and are identified even if their pids are reused."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

POLL_SECONDS = 0.05


@dataclass(frozen=True)
class ProcessRecord:
    """Unique identity of a process: pid, start time and boot id, because pids are reused."""

    pid: int
    start_ticks: int
    boot_id: str

    @classmethod
    def of(cls, pid: int) -> ProcessRecord | None:
        """Return the record of a running process, or None if it has ended or is a zombie."""
        stat = _stat(pid)
        if stat is None:
            return None
        return cls(pid, stat.start_ticks, _boot_id())

    def is_alive(self) -> bool:
        return ProcessRecord.of(self.pid) == self

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to this process, but never to a later process with the same pid."""
        try:
            descriptor = os.pidfd_open(self.pid)
        except ProcessLookupError:
            return
        try:
            # Check after opening, so that the descriptor refers to the checked process.
            if self.is_alive():
                signal.pidfd_send_signal(descriptor, number)
        except ProcessLookupError:
            pass
        finally:
            os.close(descriptor)


def spawn(
    argv: Sequence[str], *, environment: Mapping[str, str], directory: Path, log: Path
) -> ProcessRecord:
    """Start a process in a new session, so that it outlives this script; append output to `log`."""
    with log.open("ab") as output:
        child = subprocess.Popen(
            argv,
            cwd=directory,
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    record = ProcessRecord.of(child.pid)
    # Prevent Popen's warning about a child that is still running.
    child.returncode = 0
    if record is None:
        raise RuntimeError(f"{argv[0]} exited immediately; see {log}")
    return record


def end(records: Sequence[ProcessRecord], *, grace: float) -> None:
    """Terminate the processes and their groups; after `grace` seconds, kill the rest."""
    members = [member for record in records for member in _group(record)]
    if grace > 0:
        for record in members:
            record.signal(signal.SIGTERM)
        _wait_until_dead(members, grace)
    for record in members:
        record.signal(signal.SIGKILL)
    _wait_until_dead(members, 10)


def _group(leader: ProcessRecord) -> list[ProcessRecord]:
    """Return the processes in the leader's group, or an empty list if the leader has ended.

    The pid of an ended leader may belong to another process.
    """
    if not leader.is_alive():
        return []
    pids = (int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit())
    members = [pid for pid in pids if (stat := _stat(pid)) and stat.group == leader.pid]
    records = [ProcessRecord.of(pid) for pid in members if pid != leader.pid]
    return [leader, *(record for record in records if record)]


def _wait_until_dead(records: Sequence[ProcessRecord], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while any(record.is_alive() for record in records) and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)


@dataclass(frozen=True)
class _Stat:
    group: int
    start_ticks: int


def _stat(pid: int) -> _Stat | None:
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The command name may contain spaces and parentheses; the fields start after the last ")".
    state, _parent, group, *rest = text.rpartition(")")[2].split()
    if state in {"Z", "X"}:
        return None
    return _Stat(group=int(group), start_ticks=int(rest[16]))


def _boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
