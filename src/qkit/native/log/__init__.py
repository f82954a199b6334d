"""Append-only log of records, in segments on disk.

May import: ``qkit.errors`` and ``qkit.message``.
"""
