"""Views of bodies: text, JSON or base64, up to a limit."""

from __future__ import annotations

import gzip
import tracemalloc

from qkit.admin.views import MAX_PREVIEW_BYTES, body_view

GZIP = {"content-encoding": "gzip"}


def test_the_format_is_json_text_or_base64() -> None:
    assert body_view(b'{"id": 1}', {}).format == "json"
    assert body_view(b"hello", {}).format == "text"
    assert body_view(b"\xff\xfe", {}).format == "base64"
    assert body_view(b"", {}).content == ""


def test_a_compressed_body_is_shown_decompressed() -> None:
    view = body_view(gzip.compress(b'{"id": 1}'), GZIP)
    assert (view.format, view.content) == ("json", '{"id": 1}')


def test_a_decompression_bomb_is_cut_at_the_preview_limit() -> None:
    bomb = gzip.compress(b" " * 200_000_000)
    tracemalloc.start()
    view = body_view(bomb, GZIP)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert view.truncated
    assert len(view.content) == MAX_PREVIEW_BYTES
    assert view.size == len(bomb)
    assert peak < 1_000_000


def test_a_body_that_is_not_gzip_is_shown_unchanged() -> None:
    assert body_view(b"no gzip at all", GZIP).content == "no gzip at all"


def test_deeply_nested_json_is_shown_as_json_or_text() -> None:
    assert body_view(b"[" * 8_000 + b"]" * 8_000, {}).format in ("json", "text")


def test_text_is_truncated_between_characters() -> None:
    view = body_view(b"x" + "é".encode() * MAX_PREVIEW_BYTES, {})
    assert view.truncated
    assert view.format == "text"
    assert view.content.endswith("é")
