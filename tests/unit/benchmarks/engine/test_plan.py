from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.engine import plan
from benchmarks.harness.children.greenroom_child import parse_policy
from benchmarks.harness.inputs.prepared_models import BUNDLED, LARGE, RANDOM, WIDENED, PreparedModel
from benchmarks.harness.inputs.token_streams import random_stream, task_stream
from benchmarks.harness.rows import GREENROOM, ORACLES, RESIDENT, THIRD
from greenroom.core.errors import InvalidConfig
from greenroom.demo import bundled_model_path
from greenroom.policies.registry import EXPERT_POLICIES

GIB = 1 << 30


def model(name: str) -> PreparedModel:
    return PreparedModel(name, Path("/models/m"), random_stream(2048, 8), (Path("/models/m"),), GIB)


def test_every_policy_of_the_registry_runs_beside_the_resident_run() -> None:
    (stage,) = plan.policies_stages(model(WIDENED), sorted(EXPERT_POLICIES), plan.Scale(), 60.0, 64 * GIB)
    resident, *others = stage.arms
    assert resident.row.share == RESIDENT
    assert {arm.row.policy for arm in others} == set(EXPERT_POLICIES) | set(ORACLES)
    assert {arm.row.share for arm in others} == {THIRD}
    assert all(arm.arguments["link"] for arm in others)


def test_policies_are_split_where_they_do_not_all_fit_at_once() -> None:
    names = ["lru", "lfu", "fifo", "lfu-reset", "neighbour-aware"]
    stages = plan.policies_stages(model(WIDENED), names, plan.Scale(), 60.0, 5 * GIB)
    assert len(stages) > 1
    assert [arm.row.policy for stage in stages for arm in stage.arms[1:]] == names
    assert all(stage.arms[0].row.share == RESIDENT for stage in stages), "each with its own run to compare with"
    assert len({stage.arms[0].row.stage for stage in stages}) == len(stages)
    assert sum(stage.seconds for stage in stages) == pytest.approx(60.0)
    assert len(plan.policies_stages(model(WIDENED), names, plan.Scale(), 60.0, 0)) == 5, "one at a time at worst"


def test_oracles_know_as_many_runs_as_there_will_be() -> None:
    (stage,) = plan.policies_stages(model(WIDENED), ["belady"], plan.Scale(rounds=4), 60.0, 64 * GIB)
    settings = [json.loads(arm.child.settings) for arm in stage.arms if arm.row.policy in ORACLES]
    assert [each["oracle_turns"] for each in settings] == [5, 5]
    assert [each["policy_options"]["ahead"] for each in settings] == [0, plan.ORACLE_AHEAD_LAYERS]
    assert all(arm.warm_up == arm.stream for arm in stage.arms), "the future begins with the warm-up"


def test_arms_of_one_setting_share_a_process() -> None:
    stage = plan.shares_stage(model(WIDENED), "lfu", plan.Scale(), 60.0)
    resident = {arm.child for arm in stage.arms if arm.row.system == GREENROOM and arm.row.share == RESIDENT}
    assert len(resident) == 1
    assert len({arm.child for arm in stage.arms if arm.row.system == "transformers"}) == 1
    assert {arm.row.share for arm in stage.arms if arm.row.system == GREENROOM} == {
        RESIDENT, THIRD, *plan.Scale().shares,
    }  # fmt: skip
    assert sum(arm.row.instrumented for arm in stage.arms) == 2
    policies = plan.policies_stages(model(WIDENED), ["lfu"], plan.Scale(), 60.0, 64 * GIB)
    assert plan.specs(policies[0]) < plan.specs(stage), "what the stage before opened stays open"


def test_batched_products_never_run_on_several_prompts() -> None:
    """They copy a row's experts for every token of every prompt: tens of gigabytes."""
    for name in (WIDENED, RANDOM, BUNDLED):
        stage = plan.shares_stage(model(name), "lfu", plan.Scale(), 60.0)
        several = [arm.row.policy for arm in stage.arms if arm.row.system == "transformers" and arm.row.concurrency > 1]
        assert several == ["eager", "grouped_mm"]


