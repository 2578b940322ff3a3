from __future__ import annotations

import numpy as np
import pytest

from greenroom.core.artifacts.path_file import PathFile
from greenroom.core.artifacts.reuse_file import ReuseFile
from greenroom.core.errors import InvalidConfig
from greenroom.policies.base.events import Artifact
from greenroom.policies.foresight.path_weights import PATH, PathLogits, PathWeights
from greenroom.predictor.kinds.path.fit import FitOptions, fit
from greenroom.predictor.kinds.reuse.fit import KEEP
from greenroom.replay.traces.routing_trace import RoutingTrace

LAYERS, EXPERTS = 5, 8


def onward(sequences: int, tokens: int, *, seed: int = 0, back: int = 1, noise: float = 0.0) -> RoutingTrace:
    """A token that picks e in layer l picks e + 1 in layer l + ``back``. Layers before that are drawn."""
    rng = np.random.default_rng(seed)
    picks = rng.integers(EXPERTS, size=(sequences * tokens, LAYERS))
    for layer in range(back, LAYERS):
        drawn = rng.random(len(picks)) < noise
        picks[:, layer] = np.where(drawn, picks[:, layer], (picks[:, layer - back] + 1) % EXPERTS)
    return RoutingTrace(picks[..., None].astype(np.uint8), np.arange(sequences + 1) * tokens, EXPERTS, model="onward")


def knows_nothing(experts: tuple[int, ...] = (EXPERTS,) * LAYERS) -> ReuseFile:
    return ReuseFile(
        model="", experts_per_layer=experts, sequences=1, keep=np.array(KEEP, dtype=np.float32),
        weights=np.zeros((len(experts), len(KEEP) + 1), dtype=np.float32),
        bias=np.zeros(sum(experts), dtype=np.float32), followers=np.zeros(0, dtype=np.float32),
    )  # fmt: skip


def recall(made: PathFile, trace: RoutingTrace, ahead: int) -> float:
    """The share of picks that are the likeliest expert of their layer, of layers that are foreseen so far ahead."""
    weights = PathWeights.of_artifact(trace.catalogue(), Artifact(PATH, "1", made.arrays))
    logits, found = PathLogits(weights), []
    logits.begin(trace.tokens)
    for layer in range(LAYERS - ahead):
        logits.add(layer, trace.experts[:, layer])
        found.append(
            (logits.of(layer + ahead, layer + ahead + 1).argmax(axis=1) == trace.experts[:, layer + ahead, 0]).mean()
        )
    return float(np.mean(found))


def test_what_a_layer_says_of_the_next_two_is_learnt() -> None:
    made = fit(onward(60, 60, noise=0.1), knows_nothing())
    later = onward(10, 60, seed=9, noise=0.1)
    assert recall(made, later, 1) > 0.85
    assert recall(made, later, 2) > 0.75
    assert made.report["window"] <= 2, "the layer before says all"


def test_the_window_is_as_long_as_it_has_to_be() -> None:
    made = fit(onward(60, 60, back=3), knows_nothing())
    assert made.report["window"] == 4
    assert made.weights.dtype == np.float16


def test_chances_are_calibrated_on_sequences_that_were_not_learnt_from() -> None:
    made, later = fit(onward(60, 60, noise=0.3), knows_nothing()), onward(20, 60, seed=9, noise=0.3)
    weights = PathWeights.of_artifact(later.catalogue(), Artifact(PATH, "1", made.arrays))
    logits = PathLogits(weights)
    logits.begin(later.tokens)
    logits.add(0, later.experts[:, 0])
    chance = 1 / (1 + np.exp(-logits.of(1, 2)))
    picked = np.arange(EXPERTS) == later.experts[:, 1]
    for low, high in ((0, 0.2), (0.5, 1)):
        some = (chance >= low) & (chance < high)
        assert some.any()
        assert abs(picked[some].mean() - chance[some].mean()) < 0.05


def test_what_is_known_of_the_sequence_counts_where_the_path_says_nothing() -> None:
    rng = np.random.default_rng(0)
    favourites = rng.integers(EXPERTS, size=(80, LAYERS))
    picks = np.where(
        rng.random((80, 50, LAYERS)) < 0.8, favourites[:, None], rng.integers(EXPERTS, size=(80, 50, LAYERS))
    )
    trace = RoutingTrace(picks.reshape(-1, LAYERS, 1).astype(np.uint8), np.arange(81) * 50, EXPERTS)
    knows = knows_nothing()
    weights = knows.weights.copy()
    weights[:, 2] = 1.0
    made = fit(
        trace,
        ReuseFile(
            model="", experts_per_layer=knows.experts_per_layer, sequences=1, keep=knows.keep, weights=weights,
            bias=knows.bias, followers=knows.followers,
        ),
        FitOptions(window=1),
    )  # fmt: skip
    assert made.sequence[:, 1:].min() > 0.5


def test_the_same_routing_and_seed_give_the_same_and_every_layer_is_told_of() -> None:
    done: list[int] = []
    trace, options = onward(60, 60), FitOptions(rounds=1, window=2)
    one, other = fit(trace, knows_nothing(), options, on_layer=done.append), fit(trace, knows_nothing(), options)
    assert done == list(range(1, LAYERS + 1))
    for name, array in one.arrays.items():
        assert array.tolist() == other.arrays[name].tolist()


@pytest.mark.parametrize("sequences", [2, 5])
def test_a_few_long_sequences_are_enough(monkeypatch: pytest.MonkeyPatch, sequences: int) -> None:
    """Also where only one of them begins among the tokens that are learnt from."""
    monkeypatch.setattr("greenroom.predictor.kinds.path.fit.most_tokens", lambda _: 500)
    made = fit(onward(sequences, 700), knows_nothing(), FitOptions(rounds=1, steps=10, window=1))
    assert (made.report["tokens"], made.report["held_out_tokens"]) == (700, 700)


def test_where_time_is_short_less_is_learnt() -> None:
    trace, later = onward(60, 60, noise=0.1), onward(10, 60, seed=9, noise=0.1)
    hurried = fit(trace, knows_nothing(), FitOptions(seconds=0.0))
    assert not hurried.weights.any()
    at_leisure = fit(trace, knows_nothing(), FitOptions(seconds=3600.0, rounds=2, steps=50))
    unbounded = fit(trace, knows_nothing(), FitOptions(rounds=2, steps=50))
    assert np.array_equal(at_leisure.weights, unbounded.weights)
    assert recall(at_leisure, later, 1) > recall(hurried, later, 1)


def test_too_little_to_learn_from_says_how_much_is_needed() -> None:
    with pytest.raises(InvalidConfig, match="at least 500 tokens, beside the"):
        fit(onward(9, 60), knows_nothing())


def test_what_is_known_of_sequences_of_another_model_is_refused() -> None:
    with pytest.raises(InvalidConfig, match="reuse"):
        fit(onward(60, 60), knows_nothing((EXPERTS,) * 2))
    with pytest.raises(InvalidConfig, match="window"):
        fit(onward(60, 60), knows_nothing(), FitOptions(window=LAYERS + 1))
