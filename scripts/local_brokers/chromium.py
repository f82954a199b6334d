"""A Chromium for the tests of the dashboard: the machine's own, or Debian's package."""

from __future__ import annotations

import shutil
import sys

from local_brokers.packages import Missing, ensure, in_ci

NAMES = ("chromium", "chromium-browser", "google-chrome-stable", "google-chrome")
PACKAGES = ("chromium", "fonts-dejavu-core")  # without a font, pages are empty boxes


def chromium() -> str:
    """Where it is; raises `Missing` with what to type."""
    found = _find()
    if found is None:
        ensure(PACKAGES)
        found = _find()
    if found is None:
        raise Missing("Debian's package has no program called chromium")
    return found


def _find() -> str | None:
    return next((path for path in map(shutil.which, NAMES) if path is not None), None)


def main() -> int:
    """For `make test`, before the clock of any test runs; only CI insists."""
    try:
        chromium()
    except Missing as missing:
        print(f"the dashboard's tests will be skipped: {missing}", file=sys.stderr)
        return 1 if in_ci() else 0
    return 0


if __name__ == "__main__":
    sys.exit(main())
