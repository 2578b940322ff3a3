"""The form ``t5``: what is learnt of tokens, and that numpy computes what transformers trained."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from greenroom.core.artifacts.paths_file import PathsFile
from greenroom.core.artifacts.paths_forms.t5 import FIRST_TOKEN, UNKNOWN, T5Shape
from greenroom.core.artifacts.reuse_file import ReuseFile
from greenroom.core.errors import InvalidConfig
from greenroom.policies.base.events import Phase
from greenroom.policies.base.expert_keys import Catalogue
from greenroom.policies.expertflow.t5_paths import T5Paths
from greenroom.predictor.kinds.paths.t5 import T5PathNetwork
from greenroom.predictor.kinds.paths.t5_training import T5Options, fit_t5
from greenroom.replay.traces.routing_trace import RoutingTrace
from greenroom.replay.traces.trace_file import TraceError
from tests.random_t5 import SMALL, random_t5
from tests.routed_by_tokens import EXPERTS, LAYERS, LENGTH, TOKENS, drawn, ids_of, routed

CATALOGUE = Catalogue("random", experts_per_layer=[4, 3], top_k=[2, 2], expert_bytes=[1, 1])
TINY = T5Shape(width=32, inner=32, heads=2, key=16, encoder_layers=1, decoder_layers=1, window=6, prompt=8)
QUICK = T5Options(
    shape=TINY, epochs=8, piece=12, learning_rate=5e-3, dropout=0.0, unknown=0.0, unprompted=0.0, held_out=0.2, seed=1
)  # fmt: skip


@pytest.fixture(scope="module")
def told() -> tuple[RoutingTrace, list[NDArray[np.int64]]]:
    tokens, prompts = drawn(150)
    return routed(tokens, prompts), ids_of(prompts)


@pytest.fixture(scope="module")
def made(told: tuple[RoutingTrace, list[NDArray[np.int64]]]) -> PathsFile:
    return fit_t5(*told, QUICK)


def recalls(made: PathsFile, *, window: int | None = None, with_prompts: bool = True) -> list[float]:
    """Of each layer, on other sequences; one token after the other."""
    tokens, prompts = drawn(6, seed=9)
    trace, found = routed(tokens, prompts), []
    assert trace.token is not None
    paths = T5Paths(PathsFile.parse(made.dump()), trace.catalogue(), window=window)
    for sequence, prompt in enumerate(ids_of(prompts)):
        paths.begin(sequence, prompt if with_prompts else prompt[:0])
    ids = trace.token.reshape(len(tokens), LENGTH)
    for place in range(LENGTH):
        sequences = np.arange(len(tokens))
        found.append(paths.chances(sequences, np.full(len(tokens), place), ids[:, place]))
    chances = np.stack(found, axis=1).reshape(-1, LAYERS, EXPERTS)
    hits = chances.argmax(axis=2) == trace.experts[:, :, 0]
    return [float(one) for one in hits.mean(axis=0)]


def test_the_token_the_one_before_and_the_prompt_are_learnt(made: PathsFile) -> None:
    token, before, prompt = recalls(made)
    assert token > 0.99
    assert before > 0.9
    assert made.report["recall"]["alone"] > made.report["recall_by_epoch"][0] + 0.2
    assert made.vocabulary == 100 + 3 * (TOKENS - 1) + 1
    assert made.tensors["tokens"].tolist() == [100 + 3 * token for token in range(TOKENS)]
    assert prompt > 0.8


def test_without_context_only_the_token_and_without_a_prompt_only_the_context_are_known(made: PathsFile) -> None:
    token, before, _ = recalls(made, window=1)
    assert token > 0.9
    assert before < 0.5
    token, before, prompt = recalls(made, with_prompts=False)
    assert token > 0.9
    assert prompt < 0.5


def test_the_same_seed_gives_the_same_and_leaves_torchs_own_chance_alone(
    told: tuple[RoutingTrace, list[NDArray[np.int64]]],
) -> None:
    short = replace(QUICK, epochs=1, dropout=0.1, unknown=0.1, unprompted=0.5)
    torch.manual_seed(5)
    drawn_alone = torch.rand(1)
    torch.manual_seed(5)
    first = fit_t5(*told, short)
    assert torch.equal(torch.rand(1), drawn_alone)
    again, other = fit_t5(*told, short), fit_t5(*told, replace(short, seed=2))
    for name, one in first.tensors.items():
        np.testing.assert_array_equal(again.tensors[name], one)
    assert (first.tensors["head.bias"] != other.tensors["head.bias"]).any()
    assert first.report["epochs"] == 1


def test_it_ends_in_time_with_what_it_has_learnt(told: tuple[RoutingTrace, list[NDArray[np.int64]]]) -> None:
    clock, shares = itertools.count(), list[float]()
    found = fit_t5(*told, replace(QUICK, seconds=9.0), on_progress=shares.append, now=lambda: float(next(clock)))
    assert len(shares) == 9
    assert shares == sorted(shares)
    assert shares[-1] == 1
    assert found.report["epochs"] == 1


def test_prompts_are_the_rows_of_prompts_where_the_trace_has_them() -> None:
    tokens, _ = drawn(40)
    prompts = list(tokens[:, :2])
    trace = routed(tokens, prompts)
    asked = np.where(np.arange(LENGTH) < 2, Phase.PREFILL, Phase.DECODE).astype(np.uint8)
    phases = np.tile(asked, len(tokens))
    short = replace(QUICK, epochs=1)
    with_rows = fit_t5(replace(trace, phase=phases), None, short)
    as_told = fit_t5(trace, ids_of(prompts), short)
    np.testing.assert_array_equal(with_rows.tensors["head.weight"], as_told.tensors["head.weight"])


def test_what_can_not_be_learnt_from_is_refused(told: tuple[RoutingTrace, list[NDArray[np.int64]]]) -> None:
    trace, prompts = told
    with pytest.raises(TraceError, match="no array token"):
        fit_t5(replace(trace, token=None), prompts, QUICK)
    with pytest.raises(InvalidConfig, match="prompts: 149"):
        fit_t5(trace, prompts[1:], QUICK)
    with pytest.raises(InvalidConfig, match="tokens to learn from"):
        fit_t5(trace.part(0, 20), prompts[:20], QUICK)
    with pytest.raises(InvalidConfig, match="window"):
        fit_t5(trace, prompts, replace(QUICK, shape=TINY._replace(window=0)))


def test_with_coefficients_of_reuse_it_is_weighed_against_the_past() -> None:
    """Layer 2 follows what no token tells, but the sequence's past does."""
    tokens, kinds = drawn(60, seed=3)
    trace = routed(tokens, kinds)
    keep = np.array([0.5, 0.8, 0.92, 0.97, 0.99], dtype=np.float32)
    weights = np.full((LAYERS, len(keep) + 1), 0.3, dtype=np.float32)
    size = LAYERS * EXPERTS
    reuse = ReuseFile(
        model="", experts_per_layer=(EXPERTS,) * LAYERS, sequences=1, keep=keep, weights=weights,
        bias=np.zeros(size, dtype=np.float32), followers=np.zeros(0, dtype=np.float32),
    )  # fmt: skip
    made = fit_t5(trace, None, replace(QUICK, epochs=3), reuse=reuse)
    assert made.report["recall"]["past"] > made.report["recall"]["alone"] + 0.1
    assert made.report["tokens"] < 0.8 * trace.tokens
    asked_for: list[NDArray[np.int64]] = []

    def past_of(sequences: NDArray[np.int64]) -> NDArray[np.float32]:
        asked_for.append(sequences)
        return np.zeros((len(sequences), size), dtype=np.float32)

    paths = T5Paths(PathsFile.parse(made.dump()), trace.catalogue(), past_of)
    assert paths.chances(np.array([4, 4, 2]), np.array([0, 1, 0]), np.array([100, 103, 106])).shape == (3, size)
    assert asked_for[0].tolist() == [2, 4]
    with pytest.raises(InvalidConfig, match="reuse"):
        fit_t5(trace, None, QUICK, reuse=replace(reuse, experts_per_layer=(size,), weights=weights[:1]))


