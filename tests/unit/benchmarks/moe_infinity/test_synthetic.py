"""Synthetic routing: its shape, and that its quantities mean what they say."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from benchmarks.moe_infinity.synthetic_routing import LEAST, MIXES, NLLB, SWITCH, Mix, Shape, trace_of
from benchmarks.moe_infinity.synthetic_routing import _picks as picks_of
from greenroom.policies.base.events import Phase

SMALL = Shape("small-16", layers=4, experts=16, top_k=2, decoder_start=2)
MIX = Mix(
    tasks=5, spread=None, breadth=4.0, focus=2.0, locality=0.0, prompt_tokens=20, output_tokens=12, at_once=2
)  # fmt: skip


@pytest.mark.parametrize("shape", [SWITCH, NLLB, SWITCH.wide(256), SMALL.wide(8)])
def test_prompts_pick_in_the_encoder_and_answers_in_the_decoder(shape: Shape) -> None:
    trace = trace_of(shape, MIXES.get(shape.name, MIX), 6, seed=1)
    assert trace.phase is not None
    assert (trace.layers, trace.sequences, trace.decoder_start) == (shape.layers, 6, shape.decoder_start)
    picked = trace.experts < shape.experts
    encoded = trace.phase == Phase.ENCODE
    assert picked[encoded][:, : shape.decoder_start].all()
    assert not picked[encoded][:, shape.decoder_start :].any()
    assert picked[~encoded][:, shape.decoder_start :].all()
    assert not picked[~encoded][:, : shape.decoder_start].any()
    for begin, end in zip(trace.seq_starts[:-1], trace.seq_starts[1:], strict=True):
        own = trace.phase[begin:end].tolist()
        assert own == sorted(own, key=lambda phase: phase != Phase.ENCODE), "a prompt comes first"
        assert {Phase.ENCODE, Phase.DECODE} == set(own)


def test_a_seed_is_a_world_whose_tasks_do_not_depend_on_its_sequences() -> None:
    one, again = trace_of(SMALL, MIX, 30, seed=3), trace_of(SMALL, MIX, 30, seed=3)
    assert np.array_equal(one.experts, again.experts)
    assert one.task == again.task
    later = trace_of(SMALL, MIX, 400, seed=3, tasks=[1])
    assert set(later.task or ()) == {"task 1"}
    many = trace_of(SMALL, MIX, 2000, seed=3)
    tasks = np.array(many.task)[np.repeat(np.arange(2000), np.diff(many.seq_starts))]
    assert _apart(_shares(later.experts), _shares(many.experts[tasks == "task 1"])) < 0.15
    assert _apart(_shares(later.experts), _shares(many.experts[tasks == "task 2"])) > 0.3


def test_few_experts_serve_a_sequence_more_a_task_and_all_of_them_everything() -> None:
    mix = replace(MIX, tasks=40, breadth=4.0, focus=1.0, prompt_tokens=100)
    experts = trace_of(SMALL, mix, 200, seed=1).experts
    one = trace_of(SMALL, mix, 1, seed=1).experts
    task = trace_of(SMALL, mix, 200, seed=1, tasks=[0]).experts
    assert _effective(one) < 0.7 * _effective(task) < 0.7 * 0.7 * _effective(experts)
    assert _effective(experts) > 14
    skewed = trace_of(SMALL, replace(mix, spread=3.0), 200, seed=1).experts
    assert _effective(skewed) < 8


def test_locality_is_how_often_a_pick_stays() -> None:
    even = np.full((3, 64), 1 / 64)
    random = np.random.default_rng(0)
    for locality in (0.0, 0.7):
        picks = picks_of(random, even, 4000, 1, locality)
        stays = (picks[1:] == picks[:-1]).mean()
        assert stays == pytest.approx(locality + (1 - locality) / 64, abs=0.03)


def test_the_second_pick_is_of_what_the_first_one_left() -> None:
    shares = np.array([[0.6, 0.3, 0.1, 0.0]])
    picks = picks_of(np.random.default_rng(1), shares, 60_000, 2, 0.0)[:, 0]
    assert (picks[:, 0] != picks[:, 1]).all()
    first = np.bincount(picks[:, 0], minlength=4) / len(picks)
    assert first == pytest.approx(shares[0], abs=0.01)
    behind = picks[picks[:, 0] == 0, 1]
    assert np.bincount(behind, minlength=4) / len(behind) == pytest.approx([0, 0.75, 0.25, 0], abs=0.01)
    certain = np.array([[1.0, 0.0, 0.0, 0.0]])
    alone = picks_of(np.random.default_rng(1), certain, 1000, 2, 0.0)[:, 0]
    assert (alone[:, 0] == 0).mean() > 1 - 100 * LEAST
    assert (alone[:, 0] != alone[:, 1]).all()


def _shares(experts: np.ndarray[tuple[int, ...], np.dtype[np.integer]]) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """Of the first decoder layer's picks."""
    picks = experts[:, SMALL.decoder_start].ravel()
    counts = np.bincount(picks[picks < SMALL.experts], minlength=SMALL.experts)
    shares: np.ndarray[tuple[int], np.dtype[np.float64]] = counts / counts.sum()
    return shares


def _apart(
    one: np.ndarray[tuple[int], np.dtype[np.float64]], other: np.ndarray[tuple[int], np.dtype[np.float64]]
) -> float:
    return float(np.abs(one - other).sum() / 2)


def _effective(experts: np.ndarray[tuple[int, ...], np.dtype[np.integer]]) -> float:
    """How many experts share the tokens: the exponential of the entropy."""
    shares = _shares(experts)
    shares = shares[shares > 0]
    return float(np.exp(-(shares * np.log(shares)).sum()))
