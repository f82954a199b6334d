"""Benchmark runner: every suite runs, and targets and waivers are applied.

No test here asserts a duration; ``make bench-check`` does.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import _measure, brokers, native
from benchmarks._measure import Figure, Missing, Result, Scale, Suite, Waiver, judge, measure

RATE = Figure("rate", "more is better", 2.0)
SLOW_SUITES = {"footprint", "recovery", "socket", "depth"}
SIZE = Figure("size", "less is better", 100, "B", at_most=True)


def result(figure: Figure, *samples: float) -> Result:
    return Result(figure, list(samples))


@pytest.mark.parametrize(
    ("figure", "value", "state"),
    [
        (RATE, 2.0, "pass"),
        (RATE, 1.9, "fail"),
        (SIZE, 100.0, "pass"),
        (SIZE, 101.0, "fail"),
        (replace(RATE, target=None), 0.0, "info"),
    ],
)
def test_a_target_is_a_minimum_or_a_maximum(figure: Figure, value: float, state: str) -> None:
    found = result(figure, value)
    assert judge([found], {}) is (state != "fail")
    assert found.state == state


def test_the_value_of_a_figure_is_its_median() -> None:
    assert result(RATE, 0.1, 5.0, 2.5).median == 2.5
    assert result(RATE).median is None


def test_a_waived_figure_passes_and_shows_its_reason() -> None:
    missed, other = result(RATE, 1.0), result(SIZE, 200.0)
    assert not judge([missed, other], {"rate": Waiver("the disk is slow", 1.0)})
    assert (missed.state, other.state) == ("waived", "fail")
    assert "the disk is slow" in _measure.table([missed, other])


def test_a_waiver_whose_figure_meets_its_target_is_obsolete() -> None:
    met = result(RATE, 3.0)
    assert judge([met], {"rate": Waiver("was slow")})
    assert met.state == "obsolete"
    assert "waivers.toml" in _measure.table([met])


def test_a_missing_figure_fails_unless_it_is_waived() -> None:
    missing = result(RATE)
    assert not judge([missing], {})
    assert missing.state == "missing"
    assert judge([missing], {"rate": Waiver("not built yet")})


def suite(name: str, order: list[str], *, costly: bool = False) -> Suite:
    async def run(scale: Scale) -> Mapping[str, float]:
        assert scale.directory.is_dir()
        order.append(name)
        return {name: float(len(order))}

    return Suite(name, (Figure(name, name),), run, costly)


def test_repetitions_are_interleaved_and_costly_suites_run_less_often(tmp_path: Path) -> None:
    order: list[str] = []
    suites = [suite("a", order), suite("b", order, costly=True), suite("c", order)]
    results = measure(suites, Scale(1, True, tmp_path), 3, report=lambda line: None)
    assert order == ["a", "b", "c", "a", "c", "a", "c"]
    assert [item.samples for item in results] == [[1.0, 4.0, 6.0], [2.0], [3.0, 5.0, 7.0]]
    assert not list(tmp_path.iterdir())


def test_other_suites_run_when_a_peer_library_is_missing(tmp_path: Path) -> None:
    async def run(scale: Scale) -> Mapping[str, float]:
        raise Missing("somequeue is not installed")

    order: list[str] = []
    suites = [Suite("peer", (RATE,), run), suite("a", order)]
    missing, there = measure(suites, Scale(1, True, tmp_path), 2, report=lambda line: None)
    assert (missing.samples, missing.note) == ([], "somequeue is not installed")
    assert len(there.samples) == 2


@pytest.mark.parametrize(
    ("pattern", "names"), [(None, ["a", "b"]), ("b", ["b"]), ("[ab]", ["a", "b"]), ("x", [])]
)
def test_the_only_option_selects_suites_by_name_or_figure(
    pattern: str | None, names: list[str]
) -> None:
    chosen = _measure.select([suite("a", []), suite("b", [])], pattern)
    assert [item.name for item in chosen] == names


def test_the_check_exits_1_for_a_missed_target_and_writes_the_samples(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async def run(scale: Scale) -> Mapping[str, float]:
        return {"rate": 1.0}

    suites, output = [Suite("some", (RATE,), run)], tmp_path / "some.json"
    assert _measure.main(suites, output, "", ["--quick"], {}) == 0
    assert _measure.main(suites, output, "", ["--quick", "--check"], {}) == 1
    assert _measure.main(suites, output, "", ["--check"], {"rate": Waiver("known")}) == 0
    assert json.loads(output.read_text())["figures"]["rate"]["samples"] == [1.0] * 5
    assert "more is better" in capsys.readouterr().out


def test_every_waiver_has_a_figure_and_a_reason() -> None:
    suites = (*native.SUITES, *brokers.SUITES)
    names = {figure.name for suite in suites for figure in suite.figures}
    for name, waiver in _measure.waivers().items():
        assert name in names
        assert waiver.reason


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(suite.name, marks=[pytest.mark.full] * (suite.name in SLOW_SUITES))
        for suite in native.SUITES
    ],
)
def test_every_native_suite_measures_its_figures(name: str, tmp_path: Path) -> None:
    (chosen,) = [suite for suite in native.SUITES if suite.name == name]
    tiny = Scale(200, True, tmp_path)
    for found in measure([chosen], tiny, 1, report=lambda line: None):
        assert found.samples or found.note.endswith(("is not installed", "this tree yet"))


@pytest.mark.proves("003-speed-7")
@pytest.mark.broker
@pytest.mark.parametrize("name", [suite.name for suite in brokers.SUITES])
def test_every_broker_suite_measures_its_figures(
    name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    redis_url: str,
    rabbitmq_url: str,
    kafka_url: str,
) -> None:
    for broker, url in (("REDIS", redis_url), ("RABBITMQ", rabbitmq_url), ("KAFKA", kafka_url)):
        monkeypatch.setenv(f"QKIT_TEST_{broker}_URL", url)
    (chosen,) = [suite for suite in brokers.SUITES if suite.name == name]
    for found in measure([chosen], Scale(500, True, tmp_path), 1, report=lambda line: None):
        assert found.samples or found.note.endswith("is not installed")
