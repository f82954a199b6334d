"""Client end of the socket: a backend that uses the engine of another process.

May import: ``backends.common``, ``backends.native.socket``; not the engine.
"""
