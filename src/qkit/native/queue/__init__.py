"""In-memory queues and topics: messages, leases and waiting consumers.

May import: ``native.config``, ``native.cross_thread`` and ``qkit.message``.
"""
