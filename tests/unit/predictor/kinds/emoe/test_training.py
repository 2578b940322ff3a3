"""What can be learnt is learnt, and the same seed learns the same."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from greenroom.core.artifacts.forecast_kinds import EMOE_A, EMOE_L
from greenroom.predictor.judging.scores import score
from greenroom.predictor.kinds.config import BACKBONES
from greenroom.predictor.kinds.emoe.artifact import dump_learned, load_learned
from greenroom.predictor.kinds.emoe.config import EMOE_KINDS, TrainingConfig
from greenroom.predictor.kinds.emoe.priors import priors_of, tasks_of
from greenroom.predictor.kinds.emoe.sequences import Sequences
from greenroom.predictor.kinds.emoe.training import TooFewSequences, measure, split, train
from tests.unit.predictor.kinds.emoe.worlds import random_sequences, topics

QUICK: dict[str, Any] = {"width": 32, "depth": 1, "learning_rate": 5e-3}


def usual(sequences: Sequences, places: npt.NDArray[np.int64]) -> float:
    """How often popularity by task is right."""
    train = split(sequences, TrainingConfig()).train
    trained = Sequences(sequences.tasks[:train], sequences.counts[:train])
    priors = priors_of(trained, tasks_of(trained))
    numbers = [priors.number(sequences.tasks[place]) for place in places]
    return score(priors.by_slot[numbers], sequences.counts[places]).accuracy


@pytest.mark.parametrize("kind", EMOE_KINDS)
@pytest.mark.parametrize("backbone", BACKBONES)
def test_what_follows_from_the_previous_prompt_is_learnt(kind: str, backbone: str) -> None:
    sequences = topics(120)
    config = TrainingConfig(kind=kind, backbone=backbone, epochs=30, **QUICK)
    threads = torch.get_num_threads()
    artifact = train(sequences, config)
    places = np.arange(96, 120)
    learned = measure(artifact, sequences, places)
    assert usual(sequences, places) < 0.4
    assert learned.accuracy > 0.8
    assert learned.overlap > 0.75
    assert artifact.report["accuracy"] == pytest.approx(learned.accuracy)
    assert artifact.report["test_sequences"] == 24
    assert artifact.sequences == 96
    assert torch.get_num_threads() == threads


@pytest.mark.parametrize("kind", EMOE_KINDS)
def test_where_there_is_nothing_to_learn_it_says_what_is_usual(kind: str) -> None:
    sequences = random_sequences(80, seed=3)
    artifact = train(sequences, TrainingConfig(kind=kind, **QUICK))
    places = np.arange(64, 80)
    assert measure(artifact, sequences, places).accuracy > usual(sequences, places) - 0.05


def test_the_same_seed_learns_the_same() -> None:
    sequences = topics(40)
    made = [
        dump_learned(train(sequences, TrainingConfig(kind=EMOE_L, seed=seed, epochs=2, **QUICK)).as_version(1, 1))
        for seed in (4, 4, 5)
    ]
    first, again, other = (load_learned(one) for one in made)
    for name, array in first.weights.items():
        np.testing.assert_array_equal(array, again.weights[name])
    assert any((array != other.weights[name]).any() for name, array in first.weights.items())


def test_what_it_is_measured_on_it_has_not_seen() -> None:
    sequences = topics(40)
    counts = sequences.counts.copy()
    counts[32:] = counts[32:, :, :, ::-1]
    config = TrainingConfig(kind=EMOE_A, epochs=2, **QUICK)
    one, other = train(sequences, config), train(Sequences(sequences.tasks, counts), config)
    for name, array in one.weights.items():
        np.testing.assert_array_equal(array, other.weights[name])
    np.testing.assert_array_equal(one.priors.by_slot, other.priors.by_slot)
    assert one.report["accuracy"] != other.report["accuracy"]


def test_it_stops_when_it_gains_nothing_more() -> None:
    losses: list[float] = []
    config = TrainingConfig(epochs=500, patience=3, **QUICK)
    artifact = train(random_sequences(30), config, on_epoch=lambda epoch, loss: losses.append(loss))
    assert artifact.report["epochs"] == len(losses) < 500
    assert min(losses[-3:]) >= min(losses[:-3], default=np.inf) or len(losses) == 3


def test_too_few_are_refused() -> None:
    with pytest.raises(TooFewSequences, match="at least 10"):
        train(random_sequences(9), TrainingConfig())
    assert split(random_sequences(10), TrainingConfig()).fit > 0


def test_slots_and_layers_without_a_pick_do_no_harm() -> None:
    sequences = random_sequences(20)
    sequences.counts[:, 0, 1] = 0
    sequences.counts[3, 2] = 0
    artifact = train(sequences, TrainingConfig(kind=EMOE_L, epochs=2, **QUICK))
    assert all(np.isfinite(one).all() for one in artifact.weights.values())
    assert np.isfinite(artifact.report["overlap"])


def test_the_report_compares_it_on_the_same_prompts() -> None:
    """With popularity by task type, and with what is served where that is of the same shape."""
    sequences = topics(40)
    config = TrainingConfig(epochs=2, **QUICK)
    first = train(sequences, config)
    again = train(sequences, config, served=first)
    assert "served_overlap" not in first.report
    assert again.report["served_overlap"] == pytest.approx(first.report["overlap"])
    assert again.report["overlap"] == first.report["overlap"]
    trained = Sequences(sequences.tasks[:32], sequences.counts[:32])
    priors = priors_of(trained, tasks_of(trained))
    numbers = [priors.number(task) for task in sequences.tasks[32:]]
    expected = score(priors.by_slot[numbers], sequences.counts[32:]).overlap
    assert first.report["popularity_overlap"] == pytest.approx(expected)
    assert "served_overlap" not in train(topics(40, layers=4), config, served=first).report
