"""The durable engine on top of the log: journal, recovery, compaction.

May import: ``native.queue``, ``native.log`` and ``native.bulk``.
"""
