"""The bundled model in bf16: greedy tokens equal transformers' own ``generate``, at every budget under every policy.

`make test` runs each policy at one budget, `make test-full` at all.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from greenroom import LLM, SamplingParams
from greenroom.demo import bundled_model_path
from greenroom.demo.tasks import TASKS, samples
from greenroom.moe.formats.expert_format import PLAIN_FORMAT
from greenroom.moe.formats.lossless.codes import LOSSLESS
from greenroom.moe.formats.lossless.planes import LOSSLESS_PLANES
from greenroom.worker.generation_engine import ArtifactVersion
from tests.compiled import native as native
from tests.contract.prepared_policies import EVERY_POLICY, LITERAL, mlp_file
from tests.matrices import matrix

PROMPTS = [one.prompt for task in TASKS for one in samples(task, 3, seed=77)]
SHAPE, TOP_K = [16] * 6, 2
BUDGETS = ("100%", "33%", "25%", "smallest")


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    """One prompt at a time: no padding, which would round otherwise."""
    path = bundled_model_path()
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.bfloat16, experts_implementation="eager"
    )
    texts = []
    for prompt in PROMPTS:
        encoded = tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}], add_generation_prompt=True, return_dict=True, return_tensors="pt"
        )
        ids = model.generate(**encoded, do_sample=False, max_new_tokens=48)
        texts.append(ids[0, encoded["input_ids"].shape[1] :].tolist())
    return texts


@matrix(1, budget=BUDGETS, policy=EVERY_POLICY)
def test_greedy_tokens_equal_generate(expected: list[list[int]], cache: Path, budget: str, policy: str) -> None:
    with _llm(budget, policy, cache) as llm:
        conversations = [[{"role": "user", "content": prompt}] for prompt in PROMPTS]
        answers = llm.chat(conversations, SamplingParams(temperature=0, max_tokens=48))
        assert [list(answer.token_ids) for answer in answers] == expected
        assert budget == "100%" or llm.worker.experts.counters.evictions > 0


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("kept", ["expanded", "lossless-codes", "lossless-planes"])
def test_texts_do_not_depend_on_how_experts_are_kept(expected: list[list[int]], cache: Path, kept: str) -> None:
    """At a third of the bytes that they take so."""
    own = {"expanded": PLAIN_FORMAT, "lossless-codes": LOSSLESS, "lossless-planes": LOSSLESS_PLANES}[kept]
    with _llm("33%", "next-use", cache, experts_as=kept) as llm:
        assert llm.worker.pack.manifest.formats == (own.name,)
        conversations = [[{"role": "user", "content": prompt}] for prompt in PROMPTS]
        answers = llm.chat(conversations, SamplingParams(temperature=0, max_tokens=48))
        assert [list(answer.token_ids) for answer in answers] == expected
        assert llm.worker.experts.counters.evictions > 0


def _llm(budget: str, policy: str, cache: Path, **files: Any) -> LLM:
    if policy == LITERAL:
        files |= {"expert_mlp": cache / "expert_mlp.safetensors"}
        mlp_file(SHAPE, TOP_K).write(files["expert_mlp"])
    if budget != "smallest":
        return LLM(expert_memory=budget, policy=policy, cache_dir=cache, warm_start=False, threads=1, **files)
    least = str(least_bytes(cache))
    return LLM(expert_memory=least, policy=policy, cache_dir=cache, warm_start=False, threads=1, **files)


@functools.cache
def least_bytes(cache: Path) -> int:
    """Of one token's experts in one layer."""
    with LLM(expert_memory="100%", cache_dir=cache, warm_start=False, threads=1) as whole:
        sizes = whole.worker.plan.slot_sizes
        return sizes.nbytes(sizes.least)


def test_another_network_changes_no_token(expected: list[list[int]], cache: Path) -> None:
    """Both are of random weights, so they foresee other experts."""
    conversations = [[{"role": "user", "content": prompt}] for prompt in PROMPTS[:3]]
    with _llm("smallest", LITERAL, cache) as llm:
        assert llm.worker.wait_filled(60.0)
        assert llm.worker.loop.wait_idle(60.0)
        used = []
        for seed in (0, 1):
            file = mlp_file(SHAPE, TOP_K, seed=seed)
            llm.worker.swap(llm.worker.prepare(file), ArtifactVersion.of(file))
            before = llm.worker.experts.counters.prefetches_used
            answers = [llm.chat([one], SamplingParams(temperature=0, max_tokens=48))[0] for one in conversations]
            assert [list(answer.token_ids) for answer in answers] == expected[:3]
            used.append(llm.worker.experts.counters.prefetches_used - before)
        assert min(used) > 0
        assert used[0] != used[1]
