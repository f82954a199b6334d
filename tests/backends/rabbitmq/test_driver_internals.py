"""Check that only ``driver`` uses internals of aiormq and pamqp."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import aiormq
import pytest

import qkit.backends.rabbitmq
from qkit.backends.rabbitmq import driver

PACKAGE = Path(qkit.backends.rabbitmq.__file__).parent
LIBRARIES = {"aio_pika", "aiormq", "pamqp", "yarl"}
#: Modules that may use internals; ``lenient_decoding`` replaces decoders of pamqp.
EXCEPTIONS = {"driver.py", "lenient_decoding.py"}
MODULES = sorted(path for path in PACKAGE.glob("*.py") if path.name not in EXCEPTIONS)

DOCUMENTED = {
    *("aiormq", "aiormq.abc", "aiormq.exceptions"),
    *("pamqp", "pamqp.commands", "pamqp.encode", "pamqp.exceptions", "yarl"),
}
#: Undocumented attributes without an underscore, except names that qkit's classes also use.
UNDOCUMENTED = {
    *driver.CHANNEL_ATTRIBUTES,
    *("closing", "connection_tune", "write_queue"),
} - {"delivery_tag", "lock", "number"}


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__")


def library_names(tree: ast.AST) -> set[str]:
    """Return the names that a module imports from the libraries."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.partition(".")[0] in LIBRARIES:
                    names.add(alias.asname or alias.name.partition(".")[0])
        elif isinstance(node, ast.ImportFrom) and str(node.module).partition(".")[0] in LIBRARIES:
            names |= {alias.asname or alias.name for alias in node.names}
    return names


def root(node: ast.expr) -> str | None:
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else None


def of_import(node: ast.Import | ast.ImportFrom) -> Iterator[str]:
    names = [alias.name for alias in node.names]
    modules = names if isinstance(node, ast.Import) else [str(node.module)]
    for module in modules:
        if module.partition(".")[0] in LIBRARIES:
            if module not in DOCUMENTED:
                yield f"imports {module}"
            yield from (f"imports {name}" for name in names if is_private(name.split(".")[-1]))


def of_attribute(node: ast.Attribute) -> Iterator[str]:
    own = isinstance(node.value, ast.Name) and node.value.id in {"self", "cls"}
    if (is_private(node.attr) and not own) or node.attr in UNDOCUMENTED:
        yield f"uses {ast.unparse(node)}"


def of_call(node: ast.Call) -> Iterator[str]:
    name = node.func.id if isinstance(node.func, ast.Name) else ""
    if name not in {"getattr", "setattr", "hasattr", "delattr"}:
        return
    for argument in node.args:
        value = argument.value if isinstance(argument, ast.Constant) else None
        if isinstance(value, str) and (is_private(value) or value in UNDOCUMENTED):
            yield f"uses {ast.unparse(node)}"


def internals(source: str) -> list[str]:
    """Return the uses of library internals in the source of a module."""
    tree = ast.parse(source)
    imported = library_names(tree)
    found: list[str] = []
    for node in ast.walk(tree):
        match node:
            case ast.Import() | ast.ImportFrom():
                found += of_import(node)
            case ast.Attribute():
                found += of_attribute(node)
            case ast.Call():
                found += of_call(node)
            case ast.ClassDef():
                found += [f"subclasses {ast.unparse(b)}" for b in node.bases if root(b) in imported]
            case ast.AnnAssign(annotation=ast.Name(id="Any")):
                found.append(f"hides a type: {ast.unparse(node)}")
            case _:
                pass
    return found


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.stem)
def test_other_modules_use_no_internals(path: Path) -> None:
    assert internals(path.read_text()) == []


def test_the_exempt_modules_exist_and_the_driver_uses_internals() -> None:
    assert {path.name for path in PACKAGE.glob("*.py")} >= EXCEPTIONS
    assert internals((PACKAGE / "driver.py").read_text())


def test_lenient_decoding_uses_no_private_name_of_pamqp() -> None:
    found = internals((PACKAGE / "lenient_decoding.py").read_text())
    assert found == ["hides a type: _decode: Any = decode"]


@pytest.mark.parametrize(
    "source",
    [
        "channel._closing",
        "self._channel._closing.done()",
        "self._connection.write_queue.put(1)",
        "channel.closing.add_done_callback(print)",
        "getattr(channel, '_closing')",
        "getattr(connection, 'connection_tune', None)",
        "import aiormq.connection",
        "from aiormq.connection import TransportFactory",
        "from aiormq.base import Base",
        "from pamqp.decode import _embedded_value",
        "import aiormq\nclass Mine(aiormq.Channel): pass",
        "from aiormq import Channel as C\nclass Mine(C): pass",
        "untyped: Any = channel",
    ],
)
def test_the_use_of_internals_is_detected(source: str) -> None:
    assert internals(source)


@pytest.mark.parametrize(
    "source",
    [
        "self._channel.basic_ack(message.delivery_tag)",
        "cls._count",
        "__name__.__len__",
        "from aiormq import Channel, exceptions",
        "from qkit.errors import QueueError\nclass Mine(QueueError): pass",
        "count: int = 1",
    ],
)
def test_a_documented_use_is_allowed(source: str) -> None:
    assert internals(source) == []


async def test_the_maximum_frame_size_is_unknown_before_the_connection_is_open() -> None:
    assert driver.max_frame_bytes(None) is None
    assert driver.max_frame_bytes(aiormq.Connection("amqp://localhost/")) is None


async def test_the_maximum_frame_size_is_the_one_negotiated_with_the_broker(
    raw: aiormq.Channel,
) -> None:
    connection = raw.connection
    assert isinstance(connection, aiormq.Connection)
    assert driver.max_frame_bytes(connection) == connection.connection_tune.frame_max
    assert not driver.is_blocked(connection)


def test_the_docstring_of_the_driver_names_the_pinned_versions() -> None:
    pins = (Path(__file__).parents[3] / "requirements" / "run.txt").read_text().splitlines()
    pinned = dict(line.removesuffix(" \\").split("==") for line in pins if "==" in line)
    assert driver.__doc__ is not None
    text = " ".join(driver.__doc__.split())
    for library in ("aiormq", "pamqp", "aio-pika"):
        assert f"{library} {pinned[library]}" in text
