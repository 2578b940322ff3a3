"""Maps from the residual stream: what they learn, their file, and their answers in the routers' place."""

from __future__ import annotations

import tracemalloc
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from greenroom.core.artifacts.residual_file import LayerMaps, ResidualFile, ResidualForm
from greenroom.core.errors import InvalidConfig
from greenroom.moe.kernels.expert_hooks import ModelHooks
from greenroom.moe.routing.residual_fit import FitOptions, fit
from greenroom.moe.routing.residual_maps import ResidualMaps, check_fits
from greenroom.moe.routing.row_recorder import RowRecorder, recording
from greenroom.policies.base.events import Phase, Step
from greenroom.policies.base.expert_keys import Catalogue
from greenroom.replay import RoutingTrace

LAYERS, HIDDEN = 4, 8
EXPERTS = (4, 6, 5, 4)


def file_of(form: ResidualForm, *, seed: int = 0) -> ResidualFile:
    """Random maps."""
    random, maps = np.random.default_rng(seed), []
    for layer in range(LAYERS - 1):
        width = sum(EXPERTS[target] for target in form.targets(layer, LAYERS))
        inner = form.rank or form.hidden
        down = random.normal(size=(form.hidden, form.rank)).astype(np.float16) if form.rank else None
        up, bias = random.normal(size=(inner, width)).astype(np.float16), random.normal(size=width)
        offset = random.normal(size=form.rank).astype(np.float32)
        maps.append(LayerMaps(down, offset, up, bias.astype(np.float32)))
    return ResidualFile.of_layers(form, maps, model="m", experts_per_layer=EXPERTS, sequences=3)


FORMS = [ResidualForm(HIDDEN, 0, 2, False), ResidualForm(HIDDEN, 3, 2, False), ResidualForm(HIDDEN, 3, 3, True)]


@pytest.mark.parametrize("form", FORMS)
def test_logits_are_those_of_the_plain_formula_before_and_after_the_file(form: ResidualForm, tmp_path: Path) -> None:
    made = file_of(form)
    made.write(tmp_path / "r.safetensors")
    maps = ResidualMaps(ResidualFile.read(tmp_path / "r.safetensors"), dtype=torch.float32)
    rows = np.random.default_rng(1).normal(size=(5, HIDDEN)).astype(np.float32)
    for layer, one in enumerate(made.layers):
        inner = rows if one.down is None else rows @ one.down.astype(np.float32) + one.offset
        if form.silu:
            inner = inner / (1 + np.exp(-inner))
        expected = inner @ one.up.astype(np.float32) + one.bias
        targets, column = maps.targets(layer), 0
        assert targets == range(layer + 1, min(layer + 1 + form.ahead, LAYERS))
        whole = maps.logits(layer, targets.start, targets.stop, torch.from_numpy(rows))
        np.testing.assert_allclose(whole.numpy(), expected, rtol=1e-4, atol=1e-4)
        for target in targets:
            own = maps.logits(layer, target, target + 1, torch.from_numpy(rows)).numpy()
            np.testing.assert_allclose(own, expected[:, column : column + EXPERTS[target]], rtol=1e-4, atol=1e-4)
            column += EXPERTS[target]


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("form", np.array([HIDDEN, 3, 2], dtype=np.uint16)),
        ("form", np.array([HIDDEN, 3, LAYERS, 0], dtype=np.uint16)),
        ("form", np.array([HIDDEN, 0, 2, 1], dtype=np.uint16)),
        ("down", np.zeros(7, dtype=np.float16)),
        ("offset", np.zeros(9, dtype=np.float64)),
        ("up", np.full(3 * (4 + 11 + 9 + 0), np.nan, dtype=np.float16)),
        ("bias", np.zeros(3, dtype=np.float32)),
    ],
)
def test_what_is_no_such_file_is_refused_by_name(name: str, wrong: np.ndarray) -> None:
    with pytest.raises(InvalidConfig, match=name):
        replace(file_of(FORMS[1]), **{name: wrong})  # type: ignore[arg-type]
    # As large as it should be, and still not numbers.
    array = file_of(FORMS[1]).arrays["up"].copy()
    array[0] = np.inf
    with pytest.raises(InvalidConfig, match="finite"):
        replace(file_of(FORMS[1]), up=array)


def test_a_file_of_another_model_is_refused() -> None:
    made = file_of(FORMS[0])
    check_fits(made, "r", EXPERTS, HIDDEN)
    with pytest.raises(InvalidConfig, match="one of this model, 4 layers with 19 experts"):
        check_fits(made, "r", EXPERTS, 2 * HIDDEN)
    with pytest.raises(InvalidConfig, match="one of this model"):
        check_fits(made, "r", EXPERTS[:-1], HIDDEN)


