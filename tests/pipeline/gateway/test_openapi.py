"""The server as its own schema says: replies as documented, and a fuzzer that reads the schema."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings

from tests.pipeline.gateway.conftest import Server
from tests.scripted_generator import DEADLINE_S

schemathesis = pytest.importorskip("schemathesis", reason="it is in the group dev: pip install --group dev")
CHAT: dict[str, Any] = {"model": "org/small", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 9}
COMPLETION: dict[str, Any] = {"model": "org/small", "prompt": "hello", "max_tokens": 9}
EXAMPLES = 15
UNCHECKED = [pytest.importorskip("schemathesis.specs.openapi.checks").positive_data_acceptance]
"""No schema can say that a prompt must fit the context; so what it allows may be refused, with its reason."""


async def test_it_is_served(server: Server) -> None:
    async with server.http.get(server.url + "/openapi.json") as response:
        document = await response.json()
    assert (response.status, document["openapi"]) == (200, "3.1.0")
    assert {"/v1/chat/completions", "/v1/completions", "/v1/models", "/health"} <= set(document["paths"])


MODES = (schemathesis.GenerationMode.POSITIVE, schemathesis.GenerationMode.NEGATIVE)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.value)
@pytest.mark.parametrize("examples", [EXAMPLES, pytest.param(400, marks=pytest.mark.full)])
async def test_a_fuzzer_that_reads_the_schema(server: Server, mode: Any, examples: int) -> None:
    """What the schema allows is answered as it says, what it does not allow is refused, and nothing is a 5xx."""
    async with server.http.get(server.url + "/openapi.json") as response:
        document = await response.json()
    for kind in ("ChatBody", "CompletionBody"):  # or nearly all would end at the model's name, or soon
        properties = document["components"]["schemas"][kind]["properties"]
        properties["model"] = {"const": "org/small"}
        del properties["timeout"]
    failures = await asyncio.to_thread(fuzz, document, server.url, mode, examples)
    assert failures == []
    if mode is schemathesis.GenerationMode.POSITIVE:
        assert len(server.generator.seen) >= examples / 10, "some of it is served"


def fuzz(document: dict[str, Any], url: str, mode: Any, examples: int) -> list[str]:
    """Every operation, that many times; what was wrong with the answers."""
    failures: list[str] = []
    for found in schemathesis.openapi.from_dict(document).get_all_operations():
        operation: Any = found.ok()  # an error in the schema fails here
        posts = operation.method.lower() == "post"
        if not posts and mode is schemathesis.GenerationMode.NEGATIVE:
            continue  # there is nothing in it that could be wrong

        @settings(
            max_examples=examples if posts else 3,
            deadline=None,
            derandomize=True,
            database=None,
            phases=(Phase.generate,),
            suppress_health_check=list(HealthCheck),
        )
        @given(case=operation.as_strategy(generation_mode=mode))
        def once(case: Any) -> None:
            try:
                case.call_and_validate(base_url=url, timeout=DEADLINE_S, excluded_checks=UNCHECKED)
            except schemathesis.errors.FailureGroup as wrong:
                failures.append("\n".join(str(each) for each in wrong.exceptions) + f"\n{case.as_curl_command()}")

        once()
    return failures
