"""The bytes of a request's body, within a size and a time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from aiohttp import web

from greenroom.gateway.errors import ApiError, ClientGone, too_large


async def read_body(
    request: web.Request, limit: int, timeout_s: float, came: Callable[[int], None] = lambda size: None
) -> bytes:
    """At most ``limit`` bytes, as they are once decompressed. ``came`` is told how many have come, each time before
    they are kept. Raises ApiError: 413, 408, 400; ClientGone; what ``came`` raises."""
    if (request.content_length or 0) > limit:
        raise too_large(limit)
    parts = bytearray()
    try:
        async with asyncio.timeout(timeout_s):
            async for part in request.content.iter_any():
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
