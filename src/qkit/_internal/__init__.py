"""Helpers without policy: no broker, no message semantics.

May import: ``errors``.
"""
