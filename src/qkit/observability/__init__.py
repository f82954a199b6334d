"""What a service reports about itself: events, metrics, health, traces.

May import: ``settings``, ``codec`` and what lies below them.
"""
