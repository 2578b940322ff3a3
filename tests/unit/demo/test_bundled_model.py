"""The checkpoint that comes with the package: small enough, loadable by plain transformers, and it answers."""

from __future__ import annotations

import json
from typing import Any

import pytest
from transformers import AutoConfig

from greenroom.demo import bundled_model_path
from greenroom.demo.evaluate.evaluation import CARD_SEED, Evaluation
from greenroom.demo.tasks import TASKS, samples


@pytest.fixture(scope="module")
def evaluation() -> Evaluation:
    return Evaluation(bundled_model_path())


def test_it_is_small_and_of_the_promised_shape() -> None:
    assert sum(file.stat().st_size for file in bundled_model_path().iterdir()) <= 24_000_000
    config = AutoConfig.from_pretrained(bundled_model_path())
    assert config.model_type == "qwen3_moe"
    assert config.num_hidden_layers >= 6
    assert config.num_experts >= 16
    assert config.num_experts_per_tok >= 2
    assert not config.mlp_only_layers
    assert config.decoder_sparse_step == 1


@pytest.mark.parametrize("task", TASKS)
def test_it_answers_heldout_samples_as_often_as_its_card_says(evaluation: Evaluation, task: str) -> None:
    report = json.loads((bundled_model_path() / "evaluation.json").read_text(encoding="utf-8"))
    assert report["seed"] == CARD_SEED
    drawn = list(samples(task, 8, seed=CARD_SEED, split="heldout"))
    right = sum(answer == one.answer for one, answer in zip(drawn, evaluation.answers(drawn), strict=True))
    assert right >= round(8 * report["exact_match"][task]["exact"]) - 2


def test_its_experts_are_all_in_use_and_differ_by_task(evaluation: Evaluation) -> None:
    picked: dict[str, Any] = {}
    for task in ("summarise", "compare"):
        picked[task] = sum(evaluation.picks(one)[0] for one in samples(task, 6, seed=CARD_SEED))
    together = picked["summarise"] + picked["compare"]
    assert (together > 0).mean() > 0.9
    shares = {task: counts / counts.sum(-1, keepdims=True) for task, counts in picked.items()}
    assert abs(shares["summarise"] - shares["compare"]).sum(-1).mean() > 0.2
