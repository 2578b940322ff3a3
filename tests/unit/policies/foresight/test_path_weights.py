from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from greenroom.core.artifacts.path_file import LAYERS_AHEAD, PathFile, targets_of, weights_of
from greenroom.core.errors import InvalidConfig
from greenroom.policies.base.events import Artifact
from greenroom.policies.base.expert_keys import Catalogue
from greenroom.policies.foresight.path_weights import PATH, PathLogits, PathWeights
from tests.examples import examples

WIDTHS = (4, 6, 3, 5)
LAYERS, SIZE = len(WIDTHS), sum(WIDTHS)
POOL = Catalogue("p", experts_per_layer=WIDTHS, top_k=[2] * LAYERS, expert_bytes=[1] * LAYERS)


def made(reach: int, **arrays: Any) -> PathFile:
    rng = np.random.default_rng(reach)
    given: dict[str, Any] = {
        "window": np.array([reach], dtype=np.float32),
        "weights": rng.normal(size=weights_of(WIDTHS, reach)).astype(np.float16),
        "bias": rng.normal(size=(LAYERS_AHEAD, SIZE)).astype(np.float32),
        "sequence": rng.random((LAYERS_AHEAD, LAYERS)).astype(np.float32),
    }
    return PathFile(model="m", experts_per_layer=WIDTHS, sequences=9, **{**given, **arrays})


def single_weights(file: PathFile, window: int) -> dict[tuple[int, int, int, int, int], float]:
    """By (source layer, its expert, layers ahead, target layer, its expert), as the file's docstring says."""
    found, place = {}, 0
    for source, width in enumerate(WIDTHS):
        for expert in range(width):
            for ahead in range(1, LAYERS_AHEAD + 1):
                for target in range(LAYERS):
                    if 0 <= target - ahead - source < window:
                        for other in range(WIDTHS[target]):
                            found[source, expert, ahead, target, other] = float(file.weights[place])
                            place += 1
    assert place == len(file.weights)
    return found


@given(
    window=st.integers(1, LAYERS),
    rows=st.sampled_from([1, 3, 33]),
    scale=st.sampled_from([1e-3, 1.0, 300.0]),
    shift=st.sampled_from([-1.0, 0.0, 1.0]),
    seed=st.integers(0, 99),
)
@settings(max_examples=examples(40), deadline=None)
def test_logits_are_the_bias_and_the_weights_of_all_picks_in_the_window(
    window: int, rows: int, scale: float, shift: float, seed: int
) -> None:
    """To the rounding of so many whole numbers, however large the weights are, and where all are of one sign."""
    rng = np.random.default_rng(seed)
    given_weights = scale * (rng.normal(size=weights_of(WIDTHS, window)) + 3 * shift)
    file = made(window, weights=given_weights.astype(np.float16))
    weights = PathWeights.of_artifact(POOL, Artifact(PATH, "1", file.arrays))
    single = single_weights(file, window)
    logits, picked = PathLogits(weights), []
    logits.begin(rows + 1)
    logits.add(0, np.zeros((rows + 1, 2), dtype=np.uint8))  # a step before, which is forgotten
    logits.begin(rows)
    for layer, width in enumerate(WIDTHS):
        picks = np.stack([rng.permutation(width)[:2] for _ in range(rows)])
        picks[rows - 1, 1] = 255  # a row may have fewer picks
        picked.append(picks)
        logits.add(layer, picks.astype(np.uint8))
        for ahead in range(1, min(LAYERS_AHEAD, LAYERS - 1 - layer) + 1):
            target = layer + ahead
            first = int(POOL.first[target])
            found = logits.of(target, target + 1)
            for row in {0, rows - 1}:
                expected = file.bias[ahead - 1, first : first + WIDTHS[target]].astype(np.float64)
                for source in range(max(0, layer - window + 1), layer + 1):
                    for pick in picked[source][row].tolist():
                        if pick < WIDTHS[source]:
                            expected += [single[source, pick, ahead, target, other] for other in range(WIDTHS[target])]
                assert np.abs(found[row] - expected).max() <= weights.unit * (1 + 2 * (layer + 1)) / 2 * 1.001
        if layer + LAYERS_AHEAD < LAYERS:
            both = [logits.of(layer + ahead, layer + ahead + 1) for ahead in range(1, LAYERS_AHEAD + 1)]
            assert np.array_equal(logits.of(layer + 1, layer + 1 + LAYERS_AHEAD), np.concatenate(both, axis=1))


def test_the_unit_is_the_finest_that_a_byte_holds() -> None:
    file = made(2)
    weights = PathWeights.of_artifact(POOL, Artifact(PATH, "1", file.arrays))
    assert weights.unit == pytest.approx(float(np.abs(file.weights).max()) / 127)
    assert max(int(np.abs(into.astype(int)).max(initial=0)) for into in weights.into) == 127


def test_weights_of_nothing_foresee_nothing() -> None:
    file = made(2, weights=np.zeros(weights_of(WIDTHS, 2), dtype=np.float16), bias=np.zeros((2, SIZE), np.float32))
    logits = PathLogits(PathWeights.of_artifact(POOL, Artifact(PATH, "1", file.arrays)))
    logits.begin(1)
    logits.add(0, np.array([[0, 1]]))
    assert not logits.of(1, 3).any()


def test_a_file_is_written_and_read_at_half_precision() -> None:
    file = made(2)
    again = PathFile.parse(file.dump())
    assert again.weights.dtype == np.float16
    for name, array in file.arrays.items():
        assert again.arrays[name].tolist() == array.tolist()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("window", np.array([0], dtype=np.float32)),
        ("window", np.array([1.5], dtype=np.float32)),
        ("window", np.array([LAYERS + 1], dtype=np.float32)),
        ("window", np.array([1, 1], dtype=np.float32)),
        ("window", np.array([np.nan], dtype=np.float32)),
        ("weights", np.zeros(3, dtype=np.float16)),
        ("weights", np.full(weights_of(WIDTHS, 2), np.inf, dtype=np.float16)),
        ("bias", np.zeros((1, SIZE), dtype=np.float32)),
        ("sequence", np.full((LAYERS_AHEAD, LAYERS), np.nan, dtype=np.float32)),
    ],
)
def test_a_file_whose_arrays_do_not_fit_is_refused_by_their_name(name: str, value: np.ndarray) -> None:
    with pytest.raises(InvalidConfig, match=name):
        made(2, **{name: value})


def test_an_artifact_of_another_model_is_refused() -> None:
    other = Catalogue.uniform("p", layers=LAYERS, experts=5, top_k=2)
    arrays = made(2).arrays
    for artifact in (
        Artifact(PATH, "1", arrays),
        Artifact("reuse", "1", arrays),
        Artifact(PATH, "1", {name: array for name, array in arrays.items() if name != "bias"}),
    ):
        with pytest.raises(InvalidConfig):
            PathWeights.of_artifact(other, artifact)


def test_targets_lie_within_the_window_and_the_model() -> None:
    assert list(targets_of(0, 1, 2, 4)) == [1, 2]
    assert list(targets_of(0, 2, 2, 4)) == [2, 3]
    assert list(targets_of(3, 1, 2, 4)) == []
