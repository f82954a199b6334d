"""Chromium for the dashboard tests: an installed browser or the Debian package."""

from __future__ import annotations

import shutil
import sys

from local_brokers.packages import Missing, ensure, in_ci

NAMES = ("chromium", "chromium-browser", "google-chrome-stable", "google-chrome")
PACKAGES = ("chromium", "fonts-dejavu-core")  # without a font, pages show empty boxes


def chromium() -> str:
    """Return the path of Chromium and install it if necessary; raise `Missing` on failure."""
    found = _find()
    if found is None:
        ensure(PACKAGES)
        found = _find()
    if found is None:
        raise Missing(f"none of {', '.join(NAMES)} found after installing {' '.join(PACKAGES)}")
    return found


def _find() -> str | None:
    return next((path for path in map(shutil.which, NAMES) if path is not None), None)


def main() -> int:
    """Install Chromium before the tests, because it takes time; return 1 on a failure in CI."""
    try:
        chromium()
    except Missing as missing:
        print(f"the dashboard tests will be skipped: {missing}", file=sys.stderr)
        return 1 if in_ci() else 0
    return 0


if __name__ == "__main__":
    sys.exit(main())
