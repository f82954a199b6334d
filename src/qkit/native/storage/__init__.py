"""The durable engine on top of the log: journal, recovery, compaction.

May import: ``native.queue``, ``native.log`` and ``native.bulk``.

The path of a durable message::

    publish ─ reserve a place ─► journal ─► writer thread ─► write, fdatasync ─► index, queue
    consume ─ claim in memory ─► journal: CLAIM ─► written ─► the handler
    ack ───── out of memory ───► journal: ACK ───► written ─► returns; synced within fsync_interval

A message exists once its record is safe. Everything else happens in memory first and is written in
the order in which it happened. The log alone is complete; a snapshot only makes reading quicker.
"""
