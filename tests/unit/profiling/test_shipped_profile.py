"""The bundled model's own profile, which comes with it."""

from __future__ import annotations

import json

import numpy as np
import pytest

from greenroom.core.errors import InvalidConfig
from greenroom.core.model_profile import ModelProfile, dump_model_profile, load_model_profile, parse_model_profile
from greenroom.demo import bundled_model_path, bundled_profile_path
from greenroom.demo.tasks import TASKS
from greenroom.profiling.measures.sensitivity import insensitive_prefix


@pytest.fixture(scope="module")
def shipped() -> ModelProfile:
    path = bundled_profile_path()
    assert path is not None
    assert path.stat().st_size < 200_000
    return load_model_profile(path)


def test_it_is_of_the_bundled_model(shipped: ModelProfile) -> None:
    config = json.loads((bundled_model_path() / "config.json").read_text())
    shape = config["num_hidden_layers"], config["num_experts"], config["num_experts_per_tok"]
    assert (shipped.layers, shipped.experts, shipped.top_k) == shape
    assert set(shipped.tasks) == set(TASKS)
    assert shipped.costs is None, "costs are of a machine"
    assert shipped.notes["command"].startswith("greenroom profile ")


def test_its_figures_agree_with_each_other(shipped: ModelProfile) -> None:
    for task in shipped.tasks.values():
        found = task.sensitivity
        assert found is not None
        assert found.insensitive_layers == insensitive_prefix(found.similarity, found.threshold)
        assert all(
            least <= mean <= most for least, mean, most in zip(found.least, found.similarity, found.most, strict=True)
        )
    assert shipped.reuse is not None
    assert shipped.reuse.proposed_every in shipped.reuse.perplexity


def test_answers_are_as_long_as_the_model_card_says(shipped: ModelProfile) -> None:
    card = json.loads((bundled_model_path() / "evaluation.json").read_text())["lengths"]
    for name, task in shipped.tasks.items():
        assert task.generated_tokens.mean == pytest.approx(card[name]["answer"]["mean"], rel=0.1)
        assert task.input_tokens.mean == pytest.approx(card[name]["prompt"]["mean"], rel=0.1)


def test_answers_hang_on_few_experts_and_most_on_the_first_layers(shipped: ModelProfile) -> None:
    losses = []
    for task in shipped.tasks.values():
        assert task.pick_worth is not None
        losses.append(task.pick_worth.loss)
    mean = np.mean(losses, axis=0)
    assert mean.sum(axis=1).argmax() == 0
    ordered = np.sort(mean.ravel())
    assert ordered[-len(ordered) // 5 :].sum() > 0.6 * ordered.sum()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ([[0.1] * 16] * 5, r"at \$\.tasks\['classify'\].*pick_worth has 6 rows of 16 losses"),
        ([[0.1] * 15] * 6, "6 rows of 16 losses"),
        ([[-0.1] * 16] * 6, "Expected `float` >= 0"),
    ],
)
def test_worth_of_another_shape_is_refused(shipped: ModelProfile, change: list[list[float]], said: str) -> None:
    raw = json.loads(dump_model_profile(shipped))
    raw["tasks"]["classify"]["pick_worth"]["loss"] = change
    with pytest.raises(InvalidConfig, match=said):
        parse_model_profile(json.dumps(raw).encode(), "it")
