"""Redis, RabbitMQ and Kafka as local processes, using only the standard library.

A module imports only modules after it in this list: cli, lifecycle, servers, state, processes,
probes, chromium, packages.
"""
