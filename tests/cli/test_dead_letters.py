"""``qkit dlq``: list, show, replay and purge dead letters by id, reason, error and age."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Collection

import pytest

from qkit import QueueService, Settings
from qkit._internal.clock import SystemClock
from qkit._internal.ids import new_id
from qkit.admin.dead_letters import DeadLetters
from qkit.backend import QueueSpec, QueueStats
from qkit.backends.factory import open_backend
from qkit.cli.dead_letters import seconds
from qkit.errors import ConfigError
from qkit.message import Envelope
from tests.support.cli import Shell


def test_dead_letters_are_counted_listed_and_filtered(shell: Shell, letters: list[str]) -> None:
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
    assert "no matching dead letters" in shell.run("dlq", "list", "audit").stderr


def test_an_unknown_queue_or_reason_is_an_error(shell: Shell, letters: list[str]) -> None:
    for action in ("list", "replay", "purge", "show"):
        rest = {"show": ["0190"], "purge": ["--yes"]}.get(action, [])
        result = shell.run("dlq", action, "ordres", *rest, code=1)
        assert "no queue 'ordres'; did you mean 'orders'?" in result.stderr, action
    for action in ("list", "replay", "purge"):
        result = shell.run("dlq", action, "orders", "--reason", "Nack", code=2)
        assert "'ExplicitNack'" in result.stderr
    assert len(shell.json("dlq", "list", "orders", "--reason", "ExplicitNack")) == 2


def test_dead_letters_of_a_deleted_queue_are_found(shell: Shell, letters: list[str]) -> None:
    async def delete() -> None:
        async with QueueService(Settings(type="native", path=shell.path)) as service:
            await service.delete("orders")

    asyncio.run(delete())
    assert len(shell.json("dlq", "list", "orders")) == 3


def test_list_without_dead_letters_prints_a_note(shell: Shell) -> None:
    assert "No queue has dead letters" in shell.run("dlq", "list").stderr


def test_show_prints_the_whole_dead_letter(shell: Shell, letters: list[str]) -> None:
    shown = shell.run("dlq", "show", "orders", letters[2]).stdout
    for words in ("ConnectionError: the gateway did not respond", "attempts", "3", "orders"):
        assert words in shown
    record = shell.json("dlq", "show", "orders", letters[2])
    assert json.loads(record["body"]["content"]) == 3
    assert "no dead letter" in shell.run("dlq", "show", "orders", "0190", code=1).stderr


def test_a_dry_run_changes_nothing(shell: Shell, letters: list[str]) -> None:
    result = shell.run("dlq", "replay", "orders", "--dry-run")
    assert "3 dead letters of orders would be replayed (2 ExplicitNack" in result.stderr
    assert letters[0] in result.stdout
    answer = shell.json("dlq", "purge", "orders", "--dry-run")
    assert (answer["purged"], answer["dry_run"]) == (3, True)
    assert len(shell.json("dlq", "list", "orders")) == 3


@pytest.mark.proves("002-dlq-7")
def test_dead_letters_are_replayed_by_filter_by_id_and_all(
    shell: Shell, letters: list[str]
) -> None:
    answer = shell.json("dlq", "replay", "orders", "--error", "ConnectionError")
    assert answer["message_ids"] == letters[2:]
    assert (
        "1 dead letter of orders replayed"
        in shell.run("dlq", "replay", "orders", letters[0]).stderr
    )
    assert shell.json("dlq", "replay", "orders")["replayed"] == 1
    assert shell.json("dlq", "replay", "orders")["replayed"] == 0
    assert {row["id"] for row in shell.json("peek", "orders")} == set(letters)


def test_a_replay_respects_the_rate(shell: Shell, letters: list[str]) -> None:
    began = time.monotonic()
    assert shell.json("dlq", "replay", "orders", "--rate", "4")["replayed"] == 3
    # At 4/s, the third is replayed 0.5 s after the first.
    assert time.monotonic() - began >= 0.5


def test_a_purge_requires_confirmation(shell: Shell, letters: list[str]) -> None:
    assert "--yes" in shell.run("dlq", "purge", "orders", code=2).stderr
    answer = shell.json("dlq", "purge", "orders", "--reason", "ExplicitNack", "--yes")
    assert answer["message_ids"] == letters[:2]
    assert [row["id"] for row in shell.json("dlq", "list", "orders")] == letters[2:]
    shell.run("dlq", "purge", "orders", "-y")
    assert shell.json("dlq", "list", "orders") == []


def test_a_purge_keeps_messages_that_fail_after_the_confirmation_prompt(
    shell: Shell, letters: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The user confirms the purge of three dead letters; a fourth arrives before it runs."""
    real = QueueService.dead_letters
    late = Envelope(new_id(), b"4")

    def confirm(question: str, yes: bool) -> bool:
        assert "3 dead letters" in question
        return True

    def dead_letters(self: QueueService, name: str) -> DeadLetters:
        found = real(self, name)
        purge = found.purge

        async def purge_after_another_failure(
            ids: Collection[str] | None = None, *, group: str | None = None
        ) -> int:
            await self._backend.publish(self.settings.dead_letter_name(name), [late])
            return await purge(ids, group=group)

        monkeypatch.setattr(found, "purge", purge_after_another_failure)
        return found

    monkeypatch.setattr("qkit.cli.dead_letters.confirm", confirm)
    monkeypatch.setattr(QueueService, "dead_letters", dead_letters)
    answer = shell.json("dlq", "purge", "orders")
    assert (answer["purged"], answer["message_ids"]) == (3, letters)
    monkeypatch.undo()
    monkeypatch.chdir(shell.path.parent)
    assert [row["id"] for row in shell.json("dlq", "list", "orders")] == [late.id]


