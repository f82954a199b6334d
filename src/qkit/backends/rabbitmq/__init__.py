"""RabbitMQ, classic and quorum queues (aio-pika, aiormq).

May import: ``backends.common``, ``backends.capability_matrix`` and what lies below ``backends``.
"""
