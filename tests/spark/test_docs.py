"""The page of Spark is one program that runs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from tests.spark.conftest import ROOT

BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_page_runs(spark: SparkSession, directory: Path) -> None:
    names = {"spark": spark, "directory": str(directory)}
    for block in BLOCK.findall((ROOT / "docs" / "spark.md").read_text()):
        exec(compile(block, "docs/spark.md", "exec"), names)
