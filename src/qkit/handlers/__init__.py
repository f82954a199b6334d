"""Channels and handlers as the user declares them, and the routes built from them.

May import: ``observability`` and the packages below it; no backend.
"""
