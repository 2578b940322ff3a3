"""What all Kafka objects share: how they are set up, which errors mean what, and that outages do not flood the log."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable
from typing import Any

from aiokafka import AIOKafkaConsumer
from aiokafka import errors as kafka
from aiokafka.conn import create_conn

from greenroom.fabric.log.base import LogError, LogFailed, LogUnavailable, Record
from greenroom.fabric.log.config import LogConfig

_LOG = logging.getLogger(__name__)
RETRY_S = 0.1
_FOREVER_MS = 2**31 - 1

TROUBLE = (kafka.KafkaError, OSError, TimeoutError, AssertionError, LookupError)
"""What aiokafka raises when the cluster is away or in an odd state: the last two where it has lost track itself."""
FORBIDDEN = (
    kafka.TopicAuthorizationFailedError,
    kafka.GroupAuthorizationFailedError,
    kafka.ClusterAuthorizationFailedError,
    kafka.TransactionalIdAuthorizationFailed,
)
FENCED = (kafka.ProducerFenced, kafka.InvalidProducerEpoch)
FATAL = (
    *FORBIDDEN,
    *FENCED,
    kafka.OffsetOutOfRangeError,
    kafka.RecordTooLargeError,
    kafka.InconsistentGroupProtocolError,
    kafka.InvalidGroupIdError,
    kafka.InvalidSessionTimeoutError,
    kafka.InvalidTopicError,
    kafka.UnsupportedVersionError,
)


def client_options(config: LogConfig) -> dict[str, Any]:
    """What every aiokafka object is given. Reads the files that the configuration names."""
    options: dict[str, Any] = {
        "bootstrap_servers": list(config.brokers),
        "client_id": config.client_id,
        "request_timeout_ms": int(config.request_timeout_s * 1000),
        "retry_backoff_ms": int(RETRY_S * 1000),
        "security_protocol": config.protocol,
        "ssl_context": config.ssl_context(),
    }
    if config.sasl_mechanism is not None:
        options["sasl_mechanism"] = config.sasl_mechanism
        options["sasl_plain_username"] = config.sasl_user
        options["sasl_plain_password"] = config.password()
    return options


def consumer(config: LogConfig, group: str | None = None) -> AIOKafkaConsumer:
    """A consumer that commits and skips nothing by itself, and is not put out of its group for being slow."""
    options = client_options(config)
    if group is not None:
        options |= {
            "group_id": group,
            "session_timeout_ms": int(config.session_timeout_s * 1000),
            "rebalance_timeout_ms": int(config.session_timeout_s * 1000),
            "heartbeat_interval_ms": int(config.heartbeat_s * 1000),
        }
    return AIOKafkaConsumer(
        **options,
        enable_auto_commit=False,
        auto_offset_reset="none",
        max_poll_interval_ms=_FOREVER_MS,
        max_partition_fetch_bytes=4 * 1024 * 1024,
        fetch_max_bytes=32 * 1024 * 1024,
        fetch_max_wait_ms=250,
        isolation_level="read_uncommitted",
    )


def stalled(client: AIOKafkaConsumer) -> bool:
    """Whether the task that fetches has ended: ``getmany`` would not say so, and find nothing for ever."""
    fetcher = client._fetcher
    return fetcher is not None and bool(fetcher.error_future.done())


async def close_consumer(client: AIOKafkaConsumer, timeout_s: float) -> None:
    """Close it whatever state it is in, leaving its group where that can be said in time."""
    try:
        async with asyncio.timeout(timeout_s):
            await client.stop()
            return
    except TROUBLE as error:
        _LOG.debug("a consumer did not stop in order: %r", error)
    if client._fetcher is not None:
        await _try(client._fetcher.close(), timeout_s)
    await _try(client._client.close(), timeout_s)


async def _try(closing: Awaitable[Any], timeout_s: float) -> None:
    with contextlib.suppress(*TROUBLE):
        async with asyncio.timeout(timeout_s):
            await closing


def as_log_error(what: str, error: BaseException) -> LogError:
    """``error`` as one of ours: fatal, or not for now."""
    reason = str(error) or type(error).__name__
    if isinstance(error, FORBIDDEN):
        return LogFailed(f"{what}: not authorised ({reason}); the user needs the right to read, write and create there")
    if isinstance(error, kafka.OffsetOutOfRangeError):
        return LogFailed(f"{what}: offset out of range ({reason}): its records have been deleted; nothing is skipped")
    if isinstance(error, FATAL):
        return LogFailed(f"{what}: {reason}")
    return LogUnavailable(f"{what}: {reason}")


async def why_unreachable(config: LogConfig) -> str:
    """What the brokers said when they were called one by one."""
    reasons = []
    options = client_options(config)
    for broker in config.brokers:
        host, _, port = broker.rpartition(":")
        try:
            connection = await create_conn(
                host.strip("[]"),
                int(port),
                client_id=config.client_id,
                request_timeout_ms=3000,
                ssl_context=options["ssl_context"],
                security_protocol=options["security_protocol"],
                sasl_mechanism=options.get("sasl_mechanism"),
                sasl_plain_username=options.get("sasl_plain_username"),
                sasl_plain_password=options.get("sasl_plain_password"),
            )
        except Exception as error:
            reasons.append(f"{broker}: {str(error) or type(error).__name__}")
        else:
            connection.close()
            reasons.append(f"{broker}: answers now")
    return "; ".join(reasons)


def record_of(topic: str, message: Any) -> Record:
    """``topic``: without the prefix."""
    return Record(
        topic,
        message.partition,
        message.offset,
        message.timestamp,
        message.key,
        message.value,
        tuple((name, value or b"") for name, value in message.headers),
    )


class Throttle(logging.Filter):
    """Lets a message of the same wording through once in ``every_s``: aiokafka says anew at each try that a broker is
    away, many times a second."""

    def __init__(self, every_s: float = 10.0) -> None:
        super().__init__()
        self._every_s = every_s
        self._last: dict[tuple[str, str], float] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno < logging.WARNING:
            return True
        now = time.monotonic()
        wording = (record.name, str(record.msg))
        if now - self._last.get(wording, -self._every_s) < self._every_s:
            return False
        self._last[wording] = now
        return True


_THROTTLE = Throttle()
_THROTTLED = (
    "aiokafka",
    "aiokafka.conn",
    "aiokafka.consumer.fetcher",
    "aiokafka.consumer.group_coordinator",
    "aiokafka.producer.sender",
)


def throttle_logs() -> None:
    for name in _THROTTLED:
        logging.getLogger(name).addFilter(_THROTTLE)
