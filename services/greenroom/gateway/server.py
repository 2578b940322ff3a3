"""The front door as a whole: routes, start, drain, stop."""

from __future__ import annotations

import asyncio
import errno
import functools
import hashlib
import importlib.metadata
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

import msgspec
from aiohttp import web
from msgspec import UNSET
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

from greenroom.core.errors import InvalidConfig
from greenroom.core.generation import ServedModel
from greenroom.core.units import MIB
from greenroom.fabric.lifecycle.tasks import Tasks
from greenroom.fabric.rpc import Server, ServerConfig, ServerTls, join_address
from greenroom.gateway.config import GatewayConfig
from greenroom.gateway.doors.admission import Admission
from greenroom.gateway.doors.doorkeeper import Doorkeeper
from greenroom.gateway.doors.hosts import ANY, Hosts, Origins
from greenroom.gateway.errors import model_not_found
from greenroom.gateway.grpc.calls import as_status
from greenroom.gateway.grpc.inference import InferenceApi
from greenroom.gateway.grpc.open_inference import OpenInferenceApi
from greenroom.gateway.http.broken_bodies import quiet_broken_bodies
from greenroom.gateway.http.endpoints import CALLER, Api
from greenroom.gateway.http.infer_endpoints import InferApi
from greenroom.gateway.http.middleware import name_reply, note_of, page_middleware, request_middleware
from greenroom.gateway.http.openapi import openapi
from greenroom.gateway.http.routes import Handler, Routes, route_of
from greenroom.gateway.http.token_endpoints import TokenApi
from greenroom.gateway.metrics import GatewayMetrics
from greenroom.gateway.replies.reply_bodies import Condition, Model, ModelList
from greenroom.gateway.requests.request_handler import RequestGenerator, RequestHandler
from greenroom.text import TextProcessor

_LOG = logging.getLogger(__name__)
_ABORT_GRACE_S = 5.0
_IDLE_CONNECTION_S = 75.0
_READY_LOOK_S = 0.5
_LINGER_LOOK_S = 0.02
_RPC_GRACE_S = 1.0
OPEN_PATHS = frozenset({"/health", "/live", "/openapi.json", "/version", "/v2/health/live", "/v2/health/ready"})
"""Paths that need no key: what they say is no secret, and probes send none."""


