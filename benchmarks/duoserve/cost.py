"""What foreseeing costs: microseconds a layer of a large model, and the share of a served model's time.

python -m benchmarks.duoserve --stage cost
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from benchmarks.duoserve import learning
from benchmarks.duoserve.engine.scale import QUICK as QUICK_ENGINE
from benchmarks.duoserve.engine.scale import Scale as EngineScale
from benchmarks.duoserve.engine.served import Widened
from benchmarks.harness.arms.policy_kind import Kind
from benchmarks.harness.arms.served_turn import ServedTurn
from benchmarks.harness.reporting.plots import panels_of, save, tidy
from benchmarks.harness.reporting.progress import progress
from benchmarks.harness.reporting.statistics import Spread, spread_json
from benchmarks.harness.reporting.tables import median_range
from benchmarks.harness.rounds import in_turns
from greenroom.core.artifacts.expert_mlp_file import HIDDEN, ExpertMlpFile, MlpForm
from greenroom.predictor.kinds.expert_mlp.network import ExpertMlpPredictor

LAYERS, EXPERTS, TOP_K, SEQUENCES = 24, 128, 8, 8
OURS, BASE = "duoserve", "reuse"
COMMAND_S: Final = 400
_CALLS: Final = 30


@dataclass(frozen=True, slots=True)
class Scale:
    """``rounds`` of ``steps`` decisions. ``prompts``: served one at a time and ``at_once``, in ``served_rounds``, none
    begun that would end after ``seconds``. ``engine``: how the served model is made."""

    rounds: int = 9
    steps: int = 8
    prompts: int = 8
    at_once: int = 8
    served_rounds: int = 3
    seconds: float = 40.0
    engine: EngineScale = field(default_factory=EngineScale)
    learning: learning.Learning = field(default_factory=learning.Learning)
    trace: Path | None = None


QUICK = Scale(
    rounds=5, steps=1, prompts=4, served_rounds=1, seconds=2.0, engine=QUICK_ENGINE,
    learning=learning.Learning(sequences=(20,), trace_sequences=10, prompts=4, at_once=4, rounds=1, seconds=2.0),
)  # fmt: skip


def run(scale: Scale) -> dict[str, Any]:
    """``decision``: as `python -m benchmarks.decision_cost` has it. ``mlp_us``: the paper's network, a call. ``share``:
    of a served model's time, one and several at once; ``predict_share`` is the larger. ``learning``: what it takes
    beside serving."""
    decision = _decision(scale)
    with Widened(scale.engine) as served:
        share = _shares(scale, served)
        learnt = learning.run(scale.learning, served, scale.trace)
    return {
        "decision": decision,
        "mlp_us": {f"{rows} rows, {form}": mlp_us(rows, many_hot=form == "many-hot")
                   for rows in (1, SEQUENCES) for form in ("as printed", "many-hot")},
        "share": share,
        "learning": learnt,
        "predict_us_a_layer": decision["predict_us_a_layer"],
        "predict_share": max(own["over_reuse"]["median"] for own in share.values()),
    }  # fmt: skip


def _decision(scale: Scale) -> dict[str, Any]:
    """In a process of its own, so that numpy has one thread."""
    with tempfile.TemporaryDirectory() as name:
        out = Path(name) / "cost.json"
        command = [sys.executable, "-m", "benchmarks.decision_cost", "--rounds", str(scale.rounds)]
        shape = ["--layers", str(LAYERS), "--experts", str(EXPERTS), "--top-k", str(TOP_K)]
        more = ["--sequences", str(SEQUENCES), "--steps", str(scale.steps), "--json", str(out)]
        subprocess.run([*command, *shape, *more], check=True, timeout=COMMAND_S, stdout=subprocess.DEVNULL)
        found: dict[str, Any] = json.loads(out.read_text())
        return found


# -- the paper's network ---------------------------------------------------------------------------------------------


def mlp_us(rows: int, *, many_hot: bool) -> dict[str, float] | None:
    """Microseconds of one thread to foresee the next layer of so many rows, in the middle of the model."""
    predictor = ExpertMlpPredictor(random_mlp(many_hot=many_hot))
    picks = np.argsort(np.random.default_rng(1).random((rows, LAYERS, EXPERTS)), axis=2)[:, :, :TOP_K]
    spent = []
    with _one_thread():
        for _ in range(_CALLS):
            began = time.perf_counter()
            predictor.logits(picks, LAYERS // 2)
            spent.append((time.perf_counter() - began) * 1e6)
    return spread_json(Spread.of(spent[3:]), 1)


def random_mlp(*, many_hot: bool, layers: int = LAYERS, experts: int = EXPERTS, top_k: int = TOP_K) -> ExpertMlpFile:
    """A network of the paper's widths: what it foresees is worthless, what it costs is not."""
    form, random = MlpForm(1, top_k, many_hot), np.random.default_rng(0)
    widths = (form.state_width(layers, experts), *HIDDEN, experts)
    count = sum(out * (width + 1) for width, out in pairwise(widths))
    return ExpertMlpFile(
        model="cost", experts_per_layer=(experts,) * layers, sequences=1, form=np.array(form, dtype=np.uint16),
        popularity=np.full((layers, experts), 1 / experts, dtype=np.float16),
        affinity=np.full((layers - 1, experts, experts), 1 / experts, dtype=np.float16),
        weights=(random.standard_normal(count, dtype=np.float32) / 30).astype(np.float16),
    )  # fmt: skip


