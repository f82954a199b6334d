"""Import of the service that a ``MODULE:SERVICE`` argument names."""

from __future__ import annotations

import difflib
import importlib
import inspect
import sys
import traceback
from pathlib import Path
from types import ModuleType

from qkit.errors import ConfigError
from qkit.service import QueueService
from qkit.sync import SyncQueueService

__all__ = ["AnyService", "load"]

AnyService = QueueService | SyncQueueService


def load(target: str) -> AnyService:
    """Return the service that ``MODULE:SERVICE`` names, or that the named function returns.

    Raises:
        ConfigError: There is no such module or service, or the import or the call failed. The
            message includes a suggestion or the line that failed.
    """
    path, _, name = target.partition(":")
    if not path or not name:
        raise ConfigError(f"expected MODULE:SERVICE, such as shop.worker:service, got {target!r}")
    module = _module(path, target)
    found: object = module
    for part in name.split("."):
        if not hasattr(found, part):
            services = [key for key, value in vars(module).items() if isinstance(value, AnyService)]
            near = difflib.get_close_matches(part, [*services, *vars(module)], 1)
            hint = (
                f"did you mean {path}:{(services or near)[0]}?"
                if services or near
                else "the module has no QueueService"
            )
            raise ConfigError(f"{path} has no {name!r}; {hint}")
        found = getattr(found, part)
    if not isinstance(found, AnyService) and callable(found):
        _require_no_arguments(found, path, target, module)
        try:
            found = found()
        except Exception as error:
            raise _failed(f"calling {target}", error) from error
    if inspect.iscoroutine(found):
        found.close()
        raise ConfigError(
            f"{target} is an async function, but the service is created before the event loop "
            "starts: define it with def, not async def; the service connects when it starts"
        )
    if not isinstance(found, AnyService):
        raise ConfigError(
            f"{target}: expected a QueueService or SyncQueueService, or a function without "
            f"arguments that returns one, got {type(found).__name__}"
        )
    return found


def _require_no_arguments(found: object, path: str, target: str, module: ModuleType) -> None:
    """Raise ``ConfigError`` for an object that cannot be a function that returns a service."""
    kind = type(found)
    services = [key for key, value in vars(module).items() if isinstance(value, AnyService)]
    hint = f"pass {path}:{services[0]}" if services else "pass the QueueService of the application"
    if hasattr(found, "routes") or hasattr(found, "router"):  # FastAPI, Starlette
        raise ConfigError(
            f"{target} is an ASGI application ({kind.__name__}), not a service: run it with an "
            f"ASGI server such as uvicorn, or {hint} to run its handlers without the application"
        )
    if not inspect.isroutine(found) and not inspect.isclass(found):
        return
    try:
        inspect.signature(found).bind()
    except ValueError:
        return  # a built-in function without a signature
    except TypeError as error:
        raise ConfigError(
            f"{target} cannot be called without arguments ({error}): name a QueueService, or a "
            f"function without arguments that returns one; {hint}"
        ) from None


def _module(path: str, target: str) -> ModuleType:
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        return importlib.import_module(path)
    except ModuleNotFoundError as error:
        if error.name is None or not (path == error.name or path.startswith(f"{error.name}.")):
            # The module exists, but one of its own imports does not.
            raise _failed(f"importing {path}", error) from error
        file = (
            " (write it without .py, with dots instead of slashes)" if path.endswith(".py") else ""
        )
        raise ConfigError(
            f"{target!r}: there is no module {error.name!r} in {here} or among the installed "
            f"packages{file}"
        ) from None
    except Exception as error:
        raise _failed(f"importing {path}", error) from error


def _failed(what: str, error: Exception) -> ConfigError:
    """Return a ``ConfigError`` with the error of the imported program and the line that failed."""
    frames = traceback.extract_tb(error.__traceback__)
    in_program = frames and frames[-1].filename != __file__
    place = f" ({frames[-1].filename}:{frames[-1].lineno})" if in_program else ""
    return ConfigError(f"{what} failed: {type(error).__name__}: {error}{place}")
