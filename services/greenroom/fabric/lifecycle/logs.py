"""Log lines, for people or as JSON, that say which request they are about."""

from __future__ import annotations

import logging
import sys
import threading
import time
from dataclasses import dataclass
from types import TracebackType
from typing import TextIO

import msgspec

from greenroom.core.errors import InvalidConfig
from greenroom.fabric import telemetry
from greenroom.fabric.current_request import request_id

_LOG = logging.getLogger(__name__)
FORMATS = ("text", "json")
LEVELS = ("debug", "info", "warning", "error")
_encoder = msgspec.json.Encoder()


@dataclass(slots=True)
class _Process:
    service: str = "greenroom"
    instance: str = ""


_process = _Process()


def configure_logs(level: str = "info", style: str = "text", stream: TextIO | None = None) -> None:
    """All log records go to ``stream`` (stderr), as text or, with ``json``, as one object a line. With ``json`` Python
    warnings and uncaught errors are logged as well.

    Raises InvalidConfig.
    """
    if level not in LEVELS:
        raise InvalidConfig("log_level", level, f"known: {', '.join(LEVELS)}")
    if style not in FORMATS:
        raise InvalidConfig("log_format", style, f"known: {', '.join(FORMATS)}")
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonLines() if style == "json" else TextLines())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    if level != "debug":
        logging.getLogger("aiokafka").setLevel(logging.WARNING)  # it logs every step of joining a group
    if style == "json":
        logging.captureWarnings(True)
        sys.excepthook = _log_uncaught
        threading.excepthook = lambda given: _log_uncaught(given.exc_type, given.exc_value, given.exc_traceback)


def _log_uncaught(kind: type[BaseException], error: BaseException | None, traceback: TracebackType | None) -> None:
    if error is not None and not issubclass(kind, KeyboardInterrupt | SystemExit):
        _LOG.critical("uncaught: %s: %s", kind.__name__, error, exc_info=(kind, error, traceback))


def name_process(service: str, instance: str) -> None:
    """Sets the ``service`` and ``instance`` of JSON lines from now on."""
    _process.service, _process.instance = service, instance


class TextLines(logging.Formatter):
    """Text for people, with the request's id at the end of the first line unless the message has it."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)-7s %(name)s: %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:
        line = super().formatMessage(record)
        present = request_id.get()
        return f"{line} [{present}]" if present and present not in record.message else line


class JsonLines(logging.Formatter):
    """One JSON object a line: time, level, logger, message, service, instance, and where they are known request_id,
    trace_id and exception."""

    def format(self, record: logging.LogRecord) -> str:
        fields = {
            "time": f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(record.created))}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            "service": _process.service,
            "instance": _process.instance,
        }
        for key, value in (("request_id", request_id.get()), ("trace_id", telemetry.trace_id())):
            if value:
                fields[key] = value
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        if record.stack_info:
            fields["stack"] = self.formatStack(record.stack_info)
        return _encoder.encode(fields).decode()
