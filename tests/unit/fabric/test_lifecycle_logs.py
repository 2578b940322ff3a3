"""Log lines, and the port that says how a service is."""

from __future__ import annotations

import io
import json
import logging
import sys
import threading
import warnings
from collections.abc import Iterator
from typing import Any

import aiohttp
import pytest
from prometheus_client import CollectorRegistry, Counter
from prometheus_client.parser import text_string_to_metric_families

from greenroom.core.errors import InvalidConfig
from greenroom.fabric.current_request import request_id
from greenroom.fabric.lifecycle import Probes, ProbesConfig, configure_logs, name_process
from greenroom.fabric.telemetry.registry import new_registry


@pytest.fixture
def log() -> Iterator[logging.Logger]:
    """The root's handlers are put back."""
    root = logging.getLogger()
    before, level = root.handlers[:], root.level
    hooks = sys.excepthook, threading.excepthook
    yield logging.getLogger("greenroom.test")
    sys.excepthook, threading.excepthook = hooks
    logging.captureWarnings(False)
    root.handlers[:] = before
    root.setLevel(level)
    name_process("greenroom", "")


def _lines(stream: io.StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_json_is_one_object_a_line_with_the_exception_inside(log: logging.Logger) -> None:
    stream = io.StringIO()
    configure_logs("info", "json", stream)
    name_process("worker", "worker-1")
    token = request_id.set("req-1")
    try:
        raise ValueError("line one\nline two")
    except ValueError:
        log.exception("it %s", "failed\nbadly")
    finally:
        request_id.reset(token)
    log.info("well")
    log.debug("not asked for")
    first, second = _lines(stream)
    assert first["message"] == "it failed\nbadly"
    assert "line two" in first["exception"]
    assert "Traceback" in first["exception"]
    assert (first["level"], first["logger"]) == ("error", "greenroom.test")
    assert (first["service"], first["instance"], first["request_id"]) == ("worker", "worker-1", "req-1")
    assert first["time"].endswith("Z")
    assert "request_id" not in second
    assert "exception" not in second


def test_text_names_the_request_once(log: logging.Logger) -> None:
    stream = io.StringIO()
    configure_logs("info", "text", stream)
    token = request_id.set("req-1")
    try:
        log.info("placed")
        log.info("req-1 placed")
    finally:
        request_id.reset(token)
    log.info("idle")
    placed, again, idle = stream.getvalue().splitlines()
    assert placed.endswith("greenroom.test: placed [req-1]")
    assert again.count("req-1") == 1
    assert idle.endswith("idle")


@pytest.mark.filterwarnings("default")
def test_json_has_what_python_itself_would_print(log: logging.Logger) -> None:
    stream = io.StringIO()
    configure_logs("info", "json", stream)
    warnings.warn("beware", stacklevel=1)

    def breaks() -> None:
        raise OSError("in a thread")

    thread = threading.Thread(target=breaks)
    thread.start()
    thread.join()
    sys.excepthook(ValueError, ValueError("at the end"), None)
    warned, threaded, ended = _lines(stream)
    assert "beware" in warned["message"]
    assert threaded["message"] == "uncaught: OSError: in a thread"
    assert ended["message"] == "uncaught: ValueError: at the end"
    assert ended["level"] == "critical"


@pytest.mark.parametrize(("level", "style", "field"), [("loud", "text", "log_level"), ("info", "xml", "log_format")])
def test_what_logs_can_not_be(level: str, style: str, field: str) -> None:
    with pytest.raises(InvalidConfig, match=field):
        configure_logs(level, style)


# -- probes ------------------------------------------------------------------------------------------------------


async def test_probes_tell_how_it_is() -> None:
    registry = new_registry()
    Counter("greenroom_things", "Things", registry=registry).inc(3)
    why: list[str | None] = ["reads the journal"]
    probes = Probes(ProbesConfig(), registry, lambda: why[0])
    url = f"http://127.0.0.1:{await probes.start()}"
    async with aiohttp.ClientSession() as session:
        async with session.get(f"{url}/health") as answer:
            assert answer.status == 503
            assert await answer.json() == {"status": "not ready", "reason": "reads the journal"}
        why[0] = None
        async with session.get(f"{url}/health") as answer:
            assert answer.status == 200
        async with session.get(f"{url}/live") as answer:
            assert answer.status == 200
        async with session.get(f"{url}/metrics") as answer:
            families = {family.name: family for family in text_string_to_metric_families(await answer.text())}
    assert families["greenroom_things"].samples[0].value == 3
    assert "process_resident_memory_bytes" in families
    await probes.stop()


async def test_a_port_that_is_taken() -> None:
    first = Probes(ProbesConfig(), CollectorRegistry(), lambda: None)
    port = await first.start()
    with pytest.raises(InvalidConfig, match="probes_port"):
        await Probes(ProbesConfig(port=port), CollectorRegistry(), lambda: None).start()
    await first.stop()
