"""The costs in a profile: by rows, on which machine, and in files of before there was either."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from greenroom.core.errors import InvalidConfig
from greenroom.core.model_profile import MeasuredCosts, dump_model_profile, parse_model_profile
from greenroom.demo import bundled_model_path

OLD = {"token_ms_by_rows": {"1": 10.0, "2": 8.0, "4": 6.0}, "prefill_token_ms": 5.0, "load_ms_by_experts": {"1": 7.0}}


def file_with(costs: object) -> bytes:
    shipped = json.loads((Path(bundled_model_path()) / "profile.json").read_bytes())
    return json.dumps({**shipped, "costs": costs}).encode()


def test_an_older_profile_is_read_and_a_prompts_row_counts_as_one_that_decodes_and_beyond_the_batch_by_itself() -> None:
    costs = parse_model_profile(file_with(OLD), "old").costs
    assert costs is not None
    assert (costs.machine, costs.prompt_step_ms) == ("", {})
    steps = costs.steps()
    assert [steps.step_ms(rows) for rows in (1, 2, 4)] == [10.0, 16.0, 24.0]
    assert [steps.step_ms(0, rows) for rows in (1, 2, 4, 5, 14)] == [10.0, 16.0, 24.0, 29.0, 74.0]
    assert steps.step_ms(2, 2) == 24.0
    assert costs.said_of_machine("any") is None, "nobody knows where it was measured"


def test_a_profile_keeps_what_steps_with_prompts_take_and_where_that_was_measured() -> None:
    new = {**OLD, "prompt_step_ms": {"8": 20.0, "64": 40.0}, "machine": "Some CPU, 2 cores"}
    profile = parse_model_profile(file_with(new), "new")
    again = parse_model_profile(dump_model_profile(profile), "again")
    assert again == profile
    assert again.costs is not None
    assert again.costs.steps().step_ms(0, 36) == 30.0
    assert again.costs.token_ms(3) == pytest.approx(20.0 / 3), "on the line of whole steps"


def test_costs_of_another_machine_are_said_to_be_such_and_those_of_this_one_are_not() -> None:
    costs = MeasuredCosts(token_ms_by_rows={1: 1.0}, prefill_token_ms=1.0, machine="Some CPU, 2 cores")
    said = costs.said_of_machine("Another CPU, 4 cores")
    assert said is not None
    assert "Some CPU, 2 cores" in said
    assert "Another CPU, 4 cores" in said
    assert "greenroom profile --stages costs" in said
    assert costs.said_of_machine("Some CPU, 2 cores") is None


def test_a_step_that_takes_no_time_is_refused_by_its_place() -> None:
    with pytest.raises(InvalidConfig, match="prompt_step_ms"):
        parse_model_profile(file_with({**OLD, "prompt_step_ms": {"8": 0.0}}), "wrong")


def test_costs_of_experts_in_another_format_are_said_to_be_such() -> None:
    older = parse_model_profile(file_with(OLD), "old")
    assert older.said_of_format("plain") is None, "there were no others"
    said = older.said_of_format("mxfp4")
    assert said is not None
    assert "with experts as plain, and here they are kept as mxfp4 (--experts-as)" in said
    new = parse_model_profile(file_with({**OLD, "expert_format": "mxfp4"}), "new")
    assert new.said_of_format("mxfp4") is None
    assert parse_model_profile(dump_model_profile(new), "again") == new
