"""What ``import qkit`` and its first use cost, and what they must not drag in."""

from __future__ import annotations

import json
import os
import pkgutil
import resource
import subprocess
import sys
from pathlib import Path

import pytest

import qkit

# What qkit stands on; their cost is not ours to change.
LIBRARIES = "import asyncio, importlib.metadata, pydantic_settings, tenacity"
LIMIT = 0.150
DRIVERS = {
    "aio_pika", "aiormq", "aiokafka", "kafka", "redis", "hiredis", "pyspark", "pyarrow", "pandas",
    "starlette", "uvicorn", "prometheus_client", "typer", "rich", "opentelemetry",
}  # fmt: skip


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """Bytecode is cached, as in any installation, and coverage does not measure the children."""
    own = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("COV") and name != "PYTHONDONTWRITEBYTECODE"
    }
    return own | {"PYTHONPYCACHEPREFIX": str(tmp_path)}


def cpu_seconds(code: str, environment: dict[str, str]) -> float:
    """The least CPU time of several runs: a busy machine makes them wait, not work."""
    costs: list[float] = []
    for _ in range(4):  # the first fills the cache
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, "-c", code], env=environment, check=True, timeout=60)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        costs.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    return min(costs)


@pytest.mark.slow
def test_importing_it_costs_little_more_than_pydantic(environment: dict[str, str]) -> None:
    pydantic = cpu_seconds("import pydantic", environment)
    whole = cpu_seconds("import qkit", environment)
    print(f"import pydantic {pydantic:.3f} s, import qkit {whole:.3f} s")
    assert whole - pydantic <= LIMIT


@pytest.mark.slow
def test_the_first_use_costs_little_more_than_what_it_stands_on(
    environment: dict[str, str],
) -> None:
    libraries = cpu_seconds(LIBRARIES, environment)
    whole = cpu_seconds(f"{LIBRARIES}\nfrom qkit import *", environment)
    print(f"its libraries {libraries:.3f} s, everything of qkit too {whole:.3f} s")
    assert whole - libraries <= LIMIT


def test_using_it_loads_no_broker_library_and_no_opentelemetry(
    environment: dict[str, str],
) -> None:
    code = (
        "import json, sys; from qkit import *; QueueService(Settings(type='native'));"
        "print(json.dumps(sorted({n.split('.')[0] for n in sys.modules})))"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code],
        env=environment, capture_output=True, text=True, check=True, timeout=60,
    )  # fmt: skip
    assert not DRIVERS & set(json.loads(ran.stdout))


def test_no_module_hides_a_name_that_is_exported() -> None:
    modules = {module.name for module in pkgutil.iter_modules(qkit.__path__)}
    assert not modules & set(qkit.__all__)
