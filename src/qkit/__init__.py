"""Message producers and consumers with one API on a native engine, RabbitMQ, Kafka and Redis.

Decorate typed handlers with ``@channel`` and ``@consume``, send typed messages with
``QueueService.send``, and choose the backend by configuration.

May import: ``_exports``.
"""

from typing import TYPE_CHECKING

__version__ = "0.1.0"

if TYPE_CHECKING:
    from qkit._exports import *  # noqa: F403  # every name there is public

    __all__: list[str]
else:
    # Hidden from type checkers, which would otherwise accept every attribute of qkit.

    def __getattr__(name: str) -> object:
        """Import the public names when one of them is first used.

        ``import qkit`` alone imports no other qkit module, so it stays fast.
        """
        from importlib import import_module
        from importlib.util import find_spec

        # The import system tries an attribute before it looks for a submodule.
        if name == "__all__" or not (name.startswith("_") or find_spec(f"{__name__}.{name}")):
            exports = vars(import_module("qkit._exports"))
            # pytest adds names that begin with "@" to modules whose assertions it rewrites.
            public = {key: value for key, value in exports.items() if key[0].isalpha()}
            globals().update(public, __all__=sorted(public))
            if name in globals():
                return globals()[name]
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

    def __dir__() -> list[str]:
        return sorted({*globals(), *__getattr__("__all__")})
