"""The rooms of the Redis list backend: frame, scripts, connection, subscription."""
