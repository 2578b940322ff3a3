"""The stage ``memory``: accuracy and step times with a share of the experts (eMoE, Figs 13-16, section 5.7)."""

from __future__ import annotations

import gc
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from random import Random
from typing import Any

from benchmarks.emoe.measured_profile import MAX_TOKENS
from benchmarks.emoe.memory.engine_arms import EXACT, KINDS, PAPER, RESIDENT, VARIANTS, WHOLE, Arm, Kind, agreements
from benchmarks.emoe.memory.forecasters import Predictors, learn
from benchmarks.harness.inputs.bundled_routing import drawn_prompts, record_routing
from benchmarks.harness.inputs.shared_model import Ask, SharedModel
from benchmarks.harness.reporting.progress import progress
from benchmarks.harness.reporting.statistics import geometric, interval
from greenroom.core.model_profile import ModelProfile
from greenroom.demo.tasks import TASKS, sample
from greenroom.predictor.kinds.emoe.config import EMOE_KINDS
from greenroom.predictor.kinds.emoe.recorded import Recorded
from greenroom.profiling.model.teacher_forcing import Given

SEED = 52_000
MAIN_SHARE = 0.6
AIMED = (0.6, 0.8)
"""The shares at which there are aims."""
DOMINANT = 0.9
"""Share of a block's prompts that are of its own task type; the others are of any. Each block has another type."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """``seeds`` streams after a block that warms up; each has a block of ``block`` prompts for every task type.

    Shares that are not in ``AIMED`` have ``few_seeds`` streams. The predictors learn from ``recorded`` other prompts.
    ``other_batches``: further numbers of prompts at once for eMoE-A's time at ``MAIN_SHARE`` (Fig. 16).
    """

    shares: tuple[float, ...] = (0.2, 0.4, 0.6, 0.8)
    seeds: int = 5
    few_seeds: int = 1
    block: int = 8
    at_once: int = 8
    other_batches: tuple[int, ...] = (1, 16)
    recorded: int = 300
    epochs: int = 40
    kinds: tuple[Kind, ...] = KINDS


QUICK = Scale(
    shares=(MAIN_SHARE,), seeds=1, few_seeds=1, block=4, at_once=4, other_batches=(), recorded=40, epochs=2,
    kinds=tuple(kind for kind in KINDS if kind.fidelity == PAPER and kind.seed in (None, 0)),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Stream:
    """Prompts as they come. ``blocks[0]`` warms up. ``seeds[n]``: the stream of the n-th block after it."""

    blocks: tuple[tuple[Ask, ...], ...]
    seeds: tuple[int, ...]

    @property
    def kept(self) -> list[Ask]:
        return [ask for block in self.blocks[1:] for ask in block]

    def by_seed(self, values: Sequence[float]) -> list[list[float]]:
        """``values`` of the kept prompts, or blocks, by stream."""
        each = len(values) // len(self.seeds)
        found: dict[int, list[float]] = {}
        for place, seed in enumerate(self.seeds):
            found.setdefault(seed, []).extend(values[place * each : (place + 1) * each])
        return list(found.values())


def stream(shared: SharedModel, seeds: int, block: int) -> Stream:
    """Held-out prompts whose mix of task types shifts from block to block."""
    tasks = [(0, tasks_of_block(0, 0, block))]
    tasks += [(seed, tasks_of_block(seed, place, block)) for seed in range(1, seeds + 1) for place in range(len(TASKS))]
    numbers = count()
    drawn = [
        tuple(sample(task, seed=SEED, index=next(numbers), split="heldout") for task in own) for _, own in tasks
    ]  # fmt: skip
    blocks = tuple(tuple(shared.ask(one.task, one.prompt, one.answer) for one in own) for own in drawn)
    return Stream(blocks, tuple(seed for seed, _ in tasks[1:]))


def tasks_of_block(seed: int, place: int, block: int) -> list[str]:
    """Each block of a stream favours another type, in an order that follows from the seed."""
    order = Random(SEED + seed).sample(TASKS, len(TASKS))
    rng = Random(f"{SEED + seed}, {place}")
    return [order[place] if rng.random() < DOMINANT else rng.choice(TASKS) for _ in range(block)]


def trained(scale: Scale) -> Predictors:
    """Predictors trained on the bundled model's routing of other prompts; widening leaves routing as it is."""
    asked = drawn_prompts(scale.recorded, seed=SEED + 1)
    recorded = Recorded(record_routing(asked), tuple(one.task for one in asked))
    return {kind: learn(recorded, kind, scale.epochs) for kind in EMOE_KINDS}


