"""The bundled model with a part of its experts, rows confined to those that are there or not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from greenroom import LLM, SamplingParams
from greenroom.core.errors import InvalidConfig, UnsupportedModel
from greenroom.core.model_profile import ModelProfile, dump_model_profile
from greenroom.demo.tasks import TASKS, samples
from tests.random_checkpoints import save_random
from tests.unit.policies.model_profiles import model_profile, task_profile

LAYERS, EXPERTS, TOP_K = 6, 16, 2
PROMPTS = [one.prompt for task in TASKS for one in samples(task, 2, seed=5)]
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)


def profile(layers: int = LAYERS) -> ModelProfile:
    """One task that minds nothing, one that minds only the last layers, one that minds all."""
    flat = [[1.0] * EXPERTS] * layers
    insensitive = {"easy": layers, "half": layers // 2, "hard": 0}
    return model_profile({task: task_profile(flat, insensitive=n) for task, n in insensitive.items()}, top_k=TOP_K)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fidelity")


@pytest.fixture(scope="module")
def profiled(folder: Path) -> Path:
    path = folder / "profile.json"
    path.write_bytes(dump_model_profile(profile()))
    return path


def open_llm(folder: Path, **settings: Any) -> LLM:
    chosen = {"expert_memory": "60%", "policy": "static", "threads": 1, "warm_start": False, **settings}
    return LLM(cache_dir=folder / "cache", **chosen)


def answers(llm: LLM, task: str | None = None) -> tuple[list[list[int]], list[float]]:
    """Tokens of each answer, and the share of its routing that was approximated."""
    done = llm.generate(PROMPTS, GREEDY, task_types=[task] * len(PROMPTS), progress=False)
    return [list(one.token_ids) for one in done], [one.approximated for one in done]


@pytest.fixture(scope="module")
def resident(folder: Path) -> list[list[int]]:
    with open_llm(folder, expert_memory="100%") as llm:
        tokens, shares = answers(llm)
    assert set(shares) == {0.0}
    return tokens


def test_under_paper_nothing_is_loaded_for_a_row(folder: Path, resident: list[list[int]]) -> None:
    with open_llm(folder, fidelity="paper") as llm:
        tokens, shares = answers(llm)
        counters = llm.worker.experts.counters
    assert counters.on_demand_fetches == 0
    assert counters.hits == counters.lookups > 0
    assert all(0 < share < 1 for share in shares)
    assert tokens != resident


def test_under_paper_with_all_experts_answers_are_exact(folder: Path, resident: list[list[int]]) -> None:
    with open_llm(folder, fidelity="paper", expert_memory="100%") as llm:
        assert answers(llm) == (resident, [0.0] * len(PROMPTS))


def test_a_policy_that_hears_of_layers_gives_the_same_under_paper(folder: Path) -> None:
    """Its set does not change, as nothing is ever missing."""
    both = []
    for policy in ("lru", "fifo"):
        with open_llm(folder, fidelity="paper", policy=policy) as llm:
            both.append(answers(llm))
            assert llm.worker.experts.counters.on_demand_fetches == 0
    assert both[0] == both[1]


def test_exact_is_the_default_and_exact(folder: Path, profiled: Path, resident: list[list[int]]) -> None:
    with open_llm(folder, profile=profiled) as llm:
        assert answers(llm, "easy") == (resident, [0.0] * len(PROMPTS))
        assert llm.worker.experts.counters.on_demand_fetches > 0


def test_sensitive_confines_tasks_where_they_do_not_mind(
    folder: Path, profiled: Path, resident: list[list[int]]
) -> None:
    drawn = {"share": 0.6, "seed": 1}  # every layer lacks some
    with open_llm(folder, fidelity="sensitive", profile=profiled, policy_options=drawn) as llm:
        counters = llm.worker.experts.counters
        _, easy = answers(llm, "easy")
        assert counters.on_demand_fetches == 0
        assert all(0 < share < 1 for share in easy)
        _, half = answers(llm, "half")
        loaded = counters.on_demand_fetches
        assert loaded > 0
        assert all(0 < share <= 0.5 for share in half), half
        for task in ("hard", "never heard of", None):
            assert answers(llm, task) == (resident, [0.0] * len(PROMPTS)), (
                "exact, as the sensitive one is alone in its step"
            )
        assert counters.on_demand_fetches > loaded


def test_sensitive_tasks_in_the_company_of_others_are_exact(
    folder: Path, profiled: Path, resident: list[list[int]]
) -> None:
    with open_llm(folder, fidelity="sensitive", profile=profiled) as llm:
        tasks = ["hard" if place % 2 else "easy" for place in range(len(PROMPTS))]
        done = llm.generate(PROMPTS, GREEDY, task_types=tasks, progress=False)
    for place, one in enumerate(done):
        assert (one.approximated == 0) == (tasks[place] == "hard")
        if tasks[place] == "hard":
            assert list(one.token_ids) == resident[place]


def test_a_profile_of_another_model_is_refused(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "other.json").write_bytes(dump_model_profile(profile(layers=LAYERS + 1)))
    with pytest.raises(InvalidConfig, match=r"7 MoE layers of 16 experts, 2 for a row.* 6 MoE layers of 16 experts"):
        open_llm(folder, profile=tmp_path / "other.json")


def test_a_family_that_can_not_be_masked_is_refused_before_it_is_packed(tmp_path: Path) -> None:
    model = save_random("deepseek_v3", tmp_path / "model")
    with pytest.raises(UnsupportedModel, match=r"fidelity 'paper' is not for models of type 'deepseek_v3'.*'exact'"):
        LLM(str(model), cache_dir=tmp_path / "cache", fidelity="paper")
    assert not (tmp_path / "cache").exists()
