"""``module:service`` on the command line: the service that is meant, or why there is none."""

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
    """Import the module and take the service from it; a function is called for it.

    Raises ``ConfigError`` with what could have been meant, or where the module itself failed.
    """
    path, _, name = target.partition(":")
    if not path or not name:
        raise ConfigError(f"{target!r}: write MODULE:SERVICE, such as shop.worker:service")
    module = _module(path, target)
    found: object = module
    for part in name.split("."):
        if not hasattr(found, part):
            services = [key for key, value in vars(module).items() if isinstance(value, AnyService)]
            near = difflib.get_close_matches(part, [*services, *vars(module)], 1)
            hint = (
                f"did you mean {path}:{(services or near)[0]}?"
                if services or near
                else "it has no service"
            )
            raise ConfigError(f"{path} has no {name!r}; {hint}")
        found = getattr(found, part)
    if not isinstance(found, AnyService) and callable(found):
        try:
            found = found()
        except Exception as error:
            raise _failed(f"calling {target}", error) from error
    if inspect.iscoroutine(found):
        found.close()
        raise ConfigError(
            f"{target} is an async function; a service is made before there is a loop: write it "
            "with def, and leave what must be awaited to the service's start"
        )
    if not isinstance(found, AnyService):
        raise ConfigError(
            f"{target} is {type(found).__name__}, no QueueService or SyncQueueService; name one, "
            "or a function without arguments that makes one"
        )
    return found


def _module(path: str, target: str) -> ModuleType:
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        return importlib.import_module(path)
    except ModuleNotFoundError as error:
        if error.name is None or not (path == error.name or path.startswith(f"{error.name}.")):
            raise _failed(
                f"importing {path}", error
            ) from error  # something that the module imports
        file = " (leave out .py, and write dots for slashes)" if path.endswith(".py") else ""
        raise ConfigError(
            f"{target!r}: no module {error.name!r} in {here} or among the installed{file}"
        ) from None
    except Exception as error:
        raise _failed(f"importing {path}", error) from error


def _failed(what: str, error: Exception) -> ConfigError:
    """The program's own mistake, with the place where it was made."""
    frames = traceback.extract_tb(error.__traceback__)
    theirs = frames and frames[-1].filename != __file__
    place = f" ({frames[-1].filename}:{frames[-1].lineno})" if theirs else ""
    return ConfigError(f"{what} failed: {type(error).__name__}: {error}{place}")
