"""Batch policies on the bundled model: another order of work, the same fp32 tokens."""

from __future__ import annotations

from pathlib import Path

import pytest

from greenroom import LLM, SamplingParams
from greenroom.core.errors import BudgetTooSmall
from greenroom.demo.tasks import TASKS, samples
from tests.pipeline.commands import result_of

PROMPTS = [one.prompt for task in TASKS for one in samples(task, 3, seed=41)]
SAMPLING = SamplingParams(temperature=0, max_tokens=24)


def answers(cache: Path, batching: str, tokens_per_step: int) -> tuple[list[tuple[int, ...]], LLM]:
    conversations = [[{"role": "user", "content": prompt}] for prompt in PROMPTS]
    with LLM(
        dtype="float32",
        expert_memory="33%",
        batching=batching,
        tokens_per_step=tokens_per_step,
        max_running=8,
        prefill_chunk=16,
        cache_dir=cache,
        warm_start=False,
        threads=1,
    ) as llm:
        return [answer.token_ids for answer in llm.chat(conversations, SAMPLING)], llm


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def expected(cache: Path) -> tuple[list[tuple[int, ...]], int]:
    """The tokens under fcfs, and in how many steps."""
    tokens, llm = answers(cache, "fcfs", 512)
    return tokens, llm.worker.loop.stats().steps


@pytest.mark.parametrize(
    ("batching", "tokens_per_step"),
    [
        ("phases", 512),
        ("phases", 20),
        ("phases:apart=true", 512),
        ("phases:hold=1", 512),
        ("token-scheduler", 512),
        ("token-scheduler", 20),
    ],
)
def test_the_tokens_are_those_of_fcfs(
    cache: Path, expected: tuple[list[tuple[int, ...]], int], batching: str, tokens_per_step: int
) -> None:
    tokens, llm = answers(cache, batching, tokens_per_step)

    assert tokens == expected[0]
    assert f"batching: {batching}, at most {tokens_per_step} rows a step" in llm.worker.describe()
    costs = llm.worker.loop.engine.costs
    assert costs.row_seconds is not None
    assert costs.row_seconds > 0
    assert costs.moving_seconds is not None
    assert costs.moving_seconds > 0, "two thirds are missing, and some have moved"
    stats = llm.worker.loop.stats()
    assert stats.audit_failures == stats.running == stats.waiting == 0


def test_the_plan_says_what_steps_for_whole_prompts_cost(cache: Path) -> None:
    with LLM(expert_memory="33%", batching="phases", tokens_per_step="auto", cache_dir=cache, threads=1) as llm:
        config = llm.worker.config
        assert isinstance(config.tokens_per_step, int)
        assert llm.worker.loop.engine.config.tokens_per_step == config.tokens_per_step
        assert f"{config.tokens_per_step} rows a step (--tokens-per-step auto)" in llm.worker.describe()
    with LLM(expert_memory="33%", tokens_per_step="auto", cache_dir=cache, threads=1) as llm:
        assert llm.worker.config.tokens_per_step == 512


@pytest.mark.parametrize(("batching", "chunked"), [("fcfs", True), ("phases", False)])
def test_a_refusal_names_chunks_only_where_they_would_help(batching: str, chunked: bool, cache: Path) -> None:
    with pytest.raises(BudgetTooSmall) as refusal:
        LLM(kv_memory="100TiB", batching=batching, cache_dir=cache, threads=1)
    assert "fewer --tokens-per-step" in str(refusal.value)
    assert ("--prefill-chunk" in str(refusal.value)) is chunked


def test_the_command_takes_it(pack_cache: None) -> None:
    said = result_of("generate", "What does Kira drink?", "--max-tokens", "2", "--batching", "phases:hold=0.5")
    assert "batching: phases:hold=0.5, at most 512 rows a step" in said.stderr
    refused = result_of("generate", "x", "--batching", "phases:hold=-1", status=1)
    assert "hold: -1 is not allowed" in refused.stderr
