"""The owner's side of the socket: frames and JSON lines.

May import: ``native``, ``backends.native``, ``backends.native.socket``.
"""
