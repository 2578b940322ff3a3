"""What each predictor names of a token's picks, one and two layers ahead (DuoServe-MoE, Table 3).

python -m benchmarks.duoserve --stage table3
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import numpy as np

from benchmarks.duoserve.table3.hidden import ByAnswers, Hidden, by_policy, cost_us
from benchmarks.duoserve.table3.misses import Foresight, absent_experts
from benchmarks.duoserve.table3.predictors import (
    ByAffinity,
    ByMlp,
    ByPath,
    ByPathAndSequence,
    ByPopularity,
    BySequence,
    Predictor,
    path_logits,
)
from benchmarks.harness.inputs.bundled_routing import drawn_prompts
from benchmarks.harness.inputs.bundled_rows import record_bundled_rows
from benchmarks.harness.inputs.kept_fits import Kept
from benchmarks.harness.inputs.split_routing import World, world_of
from benchmarks.harness.machine import describe_machine
from benchmarks.harness.reporting.accuracy import Recalls, accuracy, named
from benchmarks.harness.reporting.progress import progress
from greenroom.core.artifacts.expert_mlp_file import ExpertMlpFile
from greenroom.core.artifacts.path_file import LAYERS_AHEAD, PathFile
from greenroom.core.artifacts.residual_file import ResidualFile
from greenroom.core.artifacts.reuse_file import ReuseFile
from greenroom.moe.routing import residual_fit
from greenroom.policies.duoserve import mlp_states
from greenroom.predictor.kinds.expert_mlp import network, training
from greenroom.predictor.kinds.expert_mlp import shares as expert_shares
from greenroom.predictor.kinds.expert_mlp.shares import ExpertShares
from greenroom.predictor.kinds.path import fit as path_fit
from greenroom.predictor.kinds.reuse import fit as reuse_fit
from greenroom.replay import RoutingTrace

BUNDLED: Final = "bundled"
PATH, PATH_AND_SEQUENCE, SEQUENCE = "path", "path + sequence", "sequence"
ROUTER, ALL, RESIDUAL, ALL_RESIDUAL = "router", "all", "residual", "all, residual"
"""``all``: path, sequence and router, as `duoserve` blends them; the last: with the maps in the router's place."""
MAPS: Final = {
    "residual, linear": residual_fit.FitOptions(rank=0, silu=False),
    "residual, rank 64": residual_fit.FitOptions(silu=False),
    RESIDUAL: residual_fit.FitOptions(),
}
"""The last is the default of `greenroom residual fit`."""
PAPER: Final = {"exact": (0.5416, 0.6685), "one": (0.9031, 0.9545)}
"""Least and most of the paper's four cells: Mixtral 8x7B and 8x22B, top-2 of 8 experts, one layer ahead."""
MLPS: Final = {"ExpertMLP, as printed": False, "ExpertMLP, many-hot": True}
"""Whether the input is many-hot."""
SLOTS: Final = 1 / 3


@dataclass(frozen=True, slots=True)
class Scale:
    """``prompts``: of the bundled model. ``sequences``: of ``trace``, the first ones; None: all. The last
    ``measured`` of either's sequences are measured on, the others are learnt from. ``maps``: of the residual stream.
    ``rounds``: in which they and routers are timed. ``mlp`` None: without the paper's network, which takes longest.
    """

    trace: Path | None = None
    prompts: int = 1000
    sequences: int | None = None
    measured: float = 0.2
    rounds: int = 200
    maps: Mapping[str, residual_fit.FitOptions] = field(default_factory=lambda: MAPS)
    path: path_fit.FitOptions = field(default_factory=path_fit.FitOptions)
    reuse: reuse_fit.FitOptions = field(default_factory=reuse_fit.FitOptions)
    mlp: training.TrainingOptions | None = field(default_factory=training.TrainingOptions)


QUICK = Scale(
    prompts=60,
    sequences=12,
    rounds=5,
    maps={name: replace(options, steps=100) for name, options in MAPS.items()},
    path=path_fit.FitOptions(rounds=1, steps=50, window=2),
    reuse=reuse_fit.FitOptions(rounds=1, steps=50, followers=False),
    mlp=training.TrainingOptions(samples=4000, epochs=1),
)


