"""What two or more backends need.

May import: ``backend``, ``settings`` and what lies below them; no driver.
"""
