"""The directory of the log: one owner, private files, no symbolic links."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from qkit.errors import LogLocked, StorageError
from qkit.native.log.disk import Disk
from qkit.native.log.log import Log
from tests.support.crasher import content


@pytest.fixture(params=[0o000, 0o022, 0o777], ids=oct)
def umask(request):
    before = os.umask(request.param)
    yield
    os.umask(before)


async def fill(path: Path) -> None:
    log = Log.open(path, segment_bytes=200)
    list(log.recover())
    log.start()
    for number in range(10):
        await log.writer.append([content(number, 50)])
    log.install(log.rewrite(1, []))
    await log.close()


@pytest.mark.usefixtures("umask")
async def test_files_are_0600_and_directories_0700_whatever_the_umask(tmp_path):
    await fill(tmp_path / "data")

    found = {path: stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "data").rglob("*")}
    assert len(found) > 4
    for path, mode in found.items():
        assert mode == (0o700 if path.is_dir() else 0o600), path
    assert stat.S_IMODE((tmp_path / "data").stat().st_mode) == 0o700


async def test_a_file_readable_by_others_becomes_private(tmp_path):
    await fill(tmp_path)
    segment = tmp_path / "log" / "00000001.seg"
    segment.chmod(0o644)
    (tmp_path / "log").chmod(0o755)
    log = Log.open(tmp_path)
    list(log.recover())
    await log.close()

    assert stat.S_IMODE(segment.stat().st_mode) == 0o600
    assert stat.S_IMODE((tmp_path / "log").stat().st_mode) == 0o700


@pytest.mark.parametrize("place", ["", "LOCK", "log", "log/00000001.seg"])
async def test_a_symbolic_link_is_rejected_and_its_target_is_unchanged(tmp_path, place):
    data, target = tmp_path / "data", tmp_path / "target"
    await fill(data)
    planted = data / place
    planted.rename(target)
    planted.symlink_to(target)
    before = {path: path.stat().st_mtime_ns for path in target.rglob("*") if path.is_file()}
    text = target.read_bytes() if target.is_file() else b""

    with pytest.raises(StorageError, match="symbolic link"):
        list(Log.open(data).recover())
    assert {path: path.stat().st_mtime_ns for path in target.rglob("*") if path.is_file()} == before
    if target.is_file():
        assert target.read_bytes() == text


async def test_a_symbolic_link_with_a_temporary_name_is_removed_and_not_followed(tmp_path):
    await fill(tmp_path / "data")
    (tmp_path / "target").write_text("precious")
    (tmp_path / "data/log/00000099.seg.0.tmp").symlink_to(tmp_path / "target")
    log = Log.open(tmp_path / "data")
    list(log.recover())
    await log.close()

    assert (tmp_path / "target").read_text() == "precious"
    assert not list((tmp_path / "data/log").glob("*.tmp"))


@pytest.mark.parametrize("place", ["LOCK", "log/00000001.seg"])
async def test_a_named_pipe_instead_of_a_file_is_rejected_without_blocking(tmp_path, place):
    await fill(tmp_path)
    (tmp_path / place).unlink()
    os.mkfifo(tmp_path / place)

    with pytest.raises(StorageError, match="cannot be used"):
        list(Log.open(tmp_path).recover())


def test_a_file_instead_of_the_directory_is_rejected(tmp_path):
    (tmp_path / "data").write_text("")
    with pytest.raises(StorageError, match="use the real path"):
        Disk(tmp_path / "data")


def test_a_second_process_is_rejected_with_the_pid_of_the_owner(tmp_path):
    code = (
        "import sys; from qkit.native.log.disk import Disk; disk = Disk(sys.argv[1]); "
        "print('ready', flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path / "data")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as owner:
        assert owner.stdout is not None
        assert owner.stdout.readline() == b"ready\n"
        with pytest.raises(LogLocked, match=f"owned by process {owner.pid}") as rejected:
            Log.open(tmp_path / "data")
        assert rejected.value.pid == owner.pid
        owner.kill()
    Disk(tmp_path / "data").close()  # the system releases the lock of a killed process


def test_the_same_process_can_reopen_the_directory_only_after_close(tmp_path):
    first = Disk(tmp_path)
    with pytest.raises(LogLocked, match=f"process {os.getpid()}"):
        Disk(tmp_path)
    first.close()
    Disk(tmp_path).close()


def test_an_owner_without_a_pid_is_reported_as_another_process(tmp_path):
    first = Disk(tmp_path)
    (tmp_path / "LOCK").write_bytes(b"")
    with pytest.raises(LogLocked, match="another process") as rejected:
        Disk(tmp_path)
    assert rejected.value.pid is None
    first.close()


def test_a_rejected_open_leaks_no_file_descriptor(tmp_path):
    def count() -> int:
        return len(os.listdir("/proc/self/fd"))  # noqa: PTH208  not a directory of real files

    first = Disk(tmp_path)
    before = count()
    with pytest.raises(LogLocked):
        Disk(tmp_path)
    assert count() == before
    first.close()


def test_short_reads_are_joined(tmp_path, monkeypatch):
    disk = Disk(tmp_path)
    fd = disk.create("x")
    disk.write(fd, b"0123456789", 0)
    pread = os.pread
    monkeypatch.setattr(os, "pread", lambda fd, length, at: pread(fd, min(length, 3), at))

    assert disk.read(fd, 8, 1) == b"12345678"
    assert disk.read(fd, 100, 5) == b"56789"
    assert disk.read(fd, 100, 50) == b""
    disk.close_file(fd)
    disk.close()


def test_concurrent_listings_are_complete(tmp_path: Path) -> None:
    disk = Disk(tmp_path / "data")
    names = {f"{number:08}.seg" for number in range(300)}
    for name in names:
        disk.close_file(disk.create(name))
    with ThreadPoolExecutor(8) as pool:
        for found in pool.map(lambda _: disk.names(), range(400)):
            assert set(found) == names
    disk.close()


@pytest.mark.parametrize("what", [".", "LOCK"])
def test_a_directory_or_lock_of_another_user_is_rejected(tmp_path, monkeypatch, what):
    Disk(tmp_path).close()
    fstat, target = os.fstat, (tmp_path / what).stat().st_ino

    def foreign(fd: int) -> os.stat_result:
        found = fstat(fd)
        if found.st_ino != target:
            return found
        fields = list(found)
        fields[stat.ST_UID] = os.geteuid() + 1
        return os.stat_result(fields)

    monkeypatch.setattr(os, "fstat", foreign)
    with pytest.raises(StorageError, match="belongs to user"):
        Disk(tmp_path)


def test_a_hard_linked_lock_is_rejected(tmp_path):
    Disk(tmp_path / "data").close()
    os.link(tmp_path / "data" / "LOCK", tmp_path / "other")
    with pytest.raises(StorageError, match="several hard links"):
        Disk(tmp_path / "data")
    (tmp_path / "other").unlink()
    Disk(tmp_path / "data").close()
