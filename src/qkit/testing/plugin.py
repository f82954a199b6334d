"""Pytest plugin: fixtures, and test failures for coroutines that are never awaited.

pytest loads it wherever qkit is installed. Without pytest-asyncio, it provides no fixtures.
"""

from importlib.util import find_spec

from qkit.testing.unawaited import (
    pytest_configure,
    pytest_runtest_call,
    pytest_runtest_setup,
    pytest_runtest_teardown,
    pytest_unconfigure,
)

__all__ = [
    "pytest_configure",
    "pytest_runtest_call",
    "pytest_runtest_setup",
    "pytest_runtest_teardown",
    "pytest_unconfigure",
]

if find_spec("pytest_asyncio") is not None:
    from qkit.testing.fixtures import qkit_service, virtual_clock

    __all__ += ["qkit_service", "virtual_clock"]
