"""``QueueService`` and the runtime that starts and stops its parts.

The only package that imports both the policies and the backends. May import: everything below
``sync``.
"""

from qkit.service.queue_service import QueueService

__all__ = ["QueueService"]
