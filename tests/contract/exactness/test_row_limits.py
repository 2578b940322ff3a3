"""Whatever was measured of a processor, equal batches come out equal to the bit at every budget."""

from __future__ import annotations

from pathlib import Path

import pytest

from greenroom import LLM, SamplingParams
from greenroom.moe.native.library import NativeUnavailable
from greenroom.moe.native.rows import RowLimits, native_rows

PROMPTS = [[(7 * n + 3 * i) % 250 + 4 for i in range(30 + n)] for n in range(12)]


def answers(cache: Path, budget: str, rows: str) -> list[tuple[tuple[int, ...], list[str]]]:
    with LLM(
        expert_memory=budget, compiled_rows=rows, cache_dir=cache, warm_start=False, threads=1, policy="lru",
        max_running=12,
    ) as llm:  # fmt: skip
        sampling = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=1)
        return [
            (answer.token_ids, [str(one) for one in answer.logprobs or ()])
            for answer in llm.generate(PROMPTS, sampling)
        ]


def limits_of(llm: LLM) -> RowLimits:
    native = llm.worker.loop.engine.model.native
    assert native is not None
    return native.limits


def test_logits_do_not_depend_on_the_budget_where_steps_have_more_rows_than_a_product(
    tmp_path: Path,
) -> None:
    """All experts in memory a layer is one call; else those that are not come later, product by product."""
    try:
        native_rows()
    except NativeUnavailable as reason:
        pytest.skip(str(reason))
    whole, quarter = (answers(tmp_path, budget, "2,1000,1000") for budget in ("100%", "25%"))
    assert whole == quarter


def test_a_worker_measures_what_it_is_asked_to_and_says_it(tmp_path: Path) -> None:
    try:
        native_rows()
    except NativeUnavailable as reason:
        pytest.skip(str(reason))
    with LLM(compiled_rows="measure", cache_dir=tmp_path, warm_start=False, threads=1) as llm:
        assert len(list(tmp_path.rglob("*.rows.json"))) == 1
        assert llm.generate([PROMPTS[0]], SamplingParams(temperature=0, max_tokens=3))[0].token_ids
        first = limits_of(llm)
    with LLM(compiled_rows="measure", cache_dir=tmp_path, warm_start=False, threads=1) as llm:
        assert limits_of(llm) == first
    with LLM(compiled_rows="measure", cache_dir=tmp_path / "other", warm_start=False, threads=1) as llm:
        assert limits_of(llm) == first
        assert len(list((tmp_path / "other").rglob("*.rows.json"))) == 1, "known in this process, yet not for others"
    with LLM(compiled_rows="1,64,2", cache_dir=tmp_path, warm_start=False, threads=1) as llm:
        assert limits_of(llm) == RowLimits(1, 64, 2)
        assert "rows of a product: 1, a decode step: 64, a prompt's step: 2" in llm.worker.describe()
