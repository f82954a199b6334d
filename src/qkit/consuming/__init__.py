"""Policies between ``Subscription.receive`` and the acknowledgement.

May import: ``sending``, ``handlers`` and the packages below them; no backend.
"""
