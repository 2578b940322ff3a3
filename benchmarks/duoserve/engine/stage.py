"""`duoserve` on the real engine, a third of the experts in memory, the others on disk.

python -m benchmarks.duoserve --stage engine
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

from benchmarks.duoserve.engine import ablation, prompt_times, speed
from benchmarks.duoserve.engine.scale import Scale
from benchmarks.duoserve.engine.served import Random, Widened
from greenroom.core.errors import GreenroomError

Found = dict[str, Any]


def run(scale: Scale) -> Found:
    """Every part under its name, figures with aims on top. A part that fails costs only itself."""
    plan = ", ".join(f"{name} {seconds:.0f}" for name, seconds in scale.planned.items())
    _say(f"about {sum(scale.planned.values()) / 60:.0f} minutes after checkpoints and fits; seconds by part: {plan}")
    found: Found = {"planned_seconds": scale.planned}
    with Widened(scale) as served:
        found["learnt"] = served.learnt.facts
        found["one"] = _part(
            "one at a time",
            lambda: speed.run(served, prompts=scale.prompts, at_once=1, rounds=scale.rounds, seconds=scale.one_seconds),
        )
        found["many"] = _part(
            f"{scale.at_once} at once",
            lambda: speed.run(
                served,
                prompts=scale.many_prompts,
                at_once=scale.at_once,
                rounds=scale.rounds,
                seconds=scale.many_seconds,
            ),
        )
        found["prompts"] = _part(
            "a prompt's time",
            lambda: prompt_times.run(
                served, rows=scale.rows, prefills=scale.prefills, rounds=scale.rounds, seconds=scale.prefill_seconds
            ),
        )
        found["ablation"] = _part("each change", lambda: ablation.run(
            served, rows=scale.ablation_rows, prefills=scale.ablation_prompts, asks=scale.ablation_asks,
            at_once=scale.at_once, rounds=scale.ablation_rounds, seconds=scale.ablation_seconds))  # fmt: skip
    with Random(scale) as served_random:
        found["random_one"] = _part(
            "random model, one at a time",
            lambda: speed.run(
                served_random,
                prompts=scale.random_prompts,
                at_once=1,
                rounds=scale.random_rounds,
                seconds=scale.random_seconds,
            ),
        )
        found["random_many"] = _part(f"random model, {scale.at_once} at once", lambda: speed.run(
            served_random, prompts=scale.random_many, at_once=scale.at_once, rounds=scale.random_rounds,
            seconds=scale.random_seconds))  # fmt: skip
    return found | {
        "speed_ratio_best": found["one"].get("speed_ratio_best"),
        "speed_ratio_best_8": found["many"].get("speed_ratio_best"),
        "prefill_bound_ratio": found["prompts"].get("prefill_bound_ratio"),
    }


def _part(name: str, run: Callable[[], Found]) -> Found:
    """With how many seconds it took."""
    began = time.monotonic()
    try:
        found = run()
    except (GreenroomError, RuntimeError, OSError) as error:
        found = {"error": f"{type(error).__name__}: {error}"}
    seconds = round(time.monotonic() - began, 1)
    _say(f"{name}: {seconds:.0f} s")
    return {**found, "seconds": seconds}


def _say(line: str) -> None:
    """Progress is for stderr, as the bars are."""
    print(line, file=sys.stderr, flush=True)
