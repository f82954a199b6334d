"""RabbitMQ backend with classic and quorum queues, based on aiormq.

May import: ``backends.common``, ``backends.capability_matrix`` and the packages below ``backends``.
"""
