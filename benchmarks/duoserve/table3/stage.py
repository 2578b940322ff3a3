"""What each predictor names of a token's picks, one and two layers ahead (DuoServe-MoE, Table 3).

python -m benchmarks.duoserve --stage table3
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import numpy as np

from benchmarks.duoserve.kept import Kept
from benchmarks.duoserve.table3.accuracy import accuracy, named
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
from benchmarks.duoserve.worlds import World, world_of
from benchmarks.harness.inputs.bundled_routing import drawn_prompts, record_routing
from benchmarks.harness.machine import describe_machine
from benchmarks.harness.reporting.progress import progress
from greenroom.core.artifacts.expert_mlp_file import ExpertMlpFile
from greenroom.core.artifacts.path_file import LAYERS_AHEAD, PathFile
from greenroom.core.artifacts.reuse_file import ReuseFile
from greenroom.predictor.kinds.expert_mlp import network, states, training
from greenroom.predictor.kinds.expert_mlp import shares as expert_shares
from greenroom.predictor.kinds.expert_mlp.shares import ExpertShares
from greenroom.predictor.kinds.path import fit as path_fit
from greenroom.predictor.kinds.reuse import fit as reuse_fit
from greenroom.replay import RoutingTrace

BUNDLED: Final = "bundled"
PATH, PATH_AND_SEQUENCE, SEQUENCE = "path", "path + sequence", "sequence"
PAPER: Final = {"exact": (0.5416, 0.6685), "one": (0.9031, 0.9545)}
"""Least and most of the paper's four cells: Mixtral 8x7B and 8x22B, top-2 of 8 experts, one layer ahead."""
MLPS: Final = {"ExpertMLP, as printed": False, "ExpertMLP, many-hot": True}
"""Whether the input is many-hot."""
SLOTS: Final = 1 / 3


@dataclass(frozen=True, slots=True)
class Scale:
    """``prompts``: of the bundled model. ``sequences``: of ``trace``, the first ones; None: all. The last
    ``measured`` of either's sequences are measured on, the others are learnt from.
    """

    trace: Path | None = None
    prompts: int = 150
    sequences: int | None = None
    measured: float = 0.2
    path: path_fit.FitOptions = field(default_factory=path_fit.FitOptions)
    reuse: reuse_fit.FitOptions = field(default_factory=reuse_fit.FitOptions)
    mlp: training.TrainingOptions = field(default_factory=training.TrainingOptions)


QUICK = Scale(
    prompts=40,
    sequences=12,
    path=path_fit.FitOptions(rounds=1, steps=50, window=2),
    reuse=reuse_fit.FitOptions(rounds=1, steps=50, followers=False),
    mlp=training.TrainingOptions(samples=4000, epochs=1),
)


def run(scale: Scale) -> dict[str, Any]:
    """``models``: of each its rows, a predictor and how far ahead. On top the figures of ``trace`` that have aims."""
    kept = Kept.usual()
    found: dict[str, Any] = {"models": [], "paper": PAPER}
    for world in worlds(scale):
        own = compared(world, scale, kept)
        found["models"].append(own)
        if world.name != BUNDLED:
            found |= figures_of(own)
    return found


def worlds(scale: Scale) -> Iterator[World]:
    """The bundled model's is recorded now."""
    yield world_of(BUNDLED, record_routing(drawn_prompts(scale.prompts)), scale.measured)
    if scale.trace is not None:
        trace = RoutingTrace.load(scale.trace)
        yield world_of(scale.trace.stem, trace.part(0, scale.sequences), scale.measured)


def compared(world: World, scale: Scale, kept: Kept) -> dict[str, Any]:
    """All predictors on one model's routing."""
    layers = world.measured.layers
    by_distance = predictors(world, scale, kept)
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
            rows += [{"predictor": name, "ahead": ahead, **asdict(accuracy(own))} for name, own in shares.items()]
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
    }


def predictors(world: World, scale: Scale, kept: Kept) -> dict[int, dict[str, Predictor]]:
    """By how many layers ahead they are asked. What has to be fitted is fitted now, where it is not kept."""
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
    return found


def trained_mlp(world: World, options: training.TrainingOptions, kept: Kept) -> ExpertMlpFile:
    def make() -> ExpertMlpFile:
        bfloat16 = "avx512_bf16" in describe_machine(kept.folder)["instructions"]
        with progress(options.epochs * options.samples, f"{world.name}: ExpertMLP", "sample") as bar:
            return training.train(world.fitted, replace(options, bfloat16=bfloat16), on_batch=bar.update)

    return kept.get(ExpertMlpFile, world.digest, options, (network, expert_shares, states, training), make)


def figures_of(own: Mapping[str, Any]) -> dict[str, float]:
    recalls = {row["ahead"]: row["recall"] for row in own["rows"] if row["predictor"] == PATH_AND_SEQUENCE}
    return {
        "trace_recall": recalls[1],
        "trace_recall_2": recalls[2],
        "misses_foreseen": own["foreseen"][PATH_AND_SEQUENCE]["share"],
    }
