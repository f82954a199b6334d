"""Bodies as people see them: text, JSON or base64, and never too much."""

from __future__ import annotations

import gzip
import tracemalloc

from qkit.admin.views import MAX_PREVIEW_BYTES, body_view

GZIP = {"content-encoding": "gzip"}


def test_json_is_told_from_text_and_bytes() -> None:
    assert body_view(b'{"id": 1}', {}).format == "json"
    assert body_view(b"hello", {}).format == "text"
    assert body_view(b"\xff\xfe", {}).format == "base64"
    assert body_view(b"", {}).content == ""


def test_a_compressed_body_is_shown_as_it_was() -> None:
    view = body_view(gzip.compress(b'{"id": 1}'), GZIP)
    assert (view.format, view.content) == ("json", '{"id": 1}')


def test_a_bomb_is_opened_no_further_than_a_page_holds() -> None:
    bomb = gzip.compress(b" " * 200_000_000)
    tracemalloc.start()
    view = body_view(bomb, GZIP)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert view.cut
    assert len(view.content) == MAX_PREVIEW_BYTES
    assert view.size == len(bomb)
    assert peak < 1_000_000


def test_what_is_no_gzip_is_shown_as_it_is() -> None:
    assert body_view(b"no gzip at all", GZIP).content == "no gzip at all"


def test_json_that_is_nested_too_deep_is_text() -> None:
    assert body_view(b"[" * 8_000 + b"]" * 8_000, {}).format in ("json", "text")


def test_a_text_is_cut_between_characters() -> None:
    view = body_view(b"x" + "é".encode() * MAX_PREVIEW_BYTES, {})
    assert view.cut
    assert view.format == "text"
    assert view.content.endswith("é")