def recorded(tokens: int = 1200, *, seed: int = 0) -> tuple[RoutingTrace, np.ndarray]:
    """Rows that turn from layer to layer, in a way that no router run ahead knows of; top-1 of what they point at."""
    random = np.random.default_rng(7)
    turns = [np.linalg.qr(random.normal(size=(HIDDEN, HIDDEN)))[0] for _ in range(LAYERS)]
    rows = [np.random.default_rng(seed).normal(size=(tokens, HIDDEN))]
    for turn in turns[1:]:
        rows.append(rows[-1] @ turn)
    picks = np.stack([one[:, : EXPERTS[layer]].argmax(axis=1) for layer, one in enumerate(rows)], axis=1)
    trace = RoutingTrace(
        picks[..., None].astype(np.uint8), np.arange(0, tokens + 1, 20), np.array(EXPERTS), model="turning",
        phase=np.tile(np.array([Phase.PREFILL] * 5 + [Phase.DECODE] * 15, np.uint8), tokens // 20),
    )  # fmt: skip
    return trace, np.stack(rows, axis=1).astype(np.float16)


@pytest.mark.parametrize(("rank", "silu"), [(0, False), (8, True)])
def test_what_rows_say_of_later_picks_is_learnt_however_layers_turn_them(rank: int, silu: bool) -> None:
    trace, rows = recorded()
    made = fit(trace, rows * 100 + 30, FitOptions(rank=rank, silu=silu, ahead=2, steps=400, batch=128))
    assert made.of == ResidualForm(HIDDEN, rank, 2, silu)
    assert (made.sequences, made.report["held_out_tokens"]) == (60, 120)
    one, two = made.report["held_out_recall"]
    assert min(one, two) > 0.8
    later, seen = recorded(200, seed=5)
    maps, right = ResidualMaps(made, dtype=torch.float32), []
    for layer in range(LAYERS - 1):
        for target in maps.targets(layer):
            given = torch.from_numpy(seen[:, layer].astype(np.float32) * 100 + 30)
            found = maps.logits(layer, target, target + 1, given).numpy()
            right.append((found.argmax(axis=1) == later.experts[:, target, 0]).mean())
    assert np.mean(right) > 0.8


def test_too_little_to_learn_from_is_said() -> None:
    trace, rows = recorded(400)
    with pytest.raises(
        InvalidConfig, match=r"'360 tokens to learn from'.* 40 tokens of 2 of 20 sequences held out: give more"
    ):
        fit(trace, rows)


class Engine:
    """What ``recording`` needs of one."""

    listener: Any = None

    def step(self, *_: Any) -> Any:
        raise AssertionError("not called")

    layer_entered = allowed_experts = rerouted = routed = resident_addresses = layer_ran = step


def test_rows_are_kept_in_the_order_of_the_trace_and_only_as_many_as_there_is_memory_for() -> None:
    pool = Catalogue.uniform("p", layers=2, experts=4, top_k=1)
    one_step = 2 * 2 * HIDDEN * 2  # two rows, two layers, half floats
    recorder, hooks, engine = RowRecorder(pool, most_bytes=2 * one_step), ModelHooks(), Engine()
    hooks.source = source = engine
    with recording(hooks, engine, recorder):
        assert engine.listener is hooks.look_ahead is recorder
        assert not hasattr(hooks.source, "resident_addresses"), "no layer runs without telling of its rows"
        for number, failed in enumerate([False, True, False, False]):
            step = Step("p", number, np.array([5, 3]), np.array([Phase.DECODE] * 2, dtype=np.uint8))
            for layer in range(2):
                recorder.layer_routed(step, layer, np.array([[number], [number]]))
                recorder(layer, torch.full((2, HIDDEN), 10.0 * number + layer))
            recorder.step_ended(step, failed=failed)
    assert hooks.source is source
    assert hooks.look_ahead is engine.listener is None
    trace, rows = recorder.trace(), recorder.rows()
    assert recorder.is_full, "the last step was too much"
    assert trace.experts[:, 0, 0].tolist() == [0, 2, 0, 2]
    assert rows.shape == (4, 2, HIDDEN)
    assert rows[:, :, 0].tolist() == [[0, 1], [20, 21], [0, 1], [20, 21]]


def test_numbers_beyond_half_precision_are_kept_as_the_largest_of_it() -> None:
    pool = Catalogue.uniform("p", layers=1, experts=4, top_k=1)
    recorder, step = RowRecorder(pool), Step("p", 0, np.arange(1), np.zeros(1, dtype=np.uint8))
    recorder.layer_routed(step, 0, np.zeros((1, 1), dtype=np.int64))
    recorder(0, torch.tensor([[1e6, -torch.inf, torch.nan, 1.5]]))
    recorder.step_ended(step, failed=False)
    assert recorder.rows()[0, 0].tolist() == [65504, -65504, 0, 1.5]


def test_rows_are_in_memory_once_when_they_are_handed_over() -> None:
    pool, hidden, steps, rows = Catalogue.uniform("p", layers=2, experts=4, top_k=1), 256, 40, 64
    recorder = RowRecorder(pool)
    whole = steps * rows * 2 * hidden * 2
    tracemalloc.start()
    try:
        for number in range(steps):
            step = Step("p", number, np.arange(rows), np.full(rows, Phase.DECODE, dtype=np.uint8))
            for layer in range(2):
                recorder.layer_routed(step, layer, np.zeros((rows, 1), dtype=np.int64))
                recorder(layer, torch.full((rows, hidden), float(number)))
            recorder.step_ended(step, failed=False)
        tracemalloc.reset_peak()
        found = recorder.rows()
        held, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert found[:, 1, 7].tolist() == list(range(steps)) * rows
    assert held < 1.2 * whole, "what was recorded is not kept beside it"
    assert peak < 2.2 * whole
