"""Chromium pages for dashboard tests, driven by Playwright."""

from __future__ import annotations

import json
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from playwright.async_api import Page, async_playwright

from local_brokers.chromium import chromium
from local_brokers.packages import Missing
from tests.support.brokers import brokers_required


def program() -> str:
    """Return the path of Chromium; if it is missing, skip the test, or fail in CI."""
    try:
        return chromium()
    except Missing as missing:
        if brokers_required():
            pytest.fail(f"no Chromium: {missing}", pytrace=False)
        pytest.skip(f"no Chromium: {missing}")


class Watched:
    """Page with its uncaught errors, dialogs, and console errors and warnings."""

    def __init__(self, page: Page) -> None:
        self.page = page
        self.console_errors: list[str] = []
        page.on("pageerror", lambda error: self.console_errors.append(f"error: {error}"))
        page.on("console", lambda message: self._add(message.type, message.text))
        page.on("dialog", lambda dialog: self.console_errors.append(f"dialog: {dialog.message}"))

    def _add(self, kind: str, text: str) -> None:
        if kind in ("error", "warning"):
            self.console_errors.append(f"{kind}: {text}")


@asynccontextmanager
async def open_page(
    address: str,
    *,
    dark: bool = False,
    width: int = 1200,
    height: int = 800,
    read_token: str | None = None,
) -> AsyncIterator[Watched]:
    """Open a page in a new browser, signed in if a read token is given."""
    sandbox = [] if os.geteuid() else ["--no-sandbox"]  # required to run Chromium as root
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=program(), args=sandbox)
        try:
            context = await browser.new_context(
                color_scheme="dark" if dark else "light",
                viewport={"width": width, "height": height},
                reduced_motion="reduce",
            )
            if read_token is not None:
                store = f"sessionStorage.setItem('qkit-read-token', {json.dumps(read_token)})"
                await context.add_init_script(store)
            watched = Watched(await context.new_page())
            await watched.page.goto(address)
            yield watched
        finally:
            await browser.close()
