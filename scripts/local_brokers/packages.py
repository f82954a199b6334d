"""Installation of the Debian packages that the servers need."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

_POLICY = Path("/usr/sbin/policy-rc.d")


class Missing(Exception):
    """A program is missing and was not installed; the message says what to do or what failed."""


def in_ci() -> bool:
    return os.environ.get("CI", "").lower() in {"1", "true", "yes"}


def ensure(packages: Sequence[str]) -> None:
    """Install Debian packages as root, or with sudo in CI; otherwise raise `Missing`."""
    if not packages:
        return
    wanted = " ".join(packages)
    if shutil.which("apt-get") is None:
        raise Missing(f"install the equivalent of the Debian packages {wanted}")
    if os.geteuid() == 0:
        prefix: list[str] = []
    elif in_ci() and shutil.which("sudo"):
        prefix = ["sudo", "-n", "--preserve-env=DEBIAN_FRONTEND"]
    else:
        raise Missing(f"run: sudo apt-get install {wanted}")
    print(f"installing {wanted}", file=sys.stderr, flush=True)
    with _services_stay_off(prefix):
        _apt([*prefix, "apt-get"], "update")
        _apt([*prefix, "apt-get"], "install", "--yes", "--no-install-recommends", *packages)


def _apt(command: Sequence[str], *arguments: str) -> None:
    # Wait up to 300 seconds for another installation to release the lock.
    result = subprocess.run(
        [*command, "-qq", "-o", "DPkg::Lock::Timeout=300", *arguments],
        env={**os.environ, "DEBIAN_FRONTEND": "noninteractive"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if result.returncode:
        raise Missing(f"apt-get {' '.join(arguments)} failed:\n{result.stdout[-2000:]}")


@contextmanager
def _services_stay_off(prefix: Sequence[str]) -> Iterator[None]:
    """Prevent Debian from starting Redis and RabbitMQ as services when it installs them."""
    if prefix or _POLICY.exists():  # only root can write it; an existing policy is kept
        yield
        return
    _POLICY.write_text("#!/bin/sh\nexit 101\n")
    _POLICY.chmod(0o755)
    try:
        yield
    finally:
        _POLICY.unlink(missing_ok=True)