def test_a_purge_reports_how_many_were_deleted(
    shell: Shell, letters: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def purge_two(
        self: DeadLetters, ids: Collection[str], *, group: str | None = None
    ) -> int:
        return 2  # as if another process had deleted the third

    monkeypatch.setattr(DeadLetters, "purge", purge_two)
    assert shell.json("dlq", "purge", "orders", "-y")["purged"] == 2
    assert (
        "2 dead letters of orders purged of 3 selected"
        in shell.run("dlq", "purge", "orders", "-y").stderr
    )


def test_an_unknown_id_replays_nothing(shell: Shell, letters: list[str]) -> None:
    result = shell.run("dlq", "replay", "orders", letters[0], "0190", code=1)
    assert "no dead letter 0190" in result.stderr
    assert len(shell.json("dlq", "list", "orders")) == 3


@pytest.mark.parametrize(
    ("text", "expected"), [("90s", 90), ("10m", 600), ("2h", 7_200), ("1.5d", 129_600)]
)
def test_ages_are_parsed(text: str, expected: float) -> None:
    assert seconds("--older-than", text) == expected


def test_an_age_without_a_unit_is_rejected(shell: Shell) -> None:
    with pytest.raises(ConfigError, match="10m"):
        seconds("--older-than", "10")
    assert "10m" in shell.run("dlq", "list", "orders", "--older-than", "soon", code=2).stderr


ATTACK = "7\n8\x1b[2J\x1b]0;owned\x07\x9b31m\r\u202e"


def test_control_characters_of_other_programs_do_not_reach_the_terminal(
    shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def put() -> None:
        backend = open_backend(Settings(type="native", path=shell.path), SystemClock())
        await backend.start()
        for name, body in (("orders", ATTACK.encode()), ("orders_dlq", b'"\x1b\xc2\x9b31m')):
            await backend.declare(QueueSpec(name=name))
            headers = {"note": ATTACK, "qkit-error": ATTACK, "qkit-reason": ATTACK}
            await backend.publish(name, [Envelope(ATTACK, body, headers, key=ATTACK)])
        await backend.aclose()

    asyncio.run(put())
    real = QueueService.queues

    async def with_foreign_names(service: QueueService) -> list[str]:
        return [*await real(service), ATTACK]

    async def figures(service: QueueService, name: str) -> QueueStats:
        return QueueStats(queue=name, depth=1)

    for words in (
        ["dlq", "list", "orders"],
        ["dlq", "show", "orders", ATTACK],
        ["dlq", "replay", "orders", "--dry-run"],
        ["dlq", "show", "orders", f"{ATTACK}?"],
        ["peek", "orders"],
        ["consume", "orders", "--limit", "1"],
    ):
        result = shell.run(*words, code=int(words[-1].endswith("?")))
        assert not set("\x1b\x07\x9b\r\u202e") & set(result.output), words
        assert not any(line.startswith("8") for line in result.output.splitlines()), words
    monkeypatch.setattr(QueueService, "queues", with_foreign_names)
    monkeypatch.setattr(QueueService, "stats", figures)
    for words in (["queues"], ["stats"], ["dlq", "list"]):
        output = shell.run(*words).output
        assert "\\x1b[2J" in "".join(output.split()), words
        assert not set("\x1b\x07\x9b\r\u202e") & set(output), words
