"""Owner's end of the socket: a server for frames and JSON lines.

May import: ``native``, ``backends.native``, ``backends.native.socket``.
"""
