"""Ids, names, headers, messages and dead letters."""

from __future__ import annotations

import os
import random
import threading
import time
import uuid

import pytest

from qkit._internal.ids import new_id, sent_at
from qkit._internal.names import check_headers, check_name
from qkit._internal.text import MAX_ERROR_TEXT
from qkit.errors import InvalidHeader, InvalidName
from qkit.message import FIRST_FAILED_AT, GROUP, DeadLetter, Envelope, Message, Reason, trace_id

TRACEPARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"

# -- ids -------------------------------------------------------------------------------------


def test_ids_sort_in_the_order_of_creation() -> None:
    ids = [new_id() for _ in range(20_000)]
    assert ids == sorted(ids)
    assert len(set(ids)) == len(ids)


def test_ids_are_version_7_uuids() -> None:
    for _ in range(1_000):
        parsed = uuid.UUID(hex=new_id())
        assert parsed.version == 7
        assert parsed.variant == uuid.RFC_4122


@pytest.mark.proves("000-structures-3")
def test_an_id_contains_its_time_of_creation() -> None:
    before = time.time()
    created_at = sent_at(new_id())
    assert created_at is not None
    assert before - 0.002 <= created_at <= time.time() + 0.001


def test_ids_still_sort_when_the_wall_clock_is_set_back() -> None:
    def an_hour_ago() -> int:
        return time.time_ns() - 3_600 * 10**9

    assert new_id() < new_id(an_hour_ago) < new_id(an_hour_ago) < new_id()


@pytest.mark.proves("000-publish-7")
def test_ids_are_unique_across_threads() -> None:
    found: list[list[str]] = [[] for _ in range(8)]
    together = threading.Barrier(len(found))

    def create(own: list[str]) -> None:
        together.wait()
        own += [new_id() for _ in range(5_000)]

    threads = [threading.Thread(target=create, args=(own,)) for own in found]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for own in found:
        assert own == sorted(own)
    assert len({id_ for own in found for id_ in own}) == 8 * 5_000


def test_ids_are_unique_after_a_fork() -> None:
    now = time.time_ns()

    def frozen() -> int:  # within a millisecond, a child could continue its parent's sequence
        return now

    new_id(frozen)
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:  # pragma: no cover  # the child is not measured
        os.write(writer, "\n".join(new_id(frozen) for _ in range(500)).encode())
        os._exit(0)
    own = [new_id(frozen) for _ in range(500)]
    os.close(writer)
    with os.fdopen(reader) as pipe:
        of_child = pipe.read().split()
    assert os.waitpid(child, 0)[1] == 0
    assert len(of_child) == 500
    assert not set(own) & set(of_child)


@pytest.mark.parametrize(
    "foreign", ["", "7", "x" * 32, "zzzzzzzzzzzz7" + "0" * 19, str(uuid.UUID(int=0))]
)
def test_a_foreign_id_has_no_time(foreign: str) -> None:
    assert sent_at(foreign) is None


# -- names -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["a", "orders.eu-1_B", "...", ".hidden", "x" * 200])
def test_names_that_every_broker_accepts_are_valid(name: str) -> None:
    assert check_name(name) == name


@pytest.mark.parametrize(
    "name",
    [
        "",
        ".",
        "..",
        "../x",
        "/etc/passwd",
        "a/b",
        "a\\b",
        "a b",
        "orders\r\nX: y",
        "orders\n",
        "orders\0",
        "x" * 201,
        "x" * 300,
        "оrders",  # a Cyrillic o
        "orders\u200b",
        "ｏrders",  # fullwidth
        "café",
        "cafe\u0301",
        "orders\u2028",
        "{orders}",
        "*",
        None,
        7,
        b"orders",
    ],
)
def test_names_that_some_broker_rejects_are_invalid(name: object) -> None:
    with pytest.raises(InvalidName) as caught:
        check_name(name)  # type: ignore[arg-type]
    text = str(caught.value)
    assert "1–200 characters" in text
    assert len(text.splitlines()) == 1
    assert len(text) < 300


def test_the_error_says_what_the_name_is_for() -> None:
    with pytest.raises(InvalidName, match="is not a valid group name"):
        check_name("a b", "group")


# -- headers ---------------------------------------------------------------------------------


def test_headers_are_copied() -> None:
    headers = {"tenant": "acme", "X-Request.Id": "ünï", "empty": ""}
    checked = check_headers(headers)
    assert checked == headers
    assert checked is not headers


@pytest.mark.parametrize(
    ("headers", "why"),
    [
        ({"a b": "x"}, "header name 'a b'"),
        ({"": "x"}, "header name ''"),
        ({"a\r\nb": "x"}, r"header name 'a\\r\\nb'"),
        ({"nаme": "x"}, "header name"),  # a Cyrillic a
        ({"n" * 300: "x"}, "header name"),
        ({7: "x"}, "header name 7"),
        ({"a": "x\r\ny"}, "control character"),
        ({"a": "x\ny"}, "control character"),
        ({"a": "x\0"}, "control character"),
        ({"a": "x\x9b2J"}, "control character"),
        ({"a": "x\u2028y"}, "control character"),
        ({"a": "\udc80"}, "control character"),
        ({"a": 1}, "expected a str, got int"),
        ({"a": b"x"}, "expected a str, got bytes"),
        ({"a": None}, "expected a str, got NoneType"),
        ({"qkit-group": "x"}, "is reserved"),
        ({"QKIT-anything": "x"}, "is reserved"),
        ({f"h{n}": "" for n in range(129)}, "headers, got 129"),
        ({"a": "é" * 16_384}, "bytes of headers, got 32769"),
        ([("a", "b")], "a mapping of str to str"),
    ],
)
def test_headers_that_some_broker_rejects_are_invalid(headers: object, why: str) -> None:
    with pytest.raises(InvalidHeader, match=why) as caught:
        check_headers(headers)  # type: ignore[arg-type]
    assert len(str(caught.value).splitlines()) == 1
    assert len(str(caught.value)) < 400


