"""The pytest plugin: offers ``qkit_service`` and ``virtual_clock`` where pytest-asyncio is.

It is loaded in every pytest run of an environment with qkit, so it must not fail without it.
"""

from importlib.util import find_spec

if find_spec("pytest_asyncio") is not None:
    from qkit.testing.fixtures import qkit_service, virtual_clock

    __all__ = ["qkit_service", "virtual_clock"]
