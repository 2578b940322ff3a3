"""The front door as a whole: routes, start, drain, stop."""

from __future__ import annotations

import hashlib
import importlib.metadata
import logging

import msgspec
from aiohttp import web
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

from greenroom.core.errors import InvalidConfig
from greenroom.core.generation import Generator, ServedModel
from greenroom.gateway.admission import Admission
from greenroom.gateway.api import Api
from greenroom.gateway.config import GatewayConfig
from greenroom.gateway.errors import model_not_found
from greenroom.gateway.exchange import exchange_middleware, name_reply
from greenroom.gateway.metrics import GatewayMetrics
from greenroom.text import TextProcessor

_LOG = logging.getLogger(__name__)
_ABORT_GRACE_S = 5.0
_IDLE_CONNECTION_S = 75.0


class Gateway:
    """An OpenAI-compatible HTTP server in front of ``generator``.

    ``text`` is the tokenizer and chat template of the model that the generator runs; ``registry`` is what /metrics
    shows, ours and whatever others put there. All of it runs on the event loop that ``start`` is called on.
    """

    def __init__(
        self, config: GatewayConfig, generator: Generator, text: TextProcessor, registry: CollectorRegistry
    ) -> None:
        self._config = config
        self._generator = generator
        self._registry = registry
        self._admission = Admission(config.max_in_flight, lambda: generator.ready)
        model = generator.model
        fingerprint = config.system_fingerprint or _fingerprint(model)
        metrics = GatewayMetrics(registry, model.name)
        self._api = Api(config, generator, text, metrics, self._admission, fingerprint)
        self._runner = web.AppRunner(
            self._app(metrics),
            handler_cancellation=True,  # or a client that left is noticed at the next write only
            access_log=None,
            keepalive_timeout=_IDLE_CONNECTION_S,
            shutdown_timeout=1.0,
        )

    def _app(self, metrics: GatewayMetrics) -> web.Application:
        app = web.Application(
            middlewares=[exchange_middleware(self._config, metrics)], client_max_size=self._config.max_body_bytes
        )
        app.on_response_prepare.append(name_reply)
        app.router.add_post("/v1/chat/completions", self._api.chat)
        app.router.add_post("/v1/completions", self._api.completion)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/v1/models/{id:.+}", self._model)
        app.router.add_get("/health", self._health)
        app.router.add_get("/live", self._live)
        app.router.add_get("/metrics", self._metrics)
        return app

    async def start(self) -> int:
        """Listens; the port. Raises InvalidConfig where the address can not be had."""
        await self._runner.setup()
        site = web.TCPSite(self._runner, self._config.host, self._config.port, backlog=1024)
        try:
            await site.start()
        except OSError as error:
            await self._runner.cleanup()
            address = f"{self._config.host}:{self._config.port}"
            raise InvalidConfig("port", address, f"it can not be listened on: {error.strerror or error}") from error
        port = int(self._runner.addresses[0][1])
        _LOG.info("serving %s at http://%s:%d", self._generator.model.name, self._config.host, port)
        return port

    async def stop(self) -> None:
        """Not ready from now on and nothing new taken; running requests may finish within ``drain_timeout_s``, then
        they are ended, and their clients told. Returns when no connection and no task is left."""
        self._admission.drain()
        if not await self._admission.idle(self._config.drain_timeout_s):
            _LOG.warning("ending %d requests that did not finish in time", self._admission.in_flight)
            self._api.abort()
            await self._admission.idle(_ABORT_GRACE_S)
        await self._runner.cleanup()
        await self._api.close()

    async def _models(self, request: web.Request) -> web.Response:
        return _json({"object": "list", "data": [_describe(self._generator.model)]})

    async def _model(self, request: web.Request) -> web.Response:
        model = self._generator.model
        if request.match_info["id"] != model.name:
            raise model_not_found(request.match_info["id"], model.name)
        return _json(_describe(model))

    async def _health(self, request: web.Request) -> web.Response:
        self._admission.check_ready()
        return _json({"status": "ready"})

    async def _live(self, request: web.Request) -> web.Response:
        return _json({"status": "live"})

    async def _metrics(self, request: web.Request) -> web.Response:
        encode, content_type = choose_encoder(request.headers.get("Accept", ""))
        return web.Response(body=encode(self._registry), headers={"Content-Type": content_type})


def _describe(model: ServedModel) -> dict[str, object]:
    return {
        "id": model.name,
        "object": "model",
        "created": model.created,
        "owned_by": "greenroom",
        "max_model_len": model.max_model_len,
    }


def _fingerprint(model: ServedModel) -> str:
    what = f"greenroom {importlib.metadata.version('greenroom')} {model.name}"
    return f"fp_{hashlib.blake2b(what.encode(), digest_size=5).hexdigest()}"


def _json(value: object) -> web.Response:
    return web.Response(body=msgspec.json.encode(value), content_type="application/json")