def run(folder: Path, profile: ModelProfile, scale: Scale, predictors: Predictors) -> dict[str, Any]:
    with SharedModel(folder, profile) as shared:
        plans = [_Plan(share, _kinds(scale, share), scale.at_once, scale.seeds if share in AIMED else scale.few_seeds)
                 for share in scale.shares]  # fmt: skip
        plans += [_Plan(MAIN_SHARE, _kinds_by_batch(scale), size, scale.few_seeds) for size in scale.other_batches]
        turns = sum((len(plan.kinds) + 1) * (plan.seeds * len(TASKS) + 2) for plan in plans)
        rows: list[dict[str, Any]] = []
        with progress(turns, "memory", "block") as bar:
            for plan in plans:
                rows += _in_turns(shared, plan, stream(shared, plan.seeds, scale.block), predictors, bar)
                gc.collect()  # an engine and its policy refer to each other; their gigabyte would stay
    settings = {"seeds": scale.seeds, "few_seeds": scale.few_seeds, "block": scale.block, "at_once": scale.at_once}
    return {**figures(rows), "rows": rows, "settings": settings}


@dataclass(frozen=True, slots=True)
class _Plan:
    """Arms that take turns."""

    share: float
    kinds: tuple[Kind, ...]
    at_once: int
    seeds: int


def _kinds(scale: Scale, share: float) -> tuple[Kind, ...]:
    """Exact and sensitive eMoE are measured at one share only, its variants where there are aims."""
    return tuple(
        kind for kind in scale.kinds
        if (kind.fidelity == PAPER or kind.policy != "emoe" or share == MAIN_SHARE)
        and (kind.name not in VARIANTS or share in AIMED)
    )  # fmt: skip


def _kinds_by_batch(scale: Scale) -> tuple[Kind, ...]:
    wanted = ("emoe-a", "no predictor", "look-ahead")
    return tuple(kind for kind in scale.kinds if kind.name in wanted and kind.fidelity in (PAPER, EXACT)
                 and not (kind.policy == "emoe" and kind.fidelity == EXACT))  # fmt: skip


def _in_turns(
    shared: SharedModel, plan: _Plan, asked: Stream, predictors: Predictors, bar: Any
) -> list[dict[str, Any]]:
    """All arms of the plan and the resident one, block by block, each time in another order."""
    arms: list[Arm] = []
    order = Random(SEED)
    try:
        for kind in (WHOLE, *plan.kinds):
            own = 1.0 if kind is WHOLE else plan.share
            arms.append(Arm(kind, shared, own, plan.at_once, predictors.get(kind.predictor)))
        for block in asked.blocks:
            for arm in order.sample(arms, len(arms)):
                arm.run(block, MAX_TOKENS)
                bar.update()
        whole, warm = arms[0], len(asked.blocks[0])
        said = [one.token_ids for one in whole.answers[warm:]]
        given = [Given(ask.prompt_ids, ids, ask.task) for ask, ids in zip(asked.kept, said, strict=True)]
        rows = []
        for arm in arms:
            rows.append(_row(arm, whole, asked, said, plan.share, agreements(arm.forced(given))))
            bar.update()
        return rows
    finally:
        for arm in arms:
            arm.close()
        shared.detach()


def _row(
    arm: Arm,
    whole: Arm,
    asked: Stream,
    said: Sequence[tuple[int, ...]],
    share: float,
    agreed: Sequence[tuple[int, int]],
) -> dict[str, Any]:
    """Figures of the blocks after the first. ``agreed``: for each prompt the tokens it would have picked, and all."""
    asks, answers = asked.kept, arm.answers[len(asked.blocks[0]) :]
    right = [answer.token_ids == ask.answer_ids for answer, ask in zip(answers, asks, strict=True)]
    same = [answer.token_ids == ids for answer, ids in zip(answers, said, strict=True)]
    tokens = [of for _, of in agreed]
    hits = [own for own, _ in agreed]
    by_seed = zip(asked.by_seed(hits), asked.by_seed(tokens), strict=True)

    def by_task(values: Sequence[float], over: Sequence[float]) -> dict[str, float | None]:
        places = {task: [place for place, ask in enumerate(asks) if ask.task == task] for task in TASKS}
        return {task: sum(values[place] for place in own) / sum(over[place] for place in own) if own else None
                for task, own in places.items()}  # fmt: skip

    ones = [1] * len(asks)
    return {
        "arm": arm.kind.name,
        "fidelity": arm.kind.fidelity,
        "seed": arm.kind.seed,
        "share": 1.0 if arm is whole else share,
        "beside": share,
        "at_once": arm.at_once,
        "experts_bytes": arm.slots * arm.shared.expert_bytes,
        "right": statistics.fmean(right),
        "same_as_resident": statistics.fmean(same),
        "agreement": sum(hits) / sum(tokens),
        "by_seed": {
            "right": [statistics.fmean(own) for own in asked.by_seed(right)],
            "agreement": [sum(own) / sum(of) for own, of in by_seed],
            "seconds": [sum(own) for own in asked.by_seed(arm.blocks[1:])],
        },
        "right_by_task": by_task(right, ones),
        "same_by_task": by_task(same, ones),
        "agreement_by_task": by_task(hits, tokens),
        "latency_s": statistics.fmean(one.seconds for one in answers),
        "seconds": sum(arm.blocks[1:]),
        "latency_ratio": sum(arm.blocks[1:]) / sum(whole.blocks[1:]),
        "latency_ratio_blocks": [own / there for own, there in zip(arm.blocks[1:], whole.blocks[1:], strict=True)],
        "bytes_moved": int(arm.moved),
        "on_demand": int(arm.on_demand),
        "approximated": statistics.fmean(one.approximated for one in answers),
        "predictor_seconds": arm.predictor_seconds,
        "forecasts": int(arm.forecasts),
    }


