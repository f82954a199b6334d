"""Fixtures for the tests of reliability: servers to harm, workers to kill."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.carriers import Carrier, Servers, Site
from tests.support.workers import Workers


@pytest.fixture(scope="session")
def workers() -> Iterator[Workers]:
    """Worker processes, all ended with the run."""
    workers = Workers()
    yield workers
    workers.close()


@pytest.fixture(scope="session")
def servers(workers: Workers) -> Iterator[Servers]:
    """Private servers, all ended with the run."""
    servers = Servers(workers)
    yield servers
    servers.close()


@pytest.fixture
def site(request: pytest.FixtureRequest, servers: Servers) -> Iterator[Site]:
    """The carrier of this case (see ``on``) with a server that runs."""
    assert isinstance(request.param, Carrier)
    # Not tmp_path: the path of a Unix socket has to be short.
    with tempfile.TemporaryDirectory(prefix="qkit-") as directory:
        yield from Site.open(request.param, servers, Path(directory) / "queues")
