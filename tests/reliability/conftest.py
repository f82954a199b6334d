"""Fixtures of the reliability tests: private servers and worker processes."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.deployments import Deployment, Servers, Site
from tests.support.workers import Workers


@pytest.fixture(scope="session")
def workers() -> Iterator[Workers]:
    """Worker processes that are killed at the end of the run."""
    workers = Workers()
    yield workers
    workers.close()


@pytest.fixture(scope="session")
def servers(workers: Workers) -> Iterator[Servers]:
    """Private servers that are stopped at the end of the run."""
    servers = Servers(workers)
    yield servers
    servers.close()


@pytest.fixture
def site(request: pytest.FixtureRequest, servers: Servers) -> Iterator[Site]:
    """Site for the deployment of this test case (see ``on``), with its server running."""
    assert isinstance(request.param, Deployment)
    # Not tmp_path, because the path of a Unix socket must be short.
    with tempfile.TemporaryDirectory(prefix="qkit-") as directory:
        yield from Site.open(request.param, servers, Path(directory) / "queues")
