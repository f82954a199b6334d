"""The two Redis backends, lists and pub/sub, built on redis-py.

May import: ``backends.common``, ``backends.capability_matrix`` and the packages below ``backends``.
"""