@pytest.mark.parametrize("window", [1, 3, SMALL.window, 30])
def test_numpy_computes_what_transformers_does(window: int) -> None:
    shape = SMALL._replace(window=window)
    made = random_t5(shape)
    network = T5PathNetwork(shape, len(made.tensors["tokens"]), 7, dropout=0.1)
    weights = {
        name: torch.from_numpy(one.astype(np.float32))
        for name, one in made.tensors.items()
        if name not in ("shape", "tokens")
    }
    with torch.no_grad():
        network.head.weight.copy_(weights.pop("head.weight"))
        network.head.bias.copy_(weights.pop("head.bias"))
    for stack in ("encoder", "decoder"):
        weights[f"{stack}.embed_tokens.weight"] = weights["shared.weight"]
    network.backbone.load_state_dict(weights)
    network.eval()
    np.testing.assert_array_equal(network.tensors()["shared.weight"], made.tensors["shared.weight"])
    random = np.random.default_rng(0)
    for prompt, length in ((1, 1), (4, 30), (shape.prompt, 40)):
        prompts, tokens = random.integers(UNKNOWN, 39, size=prompt), random.integers(UNKNOWN, 39, size=length)
        with torch.inference_mode():
            logits = network(torch.from_numpy(prompts)[None], torch.from_numpy(tokens)[None])[0]
        expected = torch.sigmoid(logits).numpy()
        paths = T5Paths(made, CATALOGUE)
        ids = np.concatenate([[0, 0], made.tensors["tokens"]])  # of rows of the embedding
        assert ids[FIRST_TOKEN] == made.tensors["tokens"][0]
        paths.begin(3, ids[prompts])
        found = paths.chances(np.full(length, 3), np.arange(length), ids[tokens])
        np.testing.assert_allclose(found, expected, rtol=2e-3, atol=1e-5)
