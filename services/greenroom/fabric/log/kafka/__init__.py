"""The log on Apache Kafka, by aiokafka."""
