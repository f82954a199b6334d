"""The native engine, usable on its own or through ``Settings(type="native")``."""

from qkit.native.delivery import Delivery
from qkit.native.engine import Engine

__all__ = ["Delivery", "Engine"]
