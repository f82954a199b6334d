"""Channels and handlers as the user declares them, resolved to routes.

May import: ``observability`` and what lies below it; no backend.
"""
