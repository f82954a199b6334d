"""``qkit dlq``: list, show, replay and purge, by id, reason, error and age."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Collection

import pytest

from qkit import QueueService, Settings
from qkit._internal.ids import new_id
from qkit.admin.dead_letters import DeadLetters
from qkit.cli.dead_letters import seconds
from qkit.errors import ConfigError
from qkit.message import Envelope
from tests.support.cli import Shell


def test_letters_are_counted_listed_and_filtered(shell: Shell, letters: list[str]) -> None:
    assert shell.json("dlq", "list") == {"orders": 3}
    assert "orders" in shell.run("dlq", "list").stdout
    assert [row["id"] for row in shell.json("dlq", "list", "orders")] == letters

    def ids(*words: str) -> list[str]:
        return [row["id"] for row in shell.json("dlq", "list", "orders", *words)]

    assert ids("--reason", "ExplicitNack") == letters[:2]
    assert ids("--error", "ConnectionError") == letters[2:]
    assert ids("--error", "total -2") == letters[1:2]
    assert ids("--older-than", "1h") == []
    assert ids("--newer-than", "1h") == letters
    assert ids("-n", "1") == letters[:1]
    assert "ConnectionError: the gateway" in shell.run("dlq", "list", "orders").stdout
    shell.run("send", "audit", "1")
    assert "no such dead letters" in shell.run("dlq", "list", "audit").stderr


def test_a_mistyped_queue_or_reason_is_no_success(shell: Shell, letters: list[str]) -> None:
    for action in ("list", "replay", "purge", "show"):
        rest = {"show": ["0190"], "purge": ["--yes"]}.get(action, [])
        result = shell.run("dlq", action, "ordres", *rest, code=1)
        assert "no queue 'ordres'; did you mean 'orders'?" in result.stderr, action
    for action in ("list", "replay", "purge"):
        refused = shell.run("dlq", action, "orders", "--reason", "Nack", code=2)
        assert "'ExplicitNack'" in refused.stderr
    assert len(shell.json("dlq", "list", "orders", "--reason", "ExplicitNack")) == 2


def test_letters_whose_queue_is_gone_are_found(shell: Shell, letters: list[str]) -> None:
    async def delete() -> None:
        async with QueueService(Settings(type="native", path=shell.path)) as service:
            await service.delete("orders")

    asyncio.run(delete())
    assert len(shell.json("dlq", "list", "orders")) == 3


def test_no_letters_anywhere_is_good_news(shell: Shell) -> None:
    assert "No dead letters" in shell.run("dlq", "list").stderr


def test_one_is_shown_whole(shell: Shell, letters: list[str]) -> None:
    shown = shell.run("dlq", "show", "orders", letters[2]).stdout
    for words in ("ConnectionError: the gateway did not answer", "attempts", "3", "orders"):
        assert words in shown
    record = shell.json("dlq", "show", "orders", letters[2])
    assert json.loads(record["body"]["content"]) == 3
    assert "no dead letter" in shell.run("dlq", "show", "orders", "0190", code=1).stderr


def test_a_dry_run_only_says_what_it_would_do(shell: Shell, letters: list[str]) -> None:
    result = shell.run("dlq", "replay", "orders", "--dry-run")
    assert "3 dead letters of orders would be replayed (2 ExplicitNack" in result.stderr
    assert letters[0] in result.stdout
    answer = shell.json("dlq", "purge", "orders", "--dry-run")
    assert (answer["purged"], answer["dry_run"]) == (3, True)
    assert len(shell.json("dlq", "list", "orders")) == 3


@pytest.mark.proves("002-dlq-7")
def test_letters_are_replayed_by_filter_by_id_and_all(shell: Shell, letters: list[str]) -> None:
    answer = shell.json("dlq", "replay", "orders", "--error", "ConnectionError")
    assert answer["message_ids"] == letters[2:]
    assert (
        "1 dead letter of orders replayed"
        in shell.run("dlq", "replay", "orders", letters[0]).stderr
    )
    assert shell.json("dlq", "replay", "orders")["replayed"] == 1
    assert shell.json("dlq", "replay", "orders")["replayed"] == 0
    assert {row["id"] for row in shell.json("peek", "orders")} == set(letters)


def test_a_rate_is_kept(shell: Shell, letters: list[str]) -> None:
    began = time.monotonic()
    assert shell.json("dlq", "replay", "orders", "--rate", "4")["replayed"] == 3
    assert time.monotonic() - began >= 0.5  # the third leaves half a second after the first


def test_letters_are_purged_after_a_question(shell: Shell, letters: list[str]) -> None:
    assert "--yes" in shell.run("dlq", "purge", "orders", code=2).stderr
    answer = shell.json("dlq", "purge", "orders", "--reason", "ExplicitNack", "--yes")
    assert answer["message_ids"] == letters[:2]
    assert [row["id"] for row in shell.json("dlq", "list", "orders")] == letters[2:]
    shell.run("dlq", "purge", "orders", "-y")
    assert shell.json("dlq", "list", "orders") == []


def test_what_fails_while_a_purge_waits_for_the_answer_stays(
    shell: Shell, letters: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The question was about three; another is buried before it is answered."""
    real = QueueService.dead_letters
    late = Envelope(new_id(), b"4")

    def confirm(question: str, yes: bool) -> bool:
        assert "3 dead letters" in question
        return True

    def dead_letters(self: QueueService, name: str) -> DeadLetters:
        found = real(self, name)
        purge = found.purge

        async def after_another(ids: Collection[str] | None = None) -> int:
            await self._backend.publish(self.settings.dead_letter_name(name), [late])
            return await purge(ids)

        monkeypatch.setattr(found, "purge", after_another)
        return found

    monkeypatch.setattr("qkit.cli.dead_letters.confirm", confirm)
    monkeypatch.setattr(QueueService, "dead_letters", dead_letters)
    answer = shell.json("dlq", "purge", "orders")
    assert (answer["purged"], answer["message_ids"]) == (3, letters)
    monkeypatch.undo()
    monkeypatch.chdir(shell.path.parent)
    assert [row["id"] for row in shell.json("dlq", "list", "orders")] == [late.id]


def test_a_purge_says_how_many_really_went(
    shell: Shell, letters: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def two(self: DeadLetters, ids: Collection[str]) -> int:
        return 2  # somebody else was faster with the third

    monkeypatch.setattr(DeadLetters, "purge", two)
    assert shell.json("dlq", "purge", "orders", "-y")["purged"] == 2
    assert (
        "2 dead letters of orders purged of 3" in shell.run("dlq", "purge", "orders", "-y").stderr
    )


def test_an_id_that_is_not_there_stops_the_whole(shell: Shell, letters: list[str]) -> None:
    result = shell.run("dlq", "replay", "orders", letters[0], "0190", code=1)
    assert "no dead letter 0190" in result.stderr
    assert len(shell.json("dlq", "list", "orders")) == 3


@pytest.mark.parametrize(
    ("text", "meant"), [("90s", 90), ("10m", 600), ("2h", 7_200), ("1.5d", 129_600)]
)
def test_ages_are_read(text: str, meant: float) -> None:
    assert seconds("--older-than", text) == meant


def test_an_age_without_a_unit_is_refused(shell: Shell) -> None:
    with pytest.raises(ConfigError, match="10m"):
        seconds("--older-than", "10")
    assert "10m" in shell.run("dlq", "list", "orders", "--older-than", "soon", code=2).stderr
