"""The pytest plugin: fixtures where pytest-asyncio is, and failures for what is never awaited.

It is loaded in every pytest run of an environment with qkit, so it must not fail without
pytest-asyncio.
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
