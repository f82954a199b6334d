"""The interfaces use the terms of docs/glossary.md: one concept, one name."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from typer.main import get_command

from qkit import QueueService, Reject, Settings, consume
from qkit.admin.views import DeadLetterView, MessageView
from qkit.backend import QueueStats
from qkit.cli import dead_letters, queues
from qkit.cli.app import app
from qkit.observability.metrics import Metrics
from tests.support.cli import Shell, restored_log_levels
from tests.support.web import client_of, make_shop, wait_for_dead_letters

ROOT = Path(__file__).parent.parent
STATIC = ROOT / "src" / "qkit" / "web" / "static"

Json = Any
Row = tuple[set[str], ...]


def table(heading: str) -> list[Row]:
    """Return the table rows below a glossary heading; a cell is the set of its `quoted` names."""
    page = (ROOT / "docs" / "glossary.md").read_text()
    section = re.search(rf"^#+ {heading}\n(.*?)(?=^#|\Z)", page, re.MULTILINE | re.DOTALL)
    assert section, f"docs/glossary.md has no section {heading!r}"
    lines = [line for line in section[1].splitlines() if line.startswith("|")][2:]
    return [
        tuple(set(re.findall(r"`([^`]+)`", cell)) for cell in line.strip("|").split("|"))
        for line in lines
    ]


def column(rows: list[Row], index: int) -> set[str]:
    return set[str]().union(*(row[index] for row in rows))


FIGURES = column(table("Statistics and metrics"), 0)
NAMES = table("Names in each interface")
METRICS, COLUMNS, LABELS = (column(NAMES, index) for index in (1, 2, 3))
FIELDS = FIGURES | column(table("Fields of JSON records"), 0)


def unknown(found: set[str], known: set[str]) -> list[str]:
    return sorted(found - known)


def in_words(field: str) -> str:
    """Return a field name in words, as lists of names and values show it."""
    return field.removesuffix("_at").removesuffix("_id").replace("_", " ")


def test_the_glossary_defines_every_figure() -> None:
    figures = {field.name for model in (QueueStats, Metrics) for field in fields(model)}
    assert unknown(figures - {"queue", "channels"}, FIGURES) == []
    assert unknown(column(NAMES, 0), FIELDS) == []


# -- the command line ------------------------------------------------------------------------


def test_columns_of_the_command_line_are_in_the_glossary() -> None:
    tables = (queues.QUEUE_COLUMNS, queues.STATS_COLUMNS, dead_letters.COUNT_COLUMNS)
    found = {title.removeprefix(">") for titles in tables for title in titles}
    assert unknown(found, COLUMNS | {"queue"}) == []


# Arguments for each command with --json. None if the output is not checked: the command runs until
# a signal, or its keys are names of settings, capabilities, queues or AsyncAPI fields.
JSON_COMMANDS: dict[str, list[str] | None] = {
    "run": None,
    "web": None,
    "send": ["orders", "1"],
    "consume": ["orders", "--limit", "1"],
    "queues": [],
    "stats": [],
    "peek": ["orders"],
    "purge": ["orders", "--yes"],
    "health": [],
    "capabilities": None,
    "asyncapi": None,
    "config check": [],
    "config show": None,
    "dlq list": ["failed"],
    "dlq show": ["failed", "ID"],
    "dlq replay": ["failed", "--dry-run"],
    "dlq purge": ["failed", "--dry-run"],
}


def json_commands(command: Any, path: tuple[str, ...] = ()) -> Iterator[str]:
    """Yield the names of all commands with the option ``--json``."""
    for name, child in getattr(command, "commands", {}).items():
        yield from json_commands(child, (*path, name))
    if any("--json" in parameter.opts for parameter in command.params):
        yield " ".join(path)


def keys(value: Json) -> Iterator[str]:
    """Yield the keys of all objects except headers and capabilities, whose keys are data."""
    if isinstance(value, list):
        for item in value:
            yield from keys(item)
    elif isinstance(value, dict):
        for key, item in value.items():
            yield key
            if key not in ("headers", "capabilities"):
                yield from keys(item)


@pytest.fixture
def shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Shell]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("QKIT_CONFIG", "")
    with restored_log_levels():
        yield Shell(tmp_path / "data")


@pytest.fixture
def dead_letter_id(shell: Shell) -> str:
    @consume("failed")
    async def reject(body: int) -> None:
        raise Reject("invalid")

    async def create() -> str:
        service = QueueService(Settings(type="native", path=shell.path))
        service.register(reject)
        async with service:
            sent = await service.send("failed", 1, key="k", headers={"tenant": "acme"})
            await wait_for_dead_letters(service, "failed", 1)
            return sent.message_id

    return asyncio.run(create())


def test_json_keys_of_the_command_line_are_in_the_glossary(
    shell: Shell, dead_letter_id: str
) -> None:
    assert set(json_commands(get_command(app))) == set(JSON_COMMANDS)
    for command, arguments in JSON_COMMANDS.items():
        if arguments is not None:
            arguments = [dead_letter_id if word == "ID" else word for word in arguments]
            answer = shell.json(*command.split(), *arguments)
            assert unknown(set(keys(answer)), FIELDS) == [], command
    error = shell.json("peek", "nowhere", code=1)
    assert unknown(set(keys(error)), FIELDS) == []


def test_names_in_the_output_of_commands_are_in_the_glossary(
    shell: Shell, dead_letter_id: str
) -> None:
    known = {in_words(field.name) for field in fields(DeadLetterView)} | {"header"}
    shown = shell.run("dlq", "show", "failed", dead_letter_id).stdout
    found = set(re.findall(r"^ *([a-z]+(?: [a-z]+)?)  \S", shown, re.MULTILINE))
    assert {"first failed", "sent"} <= found
    assert unknown(found, known) == []
    health = shell.run("health").stdout
    assert unknown(set(re.findall(r"^ +([a-z ]+?)  \S", health, re.MULTILINE)), COLUMNS) == []


# -- the API and Prometheus ------------------------------------------------------------------


async def test_json_fields_of_the_api_are_in_the_glossary() -> None:
    async with make_shop() as service, client_of(service) as client:
        document = (await client.get("/openapi.json")).json()
    schemas = document["components"]["schemas"]
    found = {name for schema in schemas.values() for name in schema.get("properties", {})}
    assert {"depth", "message_id"} <= found
    assert unknown(found, FIELDS) == []
    parameters = {
        parameter["name"]
        for path in document["paths"].values()
        for operation in path.values()
        for parameter in operation["parameters"]
    }
    assert unknown(parameters, FIELDS) == []


async def test_prometheus_names_are_in_the_glossary() -> None:
    @consume("orders")
    async def handle(body: int) -> None: ...

    async with make_shop(handle) as service, client_of(service) as client:
        await service.send("orders", 1)
        text = (await client.get("/metrics")).text
    families = list(text_string_to_metric_families(text))
    found = {f"{item.name}_total" if item.type == "counter" else item.name for item in families}
    assert found == METRICS
    labels = {label for item in families for sample in item.samples for label in sample.labels}
    assert unknown(labels, FIELDS) == []


# -- the dashboard ---------------------------------------------------------------------------


def script(name: str) -> str:
    return (STATIC / name).read_text()


def array(source: str, name: str) -> str:
    """Return the items of a JavaScript array constant as source text."""
    found = re.search(rf"^const {name} = \[(.*?)\];", source, re.MULTILINE | re.DOTALL)
    assert found, name
    return found[1]


def strings(source: str) -> set[str]:
    return set(re.findall(r'"([^"]+)"', source))


def labels() -> set[str]:
    """Return the labels of all values in tiles, columns, cells, facts and charts."""
    overview, queue = script("overview.js"), script("queue.js")
    found = set(re.findall(r'\{ name: "([^"]+)"', array(overview, "TILES")))
    found |= strings(array(overview, "COLUMNS")) - {"Queue"}
    found |= set(re.findall(r'\b(?:cell|fact)\("([^"]+)"', overview))
    found |= set(re.findall(r'\["([^"]+)", \(queue\)', array(queue, "FACTS")))
    found |= set(re.findall(r'\b(?:title|label): "([^"]+)"', overview + queue)) - {"qkit"}
    return found | set(re.findall(r"`([A-Z][^`:$]*): \$\{(?:count|rate)\(", overview + queue))


def test_labels_of_the_dashboard_are_in_the_glossary() -> None:
    found = labels()
    assert {"Depth", "Published/s", "Scheduled", "Connection", "Oldest"} <= found
    assert unknown(found, LABELS) == []
    series = set(re.findall(r'\{ name: "([^"]+)", kind', script("queue.js")))
    assert unknown(series, COLUMNS | {"messages"}) == []


def test_names_of_properties_on_the_dashboard_are_in_the_glossary() -> None:
    known = {
        in_words(field.name).capitalize()
        for view in (MessageView, DeadLetterView)
        for field in fields(view)
    }
    found: set[str] = set()
    for source in (script("queue.js"), script("dead_letters.js")):
        for call in re.findall(r"headerElement\(\w+\.headers, \{(.*?)\}\)", source, re.DOTALL):
            found |= set(re.findall(r'(?:^|, ?|\n\s*)"?([A-Z][a-z]+(?: [a-z]+)?)"?:', call))
            found |= set(re.findall(r"^\s*([A-Z][a-z]+):", call))
    assert {"Key", "Sent", "First failed"} <= found
    assert unknown(found, known) == []


def test_the_dashboard_reads_only_fields_of_the_api() -> None:
    source = "".join(path.read_text() for path in STATIC.glob("*.js"))
    objects = "queue|overview|current|health|item|message|letter|result|body"
    found = set(re.findall(rf"\b(?:{objects})\.([a-z]+(?:_[a-z]+)+)\b", source))
    assert {"oldest_message_age_secs", "queues_omitted", "sampled_at"} <= found
    assert unknown(found, FIELDS) == []


@pytest.mark.parametrize(
    "term", ["waiting", "held", "later", "users", "oldest_seconds", "in_rate", "handled", "hidden"]
)
def test_a_term_that_is_not_in_the_glossary_is_reported(term: str) -> None:
    assert unknown({term}, FIELDS | COLUMNS | {label.lower() for label in LABELS}) == [term]
