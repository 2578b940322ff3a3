"""What the synthetic traces are held to is measured as it is said."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from click.testing import CliRunner

from benchmarks.moe_infinity import calibration
from benchmarks.moe_infinity.calibration import ACTIVATED, REUSED, TARGETS, hit_rates, misfit, search, sparsity
from benchmarks.moe_infinity.synthetic_routing import MIXES, NLLB, SWITCH
from greenroom.policies.base.events import Phase
from greenroom.replay import RoutingTrace

MET = {
    "best baseline": 32.0, "belady": 56.0, "lru": 3.0, "lfu": 32.0, "lfu-reset": 4.0, "neighbour-aware": 2.0,
    **{f"activated {batch}": share for batch, share in ACTIVATED.items()},
    **{f"reused {batch}": share for batch, share in REUSED.items()},
}  # fmt: skip


@pytest.mark.parametrize("shape", [SWITCH, NLLB])
def test_the_mixes_are_near_the_papers_figures(shape: object) -> None:
    """On one small world; the benchmark and the command look at several."""
    shape = SWITCH if shape is SWITCH else NLLB
    mix, target = MIXES[shape.name], TARGETS[shape.name]
    found = hit_rates(shape, mix, target.slots, 500, seed=77)
    assert max(found[name] for name in calibration.BASELINES) == pytest.approx(target.baseline, abs=3.0)
    assert found["belady"] == pytest.approx(target.belady, abs=3.0)
    assert sparsity(shape, mix, 32, 5)[0] == pytest.approx(20, abs=6)


def test_what_a_batch_activates_and_uses_again(monkeypatch: pytest.MonkeyPatch) -> None:
    none, encode, decode = 255, Phase.ENCODE, Phase.DECODE
    rows = [[[0], [none]], [[0], [none]], [[none], [1]], [[none], [1]],  # expert 1 of layer 1 in two iterations
            [[2], [none]], [[none], [1]], [[none], [3]]]  # fmt: skip
    phases = [encode, encode, decode, decode, encode, decode, decode]
    trace = RoutingTrace(
        np.array(rows, dtype=np.uint8), np.array([0, 4, 7]), 4, phase=np.array(phases, dtype=np.uint8), decoder_start=1
    )
    monkeypatch.setattr(calibration, "trace_of", lambda *args, **kwargs: trace)
    shape = replace(SWITCH, layers=2, experts=4, decoder_start=1)
    active, reused = sparsity(shape, MIXES[SWITCH.name], 2, seed=0)
    assert active == pytest.approx(100 * 4 / 8), "of eight experts: 0 and 2 of the encoder, 1 and 3 of the decoder"
    assert reused == pytest.approx(25), "the encoder runs once, whatever the tokens"


def test_what_fits_has_no_misfit_and_every_deviation_counts() -> None:
    target = TARGETS[SWITCH.name]
    assert misfit(MET, target) == 0
    for name, value in (("belady", 57.0), ("best baseline", 31.0), ("activated 32", 25.0), ("reused 1", 20.0)):
        assert misfit({**MET, name: value}, target) > 1
    assert misfit({**MET, "lru": 33.0}, target) > 1, "recency does worse than frequency in the paper"


def test_a_search_keeps_the_better_and_its_own_number_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        calibration, "facts", lambda shape, mix, **_: {**MET, "belady": 56.0 + 40 * abs(mix.focus - 3.0)}
    )
    begun = replace(MIXES[SWITCH.name], focus=1.0)
    best, found, least = search(SWITCH, begun, tries=60, sequences=1, seeds=[1])
    assert abs(best.focus - 3.0) < 0.3
    assert best.at_once == begun.at_once
    assert best.spread is None
    assert least == misfit(found, TARGETS[SWITCH.name])


def test_the_command_says_where_baselines_and_belady_stand() -> None:
    result = CliRunner().invoke(
        calibration.main, ["--model", "nllb-moe-128", "--sequences", "60", "--seeds", "1"], catch_exceptions=False
    )
    assert '"best baseline"' in result.output
