"""What is observed of a trace: right on made-up routing whose correlations are known, and beside what order makes."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from greenroom.core.errors import InvalidConfig
from greenroom.core.pictures import PlotUnavailable
from greenroom.profiling.measures.correlation import (
    between_layers,
    between_prompts,
    correlation_of_all,
    observe,
    picks_by_prompt,
    transitions_by_task,
)
from greenroom.profiling.reports import correlation_plots
from greenroom.replay.traces.routing_trace import RoutingTrace
from tests.examples import examples
from tests.real_data import real_data

EXPERTS = 8


def trace_of(
    experts: NDArray[np.uint8],
    lengths: list[int],
    *,
    arrival: list[float] | None = None,
    tasks: list[str] | None = None,
) -> RoutingTrace:
    return RoutingTrace(
        experts,
        np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
        EXPERTS,
        arrival=None if arrival is None else np.array(arrival),
        task=None if tasks is None else tuple(tasks),
    )


def routing(seed: int, prompts: int, layers: int = 3, k: int = 2, tokens: int = 10) -> NDArray[np.uint8]:
    """[prompts * tokens, layers, k], independent of everything."""
    choose = np.random.default_rng(seed)
    return choose.random((prompts * tokens, layers, EXPERTS)).argsort(axis=2)[:, :, :k].astype(np.uint8)


def test_picks_are_counted_by_prompt_and_expert() -> None:
    none = 255
    experts = np.array([[[0, 1], [2, none]], [[0, 2], [none, none]], [[7, 0], [1, 2]]], dtype=np.uint8)
    counts = picks_by_prompt(trace_of(experts, [2, 0, 1]))
    assert counts.shape == (3, 2, EXPERTS)
    assert counts[0].tolist() == [[2, 1, 1, 0, 0, 0, 0, 0], [0, 0, 1, 0, 0, 0, 0, 0]]
    assert not counts[1].any()
    assert counts[2].tolist() == [[1, 0, 0, 0, 0, 0, 0, 1], [0, 1, 1, 0, 0, 0, 0, 0]]


def test_a_transition_is_a_pair_of_picks_of_one_token() -> None:
    experts = np.array([[[0, 1], [2, 3]], [[0, 4], [2, 255]], [[5, 6], [7, 0]]], dtype=np.uint8)
    found = transitions_by_task(trace_of(experts, [2, 1]), ["a", "b"])
    assert list(found) == ["a", "b"], "those with the most tokens first"
    assert {(a, b): found["a"][0, a, b] for a, b in np.argwhere(found["a"][0]).tolist()} == {
        (0, 2): 2, (0, 3): 1, (1, 2): 1, (1, 3): 1, (4, 2): 1,
    }  # fmt: skip
    assert found["b"].sum() == 4
    assert transitions_by_task(trace_of(experts, [2, 1]), None)["all"].sum() == 10


@given(st.integers(0, 2**32 - 1), st.integers(2, 6), st.integers(1, 4))
def test_between_prompts_it_is_the_mean_of_pearsons_coefficients(seed: int, prompts: int, layers: int) -> None:
    counts = np.random.default_rng(seed).integers(0, 6, (prompts, layers, EXPERTS)).astype(np.float64)
    counts[0, 0] = 3  # alike for all experts: correlates with nothing
    found = correlation_of_all(counts)
    for one in range(prompts):
        for other in range(prompts):
            pairs = [(counts[one, layer], counts[other, layer]) for layer in range(layers)]
            expected = [0.0 if a.std() == 0 or b.std() == 0 else np.corrcoef(a, b)[0, 1] for a, b in pairs]
            assert found[one, other] == pytest.approx(np.mean(expected), abs=1e-9)


@settings(max_examples=examples(25))
@given(st.integers(0, 2**32 - 1))
def test_the_numbers_of_experts_make_no_difference_but_where_it_says_so(seed: int) -> None:
    experts = routing(seed, prompts=4)
    choose = np.random.default_rng(seed)
    renumbered = np.stack([choose.permutation(EXPERTS)[experts[:, layer]] for layer in range(3)], axis=1)
    one, other = (trace_of(picks.astype(np.uint8), [10] * 4) for picks in (experts, renumbered))
    assert between_layers(one).by_follower == pytest.approx(between_layers(other).by_follower)
    before, after = between_prompts(one), between_prompts(other)
    assert before is not None
    assert after is not None
    assert before.consecutive == pytest.approx(after.consecutive)
    assert before.shuffled == pytest.approx(after.shuffled)


def test_a_layer_that_follows_from_the_one_before_correlates_fully_whatever_its_numbers() -> None:
    first = routing(1, prompts=20, layers=1, k=1)
    second = np.random.default_rng(0).permutation(EXPERTS)[first].astype(np.uint8)
    found = between_layers(trace_of(np.concatenate([first, second], axis=1), [10] * 20))
    assert found.by_follower == pytest.approx([1.0])
    assert found.followers_shuffled[0] < 0.3
    same = between_layers(trace_of(np.concatenate([first, first], axis=1), [10] * 20))
    assert same.by_number == pytest.approx([1.0])
    assert same.numbers_high[0] < 0.5


def test_independent_picks_correlate_as_shuffled_ones_do() -> None:
    trace = trace_of(routing(2, prompts=200), [10] * 200)
    layers, prompts = between_layers(trace), between_prompts(trace)
    assert layers.by_follower == pytest.approx(layers.followers_shuffled, abs=0.05)
    assert (np.abs(layers.by_number) < 0.1).all()
    assert prompts is not None
    assert prompts.mean == pytest.approx(np.full(20, prompts.shuffled), abs=0.05)
    assert prompts.shuffled_low <= prompts.shuffled <= prompts.shuffled_high


def test_prompts_that_drift_are_alike_when_they_are_near() -> None:
    """Fig. 9: by how far prompts are apart, in the order of their arrival, not of the file."""
    prompts = 40
    place = (np.arange(prompts)[:, None] // 10 + np.arange(2)) % EXPERTS  # ten in a row use the same two experts
    by_arrival = np.repeat(np.broadcast_to(place[:, None], (prompts, 3, 2)), 5, axis=0).astype(np.uint8)
    order = np.random.default_rng(3).permutation(prompts)
    shuffled = by_arrival.reshape(prompts, 5, 3, 2)[order].reshape(-1, 3, 2)
    found = between_prompts(trace_of(shuffled, [5] * prompts, arrival=order.tolist()))
    assert found is not None
    assert found.consecutive[:9] == pytest.approx(np.ones(9))
    assert found.mean[0] > found.mean[4] > found.mean[9]
    assert found.mean[0] > found.shuffled_high
    assert np.isnan(found.other_task).all()


def test_prompts_of_one_task_are_told_from_those_of_two() -> None:
    place = np.arange(60) % 3
    experts = np.broadcast_to((place * 2)[:, None, None] + np.arange(2), (60, 3, 2)).astype(np.uint8)
    found = between_prompts(trace_of(experts, [1] * 60), ["abc"[number] for number in place])
    assert found is not None
    assert found.of_one_task == pytest.approx(1.0)
    assert found.of_two_tasks < 0
    assert found.same_task[2] == pytest.approx(1.0)
    assert np.isnan(found.same_task[0])
    assert found.other_task[0] < 0


def test_all_is_drawn_and_said(tmp_path: Path) -> None:
    trace = trace_of(routing(4, prompts=12), [10] * 12, tasks=["one", "two"] * 6)
    observed = observe(trace)
    correlation_plots.draw(observed, tmp_path)
    names = {correlation_plots.TRANSITIONS, correlation_plots.LAYERS, correlation_plots.PROMPTS, correlation_plots.LAGS}
    assert {path.name for path in tmp_path.iterdir()} == names
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in tmp_path.iterdir())
    report = json.loads(json.dumps(observed.report(), allow_nan=False))
    assert len(report["consecutive_layers"]["by_follower"]) == 2
    assert len(report["consecutive_prompts"]["by_lag"]) == 11
    assert set(observed.transitions) == {"one", "two"}
    assert observe(trace).report() == observed.report(), "the same again"


@pytest.mark.parametrize(("lengths", "layers"), [([5], 1), ([1], 2), ([0, 3, 0], 2), ([0], 2), ([2, 2], 1)])
def test_what_is_too_little_is_left_out(lengths: list[int], layers: int) -> None:
    trace = trace_of(routing(5, prompts=1, layers=layers, tokens=sum(lengths)), lengths)
    observed = observe(trace)
    assert (observed.prompts is None) == (sum(length > 0 for length in lengths) < 2)
    assert (observed.layers is None) == (layers < 2 or sum(lengths) < 2)
    assert bool(observed.transitions) == (layers > 1 and sum(lengths) > 0)
    json.dumps(observed.report(), allow_nan=False)


def test_where_there_is_nothing_to_see_nothing_is_drawn(tmp_path: Path) -> None:
    correlation_plots.draw(observe(trace_of(routing(5, prompts=1, layers=1), [10])), tmp_path)
    assert not list(tmp_path.iterdir())


def test_tasks_are_those_of_the_sequences(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfig, match="each of the 2 sequences"):
        observe(trace_of(routing(6, prompts=2), [10, 10]), tasks=["one"])
    assert set(observe(trace_of(routing(6, prompts=2), [10, 10], tasks=["", ""])).transitions) == {"all"}
    with pytest.raises(PlotUnavailable, match="absent"):
        correlation_plots.draw(observe(trace_of(routing(6, prompts=2), [10, 10])), tmp_path / "absent")


def test_a_real_model_has_what_the_paper_saw() -> None:
    path = real_data("routing/gpt-oss-20b.npz")
    lines = path.with_suffix(".meta.jsonl").read_text().splitlines()
    found = observe(RoutingTrace.load(path), tasks=[json.loads(line)["category"] for line in lines])
    assert found.layers is not None
    assert found.prompts is not None
    assert 0.4 <= found.layers.by_follower.mean() <= 0.6, "Fig. 7: around 0.5"
    assert found.layers.followers_shuffled.max() < 0.02
    assert 0.4 <= found.prompts.mean[0] <= 0.6, "Fig. 8: 0.4 to 0.6"
    assert found.prompts.mean[0] > found.prompts.shuffled_high
    assert found.prompts.of_one_task > found.prompts.of_two_tasks + 0.2
