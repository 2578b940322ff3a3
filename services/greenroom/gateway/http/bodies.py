"""The bytes of a request's body, within a size and a time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

from aiohttp import web

from greenroom.gateway.config import GatewayConfig
from greenroom.gateway.errors import ApiError, ClientGone, too_large
from greenroom.gateway.http.content_codings import inflater_of


def check_utf8(request: web.Request) -> None:
    """Raises ApiError (415) where the header Content-Type names another charset: JSON is read as UTF-8."""
    if (request.charset or "utf-8").lower() not in ("utf-8", "utf8"):
        raise ApiError(415, "send the body in UTF-8", code="unsupported_media_type")


async def read_json(request: web.Request, config: GatewayConfig) -> bytes:
    """The body. It must say that it is JSON: a web page can not send that to another server unasked.

    Raises ApiError: 415, 413, 408, 400.
    """
    if "Content-Type" not in request.headers or request.content_type != "application/json":
        raise ApiError(
            415, "send the body as JSON, with the header Content-Type: application/json", code="unsupported_media_type"
        )
    check_utf8(request)
    return await read_body(request, config.max_body_bytes, config.body_timeout_s)


async def read_body(
    request: web.Request, limit: int, timeout_s: float, came: Callable[[int], None] = lambda size: None
) -> bytes:
    """At most ``limit`` bytes, as they come and as they are once decompressed. ``came`` is told how many have come,
    decompressed, each time before they are kept. Raises ApiError: 415, 413, 408, 400; ClientGone; what ``came``
    raises."""
    if (request.content_length or 0) > limit:
        raise too_large(limit)
    parts = bytearray()
    try:
        async with asyncio.timeout(timeout_s):
            async for part in _decompressed(request, limit):
                if len(parts) + len(part) > limit:
                    raise too_large(limit)
                came(len(part))
                parts += part
    except TimeoutError:
        message = f"the body did not come within {timeout_s:g} seconds"
        raise ApiError(408, message, code="body_timeout", headers={"Connection": "close"}) from None
    except ConnectionError as error:
        raise ClientGone("closed the connection before its request was complete") from error
    except web.RequestPayloadError as error:
        said = str(error).rpartition("\n")[2].strip()  # before that it has a status of its own
        message = f"the body can not be read: {said}"
        raise ApiError(400, message, code="invalid_body", headers={"Connection": "close"}) from error
    return bytes(parts)


async def _decompressed(request: web.Request, limit: int) -> AsyncIterator[bytes]:
    """Everybody else has a turn after each slice of what is decompressed. ``limit``: of bytes before that, since there
    are any number of them that stand for nothing. Raises ApiError: 415, 413, 400."""
    inflater = inflater_of(request.headers.getall("Content-Encoding", ()))
    size = 0
    async for part in request.content.iter_any():
        size += len(part)
        if size > limit:
            raise too_large(limit)
        if inflater is None:
            yield part
            continue
        for one in inflater.slices(part):
            yield one
            await asyncio.sleep(0)
    if inflater is not None:
        inflater.check_ended()
