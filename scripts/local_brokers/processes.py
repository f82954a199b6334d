"""Processes that outlive the script, and the proof that a recorded pid is still the same one."""

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
    """A pid alone may be recycled; with its start time and boot it names one process for ever."""

    pid: int
    start_ticks: int
    boot_id: str

    @classmethod
    def of(cls, pid: int) -> ProcessRecord | None:
        """The record of a living process; None when there is none (a zombie is dead)."""
        stat = _stat(pid)
        if stat is None:
            return None
        return cls(pid, stat.start_ticks, _boot_id())

    def is_alive(self) -> bool:
        return ProcessRecord.of(self.pid) == self

    def signal(self, number: signal.Signals) -> None:
        """Signal this process, never a stranger that has taken over its pid."""
        try:
            descriptor = os.pidfd_open(self.pid)
        except ProcessLookupError:
            return
        try:
            # Checked after the descriptor is open: it stays bound to the process that was checked.
            if self.is_alive():
                signal.pidfd_send_signal(descriptor, number)
        except ProcessLookupError:
            pass
        finally:
            os.close(descriptor)


def spawn(
    argv: Sequence[str], *, environment: Mapping[str, str], directory: Path, log: Path
) -> ProcessRecord:
    """Start a process that survives this script, in a session of its own, its output in `log`."""
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
    # It is meant to outlive this process: without this word Popen would warn of it.
    child.returncode = 0
    if record is None:
        raise RuntimeError(f"{argv[0]} ended at once; see {log}")
    return record


def end(records: Sequence[ProcessRecord], *, grace: float) -> None:
    """Ask the processes and their groups to stop, and kill what is left after `grace` seconds."""
    doomed = [member for record in records for member in _group(record)]
    if grace > 0:
        for record in doomed:
            record.signal(signal.SIGTERM)
        _wait_until_dead(doomed, grace)
    for record in doomed:
        record.signal(signal.SIGKILL)
    _wait_until_dead(doomed, 10)


def _group(leader: ProcessRecord) -> list[ProcessRecord]:
    """The leader and its children; nobody when it is gone, for its number may be another's now."""
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
    # The command name may hold spaces and brackets: fields are counted from the last bracket.
    state, _parent, group, *rest = text.rpartition(")")[2].split()
    if state in {"Z", "X"}:
        return None
    return _Stat(group=int(group), start_ticks=int(rest[16]))


def _boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
