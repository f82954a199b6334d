"""Settings, validated before anything connects.

May import: ``errors``, ``_internal``, ``message``, ``backend``.
"""
