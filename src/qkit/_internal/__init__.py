"""General helpers, independent of brokers and message semantics.

May import: ``errors``.
"""
