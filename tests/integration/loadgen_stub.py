"""An OpenAI server without a model, whose timing a test sets: each part is written at its own time.

Its clock is the machine's monotonic one, as the load generator's, so a test knows what a report must say.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import ssl
import subprocess
import threading
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import pytest
from aiohttp import web

from tests.waiting import DEADLINE_S

Handler = Callable[["Stub", web.Request, Mapping[str, Any]], Awaitable[web.StreamResponse]]


@dataclass
class Script:
    """``ttft_s`` to the first of ``tokens`` parts, ``itl_s`` between them; both may depend on the request's number."""

    ttft_s: Callable[[int], float] = lambda number: 0.05
    itl_s: Callable[[int], float] = lambda number: 0.01
    tokens: int = 8
    usage: bool = True


@dataclass
class Stub:
    """``writes``: by request id, when each part was written. ``bodies``, ``headers``: what came, in order."""

    script: Script = field(default_factory=Script)
    handler: Handler | None = None
    ready: bool = True
    writes: dict[str, list[float]] = field(default_factory=dict)
    arrived: dict[str, float] = field(default_factory=dict)
    bodies: list[Any] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    running: int = 0
    gone: int = 0
    tls: ssl.SSLContext | None = None
    changed: threading.Event = field(default_factory=threading.Event)
    url: str = ""

    async def until(self, condition: Callable[[], bool]) -> None:
        """Waits for something that requests change, in the stub's own loop."""
        async with asyncio.timeout(DEADLINE_S), self._ended:
            await self._ended.wait_for(condition)

    async def start(self) -> None:
        self._ended = asyncio.Condition()
        app = web.Application()
        app.router.add_get("/health", self._health)
        app.router.add_get("/v1/models", self._models)
        for path in ("/v1/chat/completions", "/v1/completions"):
            app.router.add_post(path, self._generate)
        self._runner = web.AppRunner(app, access_log=None, handler_cancellation=True)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0, backlog=1024, ssl_context=self.tls)
        await site.start()
        self.url = f"http{'s' if self.tls else ''}://127.0.0.1:{self._runner.addresses[0][1]}"

    async def stop(self) -> None:
        await self._runner.cleanup()

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response(status=200 if self.ready else 503, text="ready" if self.ready else "loading")

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": "stub-model", "object": "model"}]})

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        name = request.headers["X-Request-Id"]
        self.arrived[name] = time.monotonic()
        body = json.loads(await request.read())
        self.bodies.append(body)
        self.headers.append(dict(request.headers))
        self.running += 1
        try:
            return await (self.handler or played)(self, request, body)
        except asyncio.CancelledError:
            self.gone += 1
            raise
        finally:
            self.running -= 1
            self._noting = asyncio.ensure_future(self._note())  # not awaited here: this task may be cancelled

    async def _note(self) -> None:
        async with self._ended:
            self._ended.notify_all()


async def opened(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse(
        headers={"Content-Type": "text/event-stream", "X-Request-Id": request.headers["X-Request-Id"]}
    )
    await response.prepare(request)
    return response


def part(text: str | None, finish: str | None = None, **more: Any) -> bytes:
    choice = {"index": 0, "delta": {} if text is None else {"content": text}, "finish_reason": finish}
    return b"data: " + json.dumps({"id": "x", "choices": [choice], **more}).encode() + b"\n\n"


async def played(stub: Stub, request: web.Request, body: Mapping[str, Any]) -> web.StreamResponse:
    """The script, with a finish and a usage behind the last token."""
    name = request.headers["X-Request-Id"]
    number = len(stub.writes)
    writes = stub.writes.setdefault(name, [])
    due = stub.arrived[name] + stub.script.ttft_s(number)
    await asyncio.sleep(max(0.0, due - time.monotonic()))
    response = await opened(request)
    for token in range(stub.script.tokens):
        if token:
            due += stub.script.itl_s(number)
            await asyncio.sleep(max(0.0, due - time.monotonic()))
        opening = part("") if token == 0 else b""  # the role's part, which brings no token
        writes.append(time.monotonic())
        await response.write(opening + part(f" w{token}"))
    last = part(None, "stop")
    if stub.script.usage:
        usage = {"prompt_tokens": 11, "completion_tokens": stub.script.tokens}
        closing = {"id": "x", "choices": [], "usage": usage, "approximated": 0.25}
        last += b"data: " + json.dumps(closing).encode() + b"\n\n"
    await response.write(last + b"data: [DONE]\n\n")
    await response.write_eof()
    return response


def certificate(folder: Path) -> tuple[Path, Path]:
    """A certificate of 127.0.0.1, signed by itself, and its key."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed: it makes the certificate")
    made, key = folder / "server.pem", folder / "server.key"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2",
         "-subj", "/CN=stub", "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", key, "-out", made],
        check=True, capture_output=True, timeout=DEADLINE_S,
    )  # fmt: skip
    return made, key


class StubThread:
    """The stub in a thread with a loop of its own, so that neither side's work shows in the other's loop."""

    def __init__(self, stub: Stub) -> None:
        self.stub = stub
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)

    def __enter__(self) -> Self:
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self.stub.start(), self._loop).result(DEADLINE_S)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        asyncio.run_coroutine_threadsafe(self.stub.stop(), self._loop).result(DEADLINE_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(DEADLINE_S)
        self._loop.close()
