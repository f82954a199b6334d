"""Kafka backend, based on aiokafka.

May import: ``backends.common``, ``backends.capability_matrix`` and the packages below ``backends``.
"""