def test_every_valid_header_can_be_encoded() -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    generator = random.Random(seed)
    for _ in range(2_000):
        value = "".join(chr(generator.randrange(0x11000)) for _ in range(generator.randrange(6)))
        try:
            checked = check_headers({"h": value})
        except InvalidHeader:
            continue
        assert checked["h"].encode().decode() == value
        assert len(f"h: {value}".splitlines()) <= 1


# -- messages --------------------------------------------------------------------------------


def test_a_message_has_its_retry_count_time_and_trace() -> None:
    message = Message(new_id(), "orders", b"{}", {"traceparent": TRACEPARENT}, attempt=3)
    assert message.retry_count == 2
    assert message.sent_at == pytest.approx(time.time(), abs=5)
    assert message.trace_id == "0af7651916cd43dd8448eb211c80319c"
    replaced = message.replace(body=b"[]")
    assert (replaced.body, replaced.id, message.body) == (b"[]", message.id, b"{}")


@pytest.mark.parametrize("header", ["", "00-short-x-01", "garbage", "00-" + "a" * 32])
def test_an_invalid_traceparent_is_ignored(header: str) -> None:
    assert trace_id({"traceparent": header}) is None
    assert trace_id({}) is None


# -- dead letters ----------------------------------------------------------------------------


def make_letter(
    error: BaseException | None = None, envelope: Envelope | None = None, group: str | None = None
) -> DeadLetter:
    return DeadLetter.of(
        envelope or Envelope("0190", b"\x00raw", {"tenant": "acme"}, "k", 7, attempt=3),
        channel="orders",
        reason=Reason.MAX_RETRIES_EXCEEDED,
        error=error,
        at=1_700_000_000.25,
        group=group,
    )


@pytest.mark.proves("003-dlq-9")
@pytest.mark.parametrize("group", [None, "billing"])
@pytest.mark.parametrize("error", [None, ValueError("negative total")])
def test_a_dead_letter_survives_a_round_trip(error: Exception | None, group: str | None) -> None:
    letter = make_letter(error, group=group)
    assert DeadLetter.from_envelope(letter.to_envelope()) == letter
    assert (letter.body, letter.attempts, letter.key, letter.priority) == (b"\x00raw", 3, "k", 7)
    assert letter.group == group


def test_a_dead_letter_keeps_the_first_failure_and_the_trace() -> None:
    headers = {FIRST_FAILED_AT: "1699999990.5", "traceparent": TRACEPARENT, GROUP: "stale"}
    letter = make_letter(KeyError("x"), Envelope("0190", b"", headers))
    assert (letter.first_failed_at, letter.last_failed_at) == (1_699_999_990.5, 1_700_000_000.25)
    assert letter.trace_id == "0af7651916cd43dd8448eb211c80319c"
    assert letter.group is None
    assert set(letter.headers) == {"traceparent"}


def test_a_dead_letter_has_no_delay_and_no_expiry() -> None:
    envelope = Envelope("0190", b"", not_before=5.0, expires_at=6.0)
    assert make_letter(envelope=envelope).to_envelope() == Envelope(
        "0190", b"", make_letter(envelope=envelope).to_envelope().headers
    )


def test_a_replay_keeps_the_message_but_drops_the_failure() -> None:
    replayed = make_letter(ValueError("x"), group="billing").to_replay()
    assert replayed == Envelope(
        "0190", b"\x00raw", {"tenant": "acme", GROUP: "billing"}, "k", 7, attempt=1
    )
    assert GROUP not in make_letter().to_replay().headers


def test_a_foreign_dead_letter_has_defaults_for_unknown_facts() -> None:
    letter = DeadLetter.from_envelope(Envelope("their-id", b"data", {"a": "b"}), channel="orders")
    assert letter == DeadLetter(
        message_id="their-id",
        channel="orders",
        group=None,
        reason="Unknown",
        error_type=None,
        error=None,
        attempts=1,
        first_failed_at=0.0,
        last_failed_at=0.0,
        trace_id=None,
        body=b"data",
        headers={"a": "b"},
    )


@pytest.mark.parametrize("invalid", ["", "many", "nan", "inf", "-inf", "1e999"])
def test_invalid_facts_in_a_record_are_replaced_by_defaults(invalid: str) -> None:
    headers = make_letter().to_envelope().headers
    for name in ("qkit-dead-attempts", "qkit-dead-at", FIRST_FAILED_AT):
        headers[name] = invalid
    letter = DeadLetter.from_envelope(Envelope("0190", b"", headers))
    assert (letter.attempts, letter.first_failed_at, letter.last_failed_at) == (1, 0.0, 0.0)


def test_the_text_of_an_error_is_short_and_one_line() -> None:
    text = make_letter(ValueError("bad\r\ntotal\0\x1b[2J\u2028\udc80" + "x" * 10_000)).error
    assert text is not None
    assert text.startswith(r"bad\r\ntotal\x00\x1b[2J\u2028\udc80xxx")
    assert text.endswith("…")
    assert len(text) == MAX_ERROR_TEXT
    assert len(text.splitlines()) == 1
    text.encode()


def test_an_error_without_a_text_still_results_in_a_dead_letter() -> None:
    class Broken(Exception):
        def __str__(self) -> str:
            raise RuntimeError

    letter = make_letter(Broken())
    assert letter.error_type is not None
    assert letter.error_type.endswith("Broken")
    assert letter.error is not None
    assert "has no text" in letter.error
