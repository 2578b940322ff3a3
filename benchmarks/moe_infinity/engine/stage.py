"""The stage ``engine``: the real engine, experts on disk, at a third of the experts and at other budgets."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from benchmarks.harness.arms.learnt_files import Learnt
from benchmarks.harness.arms.open_arms import Fleet
from benchmarks.harness.arms.served_turn import ServedTurn
from benchmarks.harness.children.child_rounds import TURN_TIMEOUT_S
from benchmarks.harness.children.processes import ArmFailed, Children
from benchmarks.harness.inputs.checkpoints import widened
from benchmarks.harness.inputs.shared_model import Ask, SharedModel
from benchmarks.harness.inputs.task_prompts import in_turn, shortened, stream_of
from benchmarks.moe_infinity.engine.arms.compared_policies import KINDS, PAPER, SERVED, kind_of
from benchmarks.moe_infinity.engine.arms.learnt_artifacts import learn
from benchmarks.moe_infinity.engine.effort import Scale
from benchmarks.moe_infinity.engine.parts import (
    at_a_third,
    beside_accelerate,
    by_batch_size,
    by_budget,
    by_request_rate,
    one_record_or_tensors,
)
from benchmarks.moe_infinity.engine.parts.by_request_rate import Answer
from greenroom.core.errors import GreenroomError

SHARE = 0.33
"""As `--expert-memory 33%` has it."""

Found = dict[str, Any]


def run(scale: Scale) -> Found:
    """Every part under its name, figures with aims on top. A part that fails costs only itself."""
    learnt = learn(scale.recorded)
    folder = widened(scale.expert_mib)
    found: Found = {"learnt": learnt.facts, "planned_seconds": scale.planned}
    with SharedModel(folder) as shared:
        with _beside(scale, learnt, found) as (ground, children):
            if ground is not None:
                found["bounded"] = _part(lambda: _bounded(shared, ground, children, scale))
            peer = None if ground is None else _peer(ground, children)
            with Fleet(shared, learnt, SHARE, KINDS) as fleet:
                found |= _at_a_third(fleet, peer, scale)
        found["budgets"] = _part(
            lambda: by_budget.run(
                shared, learnt, SERVED, shares=(*scale.shares, SHARE), prompts=scale.share_prompts, rounds=scale.rounds,
                seconds=scale.budgets_seconds,
            )
        )  # fmt: skip
    found["records"] = [_part(partial(_records, mib, scale)) for mib in (*scale.record_mib, scale.expert_mib)]
    return found | _figures(found)


def _at_a_third(fleet: Fleet, peer: Answer | None, scale: Scale) -> Found:
    """One prompt at a time, several at once, Fig. 6, Figs 4 and 5."""
    part = scale.third_seconds / 3
    names = [kind.name for kind in SERVED if kind.name not in fleet.failed]
    return {
        "failed": fleet.failed,
        "one": _part(lambda: at_a_third.run(
            fleet, prompts=scale.prompts, at_once=1, rounds=scale.rounds, seconds=2 * part)),
        "many": _part(lambda: at_a_third.run(
            fleet, prompts=scale.many_prompts, at_once=scale.at_once, rounds=scale.rounds, seconds=part)),
        "batches": _part(lambda: by_batch_size.run(
            fleet, names, peer, sizes=scale.sizes, tokens=scale.batch_tokens, rounds=scale.rounds,
            peer_rounds=scale.peer_rounds, seconds=scale.batches_seconds)),
        "rates": _part(lambda: by_request_rate.run(
            fleet, names, peer, requests=scale.requests, loads=scale.loads, peer_loads=scale.peer_loads,
            peer_requests=scale.peer_requests, rounds=scale.rounds, seconds=scale.rates_seconds)),
    }  # fmt: skip


def _bounded(shared: SharedModel, ground: beside_accelerate.Ground, children: Children, scale: Scale) -> Found:
    asks = shortened(in_turn(shared, scale.bounded_prompts), scale.bounded_tokens)
    kinds = [kind_of(name) for name in scale.bounded_kinds]
    found = beside_accelerate.run(
        ground, children, asks, kinds, rounds=scale.rounds, seconds=scale.bounded_seconds
    )  # fmt: skip
    children.close_all_but({ground.peer()})
    return found


def _records(mib: float, scale: Scale) -> Found:
    return one_record_or_tensors.run(widened(mib), experts=scale.records, rounds=20, seconds=scale.records_seconds)


@contextmanager
def _beside(scale: Scale, learnt: Learnt, found: Found) -> Iterator[tuple[beside_accelerate.Ground | None, Children]]:
    """What accelerate needs; None where that can not be had."""
    with ExitStack() as stack:
        ground: beside_accelerate.Ground | None = None
        children = Children()
        try:
            ground, children = stack.enter_context(beside_accelerate.prepared(scale.expert_mib, learnt, kind_of(PAPER)))
        except (ArmFailed, OSError) as error:
            found["bounded"] = {"error": f"{type(error).__name__}: {error}"}
        yield ground, children


def _peer(ground: beside_accelerate.Ground, children: Children) -> Answer:
    """accelerate's answer to a batch. After a failure the next call opens it anew. Raises ArmFailed."""

    def answer(asks: Sequence[Ask]) -> ServedTurn:
        try:
            child = children.get(ground.peer())
            return ServedTurn.of_answer(child.tell("serve", TURN_TIMEOUT_S, **stream_of(asks).as_arguments()))
        except ArmFailed:
            children.close_all_but()
            raise

    return answer


def _part(run: Callable[[], Found]) -> Found:
    """With how many seconds it took."""
    began = time.monotonic()
    try:
        found = run()
    except (ArmFailed, GreenroomError, RuntimeError, OSError, LookupError) as error:
        found = {"error": f"{type(error).__name__}: {error}"}
    return {**found, "seconds": round(time.monotonic() - began, 1)}


def _figures(found: Found) -> Found:
    """Those with aims. ``lookup_share``: the higher of one sequence at a time and several at once."""
    shares = [found[name].get("lookup_share") for name in ("one", "many")]
    return {
        "speed_ratio_accelerate": found["bounded"].get("speed_ratio_accelerate"),
        "stall_recovered": found["one"].get("stall_recovered"),
        "lookup_share": max((share for share in shares if share is not None), default=None),
    }
