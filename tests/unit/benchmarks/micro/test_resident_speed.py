"""What the benchmark of resident models makes of its turns."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.harness.inputs.prepared_models import PreparedModel
from benchmarks.harness.inputs.token_streams import Stream
from benchmarks.micro.resident_speed import Work, arms, ratios, summary, table
from greenroom.moe.native.rows import INSTRUCTIONS

MODEL = PreparedModel("small", Path("small"), Stream(((1, 2, 3), (4, 5)), (6, 7)), (), 1)


def test_answers_are_tokens_a_second_and_prompts_milliseconds() -> None:
    assert Work(8).figure({"tokens": 30, "seconds": 2.0}) == 15
    assert Work(tokens=30).figure({"tokens": 3, "seconds": 0.6}) == pytest.approx(200)
    assert Work(8).gain(30, 20) == Work(tokens=30).gain(20, 30) == 1.5


def test_a_prompt_of_so_many_tokens_is_made_of_the_streams() -> None:
    asked = Work(tokens=7).arguments(MODEL)
    assert asked["prompts"][0] == [1, 2, 3, 4, 5, 1, 2]
    assert asked["lengths"] == [1] * len(asked["prompts"])
    assert Work(8).arguments(MODEL) == {"prompts": [[1, 2, 3], [4, 5]], "lengths": [6, 7], "concurrency": 8}


def test_every_instruction_set_is_a_process_of_its_own_and_transformers_is_one() -> None:
    those = arms(MODEL, ("avx512", "avx2"))
    assert [dict(arm.spec.environment) for arm in those[:2]] == [{INSTRUCTIONS: "avx512"}, {INSTRUCTIONS: "avx2"}]
    assert len({arm.spec for arm in those}) == 3
    costly = those[-1]
    assert [costly.takes(work) for work in (Work(), Work(8), Work(tokens=30))] == [True, False, False]


def test_the_first_set_is_held_against_the_others_and_the_fastest_of_transformers() -> None:
    figures = {"avx512": [30.0, 40.0], "avx2": [20.0, 20.0], "eager": [10.0, 10.0], "grouped": [15.0, 20.0], "left": []}
    found = ratios(Work(), figures)
    assert found == {
        "avx2": {"median": 1.75, "min": 1.5, "max": 2.0},
        "grouped": {"median": 2.0, "min": 2.0, "max": 2.0},
    }
    assert list(ratios(Work(tokens=30), figures)) == ["avx2", "eager"]


def test_the_table_names_each_arm_and_what_is_gained() -> None:
    figures = {"avx512": {"median": 2.0, "min": 1.0, "max": 3.0}, "eager": {"median": 1.0, "min": 1.0, "max": 1.0}}
    found = {"model": "small", "figures": {"8 at once": figures}, "ratios": {"8 at once": {"eager": figures["avx512"]}}}
    assert "8 at once: avx512 is so many times as fast as eager 2.00" in table(found)


def test_the_figures_with_aims_are_those_of_the_worst_model() -> None:
    def model(name: str, over: float, eight: float) -> dict[str, Any]:
        works = {"one at a time": over, "8 at once": over + 1, "a prompt of 30": over - 0.5}
        return {
            "model": name,
            "ratios": {work: {"avx2": {"median": 0.1}, "eager": {"median": gain}} for work, gain in works.items()},
            "figures": {"one at a time": {"avx512": {"median": 10.0}}, "8 at once": {"avx512": {"median": eight}}},
        }

    assert summary([model("a", 3.0, 20.0), model("b", 2.0, 25.0)]) == {
        "resident_ratio": 2.0,
        "resident_8_ratio": 3.0,
        "prefill_ratio": {"30": 1.5},
        "concurrency_ratio": {"a": 2.0, "b": 2.5},
    }
