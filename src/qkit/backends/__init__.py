"""Implementations of the backend boundary.

Each package is imported when its backend is opened, so that none needs another's driver.
May import: ``backend``, ``settings``, ``native`` and what lies below them; no policy.
"""
