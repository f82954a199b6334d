"""Install commands in all texts use no package index and name only extras that exist.

``qkit`` on PyPI is another project and ``qkit-messaging`` is not published, so installing either
from an index would install the wrong code or fail.
"""

from __future__ import annotations

import os
import re
import shlex
import stat
import subprocess
import sys
import tomllib
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest

import qkit
from qkit.web import openapi

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = set(PROJECT["optional-dependencies"])
PLACES = ("README.md", "CONTRIBUTING.md", "ARCHITECTURE.md", "Makefile", "pyproject.toml")
TREES = ("docs", "src", "examples", "scripts", "spark", "benchmarks", ".ci")

INSTALL = re.compile(r"pip3? install\b([^\n`]*)")
WITH_EXTRAS = re.compile(r"([\w./-]*qkit[\w.-]*|/[\w./-]+)\[([a-z]+(?:,[a-z]+)*)\]")
OURS = re.compile(r"(qkit|qkit[-_.]messaging)(?![\w/-])", re.IGNORECASE)
NAMED_EXTRA = re.compile(r"\bextra (?:'(\w+)'|`{1,2}(\w+)`{1,2})")
PAGE = re.compile(r"\bdocs/[\w/-]+\.md")


def texts() -> list[Path]:
    """Return every file of the project that may show an install command."""
    files = [ROOT / name for name in PLACES]
    for tree in TREES:
        files += [path for path in (ROOT / tree).rglob("*") if path.is_file()]
    kinds = {".md", ".py", ".toml", ".html", ".js", ""}
    return sorted(p for p in files if p.suffix in kinds and "__pycache__" not in p.parts)


def faults(text: str) -> list[str]:
    """Return the problems in the install commands of a text."""
    found: list[str] = []
    for line in INSTALL.findall(text.replace("\\\n", " ")):
        try:
            words = shlex.split(line, comments=True)
        except ValueError:  # an unbalanced quote from the surrounding sentence
            words = line.split()
        for word in words:
            name = OURS.match(word)
            if name and not re.match(r"(\[[\w,]*\])? *@ *(git\+|file:)", word[name.end() :]):
                found.append(f"pip install{line}: {word!r} would be installed from an index")
    for match in WITH_EXTRAS.finditer(text):
        if match[1] == "qkit":
            found.append(f"{match[0]}: the distribution is called qkit-messaging")
        unknown = set(match[2].split(",")) - EXTRAS
        found += [f"{match[0]}: unknown extra {name!r}" for name in unknown]
    for names in NAMED_EXTRA.findall(text):
        found += [f"unknown extra {name!r}" for name in names if name and name not in EXTRAS]
    return found


def test_install_commands_use_no_index_and_name_only_existing_extras() -> None:
    found = {str(p.relative_to(ROOT)): faults(p.read_text(errors="replace")) for p in texts()}
    assert len(found) > 200
    assert {path: wrong for path, wrong in found.items() if wrong} == {}


@pytest.mark.parametrize(
    "line",
    [
        "pip install qkit",
        "pip install 'qkit[redis]'",
        "It needs the extra: ``pip install 'qkit[web]'``.",
        "python -m pip install --upgrade qkit==0.1.0",
        "pip install qkit-messaging",
        "pip install 'qkit-messaging[redis]>=0.1'",
        "pip install pydantic \\\n    qkit_messaging",
        "pip install 'qkit-messaging[rediss] @ git+<repository-url>'",
        "pip install './qkit[rediss]'",
        "pip install '/path/to/clone[redis,rabbit]'",
        "the extra `qkit[redis]`",
        "install the extra 'rediss', see docs/install.md",
    ],
)
def test_a_wrong_install_command_is_detected(line: str) -> None:
    assert faults(line)


