"""A bad value names the field, the value and what is allowed."""

from __future__ import annotations

import importlib
import logging
import re
import time
from pathlib import Path
from typing import Any

import pytest
from aiokafka import errors as kafka

from greenroom.core.errors import InvalidConfig
from greenroom.fabric.log import (
    AppendNotSent,
    AppendRefused,
    AppendUnknown,
    LogConfig,
    LogError,
    LogFailed,
    LogUnavailable,
    Topic,
)
from greenroom.fabric.log.kafka.client import Throttle, as_log_error, client_options, throttle_logs
from greenroom.fabric.log.kafka.kafka_log import KafkaLog, _refusal
from greenroom.fabric.log.kafka.topics import Known, contradictions, settings


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"brokers": ()}, "brokers"),
        ({"brokers": ("kafka",)}, "brokers"),
        ({"brokers": ("kafka:0",)}, "brokers"),
        ({"brokers": ("kafka:70000",)}, "brokers"),
        ({"brokers": ("http://kafka:9092",)}, "brokers"),
        ({"brokers": ("a:1,b:2",)}, "brokers"),
        ({"prefix": "a b"}, "prefix"),
        ({"prefix": "x" * 101}, "prefix"),
        ({"cert_file": Path("c")}, "key_file"),
        ({"key_file": Path("k")}, "cert_file"),
        ({"sasl_mechanism": "GSSAPI"}, "sasl_mechanism"),
        ({"sasl_user": "u"}, "sasl_mechanism"),
        ({"sasl_mechanism": "PLAIN", "sasl_password": "p"}, "sasl_user"),
        ({"sasl_mechanism": "PLAIN", "sasl_user": "u"}, "sasl_password"),
        (
            {"sasl_mechanism": "PLAIN", "sasl_user": "u", "sasl_password": "p", "sasl_password_file": Path("f")},
            "sasl_password",
        ),
        ({"replication": 0}, "replication"),
        ({"connect_timeout_s": 0}, "connect_timeout_s"),
        ({"request_timeout_s": float("inf")}, "request_timeout_s"),
        ({"session_timeout_s": float("nan")}, "session_timeout_s"),
        ({"session_timeout_s": 6.0, "heartbeat_s": 3.0}, "heartbeat_s"),
    ],
)
def test_what_is_not_allowed_is_named(change: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidConfig) as raised:
        LogConfig(**({"brokers": ("kafka:9092",)} | change))
    assert raised.value.field == field


def test_a_password_is_not_shown() -> None:
    config = LogConfig(brokers=("k:1",), sasl_mechanism="PLAIN", sasl_user="u", sasl_password="very secret")
    assert "very secret" not in repr(config)
    assert config.protocol == "SASL_PLAINTEXT"


def test_files_that_are_not_there_or_wrong_are_named(tmp_path: Path) -> None:
    nonsense = tmp_path / "nonsense.pem"
    nonsense.write_text("not a certificate")
    (tmp_path / "empty").write_text("\n")
    secret = {"brokers": ("k:1",), "sasl_mechanism": "PLAIN", "sasl_user": "u"}
    for config, field in (
        (LogConfig(brokers=("k:1",), ca_file=tmp_path / "absent"), "ca_file"),
        (LogConfig(brokers=("k:1",), ca_file=nonsense), "ca_file"),
        (LogConfig(brokers=("k:1",), cert_file=nonsense, key_file=nonsense), "cert_file"),
        (LogConfig(**secret, sasl_password_file=tmp_path / "absent"), "sasl_password_file"),  # type: ignore[arg-type]
        (LogConfig(**secret, sasl_password_file=tmp_path / "empty"), "sasl_password_file"),  # type: ignore[arg-type]
    ):
        with pytest.raises(InvalidConfig) as raised:
            client_options(config)
        assert raised.value.field == field


def test_any_tls_file_means_tls(tmp_path: Path) -> None:
    assert LogConfig(brokers=("k:1",)).protocol == "PLAINTEXT"
    assert LogConfig(brokers=("k:1",), tls=True).protocol == "SSL"
    assert LogConfig(brokers=("k:1",), ca_file=tmp_path).protocol == "SSL"


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (kafka.MessageSizeTooLargeError(), AppendRefused),
        (kafka.PolicyViolationError(), AppendRefused),
        (kafka.TopicAuthorizationFailedError("t"), LogFailed),
        (kafka.ProducerFenced(), LogFailed),
        (kafka.InvalidProducerEpoch(), LogFailed),
        (kafka.OutOfOrderSequenceNumber(), AppendUnknown),
        (kafka.KafkaConnectionError(), AppendUnknown),
        (kafka.ProducerClosed(), AppendUnknown),
        (kafka.UnknownError(), AppendUnknown),
    ],
)
def test_an_answer_to_an_append_is_certain_or_unknown(error: kafka.KafkaError, kind: type[Exception]) -> None:
    assert type(_refusal("things", error)) is kind


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (kafka.OffsetOutOfRangeError({}), LogFailed),
        (kafka.GroupAuthorizationFailedError("g"), LogFailed),
        (kafka.RecordTooLargeError(), LogFailed),
        (kafka.NotLeaderForPartitionError(), LogUnavailable),
        (TimeoutError(), LogUnavailable),
        (OSError("away"), LogUnavailable),
    ],
)
def test_what_can_not_heal_is_fatal_and_the_rest_is_not(error: Exception, kind: type[Exception]) -> None:
    assert type(as_log_error("reading things", error)) is kind


