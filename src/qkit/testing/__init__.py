"""For users' tests: real handlers on the real engine, in virtual time, without a broker."""

from qkit.testing.clock import VirtualClock
from qkit.testing.service import Handled, TestService

__all__ = ["Handled", "TestService", "VirtualClock"]
