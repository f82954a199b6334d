"""Backend factory: built-in, third-party and unknown backends."""

from __future__ import annotations

from importlib.metadata import EntryPoint, EntryPoints
from typing import Any

import pytest

from qkit import ConfigError, QueueService, Settings
from qkit._internal.clock import SystemClock
from qkit.backends.factory import open_backend
from qkit.backends.native.backend import NativeBackend
from tests.support.faulty import FaultyBackend


def opener(settings: Settings) -> FaultyBackend:
    """Return a third-party backend, as the target of an entry point."""
    backend = FaultyBackend(name=settings.type)
    backend.prefix = settings.prefix  # type: ignore[attr-defined]
    return backend


@pytest.fixture
def plugin(monkeypatch: pytest.MonkeyPatch) -> None:
    found = EntryPoints(
        [
            EntryPoint("elsewhere", "tests.backends.test_factory:opener", "qkit.backends"),
            EntryPoint("console", "nowhere:main", "console_scripts"),
        ]
    )

    def entry_points(**params: Any) -> EntryPoints:
        return found.select(**params)

    for module in ("qkit.backends.factory", "qkit.settings.rules"):
        monkeypatch.setattr(f"{module}.entry_points", entry_points, raising=False)
    monkeypatch.setattr("importlib.metadata.entry_points", entry_points)


def test_settings_select_the_built_in_native_backend() -> None:
    assert isinstance(open_backend(Settings(type="native"), SystemClock()), NativeBackend)


@pytest.mark.usefixtures("plugin")
async def test_a_third_party_backend_is_found_by_its_entry_point() -> None:
    service = QueueService(Settings(type="elsewhere", prefix="staging."))
    async with service:
        await service.send("orders", 1)
        assert (await service.stats("orders")).depth == 1
        assert await service.queues() == ["orders", "orders.dlq"]
    assert service._backend.name == "elsewhere"
    assert service._backend.prefix == "staging."  # type: ignore[attr-defined]


@pytest.mark.proves("003-config-2", "003-config-3", "003-config-4")
def test_the_error_for_an_unknown_type_lists_the_known_types() -> None:
    with pytest.raises(ConfigError) as caught:
        QueueService(Settings(type="rabbit"))
    for known in ("native", "rabbitmq", "kafka", "redis"):
        assert known in str(caught.value)


@pytest.mark.usefixtures("plugin")
def test_the_error_for_a_missing_entry_point_lists_the_built_in_types(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    settings = Settings(type="elsewhere")
    monkeypatch.setattr("qkit.backends.factory.entry_points", lambda **_: EntryPoints(()))
    with pytest.raises(ConfigError, match=r"type 'elsewhere'.*native"):
        open_backend(settings, SystemClock())