def test_a_small_model_may_be_faster_on_one_thread() -> None:
    stage = plan.shares_stage(model(BUNDLED), "lfu", plan.Scale(), 60.0)
    threads = {arm.row.policy: arm.arguments["threads"] for arm in stage.arms if arm.row.system == "transformers"}
    assert threads == dict.fromkeys(plan.IMPLEMENTATIONS) | {f"{name}, 1 thread": 1 for name in plan.IMPLEMENTATIONS}


def test_bounded_arms_are_of_the_announced_total_and_cold() -> None:
    limits = plan.Limits(1000, 700, 500, Path("/offload"), Path("/scratch"))
    stage = plan.bounded_stage(model(WIDENED), "lfu", limits, plan.Scale(), 60.0)
    found = {(arm.row.system, arm.row.share): arm.child.limit_bytes for arm in stage.arms}
    assert found == {
        (GREENROOM, THIRD): 1000, (GREENROOM, "12%"): 700, ("disk_offload", ""): 1000, ("device_map", ""): 1000,
    }  # fmt: skip
    assert all(set(arm.cold) == {Path("/models/m"), Path("/offload"), Path("/scratch")} for arm in stage.arms)
    assert len({arm.stream for arm in stage.arms}) == 1, "the same tokens in all"
    shares = plan.specs(plan.shares_stage(model(WIDENED), "lfu", plan.Scale(), 60.0))
    assert not plan.specs(stage) & shares, "nothing that was open before it had a limit"


def test_a_policy_may_have_options() -> None:
    assert parse_policy("lru") == ("lru", {})
    assert parse_policy("look-ahead:layers=3,retention=lfu,evict=false") == (
        "look-ahead", {"layers": 3, "retention": "lfu", "evict": False},
    )  # fmt: skip
    stage = plan.shares_stage(model(WIDENED), "look-ahead:layers=3", plan.Scale(), 60.0)
    third = next(arm for arm in stage.arms if arm.row.share == THIRD)
    assert third.row.policy == "look-ahead:layers=3"
    assert json.loads(third.child.settings)["policy_options"] == {"layers": 3}
    for wrong in ("best", "lru:size=3", "look-ahead:layers", "look-ahead:layers=0"):
        with pytest.raises(InvalidConfig):
            parse_policy(wrong)


def test_streams_are_the_same_every_time() -> None:
    tasks = task_stream(bundled_model_path(), 7)
    assert tasks == task_stream(bundled_model_path(), 7)
    assert len(tasks.prompts) == len(tasks.lengths) == 7
    assert tasks.first(2).prompts == tasks.prompts[:2]
    assert tasks.tokens == sum(tasks.lengths)
    assert min(tasks.lengths) >= 2, "an answer and its end"
    drawn = random_stream(300, 3, prompt_tokens=5, tokens=9)
    assert drawn == random_stream(300, 3, prompt_tokens=5, tokens=9)
    assert [len(prompt) for prompt in drawn.prompts] == [5, 5, 5]
    assert drawn.lengths == (9, 9, 9)
    assert {token for prompt in drawn.prompts for token in prompt} <= set(range(4, 300))


def test_on_a_gpu_all_arms_compute_there_and_hold_all_experts_in_ram() -> None:
    scale = plan.Scale(device="cuda")
    limits = plan.Limits(None, None, GIB, None, Path("/scratch"))
    (policies,) = plan.policies_stages(model(LARGE), ["lru", "belady"], scale, 60.0, 64 * GIB)
    shares = plan.shares_stage(model(LARGE), "lru", scale, 60.0)
    bounded = plan.bounded_stage(model(LARGE), "lru", limits, scale, 60.0)
    settings = [json.loads(arm.child.settings) for stage in (policies, shares, bounded) for arm in stage.arms]
    assert {one["device"] for one in settings} == {"cuda"}
    assert {(one["share"] == RESIDENT, one["host"]) for one in settings if "share" in one} == {
        (True, "0%"),
        (False, "100%"),
        (False, "0%"),
    }
    assert {arm.row.stage for arm in shares.arms} == {"shares", "shares, from the disk"}
    assert [arm.row.system for arm in bounded.arms] == [GREENROOM, "device_map"]
    assert all(arm.child.limit_bytes is None and not arm.cold for arm in bounded.arms)
