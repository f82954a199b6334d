"""What is touched inside the driver is still there, and does what it should."""

from __future__ import annotations

import logging

import pytest
from aiokafka.consumer.group_coordinator import GroupCoordinator
from aiokafka.protocol.admin import SaslAuthenticateRequest

from qkit.backends.kafka_log import driver


def test_the_driver_s_log_never_holds_a_password(caplog: pytest.LogCaptureFixture) -> None:
    """At DEBUG it writes every request down, the one with the password too."""
    request = SaslAuthenticateRequest(b"\x00me\x00canary").prepare({36: (0, 1)})
    assert "canary" in str(request)
    logger = logging.getLogger("aiokafka.conn")
    with caplog.at_level(logging.DEBUG, logger="aiokafka.conn"):
        logger.debug("Request to %s:%d %d: %s", "localhost", 9092, 3, request)
        logger.debug("Request to %s:%d %d: %s", "localhost", 9092, 4, "metadata")
    assert "canary" not in caplog.text
    assert "metadata" in caplog.text


async def test_what_is_used_of_the_driver_s_inside_exists() -> None:
    """A new version that moves one of them fails here, and not in the middle of an outage."""
    consumer = driver.Consumer(group_id="g", bootstrap_servers="127.0.0.1:1")
    producer = driver.Producer(bootstrap_servers="127.0.0.1:1", enable_idempotence=True)
    admin = driver.Admin(bootstrap_servers="127.0.0.1:1")
    for user in (consumer, producer, admin):
        client = driver.client_of(user)
        assert callable(client._metadata_update)
        assert callable(client._get_conn)
        assert client._conns == {}
        assert driver.create_nothing(user) is user
    for name in ("_coordinator", "_fetcher", "_client", "_group_id", "_closed"):
        assert hasattr(consumer, name)
    assert producer._sender.sender_task is None
    assert producer._message_accumulator._closed is False
    assert driver.generation_of(consumer) == -1
    assert not driver.has_ended(producer)
    for name in (
        "request_rejoin",
        "_stop_heartbeat_task",
        "_stop_commit_offsets_refresh_task",
        "_maybe_leave_group",
    ):
        assert callable(getattr(GroupCoordinator, name))
    await driver.close_consumer(consumer)
    await driver.close_producer(producer, flush=0.0)
    await driver.close_admin(admin)
