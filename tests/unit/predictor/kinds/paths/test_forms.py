"""Which form is fitted, and which of two is taken."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest

from greenroom.core.artifacts.paths_file import PathsFile
from greenroom.core.artifacts.reuse_file import ReuseFile
from greenroom.policies.expertflow.paths_of_file import paths_of_file
from greenroom.policies.expertflow.t5_paths import T5Paths
from greenroom.predictor.kinds.config import BEST
from greenroom.predictor.kinds.paths.fit import FitOptions
from greenroom.predictor.kinds.paths.forms import better, fit_form
from greenroom.predictor.kinds.paths.t5_training import T5Options
from greenroom.replay.traces.trace_file import TraceError
from tests.random_t5 import SMALL, random_t5
from tests.routed_by_tokens import EXPERTS, LAYERS, drawn, ids_of, routed

KEEP = np.array([0.5, 0.8, 0.92, 0.97, 0.99], dtype=np.float32)
REUSE = ReuseFile(
    model="", experts_per_layer=(EXPERTS,) * LAYERS, sequences=1, keep=KEEP,
    weights=np.full((LAYERS, len(KEEP) + 1), 0.2, dtype=np.float32),
    bias=np.zeros(LAYERS * EXPERTS, dtype=np.float32), followers=np.zeros(0, dtype=np.float32),
)  # fmt: skip
NETWORK = T5Options(shape=SMALL, epochs=1, piece=12)
OPTIONS = FitOptions(held_out=0.2, seed=3)


def foreseeing(**recall: float) -> PathsFile:
    return replace(random_t5(), report={"recall": recall})


def test_the_one_that_foresees_more_by_all_that_it_may_be_told_is_better() -> None:
    first, second = foreseeing(tokens=0.7, past=0.72, picks=0.8), foreseeing(alone=0.6, past=0.79)
    found = better(first, second)
    assert found.report["recall"]["picks"] == 0.8
    assert found.report["other"] == "t5"
    assert found.report["other_recall"] == second.report["recall"]
    assert better(second, first).report["recall"]["picks"] == 0.8
    assert better(second, replace(first, sequences=2)).sequences == 2
    equal = replace(second, sequences=7)
    assert better(equal, second).sequences == 7


def test_each_form_is_fitted_to_the_same_sequences_and_the_best_is_one_of_them() -> None:
    tokens, prompts = drawn(50)
    trace = routed(tokens, prompts)
    shares: dict[str, list[float]] = {}
    made: Mapping[str, PathsFile] = {
        form: fit_form(
            form, trace, REUSE, OPTIONS, prompts=ids_of(prompts), network=NETWORK,
            on_share=shares.setdefault(form, []).append,
        )
        for form in ("tables", "t5", BEST)
    }  # fmt: skip
    assert {form: made[form].form for form in ("tables", "t5")} == {"tables": "tables", "t5": "t5"}
    recall = {form: max(made[form].report["recall"].values()) for form in made}
    assert recall[BEST] == max(recall.values())
    assert made[BEST].report["other"] != made[BEST].form
    assert made["tables"].report["held_out_tokens"] == made["t5"].report["held_out_tokens"]
    for form in shares:
        assert shares[form] == sorted(shares[form])
        assert shares[form][-1] == pytest.approx(1)
    paths = paths_of_file(PathsFile.parse(made["t5"].dump()), trace.catalogue())
    assert isinstance(paths, T5Paths)
    assert paths.chances(np.array([1]), np.array([0]), np.array([100])).shape == (1, LAYERS * EXPERTS)


def test_ids_beyond_the_vocabulary_are_refused_by_each_form() -> None:
    trace = routed(*drawn(50))
    for form in ("tables", "t5", BEST):
        with pytest.raises(TraceError, match="vocabulary"):
            fit_form(form, trace, REUSE, replace(OPTIONS, vocabulary=110), network=NETWORK)