@pytest.mark.parametrize(("replicas", "in_sync"), [(1, None), (2, "2"), (3, "2")])
def test_what_is_acknowledged_is_on_two_brokers_where_there_are_two(replicas: int, in_sync: str | None) -> None:
    assert settings(Topic("things"), replicas).get("min.insync.replicas") == in_sync


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (kafka.MessageSizeTooLargeError(), AppendRefused),
        (kafka.KafkaTimeoutError(), AppendNotSent),
        (kafka.TopicAuthorizationFailedError("things"), LogFailed),
    ],
)
async def test_what_was_not_taken_into_a_batch_is_certainly_not_there(
    monkeypatch: pytest.MonkeyPatch, error: kafka.KafkaError, kind: type[Exception]
) -> None:
    class Producer:
        async def send(self, *_: Any, **__: Any) -> None:
            raise error

    async def sender() -> Producer:
        return Producer()

    log = KafkaLog(LogConfig(brokers=("127.0.0.1:1",)))
    name = f"{log.config.prefix}things"
    monkeypatch.setattr(log, "_known", {name: Known(name, 1, False, 1000, False)})
    monkeypatch.setattr(log, "_sender", sender)
    with pytest.raises(LogError) as raised:
        await log.append("things", b"value")
    assert type(raised.value) is kind


def test_a_topic_is_created_so_that_it_contradicts_nothing() -> None:
    for topic in (Topic("things", 3, 1000), Topic("things", compacted=True, max_message_bytes=5)):
        chosen = settings(topic, 3)
        assert chosen["min.insync.replicas"] == "2"
        assert chosen["message.timestamp.type"] == "LogAppendTime"
        there = Known("things", topic.partitions, chosen["cleanup.policy"] == "compact", topic.max_message_bytes, True)
        assert contradictions(topic, there) == []
        stamped_by_producer = Known("things", 3, topic.compacted, topic.max_message_bytes, False)
        assert any("LogAppendTime" in problem for problem in contradictions(topic, stamped_by_producer))


def test_an_outage_is_told_once_in_a_while() -> None:
    throttle = Throttle(every_s=1000.0)

    def line(level: int, wording: str) -> logging.LogRecord:
        return logging.LogRecord("aiokafka", level, __file__, 1, wording, ("host",), None)

    assert throttle.filter(line(logging.ERROR, "Unable connect to %s"))
    assert not throttle.filter(line(logging.ERROR, "Unable connect to %s"))
    assert throttle.filter(line(logging.ERROR, "another %s"))
    assert all(throttle.filter(line(logging.INFO, "joined %s")) for _ in range(3))


def test_it_is_told_how_often_something_was_not_told() -> None:
    throttle = Throttle(every_s=0.2)

    def line(topic: str) -> logging.LogRecord:
        return logging.LogRecord("log", logging.WARNING, __file__, 1, "reading %s: %r", (topic, OSError("x")), None)

    assert [throttle.filter(line("a")) for _ in range(4)] == [True, False, False, False]
    assert throttle.filter(line("b")), "of another topic it is another message"
    deadline = time.monotonic() + 10
    while not throttle.filter(again := line("a")):
        assert time.monotonic() < deadline
    said = re.fullmatch(r"reading a: OSError\('x'\) \((\d+) more like it since the last line\)", again.getMessage())
    assert said is not None
    assert int(said[1]) >= 3


@pytest.mark.parametrize("module", ["kafka.kafka_log", "kafka.group", "kafka.reader"])
def test_what_each_try_of_an_outage_says_is_throttled(module: str) -> None:
    throttle_logs()
    logger = importlib.import_module(f"greenroom.fabric.log.{module}")._LOG
    assert any(isinstance(each, Throttle) for each in logger.filters)


async def test_a_service_without_a_broker_does_not_flood_its_log(caplog: pytest.LogCaptureFixture) -> None:
    log = KafkaLog(LogConfig(brokers=("127.0.0.1:1",), connect_timeout_s=1.0))
    with pytest.raises(LogUnavailable):
        async with log:
            pass
    said = [record for record in caplog.records if record.name == "greenroom.fabric.log.kafka.kafka_log"]
    assert len(said) <= 1
