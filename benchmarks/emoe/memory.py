"""The stage ``memory``: what answers and steps become with a share of the experts (eMoE, Figs 13-16, section 5.7)."""

from __future__ import annotations

import statistics
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from tqdm import tqdm

from benchmarks.emoe import table2
from benchmarks.emoe.foresight import Predictors, learn
from benchmarks.emoe.memory_arms import EXACT, KINDS, PAPER, RESIDENT, WHOLE, Arm, Ask, Kind, World, agreement
from benchmarks.emoe.profile import MAX_TOKENS
from greenroom.core.model_profile import ModelProfile
from greenroom.demo.tasks import TASKS, sample
from greenroom.predictor.learned.config import LEARNED_KINDS
from greenroom.predictor.learned.recorded import Recorded
from greenroom.profiling.forced import Given

SEED = 52_000
MAIN_SHARE = 0.6
DOMINANT = 0.9
"""Share of a block's prompts that are of its own task type; the others are of any. Each block has another type."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """``prompts`` in blocks of ``block``, after one that warms up; ``recorded`` of others for the predictors.
    ``other_batches``: prompts at a time at which eMoE-A's time at ``MAIN_SHARE`` is measured too (Fig. 16).
    """

    shares: tuple[float, ...] = (0.2, 0.4, 0.6, 0.8)
    prompts: int = 50
    block: int = 10
    at_once: int = 8
    other_batches: tuple[int, ...] = (1, 16)
    recorded: int = 300
    epochs: int = 40
    kinds: tuple[Kind, ...] = KINDS


QUICK = Scale(
    shares=(MAIN_SHARE,), prompts=10, block=5, at_once=4, other_batches=(), recorded=40, epochs=2,
    kinds=tuple(kind for kind in KINDS if kind.fidelity == PAPER and kind.seed in (None, 0)),
)  # fmt: skip


def stream(world: World, scale: Scale) -> list[Ask]:
    """Held-out prompts whose mix of task types shifts from block to block, after a block to warm up with."""
    return [
        world.ask(drawn.task, drawn.prompt, drawn.answer)
        for drawn in (
            sample(task, seed=SEED, index=number, split="heldout")
            for number, task in enumerate(tasks_of_stream(scale.prompts + scale.block, scale.block))
        )
    ]


def tasks_of_stream(prompts: int, block: int) -> list[str]:
    rng = Random(SEED)
    return [
        TASKS[number // block % len(TASKS)] if rng.random() < DOMINANT else rng.choice(TASKS)
        for number in range(prompts)
    ]  # fmt: skip


def trained(scale: Scale) -> Predictors:
    """Learnt from the routing of the bundled model, which widening leaves as it is, on other prompts."""
    asked = table2.prompts(scale.recorded, seed=SEED + 1)
    recorded = Recorded(table2.record(asked), tuple(one.task for one in asked))
    return {kind: learn(recorded, kind, scale.epochs) for kind in LEARNED_KINDS}


def run(folder: Path, profile: ModelProfile, scale: Scale, predictors: Predictors) -> dict[str, Any]:
    with World(folder, profile) as world:
        asks = stream(world, scale)
        plans = [(share, _kinds(scale, share), scale.at_once) for share in scale.shares]
        plans += [(MAIN_SHARE, _kinds_by_batch(scale), at_once) for at_once in scale.other_batches]
        turns = sum(len(kinds) + 1 for _, kinds, _ in plans) * (len(asks) // scale.block + 1)
        rows: list[dict[str, Any]] = []
        with tqdm(total=turns, desc="memory", unit="block", disable=not sys.stderr.isatty()) as bar:
            for share, kinds, at_once in plans:
                rows += _in_turns(world, share, kinds, at_once, asks, scale, predictors, bar)
    return {**figures(rows), "rows": rows, "settings": {"prompts": scale.prompts, "at_once": scale.at_once}}


def _kinds(scale: Scale, share: float) -> tuple[Kind, ...]:
    """eMoE without rerouting every miss is measured at one share only."""
    return tuple(
        kind for kind in scale.kinds if kind.policy != "emoe" or kind.fidelity == PAPER or share == MAIN_SHARE
    )  # fmt: skip


def _kinds_by_batch(scale: Scale) -> tuple[Kind, ...]:
    wanted = ("emoe-a", "no predictor", "look-ahead")
    return tuple(kind for kind in scale.kinds if kind.name in wanted and kind.fidelity in (PAPER, EXACT)
                 and not (kind.policy == "emoe" and kind.fidelity == EXACT))  # fmt: skip


def _in_turns(
    world: World,
    share: float,
    kinds: Sequence[Kind],
    at_once: int,
    asks: Sequence[Ask],
    scale: Scale,
    predictors: Predictors,
    bar: Any,
) -> list[dict[str, Any]]:
    """All arms with that share of the experts, and the resident one, block by block in turns."""
    arms: list[Arm] = []
    try:
        for kind in (WHOLE, *kinds):
            own = 1.0 if kind is WHOLE else share
            arms.append(Arm(kind, world, own, at_once, predictors.get(kind.predictor)))
        blocks = [asks[start : start + scale.block] for start in range(0, len(asks), scale.block)]
        for number, block in enumerate(blocks):
            turn = number % len(arms)
            for arm in arms[turn:] + arms[:turn]:
                arm.run(block, MAX_TOKENS)
                bar.update()
        whole = arms[0]
        kept = asks[scale.block :]
        said = [one.token_ids for one in whole.answers[scale.block :]]
        given = [Given(ask.prompt_ids, ids, ask.task) for ask, ids in zip(kept, said, strict=True)]
        rows = []
        for arm in arms:
            rows.append(_row(arm, whole, kept, said, scale, share, agreement(arm.forced(given))))
            bar.update()
        return rows
    finally:
        for arm in arms:
            arm.close()


def _row(
    arm: Arm,
    whole: Arm,
    asks: Sequence[Ask],
    said: Sequence[tuple[int, ...]],
    scale: Scale,
    share: float,
    agreed: float,
) -> dict[str, Any]:
    """Of the blocks after the first."""
    answers = arm.answers[scale.block :]
    right = [answer.token_ids == ask.answer_ids for answer, ask in zip(answers, asks, strict=True)]
    same = [answer.token_ids == ids for answer, ids in zip(answers, said, strict=True)]
    ratios = [own / there for own, there in zip(arm.blocks[1:], whole.blocks[1:], strict=True)]
    return {
        "arm": arm.kind.name,
        "fidelity": arm.kind.fidelity,
        "seed": arm.kind.seed,
        "share": 1.0 if arm is whole else share,
        "beside": share,
        "at_once": arm.at_once,
        "experts_bytes": arm.slots * arm.world.expert_bytes,
        "right": statistics.fmean(right),
        "same_as_resident": statistics.fmean(same),
        "agreement": agreed,
        "right_by_task": {task: _mean([hit for hit, ask in zip(right, asks, strict=True) if ask.task == task])
                          for task in TASKS},
        "latency_s": statistics.fmean(one.seconds for one in answers),
        "seconds": sum(arm.blocks[1:]),
        "latency_ratio": sum(arm.blocks[1:]) / sum(whole.blocks[1:]),
        "latency_ratio_blocks": ratios,
        "bytes_moved": int(arm.moved),
        "on_demand": int(arm.on_demand),
        "approximated": statistics.fmean(one.approximated for one in answers),
        "predictor_seconds": arm.predictor_seconds,
        "forecasts": int(arm.forecasts),
    }  # fmt: skip


def _mean(values: Sequence[bool]) -> float | None:
    return statistics.fmean(values) if values else None


# -- figures -------------------------------------------------------------------------------------------------------


def figures(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The figures with aims, of eMoE-A with every miss rerouted. ``recovered`` is the lower of what the answers and
    what the teacher-forced tokens say."""
    most = Counter(row["at_once"] for row in rows).most_common(1)[0][0]
    by_batch: dict[str, dict[str, Any]] = {str(row["at_once"]): {} for row in rows}
    for row in rows:
        if row["beside"] == MAIN_SHARE and row["arm"] != "random":
            by_batch[str(row["at_once"])][row_name(row)] = {
                "latency_s": row["latency_s"], "ratio": row["latency_ratio"],
                "predictor_share": row["predictor_seconds"] / row["seconds"],
            }  # fmt: skip
    rows = [row for row in rows if row["at_once"] == most]
    found: dict[str, Any] = {"recovered": {}, "by_batch": by_batch}
    for share in sorted({row["beside"] for row in rows}):
        own = [row for row in rows if row["beside"] == share]
        recovered = {row_name(row): recovery(row, own) for row in own if row["arm"] not in (RESIDENT, "random")}
        found["recovered"][f"{share:g}"] = recovered
        ours = recovered.get(f"emoe-a, {PAPER}")
        if ours is not None and share in (0.6, 0.8):
            found[f"recovered_at_{round(100 * share)}"] = min(ours.values(), default=None)
    at_60 = _row_of(rows, "emoe-a", 0.6)
    if at_60 is not None:
        found["latency_ratio_resident"] = at_60["latency_ratio"] if at_60["bytes_moved"] > 0 else None
        plain = _row_of(rows, "no predictor", 0.6)
        if plain is not None:
            found["overhead_share"] = 1 - plain["seconds"] / at_60["seconds"]
            found["predictor_share"] = at_60["predictor_seconds"] / at_60["seconds"]
    return found


