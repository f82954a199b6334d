"""Policies between ``QueueService.send`` and ``Backend.publish``.

May import: ``wiring`` and the packages below it; no backend.
"""
