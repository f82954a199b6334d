"""Test kit that runs your handlers on the native engine, in virtual time and without a broker."""

from qkit.testing.clock import VirtualClock
from qkit.testing.service import Handled, TestService

__all__ = ["Handled", "TestService", "VirtualClock"]
