"""The rooms of the Kafka backend: record, tracker, tiers, assignor, cluster, producer, consumer."""
