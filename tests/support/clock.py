"""The virtual clock, where tests looked for it before it was part of the package."""

from qkit.testing import VirtualClock
from qkit.testing.fixtures import virtual_clock

__all__ = ["VirtualClock", "virtual_clock"]
