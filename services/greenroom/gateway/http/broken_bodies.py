"""A body whose chunks can not be read (Transfer-Encoding) is its client's fault, and no defect of ours."""

from __future__ import annotations

import logging

from aiohttp import web

_SERVER = "aiohttp.server"


class NoTraceOfBrokenBodies(logging.Filter):
    """aiohttp reads on after the answer, to leave the connection clean, and logs what that meets as unhandled."""

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if isinstance(record.exc_info, tuple) else None
        return not isinstance(error, web.RequestPayloadError)


_FILTER = NoTraceOfBrokenBodies()


def quiet_broken_bodies() -> None:
    """May be called more than once."""
    logging.getLogger(_SERVER).addFilter(_FILTER)
