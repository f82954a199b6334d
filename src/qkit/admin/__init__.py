"""Administration on top of any backend: queues and dead letters.

May import: ``consuming``, ``sending`` and what lies below them; no backend.
"""
