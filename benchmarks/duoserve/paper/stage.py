"""DuoServe-MoE as printed, on real reads: single requests, beside ACC, MoESys and ``duoserve``.

python -m benchmarks.duoserve --stage paper
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any, Final

from benchmarks.duoserve.paper.figures import Round, gains, ratios, system_figures
from benchmarks.duoserve.paper.requests import asked
from benchmarks.duoserve.paper.systems import LITERAL, SYSTEMS, all_opened, peaks
from benchmarks.duoserve.table3.stage import trained_mlp
from benchmarks.harness.inputs.bundled_routing import record_routing
from benchmarks.harness.inputs.checkpoints import EXPERT_MIB, widened
from benchmarks.harness.inputs.fitted import QUICK_FIT, FitBoth, fitted_files
from benchmarks.harness.inputs.kept_fits import Kept
from benchmarks.harness.inputs.shared_model import SharedModel
from benchmarks.harness.inputs.split_routing import World, world_of
from benchmarks.harness.inputs.task_prompts import in_turn, shortened, to_learn_from
from benchmarks.harness.reporting.progress import progress
from benchmarks.harness.rounds import in_turns
from greenroom.core.artifacts.artifact_file import ArtifactFile
from greenroom.predictor.kinds.expert_mlp.training import TrainingOptions

PAPER: Final = {
    "ttft": (1.78, 3.8), "end_to_end": (1.42, 7.54), "end_to_end_over_acc": (1.47, 1.52), "throughput": (1.78, 7.04),
    "memory_gb": {
        "Mixtral 8x7B": {"MoESys": 4.24, "ACC": 3.63, "DuoServe-MoE": 3.91, "GPU only": 25.14},
        "Mixtral 8x22B": {"MoESys": 9.13, "ACC": 8.06, "DuoServe-MoE": 8.44, "GPU only": 138.0},
    },
}  # fmt: skip
"""Its text's least and most (§6.2), and its Table 2."""


@dataclass(frozen=True, slots=True)
class Scale:
    """``learnt_from``: prompts whose routing everything is fitted to. ``prompts``: asked in each round, one after the
    other, with answers of at most ``tokens``. ``seconds``: no round begins that would end later.
    """

    expert_mib: float = EXPERT_MIB
    learnt_from: int = 150
    prompts: int = 3
    tokens: int = 16
    rounds: int = 5
    seconds: float = 300.0
    mlp: TrainingOptions = field(default_factory=lambda: TrainingOptions(samples=60_000, epochs=5))
    fit: FitBoth = field(default_factory=FitBoth)


QUICK = Scale(
    expert_mib=1.0,
    learnt_from=12,
    prompts=1,
    tokens=4,
    rounds=1,
    mlp=TrainingOptions(samples=2000, epochs=1),
    fit=QUICK_FIT,
)


def run(scale: Scale) -> dict[str, Any]:
    kept = Kept.usual()
    files = _files(world_of("bundled", record_routing(to_learn_from(scale.learnt_from)), 0.1), scale, kept)
    with SharedModel(widened(scale.expert_mib)) as shared:
        asks = shortened(in_turn(shared, scale.prompts), scale.tokens)
        peak_bytes = peaks(shared, files, asks[:1])
        catalogue = shared.catalogue
        rounds: dict[str, dict[int, Round]] = defaultdict(dict)
        with (
            all_opened(shared, files) as arms,
            progress((scale.rounds + 1) * len(arms), "single requests", "turn") as bar,
        ):
            for round_, name in in_turns(list(arms), scale.rounds, scale.seconds):
                own = [asked(arms[name], ask) for ask in asks]
                if round_:
                    rounds[name][round_] = own
                bar.update()
        slots = {name: arm.slots for name, arm in arms.items()}
        first = {name: [request.ids for request in own[1]] for name, own in rounds.items()}
        return {
            "model": {
                "experts": catalogue.size, "layers": catalogue.layers, "top_k": int(catalogue.top_k.max()),
                "expert_mib": shared.expert_bytes / 2**20,
            },
            "settings": {"prompts": len(asks), "tokens": scale.tokens, "rounds": len(rounds[LITERAL])},
            "systems": {
                system.kind.name: {
                    **system_figures(rounds[system.kind.name]),
                    "slots": slots[system.kind.name],
                    "peak_mib": peak_bytes[system.kind.name] / 2**20,
                }
                for system in SYSTEMS
            },
            "ratios": ratios(rounds),
            "gains": gains(rounds),
            "same_answers": all(ids == first[LITERAL] for ids in first.values()),
            "paper": PAPER,
        }  # fmt: skip


def _files(world: World, scale: Scale, kept: Kept) -> tuple[ArtifactFile, ...]:
    """All that the systems predict by, of routing that is not asked later."""
    return *fitted_files(world.name, world.fitted, scale.fit, kept), trained_mlp(world, scale.mlp, kept)
