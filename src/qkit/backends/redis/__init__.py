"""Redis lists and Redis pub/sub (redis-py).

May import: ``backends.common``, ``backends.capability_matrix`` and what lies below ``backends``.
"""
