"""Architecture rules: import direction, sizes, names and package docstrings."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SRC = ROOT / "src" / "qkit"

# Top-level modules and packages, lowest layer first. Units of the same layer do not import each
# other, except the pairs in PAIRS.
LAYERS = [
    ["errors", "_internal"],
    ["message"],
    ["backend"],
    ["settings", "codec"],
    ["native", "observability"],
    ["backends", "handlers"],
    ["wiring"],
    ["sending"],
    ["consuming"],
    ["admin"],
    ["service"],
    ["sync"],
    ["asyncapi", "queue_lookup", "_exports"],
    ["web", "testing", "spark"],
    ["cli", "conformance"],
]
LEVEL = {unit: level for level, units in enumerate(LAYERS) for unit in units}
PAIRS = {frozenset({"errors", "_internal"})}

# Packages below the backend boundary, and the policies above it. Neither side imports the other.
BELOW = {"native", "backends"}
POLICIES = {"observability", "handlers", "wiring", "sending", "consuming", "admin"}

# Layers inside qkit.native and qkit.backends.
NATIVE = [
    ["config", "cross_thread"],
    ["queue", "log"],
    ["delivery", "dead_letter_router", "bulk"],
    ["bulk_jobs", "storage"],
    ["catalogue"],
    ["bulk_import"],
    ["engine"],
]
BACKENDS = [["common", "capability_matrix"], ["native", "redis", "rabbitmq", "kafka"], ["factory"]]

NATIVE_USERS = [
    *("qkit.native", "qkit.backends.native"),
    *("qkit.testing", "qkit.spark", "qkit.cli"),
]
DRIVERS = {"aio_pika", "aiormq", "pamqp", "yarl", "aiokafka", "redis", "hiredis"}
TOOLS = {"pyspark", "starlette", "uvicorn", "prometheus_client", "typer", "rich"}
OWNERS = {
    "qkit.backends.rabbitmq": {"aio_pika", "aiormq", "pamqp", "yarl"},
    "qkit.backends.kafka": {"aiokafka"},
    "qkit.backends.redis": {"redis", "hiredis"},
    "qkit.web": {"starlette", "uvicorn", "prometheus_client"},
    "qkit.cli": {"typer", "rich"},
    "qkit.spark": {"pyspark"},
    "qkit._internal.retry": {"tenacity"},
}
MAX_MODULES = 9  # in src/qkit, not counting packages
MAX_FUNCTION_LINES = 60
MIN_COPIED_STATEMENTS = 8
NAME = re.compile(r"`([\w./]+)`")


def name_of(path: Path) -> str:
    parts = ["qkit", *path.relative_to(SRC).with_suffix("").parts]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {name_of(path): path for path in sorted(SRC.rglob("*.py"))}


@cache
def imports(module: str) -> frozenset[str]:
    """Return all imports of a module, including those in functions and under TYPE_CHECKING."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(MODULES[module].read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module} has a relative import"
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                found.add(full if full in MODULES else str(node.module))
    return frozenset(found)


def inside(module: str) -> Iterator[str]:
    """Yield the qkit modules that a module imports."""
    for other in sorted(imports(module)):
        if other.split(".")[0] == "qkit":
            yield other


def part(module: str, depth: int) -> str:
    return (module.split(".") + ["__init__"] * depth)[depth]


def belongs(module: str, owner: str) -> bool:
    return module == owner or module.startswith(f"{owner}.")


every_module = pytest.mark.parametrize("module", MODULES)


@every_module
def test_imports_point_down(module: str) -> None:
    unit = part(module, 1)
    if unit == "__init__":
        assert set(inside(module)) == {"qkit._exports"}
        return
    assert unit in LEVEL, f"{unit} is missing from LAYERS"
    for other in inside(module):
        lower = part(other, 1)
        if lower == unit:
            continue
        assert lower != "__init__" or unit in {"cli", "web"}, f"{module} imports the façade"
        if lower == "__init__" or frozenset({unit, lower}) in PAIRS:
            continue
        assert LEVEL[lower] < LEVEL[unit], f"{module} imports {other}, which is not below it"
        assert not (unit in BELOW and lower in POLICIES), f"{module} imports the policy {other}"
        assert not (unit in POLICIES and lower in BELOW), f"{module} imports the backend {other}"


@pytest.mark.parametrize(
    ("package", "layers"), [("qkit.native", NATIVE), ("qkit.backends", BACKENDS)]
)
def test_imports_inside_a_package_point_down(package: str, layers: list[list[str]]) -> None:
    level = {unit: height for height, units in enumerate(layers) for unit in units}
    for module in MODULES:
        if not belongs(module, package) or module == package:
            continue
        unit = part(module, 2)
        assert unit in level, f"{unit} is missing from the layers of {package}"
        for other in inside(module):
            if belongs(other, package) and part(other, 2) != unit:
                lower = level[part(other, 2)]
                assert lower < level[unit], f"{module} imports {other}, which is not below it"


