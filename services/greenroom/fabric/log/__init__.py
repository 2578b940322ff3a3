"""The log between services: Kafka, or its in-memory twin. One contract, `tests/contract/log`, holds for both.

`greenroom.fabric.log.kafka` has KafkaLog, and is imported only by those who use it.
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
from greenroom.fabric.log.memory import MemoryBroker, MemoryLog

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
