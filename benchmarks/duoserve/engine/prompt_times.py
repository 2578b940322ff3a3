"""A prompt's time over the least that it could take: what it takes resident, or its bytes over the link."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Final

from benchmarks.duoserve.engine.served import WHOLE, Widened
from benchmarks.harness.arms.engine_arm import EngineArm
from benchmarks.harness.arms.policy_kind import Kind
from benchmarks.harness.inputs.shared_model import Ask
from benchmarks.harness.reporting.progress import progress
from benchmarks.harness.reporting.statistics import Spread, spread_json
from benchmarks.harness.rounds import in_turns

OURS: Final = "duoserve"
KINDS: Final = (Kind(OURS, "duoserve"), Kind("reuse", "reuse"))
SETTLE_S: Final = 0.1
"""So that what was fetched ahead of the last token is not still moving: it is not the prompt's."""
ONE_TOKEN: Final = 0
"""Any token: how many there are is what counts of an answer."""


@dataclass(frozen=True, slots=True)
class Prefills:
    """Prompts of one length once, under one arm: seconds, and bytes moved, of each."""

    seconds: tuple[float, ...]
    bytes_moved: tuple[int, ...]


def answered(arm: EngineArm, prompts: Sequence[Ask], fillers: Sequence[Ask]) -> Prefills:
    """Each prompt alone, after another prompt's whole answer: it finds the experts that tokens have left."""
    seconds, moved = [], []
    for prompt, filler in zip(prompts, fillers, strict=True):
        arm.run([filler], 1)
        time.sleep(SETTLE_S)
        turn = arm.run([prompt], 1)
        seconds.append(turn.request_seconds[0])
        moved.append(turn.bytes_moved)
    return Prefills(tuple(seconds), tuple(moved))


def run(served: Widened, *, rows: Sequence[int], prefills: int, rounds: int, seconds: float) -> dict[str, Any]:
    """All lengths under each arm in turns, and on an engine that holds all experts; the disk is measured before and
    after each length."""
    prompts = {length: served.of_rows(length, prefills) for length in rows}
    fillers = served.asks(prefills)
    found: dict[int, dict[int, dict[str, Prefills]]] = {}  # by round, length, arm
    links: dict[tuple[int, int, str], float] = {}
    with ExitStack() as stack:
        arms = [stack.enter_context(served.arm(WHOLE, 1.0)), *(stack.enter_context(served.arm(k)) for k in KINDS)]
        with progress((rounds + 1) * len(arms), "a prompt's time", "turn") as bar:
            for round_, arm in in_turns(arms, rounds, seconds):
                for length in rows:
                    before = served.link.bytes_per_s()
                    own = answered(arm, prompts[length], fillers) if round_ else _warmed(arm, prompts[length], fillers)
                    if round_:
                        links[round_, length, arm.kind.name] = (before + served.link.bytes_per_s()) / 2
                        found.setdefault(round_, {}).setdefault(length, {})[arm.kind.name] = own
                bar.update()
        served.shared.detach()
    cells = [_cell(length, kind.name, found, links) for length in rows for kind in KINDS]
    ours = [cell["over_bound"]["median"] for cell in cells if cell["arm"] == OURS]
    return {"cells": cells, "prefills": prefills, "rounds": len(found), "prefill_bound_ratio": max(ours)}


def _warmed(arm: EngineArm, prompts: Sequence[Ask], fillers: Sequence[Ask]) -> Prefills:
    return answered(arm, prompts[:1], fillers[:1])


def _cell(
    length: int,
    name: str,
    found: Mapping[int, Mapping[int, Mapping[str, Prefills]]],
    links: Mapping[tuple[int, int, str], float],
) -> dict[str, Any]:
    """``over_bound``: the seconds of a round's prompts over the sum of their least ones."""
    over, own_seconds, resident, by_link = [], [], [], []
    for round_, lengths in found.items():
        own, whole = lengths[length][name], lengths[length][WHOLE.name]
        link = links[round_, length, name]
        least = [max(alone, moved / link) for alone, moved in zip(whole.seconds, own.bytes_moved, strict=True)]
        over.append(sum(own.seconds) / sum(least))
        own_seconds.append(sum(own.seconds) / len(least))
        resident.append(sum(whole.seconds) / len(least))
        by_link.append(sum(own.bytes_moved) / link / len(least))
    return {
        "rows": length,
        "arm": name,
        "seconds": spread_json(Spread.of(own_seconds), 3),
        "resident_seconds": spread_json(Spread.of(resident), 3),
        "link_seconds": spread_json(Spread.of(by_link), 3),
        "over_bound": spread_json(Spread.of(over), 3),
    }