def test_there_are_no_import_cycles() -> None:
    graph = {module: set(inside(module)) & set(MODULES) for module in MODULES if module != "qkit"}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(" <- ".join(error.args[1]))


@every_module
def test_only_the_native_backend_and_tools_import_the_engine(module: str) -> None:
    if not any(belongs(module, user) for user in NATIVE_USERS):
        assert not [other for other in inside(module) if belongs(other, "qkit.native")]


@every_module
def test_each_third_party_library_is_imported_only_in_its_package(module: str) -> None:
    allowed: set[str] = set()
    for owner, libraries in OWNERS.items():
        if belongs(module, owner):
            allowed |= libraries
    roots = {name.split(".")[0] for name in imports(module)}
    assert not roots & (DRIVERS | TOOLS | {"tenacity"}) - allowed


def test_the_top_level_has_few_modules() -> None:
    modules = [path.name for path in SRC.glob("*.py")]
    assert len(modules) <= MAX_MODULES, modules


def functions(module: str) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(ast.parse(MODULES[module].read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


@every_module
def test_no_function_exceeds_the_line_limit(module: str) -> None:
    for function in functions(module):
        lines = (function.end_lineno or 0) - function.lineno + 1 - docstring_lines(function)
        assert lines <= MAX_FUNCTION_LINES, f"{module}.{function.name} has {lines} lines"


def docstring_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    if ast.get_docstring(function) is None:
        return 0
    docstring = function.body[0]
    return (docstring.end_lineno or 0) - docstring.lineno + 1


def test_no_long_function_body_is_duplicated() -> None:
    found: dict[str, list[str]] = defaultdict(list)
    for module in MODULES:
        for function in functions(module):
            body = function.body[1:] if ast.get_docstring(function) else function.body
            statements = sum(isinstance(node, ast.stmt) for top in body for node in ast.walk(top))
            if statements >= MIN_COPIED_STATEMENTS:
                found["\n".join(map(ast.dump, body))].append(f"{module}.{function.name}")
    assert [names for names in found.values() if len(names) > 1] == []


def test_each_package_has_a_docstring() -> None:
    for module, path in MODULES.items():
        if path.name == "__init__.py":
            assert ast.get_docstring(ast.parse(path.read_text())), f"{module} has no docstring"


def exists(path: str) -> bool:
    """Return whether a path exists in the root, src/qkit or a backend; its suffix is optional."""
    bases = [ROOT, SRC, SRC / "backends", *(SRC / "backends").iterdir()]
    return any(any(base.glob(path + tail)) for base in bases for tail in ("", ".*"))


def test_the_architecture_page_names_files_that_exist() -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text()
    paths = set(re.findall(r"\w+(?:/[\w.*-]+)+|\w+\.py\b", text))
    for row in re.findall(r"^\|([^|]*)\|", text, re.MULTILINE):
        paths |= set(NAME.findall(row))
    assert len(paths) > 50
    assert [path for path in sorted(paths) if not exists(path.strip("/"))] == []


def test_package_docstrings_name_modules_that_exist() -> None:
    for module, path in MODULES.items():
        if path.name != "__init__.py":
            continue
        text = ast.get_docstring(ast.parse(path.read_text())) or ""
        allowed = re.search(r"^May import: (.*?)(?:\n\n|\Z)", text, re.DOTALL | re.MULTILINE)
        names = set(NAME.findall(allowed[1].replace("``", "`"))) if allowed else set()
        for name in names | set(re.findall(r"\w+\.py\b", text)):
            stem = name.removeprefix("qkit.").removesuffix(".py")
            full = {f"qkit.{stem}", f"{module}.{stem}"}
            assert full & set(MODULES), (
                f"the docstring of {module} names {name}, which does not exist"
            )


@every_module
def test_no_module_can_load_code_from_a_message(module: str) -> None:
    assert not {name.split(".")[0] for name in imports(module)} & {
        "pickle",
        "dill",
        "cloudpickle",
        "marshal",
        "shelve",
        "yaml",
        "jsonpickle",
    }
    for node in ast.walk(ast.parse(MODULES[module].read_text())):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            assert node.func.id not in {"eval", "exec", "compile", "__import__"}


def test_tests_mirror_the_packages() -> None:
    """Each test directory mirrors a package, except those that test the whole project."""
    whole = {"brokers", "data", "examples", "reliability", "support", "typing", "upgrade"}
    tests = ROOT / "tests"
    for path in sorted(tests.rglob("test_*.py")):
        package = path.relative_to(tests).parent
        if package.parts and package.parts[0] not in whole:
            assert (SRC / package / "__init__.py").exists(), f"{path} has no matching package"
