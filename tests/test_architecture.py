"""Imports point one way: the test walks every module of the package."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

SRC = Path(__file__).parent.parent / "src" / "qkit"

# Later rooms may import earlier ones, never the other way round; rooms of one line are siblings
# that may import each other. `backends` and the policies below it share a height, and FORBIDDEN
# keeps them apart.
ORDER = [
    ["errors", "clock", "_coroutines"],
    ["message", "logs", "tasks", "loop_calls"],
    ["backend", "_compression", "_dumping", "_config_words", "_config_rules", "_config_sources"],
    ["config", "codec", "matrix", "views"],
    ["native"],
    ["backends"],
    ["retry", "breaker", "telemetry", "events", "channels", "threads", "signatures", "deadlines"],
    ["health", "decorators"],
    ["registry"],
    ["routes", "executor"],
    ["intake", "settlement"],
    ["acknowledger"],
    ["session"],
    ["consumer", "outgoing", "sending", "dead_letters", "signals", "opening"],
    ["producer"],
    ["administration", "crew", "monitor", "sync_sender"],
    ["service"],
    ["sync", "asyncapi", "lookup"],
    ["__init__"],
    ["web"],
    ["cli"],
    ["testing"],
    ["spark"],
    ["conformance"],
]
HEIGHT = {room: height for height, rooms in enumerate(ORDER) for room in rooms}
POLICIES = {room for rooms in ORDER[6:11] for room in rooms} - {"opening"}
DRIVERS = {
    "aio_pika",
    "aiormq",
    "aiokafka",
    "redis",
    "hiredis",
    "pyspark",
    "starlette",
    "typer",
    "rich",
}
OWN_TOOLS = {"web": {"starlette"}, "cli": {"typer", "rich"}, "spark": {"pyspark"}}
TENACITY = {"retry"}


def room_of(path: Path) -> str:
    return path.relative_to(SRC).parts[0].removesuffix(".py")


def imports(path: Path) -> set[str]:
    """Every module that a file imports when it runs, also inside functions; not for types alone."""
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            node.body = []
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, f"{path}: a relative import hides its direction"
            found.add(node.module)
            if node.module == "qkit":
                found |= {f"qkit.{alias.name}" for alias in node.names}
    return found


MODULES = sorted(SRC.rglob("*.py"))


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(SRC)))
def test_imports_point_one_way(path: Path) -> None:
    room = room_of(path)
    assert room in HEIGHT, f"{room} has no place in the order of rooms"
    for name in imports(path):
        if not name.startswith("qkit."):
            continue
        other = name.split(".")[1]
        if other == room:
            continue
        assert HEIGHT[other] <= HEIGHT[room], f"{room} imports {other}, which stands above it"
        if room == "backends":
            assert other not in POLICIES, f"the backend imports the policy {other}"
        if room in POLICIES:
            assert other not in {"backends", "native"}, f"the policy {room} imports a backend"


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(SRC)))
def test_drivers_stay_below_the_boundary_and_tenacity_in_one_module(path: Path) -> None:
    roots = {name.split(".")[0] for name in imports(path)}
    if room_of(path) != "backends":
        assert not roots & DRIVERS - OWN_TOOLS.get(room_of(path), set())
    if room_of(path) not in TENACITY:
        assert "tenacity" not in roots


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(SRC)))
def test_nothing_can_load_code_from_a_message(path: Path) -> None:
    assert not {name.split(".")[0] for name in imports(path)} & {
        "pickle",
        "dill",
        "cloudpickle",
        "marshal",
        "shelve",
        "yaml",
        "jsonpickle",
    }
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            assert node.func.id not in {"eval", "exec", "compile", "__import__"}
