"""Policies between ``QueueService.send`` and ``Backend.publish``.

May import: ``wiring`` and what lies below it; no backend.
"""
