"""The code in docs/spark.md and the docstring examples of ``qkit.spark`` run unchanged."""

from __future__ import annotations

import doctest
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

import qkit.spark
from tests.spark.conftest import ROOT

BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)


@pytest.mark.full  # two minutes of Spark; the ordinary suite covers what the page shows
@pytest.mark.timeout(900)
def test_the_spark_page_runs_as_one_program(spark: SparkSession, directory: Path) -> None:
    names = {"spark": spark, "directory": str(directory)}
    for block in BLOCK.findall((ROOT / "docs" / "spark.md").read_text()):
        exec(compile(block, "docs/spark.md", "exec"), names)


def docstrings() -> Iterator[tuple[str, str]]:
    """Yield the names and docstrings of the package, its public names and their methods."""
    yield "qkit.spark", inspect.getdoc(qkit.spark) or ""
    for name in qkit.spark.__all__:
        item = getattr(qkit.spark, name)
        yield name, inspect.getdoc(item) or ""
        for member in vars(item) if inspect.isclass(item) else ():
            method = getattr(item, member)
            if callable(method) and not member.startswith("_"):
                yield f"{name}.{member}", inspect.getdoc(method) or ""


DOCSTRINGS = dict(docstrings())


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", DOCSTRINGS)
def test_the_example_of_a_docstring_runs(spark: SparkSession, directory: Path, name: str) -> None:
    """Lines marked ``+SKIP`` run here too; the ordinary doctest run has no Spark session."""
    names = {"spark": spark, "directory": str(directory), "qkit": qkit, **vars(qkit.spark)}
    parsed = doctest.DocTestParser().get_doctest(DOCSTRINGS[name], names, name, None, None)
    assert parsed.examples, f"{name} has no example"
    for example in parsed.examples:
        example.options.pop(doctest.SKIP, None)
    printed: list[str] = []
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    assert runner.run(parsed, out=printed.append).failed == 0, "".join(printed)
