"""Scripts for the life cycle of messages: declare, send, claim and settle."""

from __future__ import annotations

from typing import Final

from qkit.backends.redis.scripts.script import Script

__all__ = [
    "ACK",
    "ACK_ORDERED",
    "CLAIM",
    "CLAIM_ORDERED",
    "DECLARE",
    "DISTRIBUTE",
    "EXTEND",
    "JOIN",
    "RELEASE",
    "RELEASE_ORDERED",
    "RESTORE",
    "SEND",
    "SEND_PLAIN",
]

DECLARE: Final = Script.load("declare", library=False)
JOIN: Final = Script.load("join")
SEND: Final = Script.load("send")
SEND_PLAIN: Final = Script.load("send_plain", library=False)
DISTRIBUTE: Final = Script.load("distribute")
CLAIM: Final = Script.load("claim")
ACK: Final = Script.load("ack", library=False)
RELEASE: Final = Script.load("release")
EXTEND: Final = Script.load("extend", library=False)

# For queues with ordered subscriptions
CLAIM_ORDERED: Final = Script.load("claim_ordered", order=True)
ACK_ORDERED: Final = Script.load("ack_ordered", order=True)
RELEASE_ORDERED: Final = Script.load("release_ordered", order=True)
RESTORE: Final = Script.load("restore", order=True)