class Gateway:
    """OpenAI's HTTP API, and gRPC where ``config.grpc_port`` says so, in front of ``generator``.

    ``text`` is the tokenizer and chat template of the model that the generator runs, None where that is a collaboration
    of experts. ``registry`` is what /metrics shows: the gateway's metrics and those of other parts. All of it runs on
    the event loop that ``start`` is called on. Raises InvalidConfig where the file of keys can not be read, or an
    allowed host or origin is not one.
    """

    def __init__(
        self,
        config: GatewayConfig,
        generator: RequestGenerator,
        text: TextProcessor | None,
        registry: CollectorRegistry,
    ) -> None:
        self._config = config
        self._generator = generator
        self._registry = registry
        self._doorkeeper = Doorkeeper(config.keys_file)
        # With keys on, a web page has no key, so it gets nothing by any name.
        asked = config.keys_file is None or config.allowed_hosts
        self._hosts = Hosts(config.host, config.allowed_hosts if asked else (ANY,))
        self._origins = Origins(config.allowed_origins)
        self._admission = Admission(config.max_in_flight, lambda: generator.ready)
        self._counted = metrics = GatewayMetrics(registry)
        self._requests = RequestHandler(config, generator, text, metrics, self._admission)
        self._api = Api(self._requests, lambda name: config.system_fingerprint or _fingerprint(name))
        self._schema = msgspec.json.encode(openapi(config))
        quiet_broken_bodies()
        self._runner = web.AppRunner(
            self._app(metrics),
            handler_cancellation=True,  # else a client that left is noticed only at the next write
            access_log=None,
            keepalive_timeout=_IDLE_CONNECTION_S,
            shutdown_timeout=1.0,
            auto_decompress=False,  # else it answers codings that it does not know, in a shape of its own
        )
        self._name_model()
        apis = [api(self._requests, self._doorkeeper, metrics) for api in (InferenceApi, OpenInferenceApi)]
        # Images are larger than prompts; a prompt's size is looked at once more where it is read.
        largest = config.max_body_bytes if text is not None else max(config.max_body_bytes, config.max_infer_body_bytes)
        self._rpc = _rpc_server(config, apis, largest)
        self._drained = False
        self.tasks = Tasks("gateway")
        self.grpc_port: int | None = None
        """Where the RPCs are, once started; None where they are off."""

    def _app(self, metrics: GatewayMetrics) -> web.Application:
        app = web.Application(
            middlewares=[
                request_middleware(self._config, metrics),
                page_middleware(self._hosts, self._origins),
                self._key_middleware(),
            ],
            client_max_size=self._config.max_body_bytes,
        )
        app.on_response_prepare.append(name_reply)
        app.on_response_prepare.append(self._allow_origin)
        app.on_response_prepare.append(self._close_after)
        routes = Routes(app.router)
        routes.post("/v1/chat/completions", self._api.chat)
        routes.post("/v1/completions", self._api.completion)
        routes.get("/v1/models", self._models)
        routes.get("/v1/models/{id:.+}", self._model)
        routes.get("/health", self._health)
        routes.get("/live", self._live)
        routes.get("/metrics", self._metrics)
        routes.get("/openapi.json", self._openapi)
        TokenApi(self._requests).add_to(routes)
        InferApi(self._requests).add_to(routes)
        routes.rest()
        return app

    def _key_middleware(self) -> Callable[..., Awaitable[web.StreamResponse]]:
        without_key = OPEN_PATHS | {"/metrics"} if self._config.open_metrics else OPEN_PATHS

        @web.middleware
        async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
            if route_of(request) not in without_key:
                caller = self._doorkeeper.admit(request.headers.get("Authorization"), time.monotonic())
                request[CALLER] = caller
                note_of(request).caller = caller.name
            return await handler(request)

        return middleware

    async def _allow_origin(self, request: web.Request, response: web.StreamResponse) -> None:
        """Signal handler: a browser shows a page of an allowed origin every reply, refusals too."""
        response.headers.update(self._origins.headers(request.headers.get("Origin")))

    async def start(self) -> int:
        """Listens. Returns the HTTP port. Raises InvalidConfig where an address is taken or a certificate unusable."""
        context = self._config.tls_context()
        await self._runner.setup()
        site = web.TCPSite(self._runner, self._config.host, self._config.port, backlog=1024, ssl_context=context)
        try:
            await site.start()
        except OSError as error:
            await self._runner.cleanup()
            address = f"{self._config.host}:{self._config.port}"
            reason = f"it can not be listened on: {error.strerror or error}"
            if error.errno == errno.EADDRINUSE:
                reason += "; choose another with --port (0 takes a free one)"
            raise InvalidConfig("port", address, reason) from error
        port = int(self._runner.addresses[0][1])
        if self._rpc is not None:
            try:
                self.grpc_port = await self._rpc.start()
            except InvalidConfig as error:
                await self._runner.cleanup()
                raise InvalidConfig(
                    "grpc_port",
                    error.value,
                    "it can not be listened on; choose another with --grpc-port (0 takes a free one)",
                ) from error
            self.tasks.start(self._tell_health(self._rpc), name="gateway health", forever=True)
        scheme = "http" if context is None else "https"
        host = self._config.host
        rpcs = "off" if self.grpc_port is None else f"at {join_address(host, self.grpc_port)}"
        _LOG.info("serving at %s://%s, gRPC %s", scheme, join_address(host, port), rpcs)
        if self._doorkeeper.asks and context is None and not self._config.on_loopback:
            _LOG.warning("API keys come in unencrypted: set a TLS certificate, or put a proxy that has one before it")
        return port

    @property
    def unready(self) -> str | None:
        """Why no requests are taken now, None where they are."""
        return self._admission.unready

    async def drain(self, timeout_s: float) -> None:
        """Takes nothing new from now on. Running requests may finish within ``timeout_s``; then they are ended, and
        their clients told. For what is left of that time, at most ``linger_s``, it waits until clients have closed
        their connections."""
        end = time.monotonic() + timeout_s
        self._drained = True
        self._admission.drain()
        if not await self._admission.idle(timeout_s):
            _LOG.warning("ending %d requests that did not finish in time", self._admission.in_flight)
            self._requests.abort()
            await self._admission.idle(_ABORT_GRACE_S)
        await self._linger(min(self._config.linger_s, end - time.monotonic()))

    async def _linger(self, timeout_s: float) -> None:
        """Answers who still sends a request, for a while. If the server closed a connection instead, a request could be
        on its way, and its client could not know whether it was taken."""
        end = time.monotonic() + timeout_s
        server = self._runner.server  # None where it never started
        # aiohttp has no event for the last connection that goes.
        while server is not None and server.connections and time.monotonic() < end:  # noqa: ASYNC110
            await asyncio.sleep(_LINGER_LOOK_S)

    async def _close_after(self, request: web.Request, response: web.StreamResponse) -> None:
        """Signal handler: once it drains, every reply is the last of its connection and says so."""
        if self._drained:
            response.headers["Connection"] = "close"
            response.force_close()

    async def stop(self) -> None:
        """Drains first, within ``drain_timeout_s``, if that was not done. Returns when no connection and no task is
        left."""
        if not self._drained:
            await self.drain(self._config.drain_timeout_s)
        await self.tasks.stop()
        if self._rpc is not None:
            await self._rpc.stop(_RPC_GRACE_S)
        await self._runner.cleanup()
        await self._requests.close()

    async def _tell_health(self, rpc: Server) -> None:
        """The gRPC health service follows the readiness that /health shows."""
        told = None
        while True:
            serving = self.unready is None
            if serving != told:
                rpc.serving(serving)
                told = serving
            await asyncio.sleep(_READY_LOOK_S)

    def _name_model(self) -> None:
        """Registers the model's metrics, so that they are shown at 0 before its first request."""
        if self._generator.ready:
            self._counted.of(self._generator.model.name)

    async def _models(self, request: web.Request) -> web.Response:
        return _json(ModelList(object="list", data=[self._describe(self._generator.model)]))

    async def _model(self, request: web.Request) -> web.Response:
        model = self._generator.model
        if request.match_info["id"] != model.name:
            raise model_not_found(request.match_info["id"], model.name)
        return _json(self._describe(model))

    def _describe(self, model: ServedModel) -> Model:
        """As vLLM does. By ``root`` its clients find a tokenizer."""
        return Model(
            id=model.name,
            object="model",
            created=model.created,
            owned_by="greenroom",
            root=self._config.model_root or model.name,
            parent=None,
            max_model_len=UNSET if model.collaboration is not None else model.max_model_len,
        )

    async def _health(self, request: web.Request) -> web.Response:
        self._admission.check_ready()
        return _json(Condition(status="ready"))

    async def _live(self, request: web.Request) -> web.Response:
        return _json(Condition(status="live"))

    async def _metrics(self, request: web.Request) -> web.Response:
        self._name_model()
        encode, content_type = choose_encoder(request.headers.get("Accept", ""))
        return web.Response(body=encode(self._registry), headers={"Content-Type": content_type})

    async def _openapi(self, request: web.Request) -> web.Response:
        return web.Response(body=self._schema, content_type="application/json")


