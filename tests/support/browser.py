"""A real Chromium: the machine's own, installed where we may, driven by Playwright."""

from __future__ import annotations

import atexit
import os
import subprocess
import tempfile
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import cache

import pytest
from playwright.async_api import Page, async_playwright

from local_brokers.chromium import chromium
from local_brokers.packages import Missing
from tests.support.brokers import brokers_required


def program() -> str:
    """Where Chromium is; without it the test skips, or fails where nothing may be skipped."""
    try:
        return chromium()
    except Missing as missing:
        if brokers_required():
            pytest.fail(f"no Chromium: {missing}", pytrace=False)
        pytest.skip(f"no Chromium: {missing}")


@cache
def running_browser() -> str:
    """The address of a Chromium that ends with this process."""
    sandbox = [] if os.geteuid() else ["--no-sandbox"]  # Chromium refuses root otherwise
    profile = tempfile.TemporaryDirectory(prefix="qkit-chromium-", ignore_cleanup_errors=True)
    browser = subprocess.Popen(
        [
            program(),
            *("--headless", "--remote-debugging-port=0", f"--user-data-dir={profile.name}"),
            *("--no-first-run", "--disable-gpu", "--disable-dev-shm-usage", "--mute-audio"),
            *sandbox,
        ],
        stderr=subprocess.PIPE,
        text=True,
    )

    def end() -> None:
        browser.kill()
        browser.wait()
        profile.cleanup()

    atexit.register(end)
    assert browser.stderr is not None
    for line in browser.stderr:
        if "DevTools listening on " in line:
            threading.Thread(target=browser.stderr.read, daemon=True).start()  # or it would block
            return line.split()[-1]
    raise RuntimeError("Chromium ended before it could be reached")


class Watched:
    """A page, and what it complained about."""

    def __init__(self, page: Page) -> None:
        self.page = page
        self.complaints: list[str] = []
        page.on("pageerror", lambda error: self.complaints.append(f"error: {error}"))
        page.on("console", lambda message: self._heard(message.type, message.text))
        page.on("dialog", lambda dialog: self.complaints.append(f"dialog: {dialog.message}"))

    def _heard(self, kind: str, text: str) -> None:
        if kind in ("error", "warning"):
            self.complaints.append(f"{kind}: {text}")


@asynccontextmanager
async def open_page(
    address: str, *, dark: bool = False, width: int = 1200, height: int = 800
) -> AsyncIterator[Watched]:
    """A page with storage and cookies of its own; all share one browser, which starts slowly."""
    async with async_playwright() as playwright:
        browser = await playwright.chromium.connect_over_cdp(running_browser())
        context = await browser.new_context(
            color_scheme="dark" if dark else "light",
            viewport={"width": width, "height": height},
            reduced_motion="reduce",
        )
        try:
            watched = Watched(await context.new_page())
            await watched.page.goto(address)
            yield watched
        finally:
            await context.close()
