"""Check that only ``driver.py`` uses private attributes of redis-py."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from redis import exceptions

from qkit.backends.redis import driver

PACKAGE = Path(driver.__file__).parent


def privates(code: str) -> list[str]:
    """Return uses of private attributes, except those of ``self``, ``cls`` and ``super()``."""
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
def test_private_attributes_of_other_objects_are_detected(code: str) -> None:
    assert len(privates(code)) == 1


async def test_an_unsupported_driver_version_is_rejected() -> None:
    class Other:
        """Connection of another version of redis-py."""

    with pytest.raises(exceptions.RedisError, match=r"redis-py \d\S* is not supported"):
        driver.PipelinedConnection(Other(), 1.0)  # type: ignore[arg-type]  # on purpose