def recovery(row: Mapping[str, Any], own: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """(accuracy - random) / (1 - random), the resident model's accuracy being 1; random is the mean of its draws."""
    whole = next(one for one in own if one["arm"] == RESIDENT)
    drawn = [one for one in own if one["arm"] == "random"]
    found = {}
    for name, key in (("answers", "right"), ("agreement", "agreement")):
        if drawn and whole[key]:
            random = statistics.fmean(one[key] for one in drawn) / whole[key]
            if random < 1:
                found[name] = (row[key] / whole[key] - random) / (1 - random)
    return found


def row_name(row: Mapping[str, Any]) -> str:
    return f"{row['arm']}, {row['fidelity']}"


def _row_of(rows: Sequence[Mapping[str, Any]], arm: str, share: float) -> Mapping[str, Any] | None:
    found = (row for row in rows if row["arm"] == arm and row["fidelity"] == PAPER and row["beside"] == share)
    return next(found, None)


def table(found: Mapping[str, Any]) -> str:
    heads = (
        "experts",
        "arm, fidelity",
        "right",
        "as resident",
        "agreement",
        "recovered",
        "latency ×",
        "moved",
        "predictor",
    )
    lines = ["".join(f"{head:>13}" if place != 1 else f"  {head:<24}" for place, head in enumerate(heads))]
    for row in found["rows"]:
        recovered = found["recovered"][f"{row['beside']:g}"].get(row_name(row), {})
        said = "/".join(f"{value:.2f}" for value in recovered.values()) or "-"
        name = row_name(row) + ("" if row["seed"] is None else f" ({row['seed']})")
        if row["at_once"] != found["settings"]["at_once"]:
            name += f", {row['at_once']} at once"
        lines.append(
            f"{row['share']:>13.0%}  {name:<24}{row['right']:>13.2f}{row['same_as_resident']:>13.2f}"
            f"{row['agreement']:>13.3f}{said:>13}{row['latency_ratio']:>13.3f}"
            f"{row['bytes_moved'] / 2**20:>9.0f} MiB{row['predictor_seconds'] / row['seconds']:>13.1%}"
        )
    return "\n".join(lines)
