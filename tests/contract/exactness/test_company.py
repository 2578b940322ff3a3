"""In bf16 a text is the same alone, among others, in chunks of any size, and when it gave up its memory meanwhile."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from greenroom import LLM, SamplingParams
from greenroom.core.errors import InvalidConfig
from greenroom.moe.native.library import NativeUnavailable
from greenroom.moe.native.rows import native_rows

LENGTHS = (1, 7, 30, 55, 90, 140, 200, 260, 330, 400, 18, 66, 121, 19, 20, 21)
DRAWN = random.Random(5)
PROMPTS = [[DRAWN.randrange(4, 250) for _ in range(length)] for length in LENGTHS]
SAMPLING = [
    SamplingParams(temperature=0.8 * (n % 2), seed=n, max_tokens=24, ignore_eos=True, logprobs=2)
    for n in range(len(PROMPTS))
]

Answer = tuple[tuple[int, ...], list[str]]


def answers(llm: LLM, numbers: list[int]) -> list[Answer]:
    found = llm.generate([PROMPTS[n] for n in numbers], [SAMPLING[n] for n in numbers])
    return [(one.token_ids, [str(token) for token in one.logprobs or ()]) for one in found]


@pytest.fixture(scope="module", autouse=True)
def compiled() -> None:
    try:
        native_rows()
    except NativeUnavailable as reason:
        pytest.skip(str(reason))


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def alone(cache: Path) -> list[Answer]:
    """Each by itself, its prompt whole."""
    with LLM(cache_dir=cache, batch_invariant=True, prefill_chunk=None, tokens_per_step=512, threads=1) as llm:
        return [answers(llm, [n])[0] for n in range(len(PROMPTS))]


@pytest.mark.parametrize(
    "options",
    [
        {"prefill_chunk": 16},
        {"prefill_chunk": 61, "max_running": 3, "expert_memory": "33%"},
        {"batching": "phases", "prefill_chunk": None, "expert_memory": "50%"},
        {"threads": 2, "tokens_per_step": 40},
    ],
    ids=lambda options: "-".join(f"{name}={value}" for name, value in options.items()),
)
def test_a_text_does_not_change_with_company(cache: Path, alone: list[Answer], options: dict[str, Any]) -> None:
    with LLM(**{"cache_dir": cache, "batch_invariant": True, "threads": 1, "warm_start": False, **options}) as llm:
        assert "texts do not change with it" in llm.worker.describe()
        assert answers(llm, list(range(len(PROMPTS)))) == alone


def test_who_gives_up_memory_goes_on_with_the_same_text(cache: Path) -> None:
    """What is computed again comes in chunks, where it was decoded before."""
    sampling = [SamplingParams(temperature=0.7, seed=n, max_tokens=160, ignore_eos=True) for n in range(10)]
    prompts = [PROMPTS[2][n:] for n in range(10)]
    texts, preempted = [], 0
    for kv_memory in ("64MiB", "1MiB"):
        with LLM(cache_dir=cache, batch_invariant=True, kv_memory=kv_memory, threads=1, prefill_chunk=23) as llm:
            texts.append([one.token_ids for one in llm.generate(prompts, sampling)])
            preempted = llm.worker.loop.engine.stats.preemptions
    assert preempted > 0
    assert texts[0] == texts[1]


def test_what_can_not_be_is_refused(cache: Path) -> None:
    with pytest.raises(InvalidConfig, match=r"batch_invariant.*torch computes its products"):
        LLM(cache_dir=cache, batch_invariant=True, products="torch")
    with pytest.raises(InvalidConfig, match=r"batch_invariant.*torch computes its attention"):
        LLM(cache_dir=cache, batch_invariant=True, attention="eager")
    with pytest.raises(InvalidConfig, match=r"compiled_rows.*batch_invariant"):
        LLM(cache_dir=cache, batch_invariant=True, compiled_rows="8")
    with pytest.raises(InvalidConfig, match=r"fidelity.*batch_invariant"):
        LLM(cache_dir=cache, batch_invariant=True, fidelity="paper")
    with LLM(cache_dir=cache, fidelity="paper") as llm:
        assert "texts may change with it: fidelity 'paper'" in llm.worker.describe()
    with LLM(cache_dir=cache, dtype="float32") as llm:
        assert "texts may change with it: torch computes its products" in llm.worker.describe()
