"""A board of real experts on the real engine: throughput, switches and memory, and a line that never stops.

Systems take turns in rounds. Each row stands beside what the simulation says of it, with costs measured here.

python -m benchmarks.coserve --stage real
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from benchmarks.coserve.bounds import bound_of
from benchmarks.coserve.checkpoints import NoRoom
from benchmarks.coserve.real.board import RealBoard, cores, prepare
from benchmarks.coserve.real.foretold import foretold
from benchmarks.coserve.real.samba import loading_ms, served_by_samba
from benchmarks.coserve.real.scale import Scale
from benchmarks.coserve.real.served import served
from benchmarks.coserve.real.systems import ON_THE_LINE, SYSTEMS, RealSystem
from benchmarks.coserve.settings import Setting, best_setting, candidates, run_with
from benchmarks.coserve.systems import SAMBA_TORCH
from benchmarks.harness.reporting.progress import progress
from benchmarks.harness.reporting.statistics import Spread, percentile, spread_json
from benchmarks.harness.rounds import in_turns
from greenroom.coe.simulation.simulate import Served, Way
from greenroom.profiling.coe.replayed_throughput import ARRIVES_FASTER, drawn_paths

SAMPLE_SEED = 1000


def run(scale: Scale) -> dict[str, Any]:
    """``rows``: by system. ``replay_error``: the largest of the rows'. ``line``: by system, at ``line_rate``.

    ``skipped``: why nothing was measured.
    """
    try:
        real = prepare(scale)
    except NoRoom as error:
        return {"skipped": str(error)}
    settings = {system.name: setting_of(real, system, scale.sample) for system in SYSTEMS}
    real = replace(real, torch_ms=loading_ms(real, settings[SAMBA_TORCH].expert_bytes))
    bound = bound_of(real.board, real.memory)
    every_ms = bound.least_ms / scale.requests / ARRIVES_FASTER
    ways = [Way(number * every_ms, path) for number, path in enumerate(real.board.paths)]
    runs, warm = _burst(real, settings, ways, scale)
    decide_ms = {name: own.get("decide_ms", 0.0) for name, own in warm.items()}
    rows = {
        system.name: row_of(
            runs[system.name],
            of_replay(real, system, settings[system.name], ways, decide_ms[system.name]),
            settings[system.name],
            ways,
        )
        for system in SYSTEMS
    }  # fmt: skip
    rate = scale.line_share * rows[ON_THE_LINE[-1]]["per_s"]["median"]
    line = _line(real, settings, rate, decide_ms, scale)
    return {
        "experts": len(real.graph), "expert_bytes": sum(real.board.bytes_of), "memory": real.memory,
        "requests": scale.requests, "gb_a_second": 1e-6 / real.link.ms_a_byte,
        "checked_gb_a_second": 1e-6 / (real.link.ms_a_byte + real.link.check_ms_a_byte),
        "bound_per_s": 1000 * scale.requests / bound.least_ms, "least_switches": bound.switches, "limits": bound.limits,
        "loading_share": cold_share(real), "rows": rows, "line_rate": rate, "line": line,
        "replay_error": max(row["replay_error"] for row in rows.values()),
        "line_replay_error": max((row["replay_error"] for row in line.values()), default=None),
    }  # fmt: skip


def setting_of(real: RealBoard, system: RealSystem, sample: int) -> Setting:
    """Executors, at most one a core, and the experts' memory with which a replay of other requests is served fastest.

    With more than that the replay promises what threads that share cores and an interpreter do not hold.
    """
    board = replace(real.board, paths=drawn_paths(real.graph, sample, SAMPLE_SEED))
    able = (
        candidates(board, real.memory, range(1, cores() + 1))
        if system.executors is None
        else candidates(board, real.memory, (system.executors,))
    )

    def per_s(setting: Setting) -> float:
        found = run_with(board, system.replayed, setting, real.memory)
        return 0.0 if found is None else found.per_s

    return best_setting(able, per_s)


def of_replay(real: RealBoard, system: RealSystem, setting: Setting, ways: Sequence[Way], decide_ms: float) -> Served:
    """``decide_ms``: a stage, as the round before the first has it."""
    return foretold(real, system.replayed, setting, ways, decide_ms=decide_ms, torch=system.selection is None)


def _burst(
    real: RealBoard, settings: Mapping[str, Setting], ways: Sequence[Way], scale: Scale
) -> tuple[dict[str, list[dict[str, Any]]], dict[str, dict[str, Any]]]:
    """By system, each round's figures; and those of a round before the first, of fewer requests."""
    warm: dict[str, dict[str, Any]] = {}
    found: dict[str, list[dict[str, Any]]] = {system.name: [] for system in SYSTEMS}
    with progress((scale.rounds + 1) * len(SYSTEMS), "real") as bar:
        for round_, system in in_turns(SYSTEMS, scale.rounds, scale.seconds):
            some = ways if round_ else ways[: len(ways) // 5]
            own = one_turn(real, system, settings[system.name], some)
            if round_:
                found[system.name].append(own)
            else:
                warm[system.name] = own
            bar.update()
    return found, warm


def one_turn(real: RealBoard, system: RealSystem, setting: Setting, ways: Sequence[Way]) -> dict[str, Any]:
    if system.selection is None:
        return served_by_samba(real, setting, ways)
    return served(real, system.selection, setting, ways)


def row_of(
    runs: Sequence[Mapping[str, Any]], replayed: Served, setting: Setting, ways: Sequence[Way]
) -> dict[str, Any]:
    """Spreads over rounds; ``foretold``: what the replay says."""
    spreads = {key: spread_json(Spread.of([one[key] for one in runs])) for key in runs[0]}
    rate = spreads["per_s"]
    assert rate is not None
    return {
        **spreads,
        "executors": setting.executors,
        "experts_memory": setting.expert_bytes,
        "foretold": {
            "per_s": replayed.per_s, "switches": replayed.loads,
            "p99_s": percentile(replayed.latencies_ms, 0.99) / 1000,
            "batch": sum(len(way.experts) for way in ways) / replayed.batches,
            "compute_ms": replayed.computed_ms / replayed.batches,
            "link_share": replayed.link_busy_ms / replayed.total_ms,
        },
        "replay_error": abs(replayed.per_s / rate["median"] - 1),
    }  # fmt: skip


def _line(
    real: RealBoard, settings: Mapping[str, Setting], rate: float, decide_ms: Mapping[str, float], scale: Scale
) -> dict[str, Any]:
    """The same Poisson arrivals for each system; p99 beside the replay's."""
    count = max(1, round(rate * scale.line_s))
    paths = drawn_paths(real.graph, count, scale.seed + 1)
    ways = [Way(at, path) for at, path in zip(poisson(count, rate, scale.seed), paths, strict=True)]
    found = {}
    for system in SYSTEMS:
        if system.name in ON_THE_LINE:
            own = one_turn(real, system, settings[system.name], ways)
            replayed = of_replay(real, system, settings[system.name], ways, decide_ms[system.name])
            found[system.name] = {
                **own,
                "foretold_p99_s": percentile(replayed.latencies_ms, 0.99) / 1000,
                "replay_error": abs(replayed.per_s / own["per_s"] - 1),
            }
    return found


def poisson(count: int, per_s: float, seed: int) -> list[float]:
    """Milliseconds at which so many requests come."""
    lots = random.Random(f"line/{seed}")
    found, at = [], 0.0
    for _ in range(count):
        at += 1000 * lots.expovariate(per_s)
        found.append(at)
    return found


def cold_share(real: RealBoard) -> dict[str, float]:
    """Loading's part of a request whose expert is not there, alone on all cores, by how it is loaded (paper: 0.9)."""
    own = real.costs.models["type"]
    computed = own.batches.by_executors[1].ms_of(1)
    size = real.board.bytes_of[0]
    ours = size * (real.link.ms_a_byte + real.link.check_ms_a_byte)
    return {"engine": ours / (ours + computed), "from_pretrained": real.torch_ms / (real.torch_ms + computed)}
