"""RabbitMQ, classic and quorum queues (aiormq).

May import: ``backends.common``, ``backends.capability_matrix`` and what lies below ``backends``.
"""