@contextmanager
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


# -- a served model --------------------------------------------------------------------------------------------------


def _shares(scale: Scale, served: Widened) -> dict[str, Any]:
    with ExitStack() as stack:
        asks = served.asks(scale.prompts)
        arms = [stack.enter_context(served.arm(Kind(name, name))) for name in (BASE, OURS)]
        found = {}
        for at_once in (1, scale.at_once):
            turns: dict[str, list[ServedTurn]] = {BASE: [], OURS: []}
            with progress((scale.served_rounds + 1) * len(arms), f"{at_once} at once", "turn") as bar:
                for round_, arm in in_turns(arms, scale.served_rounds, scale.seconds):
                    turn = arm.run(asks, at_once, look_inside=True)
                    if round_:
                        turns[arm.kind.name].append(turn)
                    bar.update()
            found[f"{at_once} at once"] = share_of(turns[OURS], turns[BASE])
        served.shared.detach()
        return found


def share_of(ours: list[ServedTurn], base: list[ServedTurn]) -> dict[str, Any]:
    """What the policy and its predictors took of the time. ``over_reuse``: without what `reuse` took in the same round.
    Routers that run ahead are not in it: either policy asks them."""
    spent = [(sum(turn.policy_seconds.values()), turn.seconds) for turn in ours]
    less = [sum(turn.policy_seconds.values()) for turn in base]
    steps = sum(turn.steps for turn in ours)
    methods = {name: 0.0 for turn in ours for name in turn.policy_seconds}
    for turn in ours:
        for name, seconds in turn.policy_seconds.items():
            methods[name] += seconds
    return {
        "over_reuse": spread_json(
            Spread.of([(own - other) / whole for (own, whole), other in zip(spent, less, strict=True)])
        ),
        "policy_share": spread_json(Spread.of([own / whole for own, whole in spent])),
        "us_a_step": {name: 1e6 * seconds / steps for name, seconds in sorted(methods.items())},
        "step_ms": 1e3 * sum(whole for _, whole in spent) / steps,
        "rounds": len(ours),
    }


# -- for people ------------------------------------------------------------------------------------------------------


def table(found: Mapping[str, Any]) -> str:
    lines = [
        f"{LAYERS} layers × {EXPERTS} experts, top-{TOP_K}, {SEQUENCES} decoding sequences, processor time of a thread",
        f"{'µs a layer':<32}{'all':>24}{'over reuse':>26}",
    ]
    for row in found["decision"]["rows"]:
        lines.append(f"{row['name']:<32}{median_range(row['us_a_layer'], 1):>24}{median_range(row['added_us'], 1):>26}")
    lines += [f"{f'ExpertMLP, {name}':<32}{median_range(own, 1):>24}" for name, own in found["mlp_us"].items()]
    for name, own in found["share"].items():
        spreads = {
            part: {key: 100 * value for key, value in own[part].items()} for part in ("policy_share", "over_reuse")
        }
        lines.append(
            f"widened model, {name}: {median_range(spreads['policy_share'])} % of the time in the policy and its "
            f"predictors, {median_range(spreads['over_reuse'])} % beyond reuse's; a step takes {own['step_ms']:.1f} ms"
        )
    return "\n".join(lines + learning.table(found["learning"]))


def draw(found: Mapping[str, Any], path: Path) -> None:
    rows = found["decision"]["rows"]
    figure, (panel,) = panels_of(1, 1, height=3.0)
    bars = {row["name"]: row["us_a_layer"] for row in rows}
    bars |= {f"ExpertMLP, {name}": own for name, own in found["mlp_us"].items()}
    panel.barh(range(len(bars)), [own["median"] for own in bars.values()], color="#0072b2")
    panel.set_yticks(range(len(bars)), list(bars), fontsize=7)
    panel.invert_yaxis()
    panel.set_xlabel("µs a layer, one thread")
    tidy(panel)
    save(figure, path)
