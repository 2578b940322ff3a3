from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from greenroom.core.artifacts.reuse_file import ReuseFile
from greenroom.core.errors import InvalidConfig
from greenroom.policies.base.artifacts import artifact_of
from greenroom.policies.base.events import LayerRouting, Step
from greenroom.policies.base.expert_keys import Catalogue
from greenroom.policies.reuse.chances import Coefficients, ReuseChances
from greenroom.predictor.kinds.reuse import fit as fitting
from greenroom.predictor.kinds.reuse.fit import KEEP, FitOptions, fit, layer_samples, most_tokens, moving
from greenroom.replay.traces.routing_trace import RoutingTrace

LAYERS, EXPERTS = 2, 8


def in_circles(sequences: int, tokens: int, *, seed: int = 0, noise: float = 0.0) -> RoutingTrace:
    """After expert e comes e + 1, but for a share of ``noise``."""
    rng = np.random.default_rng(seed)
    starts = rng.integers(EXPERTS, size=(sequences, 1, LAYERS))
    picks = (starts + np.arange(tokens)[None, :, None]) % EXPERTS
    drawn = rng.random(picks.shape) < noise
    picks = np.where(drawn, rng.integers(EXPERTS, size=picks.shape), picks)
    experts = picks.reshape(-1, LAYERS, 1).astype(np.uint8)
    return RoutingTrace(experts, np.arange(sequences + 1) * tokens, EXPERTS, model="circles")


def of_kinds(sequences: int, tokens: int) -> RoutingTrace:
    """Each sequence draws from three experts of its own."""
    rng = np.random.default_rng(1)
    own = np.stack([rng.permutation(EXPERTS)[:3] for _ in range(sequences)])
    picks = np.take_along_axis(own, rng.integers(3, size=(sequences, tokens * LAYERS)), axis=1)
    return RoutingTrace(
        picks.reshape(-1, LAYERS, 1).astype(np.uint8), np.arange(sequences + 1) * tokens, EXPERTS, model="kinds"
    )


def made_of(experts: tuple[int, ...], arrays: Mapping[str, np.ndarray]) -> ReuseFile:
    given: dict[str, Any] = {name: array.astype(np.float32) for name, array in arrays.items()}
    return ReuseFile(model="", experts_per_layer=experts, sequences=3, **given)


def test_which_expert_follows_which_is_learnt_where_it_says_something_and_left_out_where_not() -> None:
    circles, drawn = fit(in_circles(40, 30)), fit(in_circles(40, 30, noise=1))
    assert (circles.report["uses"], drawn.report["uses"]) == ("followers", "averages")
    losses = circles.report["held_out_loss"]
    assert losses["followers"] < 0.5 * losses["averages"]
    pairs = circles.followers[: 2 * EXPERTS * EXPERTS].reshape(2, EXPERTS, EXPERTS)[0]
    assert pairs.argmax(axis=1).tolist() == [(expert + 1) % EXPERTS for expert in range(EXPERTS)]
    assert len(drawn.followers) == 0


def test_the_more_a_sequence_used_an_expert_the_likelier_it_is_to_use_it_again() -> None:
    made = fit(of_kinds(60, 30), FitOptions(followers=False))
    assert made.weights[:, :-1].sum(axis=1).min() > 0.5
    assert made.keep.tolist() == pytest.approx(KEEP)


def test_the_same_routing_and_seed_give_the_same_and_every_layer_is_told_of() -> None:
    done: list[int] = []
    one, other = fit(in_circles(30, 30), on_layer=done.append), fit(in_circles(30, 30))
    assert done == [1, 2]
    for name, array in one.arrays.items():
        assert array.tolist() == other.arrays[name].tolist()


def test_what_it_learns_from_is_what_the_policy_knows_then() -> None:
    trace = in_circles(3, 9, seed=5, noise=0.4)
    pool = Catalogue.uniform("p", layers=LAYERS, experts=EXPERTS, top_k=1)
    rng = np.random.default_rng(0)
    arrays = {
        "keep": np.array(KEEP, dtype=np.float32),
        "weights": rng.normal(size=(LAYERS, len(KEEP) + 1)).astype(np.float32),
        "bias": np.zeros(pool.size, dtype=np.float32),
        "followers": rng.normal(size=LAYERS * 2 * EXPERTS * EXPERTS).astype(np.float32),
    }
    file = made_of((EXPERTS,) * LAYERS, arrays)
    coefficients = Coefficients.of_artifact(pool, artifact_of(pool, file, "it"))
    chances = ReuseChances(pool, coefficients)
    samples = layer_samples(trace, 1)
    foreseen = np.einsum("nre,r->ne", samples.logits, arrays["weights"][1]) + samples.recent @ coefficients.followers[1]
    place = 0
    for row in range(trace.tokens):
        sequence = int(np.searchsorted(trace.seq_starts, row, side="right")) - 1
        step = Step("p", row, np.array([sequence]), np.ones(1, dtype=np.uint8))
        for layer in range(LAYERS):
            routing = LayerRouting.from_picks(pool, step, layer, trace.experts[row, layer][None])
            chances.add(routing)
        if row + 1 in trace.seq_starts:
            chances.end(sequence)
            continue
        assert chances.soon[pool.spans[1]] == pytest.approx(1 / (1 + np.exp(-foreseen[place])), abs=1e-3)
        assert samples.follow[place].argmax() == trace.experts[row + 1, 1, 0]
        place += 1
    assert place == len(samples)


