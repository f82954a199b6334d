"""State of one queue in memory.

May import: ``native.config``, ``native.cross_thread`` and ``qkit.message``.
"""