@dataclass(frozen=True, slots=True, kw_only=True)
class _RpcConfig(ServerConfig):
    """``max_request_bytes``: the largest request. A reply with log-probabilities may be larger."""

    max_request_bytes: int = MIB

    def options(self) -> list[tuple[str, int]]:
        received = "grpc.max_receive_message_length"
        others = [option for option in ServerConfig.options(self) if option[0] != received]
        return [*others, (received, self.max_request_bytes)]


def _rpc_server(config: GatewayConfig, apis: Sequence[object], largest: int) -> Server | None:
    if config.grpc_port is None:
        return None
    rpc = _RpcConfig(
        host=config.host,
        port=config.grpc_port,
        tls=None if config.tls is None else ServerTls(certificate=config.tls[0], key=config.tls[1]),
        max_request_bytes=largest,
    )
    return Server(rpc, apis, shape=as_status)


@functools.cache  # there are few names, and finding the version reads a file
def _fingerprint(model_name: str) -> str:
    what = f"greenroom {importlib.metadata.version('greenroom')} {model_name}"
    return f"fp_{hashlib.blake2b(what.encode(), digest_size=5).hexdigest()}"


def _json(value: msgspec.Struct) -> web.Response:
    return web.Response(body=msgspec.json.encode(value), content_type="application/json")
