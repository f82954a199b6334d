"""Message bodies to bytes and back.

May import: ``errors``, ``_internal``, ``message``, ``backend``.
"""