def run(scale: Scale) -> dict[str, Any]:
    """``models``: of each its rows, a predictor and how far ahead. On top the figures of ``trace`` that have aims."""
    kept = Kept.usual()
    found: dict[str, Any] = {"models": [], "paper": PAPER}
    for world, hidden in worlds(scale):
        own = compared(world, scale, kept, hidden)
        found["models"].append(own)
        found |= figures_of(own) if hidden is None else own["gains"]
    return found


def worlds(scale: Scale) -> Iterator[tuple[World, Hidden | None]]:
    """The bundled model's is recorded now, with hidden states."""
    recorded = record_bundled_rows(drawn_prompts(scale.prompts))
    world = world_of(BUNDLED, recorded.trace, scale.measured)
    yield world, Hidden.of(recorded, world)
    if scale.trace is not None:
        trace = RoutingTrace.load(scale.trace)
        yield world_of(scale.trace.stem, trace.part(0, scale.sequences), scale.measured), None


def compared(world: World, scale: Scale, kept: Kept, hidden: Hidden | None = None) -> dict[str, Any]:
    """All predictors on one model's routing, and on its hidden states where they were recorded."""
    layers = world.measured.layers
    by_distance, cost = predictors(world, scale, kept, hidden)
    sequences = np.searchsorted(world.measured.seq_starts, world.rows, side="right")
    recalls: dict[tuple[str, int], Recalls] = {}
    slots = round(SLOTS * int(world.measured.experts_per_layer.sum()))
    with progress(world.measured.tokens, f"{world.name}: next-use", "token") as bar:
        foresight = Foresight(world, absent_experts(world.measured, slots, go_on=bar.update))
    rows = []
    with progress(sum(len(each) * (layers - ahead) for ahead, each in by_distance.items()), world.name, "layer") as bar:
        for ahead, each in by_distance.items():
            shares: dict[str, list[Any]] = {name: [] for name in each}
            for layer in range(ahead, layers):
                picks = world.measured.experts[world.rows, layer]
                for name, predictor in each.items():
                    scores = predictor.scores(layer)
                    shares[name].append(named(scores, picks))
                    if ahead == 1:
                        foresight.add(name, layer, scores)
                    bar.update()
            for name, own in shares.items():
                recalls[name, ahead] = Recalls.of(own, sequences)
                low, high = recalls[name, ahead].within()
                rows.append(
                    {"predictor": name, "ahead": ahead, **asdict(accuracy(own)), "recall_low": low, "recall_high": high}
                )
    return {
        "model": world.name,
        "top_k": world.top_k,
        "experts": int(world.measured.experts_per_layer.max()),
        "layers": layers,
        "fitted_sequences": world.fitted.sequences,
        "measured_sequences": world.measured.sequences,
        "measured_tokens": len(world.rows),
        "rows": rows,
        "slots": slots,
        "foreseen": {name: asdict(one) for name, one in foresight.found().items()},
        "cost_us": cost,
        "gains": gains_of(recalls) if hidden is not None else {},
    }


def gains_of(recalls: Mapping[tuple[str, int], Recalls]) -> dict[str, float]:
    """Points of recall that `duoserve`'s blend has over the router alone, and what the maps have, each with its 95 %
    interval over sequences."""
    found: dict[str, float] = {}
    for name, better in (("router_gain_points", ALL), ("residual_gain_points", RESIDUAL)):
        for ahead in range(1, LAYERS_AHEAD + 1):
            gain = recalls[better, ahead].less(recalls[ROUTER, ahead])
            figure = name if ahead == 1 else f"{name}_{ahead}"
            low, high = gain.within()
            found |= {figure: 100 * float(gain.values.mean()), f"{figure}_low": 100 * low, f"{figure}_high": 100 * high}
    return found


