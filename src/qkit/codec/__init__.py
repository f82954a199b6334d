"""Encoding and decoding of message bodies.

May import: ``errors``, ``_internal``, ``message``, ``backend``.
"""
