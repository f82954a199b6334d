"""qkit's own queue engine, usable by itself and behind ``Settings(type="native")``."""

from qkit.native.delivery import Delivery
from qkit.native.engine import Engine

__all__ = ["Delivery", "Engine"]
