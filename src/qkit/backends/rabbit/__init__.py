"""The rooms of the RabbitMQ backend: properties, topology, delay, connection, subscription."""
