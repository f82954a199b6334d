"""Generated foreign messages: strategies that every broker's fuzz test uses, and their checks."""

from __future__ import annotations

import gzip
import json
import logging
import zlib
from collections.abc import Iterable
from typing import Any, Protocol, TypeVar

import hypothesis
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from qkit import QueueService

__all__ = ["CASES", "assert_encodable", "assert_healthy", "bodies", "examples", "facts"]

T = TypeVar("T")

#: Parameters ``seed`` and ``count``: hundreds of messages in the ordinary suite, thousands in
#: ``make torture``. The id of a failed test shows its seed.
CASES = [
    pytest.param(1, 300, id="seed-1"),
    *(
        pytest.param(seed, 1_500, id=f"seed-{seed}", marks=pytest.mark.torture)
        for seed in range(2, 5)
    ),
]


def packed(body: bytes) -> bytes:
    """Compress a body; without a time, so that the same seed makes the same bytes."""
    return gzip.compress(body, mtime=0)


#: Bodies, plain and compressed, for a handler that accepts an integer.
plain = st.one_of(
    st.just(b"7"),
    st.integers().map(lambda number: b"%d" % number),
    st.binary(max_size=60),
    st.sampled_from(
        [b"", b"null", b"NaN", b"-Infinity", b"1e999", b"7.0", b'"7"', b"\xef\xbb\xbf7", b"\x00",
         b"{", b"[" * 3_000, b"9" * 5_000, b"'7'", b" \n7\r\n", b"\xff\xfe7\x00", b"\x80\x04."]
    ),
).filter(lambda body: body != b"8")  # fmt: skip  # the tests send 8 last
bodies = st.one_of(
    plain,
    plain.map(packed),
    plain.map(zlib.compress),
    plain.map(lambda body: packed(body)[:-4]),
    plain.map(lambda body: packed(body) + b"more"),
    st.just(packed(b"0" * (2 << 20))),  # larger than max_message_bytes
)
#: Values of headers and properties that qkit interprets.
facts = st.one_of(
    st.binary(max_size=40),
    st.sampled_from(
        [b"", b"0", b"1", b"2", b"-1", b"999999999999999999", b"9" * 25, b"1e5", b"NaN", b"+1",
         b"gzip", b"GZIP", b"br", b"identity", b"deflate, gzip", b"x" * 200,
         b"application/json", b"text/plain; charset=latin-1", b"text/plain; charset=idna",
         b"application/octet-stream", b"application/xml", b"; charset=", b"Undecodable",
         b"eyI=", b'{"key":"eHg="}', b'{"key":7}', b"{", b"[]",
         b"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01", b"00-x-y-z"]
    ),
)  # fmt: skip


def examples(strategy: st.SearchStrategy[T], seed: int, count: int) -> list[T]:
    """Return up to ``count`` generated examples, the same ones for the same seed."""
    found: list[T] = []

    @hypothesis.seed(seed)
    @settings(
        max_examples=count,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list[HealthCheck](HealthCheck),
    )
    @given(strategy)
    def collect(item: T) -> None:
        found.append(item)

    collect()
    return found


class _Received(Protocol):
    @property
    def headers(self) -> Any: ...
    @property
    def key(self) -> str | None: ...


def assert_encodable(received: Iterable[_Received], ids: Iterable[str]) -> None:
    """Check that headers, keys and ids can be written as UTF-8, for example to a log."""
    for item in received:
        json.dumps(dict(item.headers), ensure_ascii=False).encode()
        (item.key or "").encode()
    for id in ids:
        id.encode()


def assert_healthy(service: QueueService, caplog: pytest.LogCaptureFixture) -> None:
    """Check that the service is ready and healthy, and that its subscription was never lost."""
    health = service.health_check()
    assert service.ready
    assert (health.status, health.connection_state) == ("healthy", "connected")
    assert [(item.state, item.failing) for item in health.consumers] == [("consuming", None)]
    lost = [
        record.getMessage()
        for record in caplog.records
        if record.levelno >= logging.WARNING and "subscribing again" in record.getMessage()
    ]
    assert lost == []
