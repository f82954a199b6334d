"""Protocol between the process that owns a native directory and its clients.

May import: ``qkit.errors``, ``qkit.message`` and ``qkit.backend``; ``server`` the engine too.
"""
