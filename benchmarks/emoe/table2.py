"""eMoE's Table 2: how often a predictor foresees an expert, beside predictors that need no learning.

    python -m benchmarks.emoe.table2                     the bundled model, its routing recorded here
    TRACE=t.npz python -m benchmarks.emoe.table2         a recorded trace; task types from t.meta.jsonl beside it
    QUICK=1 python -m benchmarks.emoe.table2             in a minute or two, to see that it works

Predictors learn from the first four fifths of the prompts, in the order of their arrival. Measured are those of the
last fifth that have an earlier one of their task type. The bundled model's prompts come in two orders. "Drawn": task
and kind of each are drawn anew. "In runs": a task stays with a kind for about 20 prompts, as conversations do (eMoE,
section 3.3, counts on it). Figures of a learned predictor are means over seeds, with standard deviations. The last line
is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch

from benchmarks.harness.inputs.bundled_routing import drawn_prompts, record_routing
from benchmarks.harness.reporting.plots import panels_of, save
from benchmarks.harness.reporting.progress import progress
from greenroom.core.errors import InvalidConfig
from greenroom.core.units import parse_bytes
from greenroom.demo.tasks import Sample
from greenroom.predictor.judging.scores import Score
from greenroom.predictor.kinds.config import BACKBONES
from greenroom.predictor.kinds.emoe.artifact import LearnedArtifact
from greenroom.predictor.kinds.emoe.comparison import places_to_test, trivial
from greenroom.predictor.kinds.emoe.config import EMOE_KINDS, TrainingConfig
from greenroom.predictor.kinds.emoe.networks import LearnedPredictor
from greenroom.predictor.kinds.emoe.recorded import Recorded, read_recorded
from greenroom.predictor.kinds.emoe.training import measure, split, train
from greenroom.replay import RoutingTrace

PAPER = {
    "gpt2": {"emoe-l": "50-51 %", "emoe-a": "49-51 %"},
    "bert": {"emoe-l": "13-16 %", "emoe-a": "12-16 %"},
    "xlnet": {"emoe-l": "70-71 %", "emoe-a": "69-71 %"},
}
"""eMoE, Table 2: OpenMoE and Mixtral, models of 0.1 billion parameters."""
PROMPTS, QUICK_PROMPTS = 300, 100
RUN_OF = 20
FORECASTS = 15


@dataclass(frozen=True, slots=True)
class Plan:
    seeds: int
    epochs: int
    prompts: int
    backbones: tuple[str, ...] = BACKBONES
    kinds: tuple[str, ...] = EMOE_KINDS


def plan_of(*, quick: bool, seeds: int | None = None) -> Plan:
    return Plan(seeds or 1, 2, QUICK_PROMPTS, ("xlnet",)) if quick else Plan(seeds or 3, 60, PROMPTS)


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path, default=os.environ.get("TRACE") or None)
    parser.add_argument("--tasks", type=Path, help="task types of the trace's sequences, JSON Lines")
    parser.add_argument("--quick", action="store_true", default=bool(os.environ.get("QUICK")))
    parser.add_argument("--seeds", type=int, help="3, or 1 where it is quick")
    parser.add_argument("--model-bytes", help="of the traced model, such as 12.8GiB, where the trace does not say")
    parser.add_argument("--plot", type=Path, help="a picture of the same")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    plan = plan_of(quick=options.quick, seeds=options.seeds)
    size = None if options.model_bytes is None else parse_bytes(options.model_bytes, field="model-bytes")
    result = run(plan, trace=options.trace, tasks=options.tasks, model_bytes=size)
    if options.plot is not None:
        draw(result, options.plot)
    print(json.dumps(result))
    return result


def run(
    plan: Plan, *, trace: Path | None = None, tasks: Path | None = None, model_bytes: int | None = None
) -> dict[str, Any]:
    """All tables, printed as they come."""
    tables = {}
    for name, recorded in worlds(plan, trace, tasks):
        tables[name] = table(recorded, plan, model_bytes or bytes_of(recorded.trace))
        print_table(name, tables[name])
        sys.stdout.flush()
    return {"bench": "emoe-table2", "seeds": plan.seeds, "epochs": plan.epochs, "tables": tables}


def worlds(plan: Plan, trace: Path | None, tasks: Path | None) -> Iterator[tuple[str, Recorded]]:
    if trace is not None:
        yield trace.stem, read_recorded(trace, tasks)
        return
    asked = drawn_prompts(plan.prompts)
    recorded = Recorded(record_routing(asked), tuple(one.task for one in asked))
    yield "bundled model, drawn", recorded
    yield "bundled model, in runs", reordered(recorded, in_runs(asked))


# -- the order of prompts ---------------------------------------------------------------------------------------------


def in_runs(asked: Sequence[Sample], seed: int = 7) -> list[int]:
    """The same prompts in another order: the same task types, and the kinds of each in runs of about ``RUN_OF``."""
    random = Random(seed)
    queues: dict[str, list[int]] = {}
    for task in sorted({one.task for one in asked}):
        runs = []
        for kind in sorted({one.kind for one in asked if one.task == task}):
            mine = [place for place, one in enumerate(asked) if (one.task, one.kind) == (task, kind)]
            runs += [mine[start : start + RUN_OF] for start in range(0, len(mine), RUN_OF)]
        random.shuffle(runs)
        queues[task] = [place for one in reversed(runs) for place in reversed(one)]
    return [queues[one.task].pop() for one in asked]


def reordered(recorded: Recorded, order: Sequence[int]) -> Recorded:
    starts = recorded.trace.seq_starts
    rows = np.concatenate([np.arange(starts[place], starts[place + 1]) for place in order])
    lengths = [int(starts[place + 1] - starts[place]) for place in order]
    trace = RoutingTrace(
        experts=recorded.trace.experts[rows],
        seq_starts=np.concatenate([[0], np.cumsum(lengths)]),
        num_experts=recorded.trace.num_experts,
        expert_bytes=recorded.trace.expert_bytes,
        model=recorded.trace.model,
    )
    return replace(recorded, trace=trace, tasks=tuple(recorded.tasks[place] for place in order))


def bytes_of(trace: RoutingTrace) -> int | None:
    """Of the model's experts, which are most of it; None where that was not recorded."""
    if trace.expert_bytes is None:
        return None
    each = np.broadcast_to(np.asarray(trace.expert_bytes), (trace.layers,))
    return int((each * trace.experts_per_layer).sum())


