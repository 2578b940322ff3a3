"""From a request's path to what answers it, in such a way that everything is answered behind the middlewares.

aiohttp answers two things before them: a header Expect that it does not know, on every route that has no handler for
expectations of its own, and its own routes for unknown paths and methods are such. So those are ours here.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from typing import Any, NoReturn

from aiohttp import HttpVersion11, hdrs, web
from yarl import URL

from greenroom.gateway.errors import ApiError

UNMATCHED = "unmatched"
_CONTINUE = "100-continue"
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Routes:
    """Adds to ``router``."""

    def __init__(self, router: web.UrlDispatcher) -> None:
        self._router = router

    def get(self, path: str, handler: Handler) -> None:
        self._router.add_get(path, handler, expect_handler=_go_on)

    def post(self, path: str, handler: Handler) -> None:
        self._router.add_post(path, handler, expect_handler=_go_on)

    def rest(self) -> None:
        """Call this behind all others: for whatever they do not take."""
        rest, resolve = _Rest(self._router), self._router.resolve
        self._router.register_resource(rest)

        async def resolve_all(request: web.Request) -> web.UrlMappingMatchInfo:
            """A target without a path, as CONNECT's, comes to no resource, so aiohttp would answer it itself."""
            found = await resolve(request)
            return found if found.http_exception is None else (await rest.resolve(request))[0]

        self._router.resolve = resolve_all  # type: ignore[method-assign]


def route_of(request: web.Request) -> str:
    """The path as it was added, or ``UNMATCHED``."""
    resource = request.match_info.route.resource
    return UNMATCHED if resource is None or isinstance(resource, _Rest) else resource.canonical


def check_expectations(request: web.Request) -> None:
    """Raises ApiError (417) where the client expects what is not known (RFC 9110, 10.1.1)."""
    unknown = [one for one in _expectations(request) if one != _CONTINUE]
    if unknown:
        raise ApiError(
            417,
            f"the header Expect takes {_CONTINUE}, or is left out; not {unknown[0]!r:.80}",
            code="expectation_failed",
            param="expect",
        )


def _expectations(request: web.Request) -> list[str]:
    """HTTP/1.0 has none."""
    if request.version < HttpVersion11:
        return []
    said = (one.strip().lower() for header in request.headers.getall(hdrs.EXPECT, ()) for one in header.split(","))
    return [one for one in said if one]


async def _go_on(request: web.Request) -> None:
    """The client may send its body. Where it expects anything else nothing is said here: a middleware refuses it."""
    if set(_expectations(request)) == {_CONTINUE}:
        with suppress(ConnectionError):  # whoever reads the body meets it again
            await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        request.writer.output_size = 0  # of the answer nothing has been sent


class _Rest(web.AbstractResource):
    """Every path, in every method. aiohttp comes to it where no other resource takes the request."""

    def __init__(self, router: web.UrlDispatcher) -> None:
        super().__init__()
        self._router = router
        self._route = web.ResourceRoute(hdrs.METH_ANY, self._refuse, self, expect_handler=_go_on)

    @property
    def canonical(self) -> str:
        return "/"

    async def resolve(self, request: web.Request) -> tuple[web.UrlMappingMatchInfo, set[str]]:
        return web.UrlMappingMatchInfo({}, self._route), set()

    def raw_match(self, path: str) -> bool:
        return False

    def url_for(self, **parts: str) -> URL:
        return URL(self.canonical)

    def add_prefix(self, prefix: str) -> None:
        raise NotImplementedError("it is below nothing")

    def get_info(self) -> dict[str, Any]:  # type: ignore[override]  # of what aiohttp says of its own kinds
        return {}

    def __len__(self) -> int:
        """None of its routes is one of the API's."""
        return 0

    def __iter__(self) -> Iterator[web.AbstractRoute]:
        return iter(())

    async def _refuse(self, request: web.Request) -> NoReturn:
        allowed: set[str] = set()
        for resource in self._router.resources():
            if resource is not self:
                allowed |= (await resource.resolve(request))[1]
        if allowed:
            raise web.HTTPMethodNotAllowed(request.method, allowed)
        raise web.HTTPNotFound
