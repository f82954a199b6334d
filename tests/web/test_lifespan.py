"""``lifespan``: services of an application that is started more than once."""

from __future__ import annotations

import warnings

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Mount, Route

from qkit import ConfigError, LifecycleError, QueueService
from qkit.web import create_app, lifespan
from tests.support.web import AUTHORIZED, TOKEN, make_shop

with warnings.catch_warnings():  # it asks for another HTTP client
    warnings.simplefilter("ignore")
    from starlette.testclient import TestClient


async def send(request: Request) -> Response:
    sent = await request.state.service.send("orders", 1)
    return PlainTextResponse(f"{id(request.state.service)} {sent.message_id}")


ROUTES = [Route("/", send)]


def test_a_factory_creates_a_service_for_each_start() -> None:
    created: list[QueueService] = []

    def create() -> QueueService:
        created.append(make_shop())
        return created[-1]

    app = Starlette(routes=ROUTES, lifespan=lifespan(create))
    answers = []
    for _ in range(2):
        with TestClient(app) as client:
            answers.append(client.get("/").text.partition(" ")[0])
            assert created[-1].ready
    assert answers == [str(id(service)) for service in created]
    assert len(set(answers)) == 2
    assert all(service.stopping for service in created)


def test_the_error_of_a_second_start_names_the_factory() -> None:
    app = Starlette(routes=ROUTES, lifespan=lifespan(make_shop()))
    with TestClient(app) as client:
        assert client.get("/").status_code == 200
    with pytest.raises(LifecycleError, match=r"lifespan\(create_service\)"):
        TestClient(app).__enter__()


def test_something_else_than_a_service_or_a_factory_is_rejected() -> None:
    with pytest.raises(ConfigError, match="got str"):
        lifespan("orders")  # type: ignore[arg-type]  # must be rejected
    app = Starlette(lifespan=lifespan(lambda: "orders"))  # type: ignore[arg-type, return-value]
    with pytest.raises(ConfigError, match="return a QueueService, got str"):
        TestClient(app).__enter__()


def test_a_mounted_app_can_be_tested_with_a_token_and_the_host_of_the_test_client() -> None:
    service = make_shop()
    pages = create_app(service, token=TOKEN, hosts=["testserver"])
    app = Starlette(routes=[Mount("/queues", pages)], lifespan=lifespan(service))
    with TestClient(app) as client:
        assert client.get("/queues/api/overview", headers=AUTHORIZED).status_code == 200
        assert client.get("/queues/api/overview").status_code == 401
        assert client.get("/queues/readyz").status_code == 200
