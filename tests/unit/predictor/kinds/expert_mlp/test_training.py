"""ExpertMLP: trained, folded into a file, and read again."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch

from greenroom.core.artifacts.expert_mlp_file import ExpertMlpFile, MlpForm
from greenroom.core.errors import InvalidConfig
from greenroom.core.tensors import Damaged
from greenroom.predictor.kinds.expert_mlp.network import ExpertMlp, ExpertMlpPredictor
from greenroom.predictor.kinds.expert_mlp.training import TrainingOptions, train
from greenroom.replay.traces.routing_trace import RoutingTrace

LAYERS, EXPERTS = 4, 8
QUICK = TrainingOptions(samples=3000, epochs=2, batch=64)


def onward(sequences: int, *, seed: int = 0) -> RoutingTrace:
    """A token that picks e in a layer picks e + 1 in the next one."""
    first = np.random.default_rng(seed).integers(EXPERTS, size=sequences * 25)
    picks = (first[:, None] + np.arange(LAYERS)) % EXPERTS
    return RoutingTrace(picks[..., None].astype(np.uint8), np.arange(sequences + 1) * 25, EXPERTS, model="onward")


@pytest.fixture(scope="module")
def made() -> ExpertMlpFile:
    return train(onward(40), QUICK)


def recall(made: ExpertMlpFile, trace: RoutingTrace) -> float:
    predictor, ahead = ExpertMlpPredictor(made), made.of.ahead
    return float(
        np.mean([
            (predictor.logits(trace.experts, layer).argmax(axis=1) == trace.experts[:, layer, 0]).mean()
            for layer in range(ahead, LAYERS)
        ])
    )  # fmt: skip


def test_what_follows_what_is_learnt_and_is_still_known_when_the_file_is_read(made: ExpertMlpFile) -> None:
    again = ExpertMlpFile.parse(made.dump())
    assert recall(again, onward(4, seed=9)) > 0.95
    assert made.of == MlpForm(ahead=1, top_k=1, many_hot=False)
    assert {array.dtype for name, array in made.arrays.items() if name != "form"} == {np.dtype(np.float16)}
    assert made.report["held_out_loss"] < 0.2


def test_two_layers_ahead_and_many_hot() -> None:
    made = train(onward(40), replace(QUICK, ahead=2, many_hot=True))
    assert recall(made, onward(4, seed=9)) > 0.95


def test_folding_batch_norm_into_the_matrices_changes_nothing() -> None:
    torch.manual_seed(0)
    network = ExpertMlp(10, EXPERTS)
    states = torch.rand(64, 10)
    network(states)  # in training: batch norm has seen something
    network.eval()
    folded, place = torch.from_numpy(network.folded()), 0
    found, widths = states, [10, 2048, 1024, 512, 256, 128, 64, EXPERTS]
    for before, after in pairwise(widths):
        matrix = folded[place : place + before * after].view(after, before)
        place += before * after
        found = found @ matrix.T + folded[place : place + after]
        place += after
        found = found.relu() if after != EXPERTS else found
    assert place == len(folded)
    torch.testing.assert_close(found, network(states), rtol=1e-4, atol=1e-4)


def test_as_many_samples_as_asked_for_and_the_random_state_of_others_is_left_alone() -> None:
    seen: list[int] = []
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    made = train(onward(40), TrainingOptions(samples=640, epochs=2, batch=64), on_batch=seen.append)
    assert torch.equal(torch.rand(3), expected)
    assert sum(seen) == 2 * 640
    assert made.report["samples"] == 640


def test_too_little_to_learn_from_says_how_much_is_needed() -> None:
    with pytest.raises(InvalidConfig, match="at least 500 tokens, beside the"):
        train(onward(12))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("form", np.array([LAYERS, 1, 0], np.uint16)),
        ("form", np.array([1, EXPERTS + 1, 0], np.uint16)),
        ("form", np.array([1, 1], np.uint16)),
        ("form", np.array([1, 1, 1], np.uint16)),  # many-hot: the weights are too few
        ("popularity", np.zeros((LAYERS, EXPERTS - 1), np.float16)),
        ("popularity", np.zeros((LAYERS, EXPERTS), np.float32)),
        ("weights", np.zeros(7, np.float16)),
        ("affinity", np.full((LAYERS - 1, EXPERTS, EXPERTS), np.nan, np.float16)),
    ],
)
def test_arrays_that_do_not_fit_are_refused_by_name(made: ExpertMlpFile, name: str, value: Any) -> None:
    arrays: dict[str, Any] = {**made.arrays, name: value}
    blamed = "weights" if value.tolist() == [1, 1, 1] else name
    with pytest.raises(InvalidConfig, match=blamed):
        ExpertMlpFile(model="", experts_per_layer=made.experts_per_layer, sequences=1, **arrays)


def test_a_damaged_file_is_refused(made: ExpertMlpFile) -> None:
    data = made.dump()
    with pytest.raises(Damaged):
        ExpertMlpFile.parse(data[:-2])
