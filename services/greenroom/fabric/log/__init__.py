"""The log between services: Kafka, or its in-memory twin. One contract, `tests/contract/log`, holds for both.

`greenroom.fabric.log.kafka.kafka_log` has KafkaLog. It is not imported here, so that only its users need aiokafka.
"""

from greenroom.fabric.log.base import (
    AppendNotSent,
    AppendRefused,
    AppendUnknown,
    Assignment,
    GroupConsumer,
    Headers,
    Log,
    LogError,
    LogFailed,
    LogUnavailable,
    Position,
    Reader,
    Record,
    Topic,
)
from greenroom.fabric.log.config import LogConfig
from greenroom.fabric.log.memory.memory_log import MemoryBroker, MemoryLog

__all__ = [
    "AppendNotSent",
    "AppendRefused",
    "AppendUnknown",
    "Assignment",
    "GroupConsumer",
    "Headers",
    "Log",
    "LogConfig",
    "LogError",
    "LogFailed",
    "LogUnavailable",
    "MemoryBroker",
    "MemoryLog",
    "Position",
    "Reader",
    "Record",
    "Topic",
]
