"""ExpertMLP beside the running model: what it is told, when it answers, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from greenroom.core.artifacts.expert_mlp_file import ExpertMlpFile
from greenroom.core.errors import InvalidConfig
from greenroom.moe.routing.expert_mlp import ExpertMlpProvider
from greenroom.policies.base.artifacts import artifact_of
from greenroom.policies.base.events import Artifact, LayerRouting, Phase, Prediction, PredictionRequest
from greenroom.policies.base.expert_keys import Catalogue
from greenroom.policies.duoserve.literal import EXPERT_MLP
from greenroom.predictor.kinds.expert_mlp.network import ExpertMlpPredictor
from tests.contract.prepared_policies import mlp_file
from tests.unit.experts.fake_accelerator import FakeAccelerator
from tests.unit.policies.bench import step_of

WIDTHS, K = (5, 3, 6, 4), 2
POOL = Catalogue("p", experts_per_layer=WIDTHS, top_k=[2, 2, 1, 2], expert_bytes=[1] * 4)
FILE = mlp_file(WIDTHS, K)
PICKS = np.array([[[4, 0], [2, 1], [5, 9], [0, 3]], [[1, 2], [0, 3], [1, 9], [2, 1]]])
"""Of two rows ``[T, L, k]``; 9 is none, and so is 3 of the second layer."""


def provider(file: ExpertMlpFile = FILE, accelerator: FakeAccelerator | None = None) -> ExpertMlpProvider:
    made = ExpertMlpProvider(POOL, accelerator)
    made.on_artifact_swapped(artifact_of(POOL, file, "a file"))
    return made


def routed(of: ExpertMlpProvider, layer: int, picks: NDArray[np.int64] | None = None) -> PredictionRequest:
    """The layer is routed. Returns the question about the next one."""
    step = step_of(*range(len(PICKS)))
    own = PICKS[:, layer, : int(POOL.top_k[layer])] if picks is None else picks
    of.on_layer_routed(LayerRouting.from_picks(POOL, step, layer, own))
    return PredictionRequest(EXPERT_MLP, (layer + 1, layer + 2), step=0)


def expected(layer: int, file: ExpertMlpFile = FILE) -> NDArray[np.float32]:
    known = np.where(np.array(WIDTHS)[:, None] > PICKS, PICKS, max(WIDTHS))
    return ExpertMlpPredictor(file).logits(known, layer)


@pytest.mark.parametrize("many", [False, True])
def test_it_is_told_what_the_network_was_trained_on(many: bool) -> None:
    file = mlp_file(WIDTHS, K, many_hot=many)
    asked = provider(file)
    asked.on_step_started(step_of(0, 1))
    for layer in range(POOL.layers - 1):
        found = asked.answer(routed(asked, layer))
        assert found is not None
        assert found.values.shape == (2, WIDTHS[layer + 1])
        assert np.array_equal(found.values, expected(layer + 1, file)), "and of no later layer, nor of an earlier step"
    asked.on_step_started(step_of(0, 1))
    again = asked.answer(routed(asked, 0))
    assert again is not None
    assert np.array_equal(again.values, expected(1, file))


def test_prompts_and_rows_of_unknown_picks_get_no_answer() -> None:
    asked = provider()
    asked.on_step_started(step_of(0, 1, phase=Phase.PREFILL))
    assert asked.answer(routed(asked, 0)) is None

    asked.on_step_started(step_of(0, 1))
    routed(asked, 0, PICKS[:1, 0])
    assert asked.answer(routed(asked, 1)) is None, "not of this step"

    assert ExpertMlpProvider(POOL).answer(PredictionRequest(EXPERT_MLP, (1, 2))) is None


def test_another_version_counts_from_the_next_step_on() -> None:
    asked, newer = provider(), mlp_file(WIDTHS, K, seed=1)
    asked.on_step_started(step_of(0, 1))
    asked.on_artifact_swapped(asked.prepare(artifact_of(POOL, newer, "another")))
    for file in (FILE, newer):
        found = asked.answer(routed(asked, 0))
        assert found is not None
        assert found.version == str(file.version)
        assert np.array_equal(found.values, expected(1, file))
        asked.on_step_started(step_of(0, 1))


def test_a_device_computes_in_a_queue_of_its_own_and_is_not_waited_for() -> None:
    accelerator = FakeAccelerator()
    asked = provider(accelerator=accelerator)
    asked.on_step_started(step_of(0, 1))
    request = routed(asked, 0)

    assert asked.answer(request) is None
    assert asked.poll() is None
    accelerator.run("compute")
    accelerator.run("copy")
    assert asked.poll() is None, "neither the model's work nor a copy brings it"

    accelerator.run("prediction")
    found = asked.poll()
    assert isinstance(found, Prediction)
    assert found.request is request
    assert np.array_equal(found.values, expected(1))
    assert asked.poll() is None, "said once"
    assert not accelerator.waiting_threads


def test_a_new_question_replaces_one_without_an_answer() -> None:
    accelerator = FakeAccelerator()
    asked = provider(accelerator=accelerator)
    asked.on_step_started(step_of(0, 1))
    asked.answer(routed(asked, 0))
    request = routed(asked, 1)
    asked.answer(request)
    accelerator.run("prediction")

    found = asked.poll()

    assert found is not None
    assert found.request is request
    assert np.array_equal(found.values, expected(2))

    asked.answer(routed(asked, 2))
    asked.on_step_started(step_of(0, 1))
    accelerator.run("prediction")
    assert asked.poll() is None, "its step is over"


def test_networks_that_do_not_foresee_this_models_next_layer_are_refused_by_name() -> None:
    asked = ExpertMlpProvider(POOL)
    good = artifact_of(POOL, FILE, "good")
    nan, short = dict(good.arrays), dict(good.arrays)
    nan["weights"] = np.full_like(FILE.weights, np.nan)
    short["affinity"] = FILE.affinity[:, :-1]
    for artifact, why in (
        (Artifact(EXPERT_MLP, "3", nan), "weights: 'numbers that are none'"),
        (Artifact(EXPERT_MLP, "3", short), r"affinity: '\(3, 5, 6\) of float16'"),
        (Artifact(EXPERT_MLP, "3", {}), "expert_mlp: 'version 3' .*affinity, form, popularity, weights"),
        (artifact_of(POOL, mlp_file(WIDTHS, 3), "wide"), "expert_mlp: 'version 1: 1 layers ahead, top-3' .*top-2"),
        (artifact_of(POOL, mlp_file(WIDTHS, K, ahead=2), "far"), "2 layers ahead"),
    ):
        with pytest.raises(InvalidConfig, match=why):
            asked.prepare(artifact)
        asked.on_artifact_swapped(artifact)  # passed over
    with pytest.raises(InvalidConfig, match=r"expert_mlp: 'there: 3 layers × 5 experts'"):
        artifact_of(POOL, mlp_file((5, 5, 5), K), "there")
    asked.on_step_started(step_of(0, 1))
    assert asked.answer(routed(asked, 0)) is None
