"""The rooms of the RabbitMQ backend, from the names on the broker to a consumer."""
