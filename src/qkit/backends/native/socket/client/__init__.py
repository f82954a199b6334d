"""The client's side of the socket: a backend in another process.

May import: ``backends.common``, ``backends.native.socket``; not the engine.
"""
