"""Administration of queues and dead letters, the same for every backend.

May import: ``consuming``, ``sending`` and the packages below them; no backend.
"""
