"""The backend boundary on the native engine, in this process or through its socket.

May import: ``native``, ``backends.common``, ``backends.capability_matrix`` and what lies below.
"""

from qkit.backends.native.backend import NativeBackend

__all__ = ["NativeBackend"]
