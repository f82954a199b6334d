"""Native backend for an engine in this process or, over a Unix socket, in another process.

May import: ``native``, ``backends.common``, ``backends.capability_matrix`` and the packages below
them.
"""

from qkit.backends.native.backend import NativeBackend

__all__ = ["NativeBackend"]
