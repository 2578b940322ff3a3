"""Tokens/s of the real engine by how many experts fit and how many prompts run at once (sections 5.3 and 5.4).

python -m benchmarks.expertflow --stage engine
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Final

from benchmarks.expertflow.served import ModelScale, ServedModel
from benchmarks.harness.arms.engine_arm import EngineArm
from benchmarks.harness.arms.policy_kind import Kind
from benchmarks.harness.arms.served_turn import ServedTurn
from benchmarks.harness.children.process_memory import at_rest, peak_bytes
from benchmarks.harness.inputs.fitted import QUICK_FIT
from benchmarks.harness.reporting.plots import curve, legend_below, panels_of, save, style_of, tidy
from benchmarks.harness.reporting.progress import progress
from benchmarks.harness.reporting.statistics import Spread, spread_json
from benchmarks.harness.reporting.tables import median_range
from benchmarks.harness.rounds import in_turns
from greenroom.core.units import MIB
from greenroom.worker.model.config import WorkerConfig

THIRD: Final = 0.33
DEFAULT_POLICY: Final = str(next(each.default for each in fields(WorkerConfig) if each.name == "policy"))
"""What `serve` has where nothing else is said."""
OURS, SE_MOE = "expertflow", "next-layer"
_NAMES: Final = tuple(dict.fromkeys((OURS, DEFAULT_POLICY, "reuse", SE_MOE, "lru-per-layer")))
KINDS: Final = (*(Kind(name, name) for name in _NAMES), Kind("look-ahead, 1 layer", "look-ahead", {"layers": 1}))
"""`next-layer` is SE-MoE, `lru-per-layer` Cache-MoE, the last Pre-gated MoE."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """``shares``: of the experts that fit. ``at_once``: prompts; with one, ``prompts`` are answered, with more twice as
    many as run. At a third there are ``rounds`` of each of ``rounds_at_once``, none begun that would end after
    ``seconds``; all else runs once."""

    shares: tuple[float, ...] = (0.2, THIRD, 0.5, 0.75, 1.0)
    at_once: tuple[int, ...] = (1, 8, 32)
    rounds_at_once: tuple[int, ...] = (1, 8)
    prompts: int = 8
    rounds: int = 5
    seconds: float = 330.0
    model: ModelScale = field(default_factory=ModelScale)


QUICK = Scale(
    shares=(THIRD, 1.0), at_once=(1, 4), rounds_at_once=(1, 4), prompts=2, rounds=1, seconds=3.0,
    model=ModelScale(expert_mib=1.0, recorded=60, fit=QUICK_FIT),
)  # fmt: skip


def run(scale: Scale) -> dict[str, Any]:
    """``cells``: a policy with a share of the experts each. ``speed_ratio_next_layer``: tokens/s over SE-MoE's, round
    by round, the median, the worse of those prompts at once that have rounds; ``speed_ratio_default`` over the default
    policy's."""
    cells, ratios = [], dict[str, dict[str, Any]]()
    with ServedModel(scale.model) as served:
        for at_once in scale.at_once:
            for share in scale.shares:
                rounds = scale.rounds if share == THIRD and at_once in scale.rounds_at_once else 1
                turns, peaks = _turns(served, scale, share, at_once, rounds)
                cells += [_cell(served, name, share, at_once, own, peaks[name]) for name, own in turns.items()]
                if rounds > 1 or (share == THIRD and at_once in scale.rounds_at_once):
                    ratios[str(at_once)] = {
                        base: spread_json(Spread.of(_ratios(turns[OURS], turns[base])), 3)
                        for base in turns
                        if base != OURS
                    }
        predictor = served.tables_bytes
    return {
        "cells": cells,
        "ratios": ratios,
        "default": DEFAULT_POLICY,
        "predictor_bytes": predictor,
        "speed_ratio_next_layer": min(own[SE_MOE]["median"] for own in ratios.values()),
        "speed_ratio_default": min(own[DEFAULT_POLICY]["median"] for own in ratios.values()),
    }


def _turns(
    served: ServedModel, scale: Scale, share: float, at_once: int, rounds: int
) -> tuple[dict[str, dict[int, ServedTurn]], dict[str, int]]:
    """The turns of each policy by their round, and by how much opening and warming it up raised the peak of memory."""
    asks = served.asks(scale.prompts if at_once == 1 else 2 * at_once)
    found: dict[str, dict[int, ServedTurn]] = {kind.name: {} for kind in KINDS}
    peaks = dict[str, int]()
    with ExitStack() as stack:
        arms = list[EngineArm]()
        what = f"{share:.0%} of the experts, {at_once} at once"
        with progress((rounds + 1) * len(KINDS), what, "turn") as bar:
            for kind in KINDS:
                before = at_rest()
                arms.append(stack.enter_context(served.arm(kind, share)))
                arms[-1].run(asks[: max(2, at_once)], at_once)
                peaks[kind.name] = peak_bytes() - before
                bar.update()
            for round_, arm in in_turns(arms, rounds, scale.seconds, warm_up=False):
                found[arm.kind.name][round_] = arm.run(asks, at_once)
                bar.update()
        served.shared.detach()
    return found, peaks


