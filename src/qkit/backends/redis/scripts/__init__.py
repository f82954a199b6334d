"""Server-side Lua of the Redis list backend.

May import: the standard library and the driver's errors.
"""
