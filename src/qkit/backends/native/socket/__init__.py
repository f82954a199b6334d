"""Unix socket between the owner of a native directory and its clients.

May import: ``qkit.errors``, ``qkit.message`` and ``qkit.backend``; ``server`` also the engine.
"""
