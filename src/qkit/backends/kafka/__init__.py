"""Kafka (aiokafka).

May import: ``backends.common``, ``backends.capability_matrix`` and what lies below ``backends``.
"""
