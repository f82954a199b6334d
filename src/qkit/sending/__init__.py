"""Policies between ``QueueService.send`` and ``Backend.publish``.

May import: ``handlers`` and what lies below it; no backend.
"""