def _ratios(ours: Mapping[int, ServedTurn], base: Mapping[int, ServedTurn]) -> list[float]:
    return [_speed(turn) / _speed(base[round_]) for round_, turn in ours.items()]


def _speed(turn: ServedTurn) -> float:
    return turn.tokens / turn.seconds


def _cell(
    served: ServedModel, name: str, share: float, at_once: int, turns: Mapping[int, ServedTurn], peak: int
) -> dict[str, Any]:
    """``peak_bytes``: of memory, beyond the model without its experts; paths' predictor included."""
    own = list(turns.values())
    return {
        "policy": name,
        "share": share,
        "at_once": at_once,
        "rounds": len(own),
        "tokens_per_s": spread_json(Spread.of([_speed(turn) for turn in own]), 2),
        "hit_rate": sum(turn.hits for turn in own) / max(1, sum(turn.look_ups for turn in own)),
        "mib_per_token": sum(turn.bytes_moved for turn in own) / sum(turn.tokens for turn in own) / MIB,
        "peak_bytes": peak,
        "phases": {phase: _phase(own, phase) for phase in ("prefill", "decode")},
    }


def _phase(turns: Sequence[ServedTurn], phase: str) -> dict[str, Any]:
    parts = [turn.phases[phase] for turn in turns]
    steps, seconds = sum(part.steps for part in parts), sum(part.seconds for part in parts)
    return {
        "steps": steps,
        "ms_a_step": 1e3 * seconds / steps if steps else None,
        "stall_share": sum(part.stall_seconds for part in parts) / seconds if seconds else None,
    }


def table(found: Mapping[str, Any]) -> str:
    lines = [
        f"{'experts':>8}{'at once':>9}  {'policy':<22}{'tokens/s':>24}{'hits %':>8}{'MiB a token':>13}"
        f"{'prompt step ms':>16}{'waiting %':>11}{'answer step ms':>16}{'waiting %':>11}{'peak MiB':>10}"
    ]
    for cell in found["cells"]:
        phases = "".join(
            f"{_number(cell['phases'][phase]['ms_a_step']):>16}{_number(cell['phases'][phase]['stall_share'], 100):>11}"
            for phase in ("prefill", "decode")
        )
        lines.append(
            f"{cell['share']:>8.0%}{cell['at_once']:>9}  {cell['policy']:<22}{median_range(cell['tokens_per_s']):>24}"
            f"{100 * cell['hit_rate']:>8.1f}{cell['mib_per_token']:>13.1f}{phases}{cell['peak_bytes'] / MIB:>10.0f}"
        )
    for at_once, ratios in found["ratios"].items():
        said = ", ".join(f"{name} {median_range(ratio, 3)}" for name, ratio in ratios.items())
        lines.append(f"{at_once} at once at a third, {OURS} over {said}")
    predictor = found["predictor_bytes"] / MIB
    lines.append(f"the tables of tokens take {predictor:.1f} MiB; the default is {found['default']}")
    return "\n".join(lines)


def _number(value: float | None, scale: float = 1.0) -> str:
    return "-" if value is None else f"{scale * value:.1f}"


def draw(found: Mapping[str, Any], path: Path) -> None:
    at_once = list(dict.fromkeys(cell["at_once"] for cell in found["cells"]))
    figure, panels = panels_of(1, len(at_once), height=3.2)
    for panel, count in zip(panels, at_once, strict=True):
        own = [cell for cell in found["cells"] if cell["at_once"] == count]
        for place, name in enumerate(dict.fromkeys(cell["policy"] for cell in own)):
            cells = [cell for cell in own if cell["policy"] == name]
            speeds = [cell["tokens_per_s"] for cell in cells]
            curve(panel, [100 * cell["share"] for cell in cells], speeds, label=name, **style_of(place))
        panel.set_title(f"{count} at once", fontsize=9)
        panel.set_xlabel("experts that fit, %")
        panel.set_ylabel("tokens/s")
        tidy(panel)
    legend_below(figure, panels)
    save(figure, path)
