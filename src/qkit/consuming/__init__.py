"""Policies between ``Subscription.receive`` and the acknowledgement.

May import: ``sending``, ``handlers`` and what lies below them; no backend.
"""
