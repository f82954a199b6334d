"""Append-only segments on disk.

May import: ``qkit.errors`` and ``qkit.message``.
"""
