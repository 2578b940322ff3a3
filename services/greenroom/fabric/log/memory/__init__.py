"""The log in memory: the twin of Kafka in tests, and what all services share when they run in one process."""
