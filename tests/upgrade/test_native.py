"""Tests that the current version can use a native directory of qkit d324538."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from qkit import Settings
from qkit.native import Engine
from tests.upgrade.raw import DATA, PREFIX
from tests.upgrade.takeover import ARRIVING, Expected, Takeover, consume_two

STATES = ["native-killed", "native-clean"]
OLD_SETTINGS: dict[str, Any] = {"retry": {"initial_delay": 0.05, "jitter": 0}}


@pytest.fixture
def directory(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """Copy of the old directory, with the original file modes, which git does not store."""
    path = tmp_path / "data"
    shutil.copytree(DATA / request.getfixturevalue("state"), path)
    for each in [path, *path.rglob("*")]:
        each.chmod(0o700 if each.is_dir() else 0o600)
    return path


def settings(directory: Path, **values: Any) -> Settings:
    return Settings(type="native", path=directory, prefix=PREFIX, **values)


@pytest.mark.slow
@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("values", [{}, OLD_SETTINGS], ids=["default", "as-before"])
async def test_every_message_of_the_old_version_arrives(
    state: str, directory: Path, values: dict[str, Any]
) -> None:
    await Takeover(settings(directory, **values), Expected(state)).run()


@pytest.mark.parametrize("state", STATES)
async def test_the_engine_without_a_service_contains_all_messages(
    state: str, directory: Path
) -> None:
    expected = Expected(state)
    async with await Engine.open(directory) as engine:
        for channel in expected.channels:
            if channel == "loaded":  # bulk files are imported up to a second later
                continue
            waiting = [m["id"] for m in expected.of(*ARRIVING, "far", channels=(channel,))]
            peeked = [envelope.id for envelope in await engine.peek(PREFIX + channel, 100)]
            short_lived = {message["id"] for message in expected.of("expired")}
            assert sorted(id for id in peeked if id not in short_lived) == sorted(waiting)
        letters = [m["id"] for m in expected.of("dead", channels=("orders",))]
        peeked = [envelope.id for envelope in await engine.peek(f"{PREFIX}orders_dlq", 100)]
        assert set(letters) <= set(peeked)


@pytest.mark.parametrize("state", STATES)
async def test_an_uncommitted_bulk_file_is_not_imported(state: str, directory: Path) -> None:
    unpublished = directory / "inbox" / ".unfinished" / "00000000.seg"
    before = unpublished.read_bytes()
    async with await Engine.open(directory) as engine:
        for queue in await engine.list():
            assert "unfinished-1" not in {each.id for each in await engine.peek(queue, 100)}
    assert unpublished.read_bytes() == before


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("channel", Expected("native-killed").options)
async def test_a_channel_with_old_options_can_be_consumed(
    state: str, directory: Path, channel: str
) -> None:
    await consume_two(settings(directory), Expected(state), channel)
