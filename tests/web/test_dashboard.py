"""Dashboard of a running service, in a real Chromium."""

from __future__ import annotations

import asyncio
import itertools
import json
import re
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace

import pytest
from playwright.async_api import Page, Route, expect

from qkit import BackendUnavailable, Channel, QueueService, Settings, consume
from qkit.backend import QueueStats
from qkit.web import serve
from tests.support.browser import Watched, open_page
from tests.support.faulty import FaultyBackend
from tests.support.web import READ_TOKEN, TOKEN, Orders, make_shop, wait_for_dead_letters

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

expect.set_options(timeout=60_000)


@asynccontextmanager
async def open_dashboard(
    service: QueueService, path: str = "", *, token: str | None = TOKEN, **options: int | bool
) -> AsyncIterator[Watched]:
    """Open the dashboard of a service; fail on errors in the browser console."""
    read_token = READ_TOKEN if token else None
    async with serve(service, port=0, token=token, read_token=read_token) as address:
        url = f"{address}{path}"
        async with open_page(url, read_token=read_token, **options) as watched:  # type: ignore[arg-type]
            yield watched
        assert watched.console_errors == []


async def unlock(page: Page, token: str = TOKEN) -> None:
    await page.get_by_label("Token").fill(token)
    await page.get_by_role("dialog").get_by_role("button", name="Unlock").click()


async def test_the_overview_shows_all_queues_and_the_health(service: QueueService) -> None:
    await service.send("archive", {"id": 1})
    async with open_dashboard(service) as watched:
        page = watched.page
        await expect(page.locator("#service-state")).to_contain_text("ready")
        row = page.get_by_role("row", name="orders")
        await expect(row).to_contain_text("consuming")
        await expect(page.get_by_role("row", name="archive")).to_contain_text("not consumed here")
        await expect(page.get_by_role("region", name="Health")).to_contain_text("connected")
        await expect(page.get_by_role("region", name="Health")).to_contain_text("Orders.place")
        assert await page.title() == "qkit"


async def test_figures_update_live(service: QueueService) -> None:
    async with open_dashboard(service) as watched:
        row = watched.page.get_by_role("row", name="orders")
        await expect(row).to_be_visible()
        for number in (-1, -2):
            await service.send("orders", number)
        await expect(row.get_by_label("2 dead letters of orders")).to_be_visible()
        for _ in range(3):
            await service.send("archive", 1)
        await expect(watched.page.get_by_role("row", name="archive")).to_contain_text("3")
        line = watched.page.get_by_role("row", name="archive").locator("path.line").first
        await expect(line).to_have_attribute("d", re.compile("M.+L"))


