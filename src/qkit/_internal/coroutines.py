"""Decorators for functions that return coroutines."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from types import FunctionType
from typing import TypeVar, cast

__all__ = ["returns_coroutine", "shown_as"]

F = TypeVar("F", bound=Callable[..., object])


def returns_coroutine(function: F) -> F:
    """Make ``inspect.iscoroutinefunction`` true for a plain function that returns a coroutine.

    Args:
        function: A function or method that always returns a coroutine.

    Returns:
        The same function. Its signature, docstring and speed do not change.
    """
    if sys.version_info >= (3, 12):
        return inspect.markcoroutinefunction(function)
    # In Python 3.11 only ``inspect`` reads this flag. The interpreter creates a coroutine only if
    # the bytecode contains RETURN_GENERATOR, which this bytecode does not.
    plain = cast("FunctionType", function)
    code = plain.__code__
    plain.__code__ = code.replace(co_flags=code.co_flags | inspect.CO_COROUTINE)
    return function


def shown_as(name: str) -> Callable[[F], F]:
    """Set the name that warnings and tasks show for a function's coroutines.

    Args:
        name: Name of the public function that returns the coroutine, such as
            ``QueueService.send``.

    Returns:
        A decorator that returns the same function.
    """

    def rename(function: F) -> F:
        function.__qualname__ = name
        return function

    return rename
