"""Private attributes of redis-py are used in ``driver.py`` alone."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from redis import exceptions

from qkit.backends.redis import driver

PACKAGE = Path(driver.__file__).parent


def privates(code: str) -> list[str]:
    """Uses of private attributes of anything but ``self``, ``cls`` and ``super()``."""
    own = {"self", "cls", "super()"}
    return [
        ast.unparse(node)
        for node in ast.walk(ast.parse(code))
        if isinstance(node, ast.Attribute)
        and node.attr.startswith("_")
        and not node.attr.startswith("__")
        and ast.unparse(node.value) not in own
    ]


def test_only_the_driver_module_uses_private_attributes() -> None:
    found = {
        path.name: uses
        for path in PACKAGE.rglob("*.py")
        if (uses := privates(path.read_text(encoding="utf-8")))
    }
    assert set(found) == {"driver.py"}, found
    assert set(found["driver.py"]) == {"connection._reader", "connection._writer"}


@pytest.mark.parametrize("code", ["pool._connect()", "self._connection._writer", "a.b._c = 1"])
def test_private_attributes_of_other_objects_are_found(code: str) -> None:
    assert len(privates(code)) == 1


async def test_a_driver_without_these_attributes_is_refused_with_its_version() -> None:
    class Other:
        """A connection as another version may have it."""

    with pytest.raises(exceptions.RedisError, match=r"cannot use redis-py \d"):
        driver.PipelinedConnection(Other(), 1.0)  # type: ignore[arg-type]  # that is the point