# -- figures -------------------------------------------------------------------------------------------------------


def figures(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The figures with aims, of eMoE-A with every miss rerouted. ``recovered``: the lower of two, by whole answers and
    by teacher-forced tokens."""
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
            found[f"recovered_at_{round(100 * share)}"] = min((one["mean"] for one in ours.values()), default=None)
    at_60 = _row_of(rows, "emoe-a", 0.6)
    if at_60 is not None:
        whole = next(row for row in rows if row["arm"] == RESIDENT and row["beside"] == MAIN_SHARE)
        found["latency_ratio_resident"] = at_60["latency_ratio"] if at_60["bytes_moved"] > 0 else None
        found["latency_ratio_interval"] = geometric(at_60["by_seed"]["seconds"], whole["by_seed"]["seconds"])
        plain = _row_of(rows, "no predictor", 0.6)
        if plain is not None:
            found["overhead_share"] = 1 - plain["seconds"] / at_60["seconds"]
            found["overhead_interval"] = geometric(plain["by_seed"]["seconds"], at_60["by_seed"]["seconds"])
            found["predictor_share"] = at_60["predictor_seconds"] / at_60["seconds"]
    return found


def recovery(row: Mapping[str, Any], own: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """(accuracy - random) / (1 - random), where the resident model's accuracy is 1 and random is the mean of its draws.

    Of all streams together, with the 95 % interval of a jackknife over streams.
    """
    whole = next(one for one in own if one["arm"] == RESIDENT)
    drawn = [one for one in own if one["arm"] == "random"]
    found = {}
    for name, key in (("answers", "right"), ("agreement", "agreement")):
        if not drawn:
            continue
        seeds = range(len(row["by_seed"][key]))
        every = _recovered(row, whole, drawn, key, seeds)
        if every is None:
            continue
        without = [_recovered(row, whole, drawn, key, [one for one in seeds if one != left]) for left in seeds]
        count = len(seeds)
        pseudo = [count * every - (count - 1) * one for one in without if one is not None] if count > 1 else [every]
        found[name] = {"mean": every, "within": interval(pseudo or [every])["within"]}
    return found


def _recovered(
    row: Mapping[str, Any], whole: Mapping[str, Any], drawn: Sequence[Mapping[str, Any]], key: str, seeds: Sequence[int]
) -> float | None:
    def mean(one: Mapping[str, Any]) -> float:
        return statistics.fmean(one["by_seed"][key][seed] for seed in seeds)

    if not seeds or not mean(whole):
        return None
    random = statistics.fmean(mean(one) for one in drawn) / mean(whole)
    return (mean(row) / mean(whole) - random) / (1 - random) if random < 1 else None


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
    widths = (13, -36, 13, 13, 13, 23, 13, 13, 13)
    lines = [
        "".join(
            f"{head:>{width}}" if width > 0 else f"  {head:<{-width}}"
            for head, width in zip(heads, widths, strict=True)
        )
    ]
    for row in found["rows"]:
        recovered = found["recovered"][f"{row['beside']:g}"].get(row_name(row), {})
        said = "/".join(f"{one['mean']:.2f}±{one['within']:.2f}" for one in recovered.values()) or "-"
        name = row_name(row) + ("" if row["seed"] is None else f" ({row['seed']})")
        if row["at_once"] != found["settings"]["at_once"]:
            name += f", {row['at_once']} at once"
        lines.append(
            f"{row['share']:>13.0%}  {name:<36}{row['right']:>13.2f}{row['same_as_resident']:>13.2f}"
            f"{row['agreement']:>13.3f}{said:>23}{row['latency_ratio']:>13.3f}"
            f"{row['bytes_moved'] / 2**20:>9.0f} MiB{row['predictor_seconds'] / row['seconds']:>13.1%}"
        )
    return "\n".join(lines)
