"""A shift of the tasks, and the collection rebuilt from badly predicted sequences (MoE-Infinity, §4.3 and §8.5).

    python -m benchmarks.moe_infinity --stage drift

The collection is made from sequences of half of the tasks. More of these are served, then sequences of the other half.
The predictor service's own rule (``Drift``, with its defaults) decides which are recorded and when to rebuild. The
rebuild is the service's own process, on what the service would have then: the sequences that the collection was made
from and all later ones, the recorded ones last. A sequence's recall is what the policy reports. ``meanwhile``:
sequences that are served with the old collection during the rebuild, by the timed replay at PCIe 4.0 with one or eight
at once. ± is half a 95 % interval over seeds.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from benchmarks.harness.reporting.plots import panels_of, save, tidy
from benchmarks.harness.reporting.progress import progress
from benchmarks.harness.reporting.statistics import interval
from benchmarks.harness.reporting.tables import plus_minus
from benchmarks.moe_infinity.simulated_models import MODELS, PCIE4_BYTES_PER_S, Model
from benchmarks.moe_infinity.synthetic_routing import trace_of
from greenroom.core.artifacts.eamc_file import EamcFile
from greenroom.core.pictures import COLOURS
from greenroom.policies.base.artifacts import artifact_of
from greenroom.policies.base.events import LayerRouting, SequenceEnd, Step
from greenroom.policies.moe_infinity.policy import RECALL, MoeInfinity
from greenroom.predictor.kinds.config import BuildingConfig
from greenroom.predictor.kinds.eamc.drift import Drift
from greenroom.predictor.kinds.eamc.kind import EamcKind
from greenroom.predictor.kinds.eamc.members import choose_members
from greenroom.predictor.kinds.registry import MAKE
from greenroom.predictor.making.job import Job
from greenroom.predictor.making.maker import make_in_subprocess
from greenroom.predictor.traces.counts import Shape
from greenroom.predictor.traces.samples import Sample
from greenroom.replay import RoutingTrace
from greenroom.replay.simulation.simulated_hardware import LinkProfile
from greenroom.replay.simulation.timed_replay import ComputeProfile, TimedReplay
from greenroom.replay.traces.activation_matrices import activation_matrices

PAPER_MEANWHILE: Final = "10-13"
AT_ONCE: Final = (1, 8)
_SMOOTHED: Final = 10
"""Sequences that a point of the picture is the mean of."""


@dataclass(frozen=True, slots=True)
class Scale:
    """``learnt``: sequences of the first half of the tasks, for the collection; ``before``: served before the shift.

    ``until``: at most so many after it, until the collection is due; ``after``: served after the rebuild. ``timed``:
    replayed to find how many are served a second.
    """

    seeds: int = 3
    learnt: int = 400
    before: int = 100
    until: int = 400
    after: int = 100
    timed: int = 16
    models: tuple[str, ...] = tuple(MODELS)


QUICK = Scale(seeds=1, learnt=120, until=200, after=30, timed=3, models=("switch-large-128",))


@dataclass(frozen=True, slots=True)
class Shifted:
    """What one seed showed: recalls, sequence by sequence.

    ``fresh``: of a collection made from ``learnt`` sequences of the second half alone. ``trigger``: sequences from the
    shift until the collection was due; None if it never was.
    """

    before: list[float]
    shifted: list[float]
    rebuilt: list[float]
    fresh: list[float]
    trigger: int | None
    rebuild_s: float
    per_second: tuple[float, ...]


def run(scale: Scale) -> dict[str, Any]:
    """A row for each model. A rebuild is timed, so nothing else runs beside it."""
    rows = []
    with progress(scale.seeds * len(scale.models), "drift") as bar:
        for name in scale.models:
            found = []
            for seed in range(scale.seeds):
                found.append(shift(MODELS[name], scale, seed))
                bar.update()
            rows.append(_row(name, found))
    return {"rows": rows, "paper_meanwhile": PAPER_MEANWHILE}


def shift(model: Model, scale: Scale, seed: int) -> Shifted:
    first, second = np.array_split(np.arange(model.mix.tasks), 2)
    known = trace_of(model.shape, model.mix, scale.learnt + scale.before, seed=seed, tasks=first.tolist())
    count = scale.learnt + scale.until + scale.after
    others = trace_of(model.shape, model.mix, count, seed=seed, tasks=second.tolist())
    catalogue = known.catalogue()
    policy = MoeInfinity(catalogue)
    old = _collection(known.part(0, scale.learnt))
    policy.on_artifact_swapped(artifact_of(catalogue, old, "old"))
    config = BuildingConfig().drift
    drift = Drift(config, made=True)
    recorded: list[NDArray[np.float32]] = []
    others_kept = list(activation_matrices(known.part(0, scale.learnt)))
    before, matrices = [], activation_matrices(known.part(scale.learnt))
    for number, recall in recalls(policy, known.part(scale.learnt)):
        (recorded if drift.note(recall) else others_kept).append(matrices[number])
        before.append(recall)
    stream = others.part(scale.learnt)
    matrices = activation_matrices(stream)
    shifted = []
    for number, recall in recalls(policy, stream.part(0, scale.until)):
        shifted.append(recall)
        (recorded if drift.note(recall) else others_kept).append(matrices[number])
        if drift.due:
            break
    per_second = tuple(_per_second(model, stream.part(0, scale.timed), old, n) for n in AT_ONCE)
    began = time.perf_counter()
    new = asyncio.run(_rebuilt(model, known.model, [*others_kept, *recorded], len(recorded)))
    rebuild_s = time.perf_counter() - began
    rest = stream.part(scale.until, scale.until + scale.after)
    policy.on_artifact_swapped(artifact_of(catalogue, new, "new"))
    rebuilt = [recall for _, recall in recalls(policy, rest)]
    reference = MoeInfinity(catalogue)
    reference.on_artifact_swapped(artifact_of(catalogue, _collection(others.part(0, scale.learnt)), "fresh"))
    return Shifted(
        before, shifted, rebuilt, [recall for _, recall in recalls(reference, rest)],
        len(shifted) if drift.due else None, rebuild_s, per_second,
    )  # fmt: skip


def recalls(policy: MoeInfinity, trace: RoutingTrace) -> Iterator[tuple[int, float]]:
    """What the policy reports of each sequence, one after the other.

    Only routers are replayed: recall is of the prediction, whatever a link brings.
    """
    width = policy.catalogue.experts_per_layer[:, None]
    for number, traced in enumerate(trace.steps(concurrent=1)):
        step = Step(policy.catalogue.pool, number, traced.sequences, traced.phases)
        for layer in np.flatnonzero((traced.picks < width).any(axis=(0, 2))).tolist():
            picks = traced.picks[:, layer].astype(np.int64)
            policy.on_layer_routed(LayerRouting.from_picks(policy.catalogue, step, layer, picks))
        for sequence in traced.ended:
            policy.on_sequence_ended(sequence, SequenceEnd.FINISHED)
            yield sequence, policy.report(sequence)[RECALL]


def _collection(trace: RoutingTrace) -> EamcFile:
    matrices = activation_matrices(trace)
    experts = tuple(trace.experts_per_layer.tolist())
    members = choose_members(experts, matrices)
    return EamcFile(model=trace.model, experts_per_layer=experts, matrices=matrices[members], sequences=len(matrices))


async def _rebuilt(model: Model, name: str, kept: Sequence[NDArray[np.float32]], recorded: int) -> EamcFile:
    """As the predictor service makes it, in a process of its own."""
    config = BuildingConfig()
    kind = EamcKind(config)
    shape = Shape(model.shape.layers, model.shape.experts)
    newest = kept[-config.max_sequences :]
    samples = [Sample("", matrix.astype(np.uint16).reshape(1, shape.layers, shape.experts)) for matrix in newest]
    job = Job(kind.name, name, shape, samples, kind.options(), recorded=recorded)
    return await make_in_subprocess(kind, job, timeout_s=config.timeout_s, command=MAKE)


def _per_second(model: Model, trace: RoutingTrace, eamc: EamcFile, at_once: int) -> float:
    """Sequences that end in a second of the simulated machine."""
    setup = TimedReplay(
        trace, model.expert_bytes, LinkProfile(PCIE4_BYTES_PER_S), ComputeProfile(layer_s=model.layer_s)
    )  # fmt: skip
    policy = MoeInfinity(setup.catalogue())
    policy.on_artifact_swapped(artifact_of(setup.catalogue(), eamc, "old"))
    return trace.sequences / setup.run(policy, trace.steps(concurrent=at_once), model.slots).seconds


def _row(name: str, found: Sequence[Shifted]) -> dict[str, Any]:
    triggers = [one.trigger for one in found if one.trigger is not None]
    shown = ("before", "shifted", "rebuilt", "fresh")
    means = {key: [float(np.mean(getattr(one, key))) for one in found] for key in shown}
    return {
        "model": name,
        **{key: interval(values) for key, values in means.items()},
        "until_trigger": interval(triggers) if triggers else None,
        "triggered": len(triggers) / len(found),
        "rebuild_s": interval([one.rebuild_s for one in found]),
        **{
            f"meanwhile_{n}": interval([one.rebuild_s * one.per_second[place] for one in found])
            for place, n in enumerate(AT_ONCE)
        },
        "series": {key: [round(value, 3) for value in getattr(found[0], key)] for key in means if key != "fresh"},
    }


def table(found: Mapping[str, Any]) -> str:
    columns = (
        ("before", "before", 100), ("shifted", "shifted", 100), ("rebuilt", "rebuilt", 100),
        ("fresh", "all anew", 100), ("until_trigger", "until due", 1), ("rebuild_s", "rebuild, s", 1),
        *((f"meanwhile_{n}", f"meanwhile, {n}", 1) for n in AT_ONCE),
    )  # fmt: skip
    lines = ["recall, %, around a shift of the tasks; sequences until the collection was due, and served while it was "
             f"made, {' or '.join(map(str, AT_ONCE))} at once (paper: {found['paper_meanwhile']})"]  # fmt: skip
    lines.append(f"{'':<18}" + "".join(f"{label:>16}" for _, label, _ in columns))
    for row in found["rows"]:
        cells = ["never" if row[key] is None else plus_minus(row[key], scale, 1) for key, _, scale in columns]
        lines.append(f"{row['model']:<18}" + "".join(f"{cell:>16}" for cell in cells))
    return "\n".join(lines)


def draw(found: Mapping[str, Any], path: Path) -> None:
    """Recall, sequence by sequence, of the first seed."""
    figure, (panel,) = panels_of(1, 1)
    for colour, row in zip(COLOURS, found["rows"], strict=False):
        parts = list(row["series"].values())
        recall = 100 * np.convolve(np.concatenate(parts), np.ones(_SMOOTHED) / _SMOOTHED, mode="valid")
        panel.plot(np.arange(len(recall)) + _SMOOTHED, recall, color=colour, label=row["model"])
        for border, style in zip(np.cumsum([len(part) for part in parts])[:-1], (":", "--"), strict=True):
            panel.axvline(border, color=colour, linestyle=style, linewidth=1)
    panel.set_ylim(bottom=0)
    panel.set_xlabel("sequences served (dotted: the tasks shift; dashed: the collection is rebuilt)")
    panel.set_ylabel(f"recall of the prediction, %, mean of {_SMOOTHED}")
    tidy(panel)
    panel.legend(fontsize=9)
    save(figure, path)
