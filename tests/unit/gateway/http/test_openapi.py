"""The schema that is served: valid, complete, and exact about what is refused."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from greenroom.gateway import Gateway, GatewayConfig
from greenroom.gateway.doors.keys import KeyFile, write_keys
from greenroom.gateway.http.openapi import openapi
from greenroom.gateway.requests.bodies import NEUTRAL, NEUTRAL_IN_CHAT, NEUTRAL_IN_MESSAGE, ChatBody, CompletionBody
from greenroom.text import TextProcessor
from tests import small_tokenizers
from tests.scripted_generator import ScriptedGenerator

validator = pytest.importorskip("openapi_spec_validator", reason="it is in the group dev: pip install --group dev")


@pytest.fixture(params=[False, True], ids=["open", "with keys"])
def config(request: pytest.FixtureRequest, tmp_path: Path) -> GatewayConfig:
    keys = tmp_path / "keys.json"
    write_keys(keys, KeyFile())
    return GatewayConfig(keys_file=keys if request.param else None, open_metrics=not request.param, max_new_tokens=99)


def operations(document: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {f"{method} {path}": one for path, item in document["paths"].items() for method, one in item.items()}


def test_it_is_valid(config: GatewayConfig) -> None:
    validator.OpenAPIV31SpecValidator(openapi(config)).validate()


async def test_it_has_every_route_and_no_other(config: GatewayConfig, tmp_path: Path) -> None:
    text = TextProcessor.from_folder(small_tokenizers.write_chat(tmp_path / "text"))
    gateway = Gateway(config, ScriptedGenerator(text.tokenizer), text, CollectorRegistry())
    app = gateway._runner.app
    routes = {
        f"{route.method.lower()} {route.resource.canonical.replace(':.+', '')}"
        for route in app.router.routes()
        if route.resource is not None and route.method != "HEAD"
    }
    assert set(operations(openapi(config))) == routes
    await asyncio.wait_for(gateway.stop(), 10)


def test_every_field_of_the_bodies_is_there(config: GatewayConfig) -> None:
    schemas = openapi(config)["components"]["schemas"]
    for kind in (ChatBody, CompletionBody):
        assert set(schemas[kind.__name__]["properties"]) == set(kind.__struct_fields__)
        assert schemas[kind.__name__]["additionalProperties"] is False


def test_what_is_not_supported_has_only_its_neutral_values(config: GatewayConfig) -> None:
    schemas = openapi(config)["components"]["schemas"]
    assert schemas["ChatBody"]["properties"]["functions"]["enum"] == [None, *NEUTRAL["functions"]]
    assert schemas["ChatBody"]["properties"]["echo"]["enum"] == [None, *NEUTRAL_IN_CHAT["echo"]]
    assert "enum" not in schemas["CompletionBody"]["properties"]["echo"]
    assert schemas["CompletionBody"]["properties"]["best_of"]["enum"] == [None, 1]
    assert schemas["Message"]["properties"]["tool_calls"]["enum"] == [None, *NEUTRAL_IN_MESSAGE["tool_calls"]]


def test_limits_are_those_of_the_settings(config: GatewayConfig) -> None:
    properties = openapi(config)["components"]["schemas"]["ChatBody"]["properties"]
    assert properties["max_tokens"]["maximum"] == 99
    assert properties["n"]["maximum"] == config.max_choices
    assert properties["timeout"]["maximum"] == config.max_request_timeout_s


def test_what_needs_a_key(config: GatewayConfig) -> None:
    document = openapi(config)
    with_key = {name for name, operation in operations(document).items() if "security" in operation}
    if config.keys_file is None:
        assert with_key == set()
        assert "securitySchemes" not in document["components"]
        return
    of_a_model = ("/v2/models/{name}", "/v2/models/{name}/versions/{version}")
    assert with_key == {
        "post /v1/chat/completions", "post /v1/completions", "post /tokenize", "post /detokenize",
        "get /v1/models", "get /v1/models/{id}", "get /metrics",
        "get /v2", *(f"get {path}{end}" for path in of_a_model for end in ("", "/ready")),
        *(f"post {path}/infer" for path in of_a_model),
    }  # fmt: skip
    for name, operation in operations(document).items():
        assert ("401" in operation["responses"]) == (name in with_key)
