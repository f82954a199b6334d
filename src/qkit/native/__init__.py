"""qkit's own queue engine, usable by itself and behind ``Settings(type="native")``."""

from qkit.native.engine import Delivery, Engine

__all__ = ["Delivery", "Engine"]