async def test_unknown_figures_are_shown_as_a_dash_and_rates_of_this_service_are_labelled(
    service: QueueService, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = service.stats

    async def without_totals(name: str) -> QueueStats:
        return replace(await real(name), published_total=None, acked_total=None)

    async def unavailable(*arguments: object) -> None:
        raise BackendUnavailable("unreachable")

    monkeypatch.setattr(service, "stats", without_totals)
    async with open_dashboard(service) as watched:
        page = watched.page
        await expect(page.get_by_role("row", name="orders")).to_contain_text("this service only")
        tiles = page.locator(".tile")
        await expect(tiles.nth(0).locator("strong")).to_have_text("0")
        await expect(tiles.nth(1)).to_contain_text("this service only")
        # This service has sent nothing.
        await expect(tiles.nth(1).locator("strong")).to_have_text("–")
        monkeypatch.setattr(service, "stats", unavailable)
        for number in range(4):
            await expect(tiles.nth(number).locator("strong")).to_have_text("–")
        monkeypatch.setattr(service, "stats", without_totals)
        await page.goto(f"{page.url.partition('#')[0]}#/queues/orders")
        await expect(page.get_by_role("heading", level=3).nth(1)).to_contain_text(
            "Messages/s, this service only"
        )


@pytest.mark.proves("002-dlq-7")
async def test_dead_letters_are_read_filtered_and_replayed(
    service: QueueService, orders: Orders
) -> None:
    for number in (-1, -2, -3):
        await service.send("orders", number)
    await wait_for_dead_letters(service, "orders", 3)
    async with open_dashboard(service, "#/queues/orders/dead-letters") as watched:
        page = watched.page
        letters = page.locator(".item")
        await expect(letters).to_have_count(3)
        await page.get_by_label("Error").fill("total -2")
        await expect(letters).to_have_count(1)
        await letters.first.locator("summary").click()
        await expect(letters.first).to_contain_text("Reject: negative total -2")
        await expect(letters.first.locator("pre")).to_have_text("-2")
        orders.accept_all = True
        await page.get_by_role("button", name="Replay this one").click()
        await unlock(page)
        await expect(page.locator(".toast")).to_contain_text("1 dead letter replayed to orders")
        await expect(page.locator(".empty", has_text="No match")).to_be_visible()
        await page.get_by_label("Error").fill("")
        await expect(letters).to_have_count(2)
        await letters.first.get_by_role("checkbox").check()
        await expect(page.get_by_role("button", name="Replay 1 selected")).to_be_enabled()
        await page.get_by_label("Select all").check()
        await page.get_by_role("button", name="Replay 2 selected").click()
        await expect(page.locator(".empty", has_text="No dead letters")).to_be_visible()
    assert sorted(orders.handled) == [-3, -2, -1]


async def test_a_selection_made_during_a_reload_is_kept(service: QueueService) -> None:
    for number in (-1, -2):
        await service.send("orders", number)
    await wait_for_dead_letters(service, "orders", 2)
    async with open_dashboard(service, "#/queues/orders/dead-letters") as watched:
        page = watched.page
        letters = page.locator(".item")
        await expect(letters).to_have_count(2)
        requested, respond = asyncio.Event(), asyncio.Event()

        async def hold(route: Route) -> None:
            requested.set()
            await respond.wait()
            await route.continue_()

        await page.route("**/dead-letters?*", hold)
        await page.get_by_label("Error").press("Enter")
        await requested.wait()
        await letters.first.get_by_role("checkbox").check()
        await letters.first.evaluate("item => item.classList.add('replaced')")
        respond.set()
        await expect(page.locator(".item.replaced")).to_have_count(0)
        await expect(letters.first.get_by_role("checkbox")).to_be_checked()
        await expect(page.get_by_role("button", name="Replay 1 selected")).to_be_enabled()


async def test_a_purge_asks_for_confirmation(service: QueueService) -> None:
    for number in (-1, -2):
        await service.send("orders", number)
    await wait_for_dead_letters(service, "orders", 2)
    async with open_dashboard(service, "#/queues/orders/dead-letters") as watched:
        page = watched.page
        await page.get_by_role("button", name="Purge all…").click()
        dialog = page.get_by_role("dialog")
        await expect(dialog).to_contain_text("all 2 dead letters")
        await expect(dialog.get_by_role("button", name="Cancel")).to_be_focused()
        await page.keyboard.press("Escape")
        await expect(page.locator(".item")).to_have_count(2)
        assert len(await service.dead_letters("orders").list()) == 2
        await page.get_by_role("button", name="Purge all…").click()
        await dialog.get_by_role("button", name="Purge").click()
        await unlock(page)
        await expect(page.locator(".toast")).to_contain_text("2 dead letters purged")
    assert await service.dead_letters("orders").list() == []


async def test_a_purge_keeps_messages_that_fail_after_the_confirmation_prompt(
    service: QueueService,
) -> None:
    for number in (-1, -2):
        await service.send("orders", number)
    await wait_for_dead_letters(service, "orders", 2)
    async with open_dashboard(service, "#/queues/orders/dead-letters") as watched:
        page = watched.page
        await page.get_by_role("button", name="Purge all…").click()
        dialog = page.get_by_role("dialog")
        await expect(dialog).to_contain_text("all 2 dead letters")
        await service.send("orders", -3)
        await wait_for_dead_letters(service, "orders", 3)
        await dialog.get_by_role("button", name="Purge").click()
        await unlock(page)
        await expect(page.locator(".toast")).to_contain_text("2 dead letters purged")
    assert [item.error for item in await service.dead_letters("orders").list()] == [
        "negative total -3"
    ]


async def test_a_purge_covers_more_dead_letters_than_the_page_lists(
    service: QueueService,
) -> None:
    await service.send_many("orders", [-1] * 101)
    await wait_for_dead_letters(service, "orders", 101)
    async with open_dashboard(service, "#/queues/orders/dead-letters") as watched:
        page = watched.page
        await expect(page.get_by_text("Select the newest 100 of 101")).to_be_visible()
        await page.get_by_role("button", name="Purge all…").click()
        dialog = page.get_by_role("dialog")
        await expect(dialog).to_contain_text("all 101 dead letters")
        await service.send("orders", -3)
        await wait_for_dead_letters(service, "orders", 102)
        await dialog.get_by_role("button", name="Purge").click()
        await unlock(page)
        await expect(page.locator(".toast")).to_contain_text("101 dead letters purged")
    assert len(await service.dead_letters("orders").list()) == 1


async def test_a_queue_is_paused_and_resumed(service: QueueService) -> None:
    async with open_dashboard(service, "#/queues/orders") as watched:
        page = watched.page
        await page.get_by_role("button", name="Pause").click()
        await unlock(page)
        await expect(page.get_by_role("heading", level=1)).to_contain_text("paused")
        await expect(page.locator(".toast")).to_contain_text("Other processes continue.")
        assert [item.state for item in service.health_check().consumers] == ["paused"]
        await service.send("orders", 41)
        await expect(page.locator(".item pre, .item .preview").first).to_have_text("41")
        await page.get_by_role("button", name="Resume").click()
        await expect(page.get_by_role("heading", level=1)).to_contain_text("consuming")
        await expect(page.locator(".empty", has_text="No messages")).to_be_visible()


async def test_a_message_is_sent_and_a_wrong_token_can_be_corrected(
    service: QueueService, orders: Orders
) -> None:
    # Chromium reports the 401 response to a wrong token in its console.
    async with serve(service, port=0, token=TOKEN, read_token=READ_TOKEN) as address:
        async with open_page(f"{address}#/queues/orders", read_token=READ_TOKEN) as watched:
            page = watched.page
            await page.get_by_text("Send a message").click()
            await page.get_by_label("Body (JSON)").fill("7")
            await page.get_by_role("button", name="Send", exact=True).click()
            await unlock(page, "wrong")
            dialog = page.get_by_role("dialog")
            await expect(dialog.get_by_role("alert")).to_have_text("The token is invalid.")
            await expect(page.get_by_label("Token")).to_be_focused()
            await unlock(page)
            await expect(dialog).to_have_count(0)
            await expect(page.locator(".toast", has_text="Sent as")).to_be_visible()
            await page.get_by_label("Body (JSON)").fill('"not a number"')
            await page.get_by_role("button", name="Send", exact=True).click()
            await expect(page.locator(".toast.bad", has_text="orders")).to_be_visible()
            await page.get_by_role("button", name="Lock").click()
            await expect(page.get_by_role("button", name="Unlock")).to_be_visible()
        unexpected = [
            text for text in watched.console_errors if "401" not in text and "422" not in text
        ]
        assert unexpected == []
    assert orders.handled == [7]


async def test_the_unlock_button_accepts_only_a_valid_token(service: QueueService) -> None:
    async with (
        serve(service, port=0, token=TOKEN, read_token=READ_TOKEN) as address,
        open_page(address, read_token=READ_TOKEN) as watched,
    ):
        page = watched.page
        await page.get_by_role("button", name="Unlock").click()
        await unlock(page, "wrong")
        alert = page.get_by_role("dialog").get_by_role("alert")
        await expect(alert).to_have_text("The token is invalid.")
        await unlock(page, READ_TOKEN)
        await expect(alert).to_have_text("This token permits reading only.")
        assert await page.evaluate("sessionStorage.getItem('qkit-token')") is None
        await unlock(page, f" {TOKEN} ")
        await expect(page.get_by_role("button", name="Lock", exact=True)).to_be_visible()
        # Store a token that is no longer valid.
        await page.evaluate("sessionStorage.setItem('qkit-token', 'old')")
        await page.goto(f"{address}#/queues/orders")
        await page.get_by_role("button", name="Pause").click()
        await expect(page.get_by_role("dialog", name="Unlock changes")).to_be_visible()


async def test_the_dashboard_asks_for_a_token_and_works_with_the_read_token(
    service: QueueService,
) -> None:
    for number in (-1, -2, -3):
        await service.send("orders", number)
        await wait_for_dead_letters(service, "orders", -number)
    await service.send("archive", "only for readers")
    async with (
        serve(service, port=0, token=TOKEN, read_token=READ_TOKEN) as address,
        open_page(address) as watched,
    ):
        page = watched.page
        dialog = page.get_by_role("dialog", name="Sign in")
        await expect(dialog).to_be_visible()
        await expect(page.locator("#service-state")).to_contain_text("signed out")
        await page.get_by_label("Token").fill("wrong")
        await dialog.get_by_role("button", name="Sign in").click()
        await expect(dialog.get_by_role("alert")).to_have_text("The token is invalid.")
        await page.keyboard.press("Escape")  # without a token there is nothing to show
        await expect(dialog).to_be_visible()
        await page.get_by_label("Token").fill(READ_TOKEN)
        await dialog.get_by_role("button", name="Sign in").click()
        await expect(page.get_by_role("row", name="orders")).to_contain_text("consuming")
        await page.goto(f"{address}#/queues/archive")
        await expect(page.locator(".item .preview")).to_contain_text("only for readers")
        await page.goto(f"{address}#/queues/orders/dead-letters")
        await expect(page.locator(".item")).to_have_count(3)
        await expect(page.locator(".item").first).to_contain_text("total -3")  # newest first
        async with page.context.expect_page() as opened:
            await page.get_by_role("link", name="health").click()
        health = await opened.value
        await expect(health.locator("body")).to_contain_text('"status":"healthy"')
        await page.bring_to_front()
        await page.get_by_role("button", name="Replay all").click()
        await unlock(page)
        await expect(page.locator(".toast")).to_contain_text("3 dead letters replayed")
        await page.get_by_role("button", name="Lock", exact=True).click()
        await expect(page.get_by_role("button", name="Unlock")).to_be_visible()
        await page.goto(f"{address}#/")
        await expect(page.get_by_role("row", name="archive")).to_be_visible()
        unexpected = [text for text in watched.console_errors if "401" not in text]
        assert unexpected == []


async def test_without_a_token_the_dashboard_is_read_only(service: QueueService) -> None:
    async with open_dashboard(service, "#/queues/orders", token=None) as watched:
        page = watched.page
        await expect(page.get_by_role("button", name="Read-only")).to_be_disabled()
        await expect(page.get_by_role("button", name="Pause")).to_be_disabled()
        await expect(page.get_by_text("Send a message")).to_be_hidden()
        await expect(page.locator("#foot-note")).to_contain_text("QKIT_TOKEN")


async def test_an_overview_without_queues_shows_a_hint() -> None:
    async with make_shop() as service, open_dashboard(service) as watched:
        await expect(watched.page.locator(".empty")).to_contain_text("No queues yet")


async def test_an_unknown_queue_is_reported(service: QueueService) -> None:
    async with open_dashboard(service, "#/queues/nowhere") as watched:
        await expect(watched.page.locator(".empty").first).to_contain_text("No such queue")


async def test_the_banner_reports_a_lost_broker_until_it_is_back() -> None:
    backend = FaultyBackend()
    service = QueueService(Settings(type="native"), backend=backend)
    async with service, open_dashboard(service) as watched:
        banner = watched.page.locator("#banner")
        await expect(watched.page.locator("#service-state")).to_contain_text("ready")
        backend.always("ping", BackendUnavailable("no route to the broker"))
        await expect(banner).to_contain_text("The broker cannot be reached.")
        await expect(banner).to_contain_text("no route to the broker")
        await expect(watched.page.locator("#service-state")).to_contain_text("not ready")
        health = watched.page.get_by_role("region", name="Health")
        await expect(health).to_contain_text("not connected: sends fail")
        await expect(health).not_to_contain_text("sends are accepted")
        backend.heal("ping")
        await expect(banner).to_be_empty()


async def test_the_banner_reports_a_stopped_service_until_it_is_back(service: QueueService) -> None:
    # Chromium reports refused connections in its console, so the console is not checked.
    async with AsyncExitStack() as first:
        address = await first.enter_async_context(serve(service, port=0))
        port = int(address.rstrip("/").rpartition(":")[2])
        async with open_page(address) as watched:
            page = watched.page
            await expect(page.locator("#service-state")).to_contain_text("ready")
            await first.aclose()
            await expect(page.locator("#banner")).to_contain_text("The service does not respond.")
            await expect(page.locator("body")).to_have_class("stale")
            async with serve(service, port=port):
                await expect(page.locator("#banner")).to_be_empty()
                await expect(page.locator("#service-state")).to_contain_text("ready")


async def test_the_dashboard_can_be_used_with_the_keyboard(service: QueueService) -> None:
    await service.send("orders", -1)
    await wait_for_dead_letters(service, "orders", 1)
    async with open_dashboard(service) as watched:
        page = watched.page
        await expect(page.get_by_role("link", name="orders", exact=True)).to_be_visible()
        await page.keyboard.press("Tab")
        await expect(page.get_by_role("link", name="Skip to content")).to_be_focused()
        await page.get_by_role("link", name="1 dead letters of orders").focus()
        await page.keyboard.press("Enter")
        await expect(page.get_by_role("heading", level=1)).to_contain_text("orders")
        await page.locator(".item summary").focus()
        await page.keyboard.press("Enter")
        await expect(page.get_by_role("button", name="Replay this one")).to_be_visible()
        await page.keyboard.press("Tab")  # the scrollable body takes the focus first
        await page.keyboard.press("Tab")
        await page.keyboard.press("Enter")
        await expect(page.get_by_label("Token")).to_be_focused()
        await page.keyboard.type(TOKEN)
        await page.keyboard.press("Enter")
        await expect(page.locator(".toast")).to_contain_text("replayed to orders")


async def test_the_skip_link_focuses_the_content(service: QueueService) -> None:
    async with open_dashboard(service, "#/queues/orders") as watched:
        page = watched.page
        await expect(page.get_by_role("heading", level=1)).to_contain_text("orders")
        await page.keyboard.press("Tab")
        await page.keyboard.press("Enter")
        await expect(page.locator("main")).to_be_focused()
        await page.evaluate("location.hash = '#main'")  # as from a bookmark
        await page.wait_for_timeout(100)
        await expect(page.get_by_role("heading", level=1)).to_contain_text("orders")


async def test_a_malformed_address_is_reported_as_an_unknown_queue(
    service: QueueService,
) -> None:
    async with open_dashboard(service, "#/queues/%zz") as watched:
        page = watched.page
        await expect(page.locator(".empty").first).to_contain_text("No such queue")
        await expect(page.locator("#service-state")).to_contain_text("ready")
        await page.get_by_role("link", name="All queues").first.click()
        await expect(page.get_by_role("row", name="orders")).to_be_visible()


async def test_the_keyboard_focus_survives_a_replay_and_a_purge(
    service: QueueService, orders: Orders
) -> None:
    for number in (-1, -2, -3):
        await service.send("orders", number)
        await wait_for_dead_letters(service, "orders", -number)
    async with open_dashboard(service, "#/queues/orders/dead-letters") as watched:
        page = watched.page
        summaries = page.locator(".item summary")
        await expect(summaries).to_have_count(3)
        orders.accept_all = True
        await summaries.nth(1).click()
        await page.get_by_role("button", name="Replay this one").press("Enter")
        await unlock(page)
        await expect(summaries).to_have_count(2)
        await expect(summaries.nth(1)).to_be_focused()  # the next dead letter
        await expect(summaries.nth(1)).to_contain_text("total -1")
        await page.keyboard.press("Enter")
        await page.get_by_role("button", name="Purge this one…").press("Enter")
        await page.get_by_role("dialog").get_by_role("button", name="Purge").press("Enter")
        await expect(summaries).to_have_count(1)
        await expect(summaries.first).to_be_focused()
        await page.get_by_role("button", name="Replay all").press("Enter")
        await expect(page.locator(".empty", has_text="No dead letters")).to_be_visible()
        await expect(page.locator(".items")).to_be_focused()


async def test_chart_labels_are_readable_on_a_phone_and_lines_share_a_scale(
    service: QueueService,
) -> None:
    for _ in range(9):
        await service.send("archive", 1)  # published but never acked
    async with open_dashboard(service, "#/queues/archive", width=360, height=740) as watched:
        page = watched.page
        label = page.locator(".chart .grid text").first
        await expect(label).to_be_visible()
        drawing = page.locator(".chart").first
        assert await drawing.evaluate("item => item.getScreenCTM().a") == 1  # one unit is one pixel
        # Measured in one call, because the chart replaces its labels every second.
        height, right, boxes = await drawing.evaluate(
            "item => [item.querySelector('.grid text').getBoundingClientRect().height,"
            " item.getBoundingClientRect().right,"
            " [...item.querySelectorAll('text[y=\"162\"]')].map((word) => {"
            " const { left, right } = word.getBoundingClientRect(); return [left, right]; })]"
        )
        assert height >= 12
        times = sorted(boxes)
        assert len(times) >= 3
        assert all(one[1] < other[0] for one, other in itertools.pairwise(times))  # none overlap
        assert times[-1][1] <= right
    points = "[[98, 0, 10, 2], [99, 0, 10, 2], [100, 0, 10, 2]]"
    async with open_dashboard(service) as watched:
        await expect(watched.page.get_by_role("row", name="archive")).to_be_visible()
        heights = await watched.page.evaluate(
            """async (points) => {
                const { peak, sparkline } = await import("./static/charts.js");
                return [2, 3].map((column) => {
                    const line = sparkline();
                    const own = points.map((row) => [row[0], row[column]]);
                    line.draw(own, 100, "", peak(points, 100, [2, 3]));
                    return Number(line.element.querySelector("circle").getAttribute("cy"));
                });
            }""",
            json.loads(points),
        )
    tall, low = heights
    assert tall == 3  # 10, the peak: at the top
    assert low == pytest.approx(3 + 0.8 * 27)  # 2, a fifth of the peak


async def test_json_is_indented_and_its_numbers_are_unchanged(service: QueueService) -> None:
    body = {
        "id": 12345678901234567890,
        "total": 4.0,
        "note": 'a "b", {c}: \\',
        "none": [],
        "of": [1],
    }
    await service.send("archive", body)
    async with open_dashboard(service, "#/queues/archive") as watched:
        await watched.page.locator(".item summary").click()
        text = await watched.page.locator(".item pre").text_content()
    assert text is not None
    assert json.loads(text) == body
    assert text.splitlines()[1:3] == ['  "id": 12345678901234567890,', '  "total": 4.0,']
    assert '  "none": [],' in text


async def test_the_numbers_of_a_sent_body_are_unchanged(service: QueueService) -> None:
    await service.send("archive", 1)
    body = '{"id": 12345678901234567890, "total": 4.0, "share": 0.12345678901234567890}'
    async with open_dashboard(service, "#/queues/archive") as watched:
        page = watched.page
        await page.get_by_text("Send a message").click()
        await page.get_by_label("Body (JSON)").fill(body)
        await page.get_by_label("Priority").fill("9")
        await page.get_by_role("button", name="Send", exact=True).click()
        await unlock(page)
        await expect(page.locator(".toast", has_text="Sent as")).to_be_visible()
    sent = (await service.peek("archive"))[0]
    assert sent.priority == 9
    assert b'"id":12345678901234567890,"total":4.0' in sent.body.replace(b" ", b"")


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
async def test_pages_fit_a_phone(service: QueueService, dark: bool) -> None:
    await service.send("a-queue-with-quite-a-long-name.for-a-phone.that-must-wrap", {"id": 1})
    await service.send("orders", -1)
    await wait_for_dead_letters(service, "orders", 1)
    async with open_dashboard(service, width=360, height=740, dark=dark) as watched:
        page = watched.page
        for path in ("#/", "#/queues/orders", "#/queues/orders/dead-letters"):
            await page.evaluate("path => { location.hash = path }", path)
            await expect(page.get_by_text("orders").first).to_be_visible()
            await page.wait_for_timeout(100)
            wide = await page.evaluate("document.documentElement.scrollWidth - innerWidth")
            assert wide <= 0, path
        background = await page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert background == ("rgb(13, 16, 21)" if dark else "rgb(245, 246, 248)")


async def test_the_theme_button_cycles_through_light_dark_and_auto(service: QueueService) -> None:
    async with open_dashboard(service) as watched:
        page = watched.page
        chosen = []
        for _ in range(3):
            await page.locator("#theme-button").click()
            chosen.append(await page.evaluate("document.documentElement.dataset.theme"))
        assert chosen == ["light", "dark", "auto"]


ATTACKS = [
    "<script>window.hit = 1</script>",
    "<img src=x onerror=window.hit=1>",
    '"><svg onload=window.hit=1>',
    "'-window.hit=1-'",
    "</textarea><script>window.hit=1</script>",
    "javascript:window.hit=1",
    "{{constructor.constructor('window.hit=1')()}}",
    "<iframe srcdoc='<script>parent.hit=1</script>'>",
    "</script><script>window.hit=1</script>",
    "\u202ealert(1)",
]


async def test_message_content_is_never_executed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    @consume("orders")
    async def fail(body: str) -> None:
        kind = type(body, (Exception,), {})
        raise kind(body)

    service = make_shop(fail)
    service.declare(Channel("archive"))
    async with service:
        for attack in ATTACKS:
            await service.send("orders", attack, headers={"note": attack}, key=attack)
            await service.send("archive", attack, headers={"note": attack}, key=attack)
        await wait_for_dead_letters(service, "orders", len(ATTACKS))
        real = service.queues

        async def with_foreign_names() -> list[str]:  # as if declared by another program
            return [*await real(), *ATTACKS]

        monkeypatch.setattr(service, "queues", with_foreign_names)
        service._runtime.wiring.connection.last_error = ATTACKS[1]
        async with open_dashboard(service) as watched:
            page = watched.page
            await expect(page.get_by_role("row")).to_have_count(1 + 2 + len(ATTACKS))
            for attack in ATTACKS:
                await expect(page.get_by_text(attack).first).to_be_visible()
            for path in ("#/queues/orders/dead-letters", "#/queues/archive"):
                await page.evaluate("path => { location.hash = path }", path)
                items = page.locator(".item summary")
                await expect(items).to_have_count(len(ATTACKS))
                for item in await items.all():
                    await item.click()
                await expect(page.locator(".item pre")).to_have_count(len(ATTACKS))
            name = "#/queues/" + "%3Cimg%20src%3Dx%20onerror%3Dwindow.hit%3D1%3E"
            await page.evaluate("path => { location.hash = path }", name)
            await expect(page.get_by_role("heading", level=1)).to_contain_text("<img src=x")
            await page.wait_for_timeout(300)
            assert await page.evaluate("window.hit") is None
            assert await page.locator("main script, main img, main iframe").count() == 0
            assert await page.evaluate("document.title") == f"{ATTACKS[1]} · qkit"
            watched.console_errors = [text for text in watched.console_errors if "422" not in text]
