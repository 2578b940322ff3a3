"""What single requests' rounds come to, and what prediction can gain at top-k slots."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.duoserve.paper import draw, figures, table
from benchmarks.duoserve.paper.figures import Round, Side
from benchmarks.duoserve.paper.requests import Phase, Request
from benchmarks.duoserve.paper.stage import PAPER
from benchmarks.duoserve.paper.systems import ACC, LITERAL, MOESYS, SYSTEMS
from greenroom.policies.base.expert_keys import Catalogue

MIB = 2**20


def request(*, prefill: float = 1.0, decode: float, stall: float = 0.0, moved: int = 0, tokens: int = 5) -> Request:
    """``decode``, ``stall``: seconds of all tokens after the first. The link moves 10 MiB/s."""
    of_decode = Phase(decode, stall, moved * MIB)
    return Request(tokens, (1,) * tokens, prefill + decode, Phase(prefill, 0.5, 20 * MIB), of_decode,
                   2.0 + moved / 10, (20 + moved) * MIB)  # fmt: skip


def rounds() -> Mapping[str, dict[int, Round]]:
    """On demand: 4 tokens of 0.3 s, 0.1 of it computing; moving takes 0.25 s, a fifth of it while others compute."""
    acc: dict[int, Round] = {number: [request(decode=1.2, stall=0.8, moved=10)] * 2 for number in (1, 2)}
    literal: dict[int, Round] = {number: [request(decode=1.0, moved=12, prefill=0.5 * number)] * 2 for number in (1, 2)}
    others = {system.kind.name: literal for system in SYSTEMS}
    return {**others, ACC: acc, LITERAL: literal, MOESYS: {1: [request(decode=4.0, moved=40)] * 2}}


def test_prediction_hides_the_shorter_side_and_no_more() -> None:
    assert Side(computing=0.1, moving=0.4).most == pytest.approx(1 + 0.1 / 0.4)
    assert Side(computing=0.4, moving=0.1).most == pytest.approx(1 + 0.1 / 0.4)
    assert Side(computing=0.1, moving=0.4).most_with(1.5) == pytest.approx(0.5 / 0.6)
    assert Side(computing=0.4, moving=0.1).most_with(1.5) == pytest.approx(0.5 / 0.4), "the link has time for it"


def test_gains_are_told_by_round_from_measured_sides() -> None:
    found = figures.gains(rounds())

    assert found["computing_ms"]["median"] == pytest.approx(100)
    assert found["moving_ms"]["median"] == pytest.approx(250)
    assert found["at_most"]["median"] == pytest.approx(1.4)
    assert found["bytes_ratio"]["median"] == pytest.approx(1.2)
    assert found["at_most_with_what_is_wrong"]["median"] == pytest.approx(0.35 / 0.3)
    assert found["measured"]["median"] == pytest.approx(1.2)


def test_ratios_are_of_the_same_round_and_missing_rounds_are_left_out() -> None:
    found = figures.ratios(rounds())

    assert found["literal_over_acc"]["decode"]["median"] == pytest.approx(1.2)
    assert found["literal_over_acc"]["ttft"] == pytest.approx({"median": 1.5, "min": 1.0, "max": 2.0})
    assert found["literal_over_moesys"]["end_to_end"]["min"] == pytest.approx(5.0 / 1.5)
    assert found["literal_over_moesys"]["end_to_end"]["max"] == pytest.approx(5.0 / 1.5), "round 1 alone"


def test_a_systems_figures_are_a_prompt_and_a_decoded_token() -> None:
    own = rounds()[ACC]
    found = figures.system_figures({**own, 3: [replace(own[1][0], seconds=5.2)] * 2})

    assert found["requests"] == 6
    assert found["end_to_end_s"] == pytest.approx({"median": 2.2, "min": 2.2, "max": 5.2})
    assert found["decode_tokens_per_s"] == pytest.approx([4 / 1.2] * 6)
    assert (found["prefill_mib"], found["decode_mib_a_token"]) == (20.0, 2.5)
    assert found["decode_stall_ms"] == pytest.approx(200)


def test_slots_are_what_the_paper_gives_each_system() -> None:
    catalogue = Catalogue.uniform("p", layers=6, experts=16, top_k=2)
    slots = {system.kind.name: system.slots_of(catalogue) for system in SYSTEMS}
    assert [slots[LITERAL], slots[ACC], slots[MOESYS], max(slots.values())] == [2, 2, 16, 96]
    for count in slots.values():
        assert int((count + 0.5) / 96 * 96) == count, "an arm is given a share and rounds down"


def test_it_is_shown_and_drawn(tmp_path: Path) -> None:
    own = rounds()
    found: dict[str, Any] = {
        "model": {"experts": 96, "layers": 6, "top_k": 2, "expert_mib": 11.0},
        "settings": {"prompts": 2, "tokens": 5, "rounds": 2},
        "systems": {name: {**figures.system_figures(of), "slots": 2, "peak_mib": 30.0} for name, of in own.items()},
        "ratios": figures.ratios(own),
        "gains": figures.gains(own),
        "same_answers": True,
        "paper": PAPER,
    }
    assert json.loads(json.dumps(found))["gains"] == found["gains"]
    shown = table(found)
    assert "at most 1.40 (1.40–1.40) over fetching on demand" in shown
    assert all(name in shown for name in own)
    draw(found, tmp_path / "paper.png")
    assert (tmp_path / "paper.png").stat().st_size > 10_000
