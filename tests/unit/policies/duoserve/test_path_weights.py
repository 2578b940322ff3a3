from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from greenroom.core.artifacts.path_file import LAYERS_AHEAD, PathFile, targets_of, weights_of
from greenroom.core.errors import InvalidConfig
from greenroom.policies.base.events import Artifact
from greenroom.policies.base.expert_keys import Catalogue
from greenroom.policies.duoserve.path_weights import PATH, PathLogits, PathWeights

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


@pytest.mark.parametrize("window", [1, 2, 4])
@pytest.mark.parametrize("rows", [1, 3])
def test_logits_are_the_bias_and_the_weights_of_all_picks_in_the_window(window: int, rows: int) -> None:
    file = made(window)
    weights = PathWeights.of_artifact(POOL, Artifact(PATH, "1", file.arrays))
    single = single_weights(file, window)
    rng = np.random.default_rng(rows)
    logits, picked = PathLogits(weights, rows), []
    for layer, width in enumerate(WIDTHS):
        picks = np.stack([rng.permutation(width)[:2] for _ in range(rows)])
        picks[rows - 1, 1] = 255  # a row may have fewer picks
        picked.append(picks)
        logits.add(layer, picks.astype(np.uint8))
        for ahead in range(1, LAYERS_AHEAD + 1):
            target = layer + ahead
            if target >= LAYERS:
                continue
            first = int(POOL.first[target])
            for row in range(rows):
                expected = file.bias[ahead - 1, first : first + WIDTHS[target]].astype(np.float64)
                for source in range(max(0, layer - window + 1), layer + 1):
                    for pick in picked[source][row].tolist():
                        if pick < WIDTHS[source]:
                            expected += [single[source, pick, ahead, target, other] for other in range(WIDTHS[target])]
                assert logits.of(target, ahead)[row].tolist() == pytest.approx(expected.tolist(), abs=1e-4)


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
