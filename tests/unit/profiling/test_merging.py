from __future__ import annotations

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from greenroom.core.model_profile import (
    Lengths,
    MeasuredCosts,
    ModelProfile,
    PickWorth,
    Reuse,
    Sensitivity,
    TaskProfile,
    dump_model_profile,
    parse_model_profile,
)
from greenroom.profiling.config import STAGES
from greenroom.profiling.merging import EARLIER, merged

names = st.sets(st.sampled_from(["a", "b", "c"]), min_size=1)
stages = st.sets(st.sampled_from(STAGES))


def profile(mark: int, tasks: set[str], measured: set[str]) -> ModelProfile:
    """A profile in which every figure says which profile it is from."""
    lengths = Lengths(mean=mark, p50=mark, p90=mark, p99=mark, most=mark)
    sensitivity = Sensitivity(threshold=0.85, insensitive_layers=0, similarity=(1.0, mark / 100))
    return ModelProfile(
        format="greenroom-model-profile",
        version=1,
        model="m",
        layers=1,
        experts=2,
        top_k=1,
        tasks={
            name: TaskProfile(
                prompts=mark,
                input_tokens=lengths,
                generated_tokens=lengths,
                popularity=((0.5, 0.5),),
                sensitivity=sensitivity if "sensitivity" in measured else None,
                pick_worth=PickWorth(loss=((mark, mark),)) if "worth" in measured else None,
            )
            for name in sorted(tasks)
        },
        costs=MeasuredCosts(token_ms_by_rows={1: mark}, prefill_token_ms=mark) if "costs" in measured else None,
        reuse=Reuse(share=0.5, perplexity={0: mark}, proposed_every=mark) if "reuse" in measured else None,
        notes={"command": f"command {mark}", f"only {mark}": ""},
    )


@given(names, names, stages, stages)
def test_what_was_measured_is_new_and_the_rest_is_kept(
    old_tasks: set[str], new_tasks: set[str], once: set[str], now: set[str]
) -> None:
    earlier, new = profile(1, old_tasks, once), profile(2, new_tasks, now)
    both = merged(new, earlier, now)
    assert set(both.tasks) == (new_tasks if "lengths" in now else old_tasks | new_tasks)
    for name, task in both.tasks.items():
        assert task.prompts == (2 if "lengths" in now or name not in old_tasks else 1)
        expected = None
        if "sensitivity" in now and name in new_tasks:
            expected = 0.02
        elif "sensitivity" in once and name in old_tasks:
            expected = 0.01
        assert (task.sensitivity.similarity[1] if task.sensitivity else None) == expected
        worth = None
        if "worth" in now and name in new_tasks:
            worth = 2
        elif "worth" in once and name in old_tasks:
            worth = 1
        assert (task.pick_worth.loss[0][0] if task.pick_worth else None) == worth
    assert (both.costs or earlier.costs) == (new.costs or earlier.costs)
    assert both.costs == (new.costs if "costs" in now else earlier.costs)
    assert both.reuse == (new.reuse if "reuse" in now else earlier.reuse)
    assert both.notes == {"command": "command 2", "only 1": "", "only 2": "", EARLIER: "command 1"}
    assert parse_model_profile(dump_model_profile(both), "it") == msgspec.structs.replace(both)
