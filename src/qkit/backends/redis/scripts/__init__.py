"""Lua scripts of the Redis list backend.

May import: the standard library.
"""
