"""What all Kafka objects share: their options, the meaning of errors, and a throttle on log lines during outages."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any

from aiokafka import AIOKafkaConsumer
from aiokafka import errors as kafka
from aiokafka.conn import create_conn

from greenroom.fabric.log.base import LogError, LogFailed, LogUnavailable, Record
from greenroom.fabric.log.config import LogConfig

_LOG = logging.getLogger(__name__)
RETRY_S = 0.1
CLOSE_S = 3.0
"""How long a close may take in which brokers are told that we leave."""
_FOREVER_MS = 2**31 - 1

TROUBLE = (kafka.KafkaError, OSError, TimeoutError, AssertionError, LookupError)
"""What aiokafka raises when the cluster is away or in an odd state. It raises the last two where it has lost track."""
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
    """The options of every aiokafka object. Reads the files that the configuration names."""
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
    """A consumer that neither commits nor skips by itself, and is not removed from its group for being slow."""
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
        fetch_max_wait_ms=500,
        isolation_level="read_uncommitted",
    )


def hear_commits(client: AIOKafkaConsumer) -> None:
    """See how each commit's request ends, also where its caller no longer waits. ``client`` has started.

    aiokafka shields the request from the caller's cancellation, and no one would then ask for its failure.
    """
    coordinator = client._coordinator
    request = coordinator._do_commit_offsets

    def heard(*arguments: Any) -> asyncio.Task[None]:
        task = asyncio.create_task(request(*arguments), name="commit")
        task.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
        return task

    coordinator._do_commit_offsets = heard


def stalled(client: AIOKafkaConsumer) -> bool:
    """Whether the task that fetches has ended. ``getmany`` would not raise then, but return nothing for ever."""
    fetcher = client._fetcher
    return fetcher is not None and bool(fetcher.error_future.done())


async def close_consumer(client: AIOKafkaConsumer) -> None:
    """Close it in any state; none of its tasks goes on. It leaves its group where the brokers answer in time."""
    if await finish(asyncio.create_task(client.stop()), CLOSE_S):
        return
    coordinator, fetcher = client._coordinator, client._fetcher
    for name in ("_coordination_task", "_heartbeat_task", "_commit_refresh_task", "_reset_committed_task"):
        await finish(getattr(coordinator, name, None))
    if fetcher is not None:
        for task in (fetcher._fetch_task, *fetcher._pending_tasks):
            await finish(task)
    await finish(asyncio.create_task(client._client.close()), CLOSE_S)


async def finish(task: asyncio.Task[Any] | None, timeout_s: float = 0.0, cancelling_s: float = CLOSE_S) -> bool:
    """Let a task go on for ``timeout_s``, then cancel it. Returns whether it ended in order.

    Some tasks of aiokafka cancel each other. This must not look as if our own task was cancelled.
    """
    if task is None:
        return True
    if timeout_s > 0:
        await asyncio.wait([task], timeout=timeout_s)
    if not task.done():
        task.cancel()
        await asyncio.wait([task], timeout=cancelling_s)
    if not task.done() or task.cancelled():
        return False
    if task.exception() is not None:
        _LOG.debug("a task of aiokafka failed at its end: %r", task.exception())
        return False
    return True


def as_log_error(what: str, error: BaseException) -> LogError:
    """``error`` as one of ours: LogFailed where it is fatal, else LogUnavailable."""
    reason = str(error) or ("no answer in time" if isinstance(error, TimeoutError) else type(error).__name__)
    if isinstance(error, FORBIDDEN):
        return LogFailed(f"{what}: not authorised ({reason}); the user needs the right to read, write and create there")
    if isinstance(error, kafka.OffsetOutOfRangeError):
        return LogFailed(f"{what}: offset out of range ({reason}): its records have been deleted; nothing is skipped")
    if isinstance(error, FATAL):
        return LogFailed(f"{what}: {reason}")
    return LogUnavailable(f"{what}: {reason}")


async def why_unreachable(config: LogConfig) -> str:
    """What each broker answers when it is called by itself."""
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
    """Lets a warning of the same wording through once in ``every_s``, with how many there were. While a broker is away
    each try logs it, many times a second. Only text among the arguments tells wordings apart: names, not errors."""

    def __init__(self, every_s: float = 10.0) -> None:
        super().__init__()
        self._every_s = every_s
        self._last: dict[tuple[str, ...], float] = {}
        self._held_back: dict[tuple[str, ...], int] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno < logging.WARNING:
            return True
        now = time.monotonic()
        arguments = record.args if isinstance(record.args, tuple) else ()
        wording = (record.name, str(record.msg), *(each for each in arguments if isinstance(each, str)))
        if now - self._last.get(wording, -self._every_s) < self._every_s:
            self._held_back[wording] = self._held_back.get(wording, 0) + 1
            return False
        if len(self._last) >= _MOST_WORDINGS:
            self._last.clear()
            self._held_back.clear()
        self._last[wording] = now
        if more := self._held_back.pop(wording, 0):
            record.msg = f"{record.msg} ({more} more like it since the last line)"
        return True


_MOST_WORDINGS = 1000
_THROTTLE = Throttle()
_THROTTLED = (
    "aiokafka",
    "aiokafka.conn",
    "aiokafka.consumer.fetcher",
    "aiokafka.consumer.group_coordinator",
    "aiokafka.producer.sender",
    "greenroom.fabric.log.kafka.kafka_log",
    "greenroom.fabric.log.kafka.group",
    "greenroom.fabric.log.kafka.reader",
)


def throttle_logs() -> None:
    for name in _THROTTLED:
        logging.getLogger(name).addFilter(_THROTTLE)
