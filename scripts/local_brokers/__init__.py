"""Redis, RabbitMQ and Kafka as plain local processes; standard library only.

cli -> lifecycle -> servers -> {processes, probes, packages, state}
"""