# -- figures ----------------------------------------------------------------------------------------------------------


def table(recorded: Recorded, plan: Plan, model_bytes: int | None) -> dict[str, Any]:
    sequences = recorded.sequences
    begin = split(sequences, TrainingConfig()).train
    places = places_to_test(sequences, begin)
    if not len(places):
        raise InvalidConfig("trace", recorded.trace.model, "one whose last fifth has prompts of types seen before")
    rows: dict[str, Any] = {name: _row([one]) for name, one in trivial(recorded, begin, places).items()}
    jobs = [(backbone, kind) for backbone in plan.backbones for kind in plan.kinds]
    with progress(len(jobs) * plan.seeds, "training") as bar:
        for backbone, kind in jobs:
            made = []
            for seed in range(plan.seeds):
                config = TrainingConfig(kind=kind, backbone=backbone, seed=seed, epochs=plan.epochs)
                made.append(train(sequences, config))
                bar.update()
            scores = [measure(artifact, sequences, places) for artifact in made]
            rows[f"{backbone} {kind}"] = {**_row(scores), **_costs(made, model_bytes), "paper": PAPER[backbone][kind]}
    return {
        "model": recorded.trace.model,
        "shape": str(recorded.shape),
        "sequences": len(sequences),
        "trained_on": begin,
        "measured_on": len(places),
        "task_types": len(set(sequences.tasks)),
        "model_bytes": model_bytes,
        "rows": rows,
    }


def _row(scores: Sequence[Score]) -> dict[str, Any]:
    """Mean and standard deviation over seeds."""
    row: dict[str, Any] = {}
    for name in ("accuracy", "precision", "recall", "f1", "overlap"):
        values = [getattr(one, name) for one in scores]
        row[name] = float(np.mean(values))
        row[f"{name}_sd"] = float(np.std(values, ddof=1)) if len(values) > 1 else 0.0
    row["coverage"] = {
        str(percent): float(np.mean([one.coverage[percent] for one in scores])) for percent in scores[0].coverage
    }
    return row


def _costs(made: Sequence[LearnedArtifact], model_bytes: int | None) -> dict[str, Any]:
    one = made[0]
    predictor = LearnedPredictor(one)
    times = []
    for _ in range(FORECASTS):
        began = time.thread_time()
        predictor.forecast("", None)
        times.append((time.thread_time() - began) * 1000)
    return {
        "parameters": int(sum(array.size for array in one.weights.values())),
        "bytes": one.nbytes,
        "share_of_model": None if model_bytes is None else one.nbytes / model_bytes,
        "train_s": float(np.mean([artifact.report["seconds"] for artifact in made])),
        "forecast_cpu_ms": float(np.median(times)),
    }


def print_table(name: str, found: Mapping[str, Any]) -> None:
    print(
        f"\n{name}: {found['shape']}, {found['sequences']} prompts of {found['task_types']} types, "
        f"learnt from the first {found['trained_on']}, measured on {found['measured_on']}"
    )
    print(f"{'':30} {'right':>14} {'P':>6} {'F1':>6} {'overlap':>14}  at 20/40/60/80 % of experts   "
          f"{'parameters':>10} {'of model':>8} {'CPU ms':>6}  paper")  # fmt: skip
    for label, row in found["rows"].items():
        within = " ".join(f"{share:.3f}" for share in row["coverage"].values())
        cost = ""
        if "parameters" in row:
            share = "" if row["share_of_model"] is None else f"{row['share_of_model']:.2%}"
            cost = f"{row['parameters']:10,} {share:>8} {row['forecast_cpu_ms']:6.1f}  {row['paper']}"
        print(f"{label:30} {_with_sd(row, 'accuracy')} {row['precision']:6.3f} {row['f1']:6.3f} "
              f"{_with_sd(row, 'overlap')}  {within}       {cost}".rstrip())  # fmt: skip


def _with_sd(row: Mapping[str, Any], name: str) -> str:
    return f"{row[name]:.4f} ±{row[f'{name}_sd']:.4f}"


def draw(result: Mapping[str, Any], path: Path) -> None:
    """Bars of what was right, a table beside the other. Raises PlotUnavailable."""
    figure, panels = panels_of(len(result["tables"]), 1, height=4.2)
    for panel, (name, found) in zip(panels, result["tables"].items(), strict=True):
        labels = list(found["rows"])[::-1]
        rows = [found["rows"][label] for label in labels]
        colours = ["tab:blue" if "parameters" in row else "tab:grey" for row in rows]
        panel.barh(labels, [row["accuracy"] for row in rows], xerr=[row["accuracy_sd"] for row in rows], color=colours)
        panel.set_title(name)
        panel.set_xlabel("share of (token, layer, slot) whose expert was foreseen")
    save(figure, path)


if __name__ == "__main__":
    main()
