"""Web app on every backend."""

from __future__ import annotations

import uuid

import pytest

from qkit import QueueService, Reject, Settings, consume
from tests.support.everywhere import BACKENDS, NAMES
from tests.support.web import AUTHORIZED, client_of, eventually, wait_for_dead_letters


@pytest.fixture(params=NAMES)
def settings(request: pytest.FixtureRequest) -> Settings:
    return BACKENDS[request.param][1](request.getfixturevalue)


async def test_figures_dead_letters_replay_and_pause_work_on_every_backend(
    settings: Settings,
) -> None:
    name = f"orders-{uuid.uuid4().hex[:8]}"
    handled: list[int] = []
    accept_all = False

    @consume(name)
    async def handle(number: int) -> None:
        if number < 0 and not accept_all:
            raise Reject("negative total")
        handled.append(number)

    service = QueueService(settings)
    service.register(handle)
    path = f"/api/queues/{name}"
    async with service, client_of(service) as client:
        for number in (1, -1):
            answer = await client.post(
                f"{path}/messages", json={"body": number}, headers=AUTHORIZED
            )
            assert answer.status_code == 201, answer.text
        await wait_for_dead_letters(service, name, 1)

        async def counted() -> bool:
            row = (await client.get(path)).json()
            known = row["error"] is None  # the statistics of a busy broker may time out
            return bool(known and row["messages_failed"] == 1 and row["dead_letters"] in (1, None))

        await eventually(counted, seconds=60, every=0.2)
        row = (await client.get(path)).json()
        assert row["state"] == "consuming"
        assert (await client.get("/readyz")).status_code == 200
        assert (
            f'qkit_messages_failed_total{{channel="{name}"}} 1.0'
            in (await client.get("/metrics")).text
        )
        affected = settings.type == "rabbitmq"
        assert service.peek_affects_queue is affected
        assert (await client.get(f"{path}/messages")).status_code == 403 or not affected
        peeked = await client.get(f"{path}/messages", headers=AUTHORIZED)
        assert peeked.status_code == (200 if service.capabilities.peek else 501), peeked.text
        (letter,) = (await client.get(f"{path}/dead-letters")).json()["dead_letters"]
        assert (letter["reason"], letter["error"]) == ("ExplicitNack", "negative total")
        accept_all = True
        answer = await client.post(f"{path}/dead-letters/replay", json={}, headers=AUTHORIZED)
        assert answer.json() == {"replayed": 1}

        async def replayed() -> bool:
            return sorted(handled) == [-1, 1]

        await eventually(replayed)
        for action, state in (("pause", "paused"), ("resume", "consuming")):
            answer = await client.post(f"{path}/{action}", headers=AUTHORIZED)
            assert [item["state"] for item in answer.json()["consumers"]] == [state]