def test_moving_averages_of_many_tokens_are_those_of_one_after_the_other() -> None:
    tokens = np.random.default_rng(2).integers(2, size=(150, 3)).astype(np.float32)
    start = np.array([0.2, 0.5, 0.9], dtype=np.float32)
    found, now = moving(tokens, start, 0.97), start
    for token, average in zip(tokens, found, strict=True):
        now = 0.97 * now + 0.03 * token
        assert average == pytest.approx(now, abs=1e-5)


@pytest.mark.parametrize("sequences", [1, 2, 5])
def test_a_few_long_sequences_are_enough(monkeypatch: pytest.MonkeyPatch, sequences: int) -> None:
    monkeypatch.setattr(fitting, "MOST_TOKENS", 1000)
    made = fit(in_circles(sequences, 1200), FitOptions(followers=False))
    assert made.report["tokens"] + made.report["held_out_tokens"] == 1199, "the last of them, whole"
    assert made.report["held_out_tokens"] == 120
    monkeypatch.setattr(fitting, "MOST_TOKENS", 10_000)
    made = fit(in_circles(sequences, 1200), FitOptions(followers=False))
    assert made.report["held_out_tokens"] == (120 if sequences == 1 else 1199)


def test_where_time_is_short_less_is_learnt() -> None:
    trace = in_circles(4, 200)
    hurried = fit(trace, FitOptions(seconds=0.0))
    assert not hurried.bias.any()
    at_leisure, unbounded = (fit(trace, FitOptions(seconds=seconds)) for seconds in (3600.0, None))
    assert np.array_equal(at_leisure.bias, unbounded.bias)
    assert at_leisure.bias.any()


def test_more_experts_are_learnt_from_fewer_tokens() -> None:
    none = np.zeros((4, 1, 1), dtype=np.uint16)
    narrow, wide = (RoutingTrace(none, np.array([0, 4]), experts) for experts in (128, 512))
    assert (most_tokens(narrow), most_tokens(wide)) == (50_000, 12_500)


def test_too_little_to_learn_from_is_refused() -> None:
    with pytest.raises(InvalidConfig, match="held out"):
        fit(in_circles(4, 10))


def test_a_file_comes_back_as_it_was_and_nonsense_does_not_go_in(tmp_path: Path) -> None:
    made = fit(in_circles(40, 30))
    made.write(tmp_path / "r.safetensors")
    back = ReuseFile.read(tmp_path / "r.safetensors")
    assert {name: array.tolist() for name, array in back.arrays.items()} == {
        name: array.tolist() for name, array in made.arrays.items()
    }
    assert (back.model, back.sequences, back.report) == ("circles", 40, made.report)
    arrays = {
        "keep": np.full(1, 0.5),
        "weights": np.ones((2, 2)),
        "bias": np.ones(4),
        "followers": np.ones(16),
    }
    made_of((2, 2), arrays)
    for name, wrong in (
        ("keep", np.array([1.0])), ("keep", np.ones((1, 1))), ("weights", np.ones((2, 3))),
        ("bias", np.full(4, np.nan)), ("followers", np.ones(5)),
    ):  # fmt: skip
        with pytest.raises(InvalidConfig, match=name):
            made_of((2, 2), arrays | {name: wrong})
    (tmp_path / "none").write_bytes(b"nothing")
    with pytest.raises(InvalidConfig, match="greenroom reuse fit"):
        ReuseFile.read(tmp_path / "none")


def test_a_layer_learns_from_the_rows_that_run_in_it_alone() -> None:
    """As in an encoder-decoder: prompts run in layer 0, answers in layer 1."""
    decoded = in_circles(30, 20)
    experts = decoded.experts.copy()
    encodes = np.arange(len(experts)) % 20 < 8
    experts[encodes, 1] = experts[~encodes, 0] = 255
    both = replace(decoded, experts=experts, decoder_start=1)
    for layer, rows in ((0, 8), (1, 12)):
        samples = layer_samples(both, layer)
        assert np.bincount(samples.sequence).tolist() == [rows - 1] * 30
        assert (samples.recent[:, :EXPERTS].argmax(axis=1) + 1).tolist() == [
            follow or EXPERTS for follow in samples.follow.argmax(axis=1).tolist()
        ]
    assert fit(both).report["uses"] == "followers"
