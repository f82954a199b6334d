"""Durability of the engine on top of the log: journal, recovery and compaction.

May import: ``native.queue``, ``native.log`` and ``native.bulk``.

The path of a durable message::

    publish ─ reserve capacity ──► journal ─► writer thread ─► write, fdatasync ─► index, queue
    consume ─ claim in memory ───► journal: CLAIM ─► written ─► the handler
    ack ───── remove from memory ► journal: ACK ───► written ─► returns; sync within fsync_interval

A message exists once its record is written as the fsync policy requires. Every other change is
made in memory first, and changes are written in the order in which they were made. The log alone
contains the complete state; a snapshot only makes recovery faster.
"""