@pytest.mark.parametrize(
    "line",
    [
        "pip install /path/to/clone",
        "pip install './qkit[redis,cli]'",
        "pip install './dist/qkit_messaging-0.1.0-py3-none-any.whl[redis]'",
        "pip install 'qkit-messaging[redis] @ git+<repository-url>'",
        "pip install 'qkit-messaging @ file:///srv/qkit_messaging-0.1.0-py3-none-any.whl'",
        "pip install --no-deps --editable .",
        "install the extra 'redis', see docs/install.md",
    ],
)
def test_a_correct_install_command_is_accepted(line: str) -> None:
    assert faults(line) == []


def test_the_install_page_shows_every_source_and_every_extra() -> None:
    page = (ROOT / "docs" / "install.md").read_text()
    installs = "\n".join(INSTALL.findall(page))
    for wanted in ("./qkit", ".whl[", "git+<repository-url>"):
        assert wanted in installs
    assert {name for name in EXTRAS if f"`{name}`" in page} == EXTRAS
    assert f"qkit_messaging-{qkit.__version__}-py3-none-any.whl" in page
    assert qkit.__version__ == PROJECT["version"]


MISSING = {
    "redis": ("redis", "Settings(type='redis', mode='list', url='redis://localhost/')"),
    "rabbitmq": ("aiormq", "Settings(type='rabbitmq', url='amqp://localhost/')"),
    "kafka": ("aiokafka", "Settings(type='kafka', url='localhost:9092')"),
    "web": ("starlette", "import qkit.web"),
    "spark": ("pyspark", "import qkit.spark"),
    "cli": ("typer", "from qkit.cli import main; main()"),
}


def test_every_extra_has_a_test_for_its_missing_library() -> None:
    assert set(MISSING) == EXTRAS - {"all"}


@pytest.mark.parametrize("extra", sorted(MISSING))
def test_the_error_for_a_missing_library_names_its_extra_and_a_page(extra: str) -> None:
    library, code = MISSING[extra]
    if code.startswith("Settings"):
        code = f"from qkit import QueueService, Settings; QueueService({code})"
    environment = {k: v for k, v in os.environ.items() if not k.startswith("QKIT_")}
    ran = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.modules[{library!r}] = None; {code}"],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 1
    last = ran.stderr.strip().splitlines()[-1]
    assert f"install the extra '{extra}', see docs/install.md" in last
    assert faults(last) == []
    for page in PAGE.findall(last):
        assert (ROOT / page).is_file()


def test_no_error_message_contains_an_install_command() -> None:
    """Errors name the install page, because they cannot know the path of a clone or wheel."""
    for path in (ROOT / "src").rglob("*.py"):
        assert not INSTALL.search(path.read_text()), path


@pytest.mark.parametrize("installed", [True, False])
def test_make_venv_first_removes_the_distribution_with_the_old_name(
    tmp_path: Path, installed: bool
) -> None:
    # With both installed, Python imports the old one, and removing it later also removes the
    # `qkit` command.
    script = tmp_path / "scripts" / "make-venv"
    script.parent.mkdir()
    script.write_text((ROOT / "scripts" / "make-venv").read_text())
    python = tmp_path / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    shown = "exit 0" if installed else "exit 1"
    python.write_text(
        f'#!/bin/sh\necho "$*" >> {tmp_path}/calls\ncase "$*" in "-m pip show"*) {shown};; esac\n'
    )
    python.chmod(python.stat().st_mode | stat.S_IXUSR)
    subprocess.run(["bash", str(script), "run"], check=True, capture_output=True)
    calls = (tmp_path / "calls").read_text().splitlines()
    removed = [n for n, call in enumerate(calls) if "uninstall" in call and call.endswith(" qkit")]
    made = [n for n, call in enumerate(calls) if "--editable ." in call]
    assert len(made) == 1
    assert len(removed) == installed
    assert all(n < made[0] for n in removed)


def test_the_version_is_unknown_if_the_package_is_not_installed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    queried: list[str] = []

    def missing(name: str) -> str:
        queried.append(name)
        raise PackageNotFoundError(name)

    monkeypatch.setattr(openapi, "version", missing)
    assert openapi.document([])["info"]["version"] == "unknown"
    assert queried == [PROJECT["name"]]