def predictors(
    world: World, scale: Scale, kept: Kept, hidden: Hidden | None = None
) -> tuple[dict[int, dict[str, Predictor]], dict[str, float]]:
    """By how many layers ahead they are asked; and what those that read hidden states cost. What has to be fitted is
    fitted now, where it is not kept.
    """
    fitted, layers = world.fitted, world.fitted.layers
    with progress(2 * layers, f"{world.name}: fitting", "layer") as bar:
        reuse = kept.get(
            ReuseFile, world.digest, scale.reuse, (reuse_fit,),
            lambda: reuse_fit.fit(fitted, scale.reuse, on_layer=lambda _: bar.update()),
        )  # fmt: skip
        path = kept.get(
            PathFile, world.digest, (scale.reuse, scale.path), (reuse_fit, path_fit),
            lambda: path_fit.fit(fitted, reuse, scale.path, on_layer=lambda _: bar.update()),
        )  # fmt: skip
    sequence, logits = BySequence(world, reuse), path_logits(world, path)
    found: dict[int, dict[str, Predictor]] = {}
    for ahead in range(1, LAYERS_AHEAD + 1):
        shares, by_path = ExpertShares.of_trace(fitted, ahead), ByPath(logits, ahead)
        networks: dict[str, ExpertMlpFile] = {}
        if scale.mlp is not None:
            networks = {
                name: trained_mlp(world, replace(scale.mlp, ahead=ahead, many_hot=many_hot), kept)
                for name, many_hot in MLPS.items()
            }
        found[ahead] = {
            "popularity": ByPopularity(world, shares),
            "affinity": ByAffinity(world, shares),
            **{name: ByMlp(world, network.ExpertMlpPredictor(file)) for name, file in networks.items()},
            SEQUENCE: sequence,
            PATH: by_path,
            PATH_AND_SEQUENCE: ByPathAndSequence(by_path, sequence, np.asarray(path.sequence[ahead - 1])),
        }
    if hidden is None:
        return found, {}
    files = {name: fitted_maps(world, hidden, options, kept, name) for name, options in scale.maps.items()}
    answers = {ROUTER: hidden.by_routers(), **{name: hidden.by_maps(file) for name, file in files.items()}}
    answers[ALL] = by_policy(world, reuse, path, answers[ROUTER])
    answers[ALL_RESIDUAL] = by_policy(world, reuse, path, answers[RESIDUAL])
    for name, each in answers.items():
        for ahead in sorted({ahead for _, ahead in each}):
            found.setdefault(ahead, {})[name] = ByAnswers(world, each, ahead)
    return found, cost_us(hidden, files, world.measured.catalogue(), scale.rounds)


def fitted_maps(world: World, hidden: Hidden, options: residual_fit.FitOptions, kept: Kept, name: str) -> ResidualFile:
    def make() -> ResidualFile:
        with progress(world.fitted.layers - 1, f"{world.name}: {name}", "layer") as bar:
            return residual_fit.fit(world.fitted, hidden.fitted, options, on_layer=lambda _: bar.update())

    return kept.get(ResidualFile, world.digest, options, (residual_fit,), make)


def trained_mlp(world: World, options: training.TrainingOptions, kept: Kept) -> ExpertMlpFile:
    def make() -> ExpertMlpFile:
        bfloat16 = "avx512_bf16" in describe_machine(kept.folder)["instructions"]
        with progress(options.epochs * options.samples, f"{world.name}: ExpertMLP", "sample") as bar:
            return training.train(world.fitted, replace(options, bfloat16=bfloat16), on_batch=bar.update)

    return kept.get(ExpertMlpFile, world.digest, options, (network, expert_shares, mlp_states, training), make)


def figures_of(own: Mapping[str, Any]) -> dict[str, float]:
    recalls = {row["ahead"]: row["recall"] for row in own["rows"] if row["predictor"] == PATH_AND_SEQUENCE}
    return {
        "trace_recall": recalls[1],
        "trace_recall_2": recalls[2],
        "misses_foreseen": own["foreseen"][PATH_AND_SEQUENCE]["share"],
    }
