"""No plan takes more than there is, and every refusal says what would work."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from greenroom.core.errors import BudgetTooSmall, InvalidConfig
from greenroom.core.units import GIB, MIB, format_bytes, parse_bytes
from greenroom.policies.base.expert_keys import Catalogue
from greenroom.policies.base.slot_sizes import SlotSizes
from greenroom.worker.model.memory_plan import (
    LEAST_CONTEXT,
    ROWS_SHARE,
    MemoryPlan,
    Needs,
    plan_memory,
    plan_rows,
    plan_to_fit,
)
from greenroom.worker.usable_memory import Memory

NEEDS = Needs(
    dense=1 * GIB, workspace=100 * MIB, slot_sizes=SlotSizes.uniform(96, nbytes=11 * MIB, top_k=2),
    kv_for_one=64 * MIB, kv_for_all=512 * MIB,
)  # fmt: skip


def plan(
    available: int, needs: Needs = NEEDS, expert: str = "auto", host: str = "auto", kv: str = "auto"
) -> MemoryPlan:
    machine = Memory(2 * available, available, "the machine")
    return plan_memory(needs, machine, 500 * MIB, expert_memory=expert, host_memory=host, kv_memory=kv)


def test_with_plenty_everything_is_resident() -> None:
    planned = plan(20 * GIB)
    assert planned.device_slots == 96
    assert planned.kv == NEEDS.kv_for_all
    assert "all of them fit" in planned.describe()


def test_with_little_kv_gets_a_share_and_experts_the_rest() -> None:
    planned = plan(2 * GIB)
    assert 2 < planned.device_slots < 96
    assert NEEDS.kv_for_one <= planned.kv < NEEDS.kv_for_all
    assert planned.total - planned.base <= 2 * GIB
    assert "the machine has no more" in planned.describe()


def test_with_little_kv_has_no_more_than_requests_will_probably_use_and_one_of_full_length() -> None:
    share = plan(2 * GIB).kv
    assert plan(2 * GIB, replace(NEEDS, kv_expected=50 * MIB)).kv == 100 * MIB < share
    assert plan(2 * GIB, replace(NEEDS, kv_expected=5 * MIB)).kv == NEEDS.kv_for_one
    assert plan(2 * GIB, replace(NEEDS, kv_expected=1 * GIB)).kv == share
    few, many = plan(2 * GIB), plan(2 * GIB, replace(NEEDS, kv_expected=50 * MIB))
    assert many.device_slots > few.device_slots
    assert plan(20 * GIB, replace(NEEDS, kv_expected=5 * MIB)).kv == NEEDS.kv_for_all, "where there is plenty"


@pytest.mark.parametrize(("text", "slots"), [("33%", 31), ("100%", 96), ("25%", 24), ("100MiB", 9), ("1TiB", 96)])
def test_an_explicit_expert_budget_is_never_exceeded(text: str, slots: int) -> None:
    assert plan(20 * GIB, expert=text).device_slots == slots


def test_the_host_tier_takes_its_share() -> None:
    planned = plan(20 * GIB, expert="25%", host="50%")
    assert planned.host_slots == 48
    assert "host tier" in planned.describe()


def test_less_than_a_routers_top_k_is_refused_with_the_least_that_works() -> None:
    with pytest.raises(BudgetTooSmall, match=r"hold 1 of 11 MiB; one layer's router picks 2: give at least 22 MiB"):
        plan(20 * GIB, expert="15MiB")


def test_more_than_the_machine_has_is_refused() -> None:
    with pytest.raises(BudgetTooSmall, match="the machine has 2 GiB available"):
        plan(2 * GIB, expert="100%", kv="512MiB")


@pytest.mark.parametrize("text", ["", "lots", "-1GiB", "120%", "1GiBB", "%"])
def test_what_is_no_size_names_the_field(text: str) -> None:
    with pytest.raises(InvalidConfig, match="expert_memory"):
        plan(20 * GIB, expert=text)


@given(
    available=st.integers(0, 8 * GIB),
    dense=st.integers(0, 2 * GIB),
    experts=st.integers(2, 3000),
    slot=st.integers(4096, 64 * MIB),
    larger=st.one_of(st.just(0), st.integers(1, 64 * MIB)),
    one=st.integers(1, GIB),
    running=st.integers(1, 64),
    expert=st.sampled_from(["auto", "25%", "100%", "300MiB"]),
)
def test_a_plan_fits_or_is_refused(
    available: int, dense: int, experts: int, slot: int, larger: int, one: int, running: int, expert: str
) -> None:
    layers = Catalogue("two", experts_per_layer=[experts, 5], top_k=[2, 2], expert_bytes=[slot, slot + larger])
    sizes = SlotSizes(layers)
    needs = Needs(dense, 10 * MIB, sizes, one, one * running)
    try:
        planned = plan(available, needs, expert)
    except BudgetTooSmall:
        return
    assert planned.total - planned.base <= available
    assert sizes.least <= planned.device_slots <= sizes.experts
    asked = planned.expert_memory if expert == "auto" else parse_bytes(expert, field="", whole=sizes.all_bytes)
    assert planned.expert_memory <= asked
    assert planned.device_slots == sizes.experts or sizes.nbytes(planned.device_slots + 1) > asked or expert == "auto"
    assert 0 <= planned.kv <= needs.kv_for_all


def on_gpu(gpu: int, ram: int, expert: str = "auto", host: str = "auto", needs: Needs = NEEDS) -> MemoryPlan:
    return plan_memory(
        needs, Memory(gpu, gpu, "the GPU"), 500 * MIB, expert_memory=expert, host_memory=host, kv_memory="auto",
        ram=Memory(ram, ram, "the machine"),
    )  # fmt: skip


def test_a_gpu_that_holds_everything_needs_no_host_tier() -> None:
    planned = on_gpu(20 * GIB, 20 * GIB)
    assert planned.device_slots == 96
    assert planned.host_slots == 0
    assert "total on GPU" in planned.describe()


def test_what_the_gpu_does_not_hold_goes_to_ram_by_itself() -> None:
    planned = on_gpu(2 * GIB, 20 * GIB)
    assert 2 < planned.device_slots < 96
    assert planned.host_slots == 96
    assert planned.total <= 2 * GIB, "RAM is not counted as the GPU's"
    few = on_gpu(2 * GIB, 200 * MIB)
    assert few.host_slots == int(200 * MIB * 0.75) // (11 * MIB), "locked pages are lost to all others"
    assert on_gpu(2 * GIB, 200 * MIB, host="180MiB").host_slots == 180 // 11, "more may be had by asking for it"
    assert on_gpu(2 * GIB, 20 * GIB, host="0%").host_slots == 0


def test_a_host_tier_larger_than_ram_is_refused() -> None:
    with pytest.raises(BudgetTooSmall, match="the machine has 500 MiB available: give less to --host-memory"):
        on_gpu(2 * GIB, 500 * MIB, host="100%")


def test_a_gpu_too_small_for_the_dense_weights_is_refused() -> None:
    with pytest.raises(BudgetTooSmall):
        on_gpu(1 * GIB, 20 * GIB)


LONG = 131_072


def long_needs(length: int) -> Needs:
    """As gpt-oss-20b: eager attention over its whole context, 24 layers of 32 experts of 13 MiB."""
    kv = length * 48 * 1024
    return Needs(
        dense=3 * GIB, workspace=GIB + length * 128 * 1024,
        slot_sizes=SlotSizes.uniform(768, nbytes=13 * MIB, top_k=4),
        kv_for_one=kv, kv_for_all=32 * kv, attention=length * 128 * 1024,
    )  # fmt: skip


def fit(available: int, expert: str = "auto", kv: str = "auto", *, fixed: bool = False) -> tuple[MemoryPlan, int]:
    def made(needs: Needs) -> MemoryPlan:
        return plan(available, needs, expert, kv=kv)

    return plan_to_fit(long_needs, LONG, made, fixed=fixed)


def test_a_context_that_does_not_fit_is_shortened_and_that_is_said() -> None:
    with pytest.raises(BudgetTooSmall):
        plan(18 * GIB, long_needs(LONG))
    planned, length = fit(18 * GIB)
    assert LEAST_CONTEXT <= length < LONG
    assert planned.device_slots > 100, "attention leaves most to the experts"
    assert planned.total - planned.base <= 18 * GIB
    assert f"requests of at most {length} tokens (attention over {LONG} would take 16 GiB; --max-model-len)" in (
        planned.describe()
    )


def test_a_context_that_leaves_little_to_the_experts_is_shortened_too() -> None:
    crowded = plan(22 * GIB, long_needs(LONG))
    planned, length = fit(22 * GIB)
    assert length < LONG
    assert planned.device_slots > 5 * crowded.device_slots


def test_with_plenty_or_by_ones_own_wish_a_context_stays_as_it_is() -> None:
    planned, length = fit(200 * GIB)
    assert (length, planned.notes) == (LONG, plan(200 * GIB, long_needs(LONG)).notes)
    assert fit(22 * GIB, fixed=True)[1] == LONG


def test_what_no_context_helps_is_refused_as_it_is_at_full_length() -> None:
    with pytest.raises(BudgetTooSmall, match="give at least 52 MiB") as refusal:
        fit(2 * GIB)
    with pytest.raises(BudgetTooSmall) as whole:
        plan(2 * GIB, long_needs(LONG))
    assert str(refusal.value) == str(whole.value)


@pytest.mark.parametrize(
    ("expert", "kv", "named", "unnamed"),
    [
        ("auto", "auto", ["--max-model-len", "--tokens-per-step", "--prefill-chunk"], ["--kv-memory", "--host-memory"]),
        ("auto", "2GiB", ["--max-model-len", "less for --kv-memory", "--tokens-per-step"], []),
        ("50%", "2GiB", ["--max-model-len", "less for --expert-memory", "less for --kv-memory"], ["--host-memory"]),
    ],
)
def test_a_refusal_names_the_options_that_help_and_what_they_are_about(
    expert: str, kv: str, named: list[str], unnamed: list[str]
) -> None:
    with pytest.raises(BudgetTooSmall) as refusal:
        fit(12 * GIB, expert, kv, fixed=True)
    said = str(refusal.value)
    assert all(option in said for option in named), said
    assert not any(option in said for option in unnamed), said
    assert "attention over it takes 16 GiB" in said


def rows_of(
    available: int, longest: int, expert: str = "auto", kv: str = "auto", holds: int = 1 << 20
) -> tuple[MemoryPlan, int]:
    def plan_at(rows: int) -> tuple[MemoryPlan, int]:
        return plan(available, replace(NEEDS, workspace=100 * MIB + rows * 64 * 1024), expert, kv=kv), 4096

    planned, _, rows = plan_rows(plan_at, 512, longest, holds=lambda _: holds)
    return planned, rows


def test_rows_are_doubled_while_that_is_worth_the_experts_memory() -> None:
    """With 512 rows there are about 580 MiB for experts; a row takes 64 KiB: 1024 take 32 MiB more, 2048 take 96."""
    planned, rows = rows_of(2 * GIB, 100_000)
    fewer, _ = rows_of(2 * GIB, 512)
    assert rows == 1024
    assert planned.device_slots < fewer.device_slots
    assert planned.workspace - fewer.workspace <= ROWS_SHARE * fewer.expert_memory
    lost = fewer.device_slots - planned.device_slots
    kv = f" and {format_bytes(fewer.kv - planned.kv)} of KV" if planned.kv < fewer.kv else ""
    note = (
        f"1024 rows a step (--tokens-per-step auto), for which there are 32 MiB less than with 512: {lost} experts{kv}"
    )
    assert note in planned.describe()
    assert planned.total - planned.base <= 2 * GIB


def test_no_more_rows_than_the_longest_prompt_has() -> None:
    assert rows_of(20 * GIB, 1000)[1] == 1024
    planned, rows = rows_of(20 * GIB, 300)
    assert rows == 512
    assert "512 rows a step (--tokens-per-step auto)" in planned.describe()


def test_where_more_rows_do_not_fit_there_are_fewer() -> None:
    """All memory is given, so nothing makes room: 1 GiB, 132 MiB of workspace, 96 experts, KV, and 16 MiB to spare."""
    available = 1 * GIB + (132 + 96 * 11 + 64 + 16) * MIB
    assert rows_of(available, 4096, expert="100%", kv="64MiB")[1] == 512
    assert rows_of(available + 16 * MIB, 4096, expert="100%", kv="64MiB")[1] == 1024


def test_no_request_is_shortened_for_more_rows() -> None:
    lengths = {512: 4096, 1024: 4096, 2048: 2048}

    def plan_at(rows: int) -> tuple[MemoryPlan, int]:
        return plan(20 * GIB), lengths[rows]

    assert plan_rows(plan_at, 512, 4096, holds=lambda _: 4096)[1:] == (4096, 1024)


def test_no_more_rows_than_kv_holds_tokens() -> None:
    assert rows_of(20 * GIB, 100_000)[1] == 2048
    assert rows_of(20 * GIB, 100_000, holds=1025)[1] == 2048
    assert rows_of(20 * GIB, 100_000, holds=1024)[1] == 1024
    assert rows_of(20 * GIB, 100_000, holds=300)[1] == 512


def test_rows_that_would_leave_kv_for_no_more_tokens_are_not_taken() -> None:
    """KV shrinks as the workspace grows: 4096 tokens with 512 rows, 700 with 1024."""

    def plan_at(rows: int) -> tuple[MemoryPlan, int]:
        return replace(plan(20 * GIB), workspace=rows * MIB // 64), 4096

    held = {8 * MIB: 4096, 16 * MIB: 500}
    assert plan_rows(plan_at, 512, 4096, holds=lambda made: held[made.workspace])[2] == 512


def test_the_plan_says_what_more_rows_take_from_kv() -> None:
    fewer, more = replace(plan(20 * GIB), kv=80 * MIB), replace(plan(20 * GIB), kv=72 * MIB)
    plans = {512: fewer, 1024: replace(more, workspace=fewer.workspace + 24 * MIB)}
    said = plan_rows(lambda rows: (plans[rows], 4096), 512, 1024, holds=lambda _: 4096)[0].describe()
    assert "for which there are 24 MiB less than with 512: 0 experts and 8 MiB of KV" in said


def test_chunks_are_no_way_out_where_prompts_run_whole() -> None:
    with pytest.raises(BudgetTooSmall) as refusal:
        plan(1 * GIB, replace(NEEDS, chunked=False))
    assert "fewer --tokens-per-step (" in str(refusal.value)
    assert "--prefill-chunk" not in str(refusal.value)


def test_what_does_not_fit_with_the_fewest_rows_is_refused() -> None:
    with pytest.raises(BudgetTooSmall):
        rows_of(1 * GIB, 4096)
