"""What the synthetic traces have to match, and the search for a `Mix` that does: baselines and Belady alone.

    python -m benchmarks.moe_infinity.calibration                 the mixes of synthetic_routing.py, on fresh seeds
    python -m benchmarks.moe_infinity.calibration --search        look for others; tens of minutes

Neither MoE-Infinity nor any policy of ours is run here.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

import click
import numpy as np
from tqdm import tqdm

from benchmarks.moe_infinity.synthetic_routing import MIXES, NLLB, SWITCH, Mix, Shape, trace_of
from greenroom.policies.base.array_types import Counts
from greenroom.policies.base.events import Phase
from greenroom.policies.registry import create_policy
from greenroom.replay import RoutingTrace
from greenroom.replay.hit_rates import optimum, replay

BASELINES: Final = ("lru", "lfu", "lfu-reset", "neighbour-aware")


@dataclass(frozen=True, slots=True)
class Target:
    """Where the paper has the best baseline and the oracle (§8.4), in percent, with so many slots or GB."""

    slots: int
    gb: int
    baseline: float
    belady: float


TARGETS: Final = {SWITCH.name: Target(535, 15, 32.0, 56.0), NLLB.name: Target(60, 8, 21.0, 43.0)}

ACTIVATED: Final = {1: 3.0, 32: 20.0, 64: 26.0}
"""Percent of the experts that a batch of so many sequences activates (§3)."""
REUSED: Final = {1: 30.0, 32: 46.0, 64: 56.0}
"""Percent of those that it uses in more than one of its iterations (§3)."""

BATCH_TASKS: Final = 4
"""Few, as sequences are alike and 64 of them activate no more than these do; several, as 32 activate seven times what
one does."""


def hit_rates(shape: Shape, mix: Mix, slots: int, sequences: int, seed: int) -> dict[str, float]:
    """Of each baseline and of Belady's optimum, in percent, on one trace."""
    trace = trace_of(shape, mix, sequences, seed=seed)
    catalogue, steps = trace.catalogue(), list(trace.steps(concurrent=mix.at_once))
    found = {name: replay(create_policy(name, catalogue=catalogue), steps, slots).hit_rate for name in BASELINES}
    found["belady"] = optimum(catalogue, steps, slots).hit_rate
    return {name: 100 * rate for name, rate in found.items()}


def sparsity(shape: Shape, mix: Mix, batch: int, seed: int) -> tuple[float, float]:
    """Percent of the experts that a batch of sequences activates, and percent of those it uses in several iterations.

    All sequences begin together and are of ``BATCH_TASKS`` tasks. In the paper batches of 64 activate little more than
    those of 32, while caches that hold more than that miss two look-ups of three. So a batch has similar sequences (one
    dataset), and successive sequences in a cache are mixed (all datasets).
    """
    tasks = [(seed + number) % mix.tasks for number in range(BATCH_TASKS)]
    trace = trace_of(shape, mix, batch, seed=seed, tasks=tasks)
    size, iterations = trace.catalogue().size, _iterations(trace)
    keys = trace.experts.astype(np.int64) + trace.catalogue().first[:-1, None]
    real = trace.experts < shape.experts
    places = np.broadcast_to(iterations[:, None, None], keys.shape)
    used = np.bincount(np.unique(places[real] * size + keys[real]) % size, minlength=size)
    active = int(np.count_nonzero(used))
    return 100 * active / size, 100 * int(np.count_nonzero(used > 1)) / active


def _iterations(trace: RoutingTrace) -> Counts:
    """Of each row, where all sequences begin at once: 0 encodes all prompts."""
    assert trace.phase is not None
    decoded = (trace.phase == Phase.DECODE).astype(np.int64)
    through = np.cumsum(decoded)
    before = np.concatenate(([0], through))[trace.seq_starts[:-1]]
    own: Counts = (through - np.repeat(before, np.diff(trace.seq_starts))) * decoded
    return own


def facts(shape: Shape, mix: Mix, *, sequences: int, seeds: Sequence[int]) -> dict[str, float]:
    """Everything that is held to the paper, in percent; means over seeds."""
    slots = TARGETS[shape.name].slots
    rates = [hit_rates(shape, mix, slots, sequences, seed) for seed in seeds]
    found = {name: statistics.mean(rate[name] for rate in rates) for name in rates[0]}
    found["best baseline"] = max(found[name] for name in BASELINES)
    for batch in ACTIVATED:
        several = [sparsity(shape, mix, batch, 1000 * seed + n) for seed in seeds for n in range(max(2, 16 // batch))]
        found[f"activated {batch}"] = statistics.mean(one for one, _ in several)
        found[f"reused {batch}"] = statistics.mean(other for _, other in several)
    return found


def misfit(found: Mapping[str, float], target: Target) -> float:
    """Squared deviations, each in units of its tolerance.

    Tolerances: a third of a point for hit rates; a tenth of the value for shares of experts, which the paper gives for
    all its models alike; a fifth for reuse. "LRU and NEIGHBOR-AWARE perform worse" than LFU (§8.4).
    """
    terms = [(found["best baseline"] - target.baseline) / 0.3, (found["belady"] - target.belady) / 0.3]
    terms += [math.log(found[f"activated {batch}"] / share) / 0.1 for batch, share in ACTIVATED.items()]
    terms += [math.log(found[f"reused {batch}"] / share) / 0.2 for batch, share in REUSED.items()]
    frequency, recency = max(found["lfu"], found["lfu-reset"]), max(found["lru"], found["neighbour-aware"])
    terms.append(max(0.0, recency - frequency) / 0.5)
    return sum(term * term for term in terms)


# -- the search ----------------------------------------------------------------------------------------------------

_FREE: Final = ("breadth", "focus", "prompt_tokens", "output_tokens", "spread")
"""Quantities above 0 that the search moves, by a factor at a time."""
_LARGEST_STEP: Final = 0.4
_SMALLEST_STEP: Final = 0.03


def search(
    shape: Shape, mix: Mix, *, tries: int, sequences: int, seeds: Sequence[int], largest: float = _LARGEST_STEP
) -> tuple[Mix, dict[str, float], float]:
    """Random search from ``mix``: ``tries`` neighbours, each kept if it fits better, always on the same seeds.

    The first steps are the ``largest`` (of logarithms). The number of sequences at once stays. Returns the best, its
    facts and its misfit.
    """
    random, target = np.random.default_rng(0), TARGETS[shape.name]
    best, found = mix, facts(shape, mix, sequences=sequences, seeds=seeds)
    least = misfit(found, target)
    with tqdm(range(tries), desc=f"{shape.name}, {mix.at_once} at once", unit="mix") as bar:
        for number in bar:
            step = largest * (_SMALLEST_STEP / largest) ** (number / tries)
            other = _neighbour(best, step, random)
            now = facts(shape, other, sequences=sequences, seeds=seeds)
            if misfit(now, target) < least:
                best, found, least = other, now, misfit(now, target)
                bar.set_postfix(misfit=f"{least:.1f}", baseline=f"{now['best baseline']:.1f}")
    return best, found, least


def _neighbour(mix: Mix, step: float, random: np.random.Generator) -> Mix:
    moved: dict[str, Any] = {}
    for name in _FREE:
        factor, value = math.exp(step * random.standard_normal()), getattr(mix, name)
        if value is not None:
            moved[name] = max(1.0, value * factor) if name.endswith("tokens") else value * factor
    locality = min(max(mix.locality + step * random.standard_normal() / 2, 0.0), 0.9)
    return replace(mix, locality=locality, **moved)


# -- the command ---------------------------------------------------------------------------------------------------


@click.command()
@click.option("--search", "tries", type=int, default=0, help="Mixes to try for each number at once.  [default: 0]")
@click.option("--model", "models", multiple=True, type=click.Choice(list(MIXES)), help="Only these.  [default: both]")
@click.option("--at-once", multiple=True, type=int, help="Sequences at once to search with.  [default: 8 to 64]")
@click.option("--step", default=_LARGEST_STEP, show_default=True, help="How far a search looks at first.")
@click.option("--sequences", default=500, show_default=True, help="Of each trace.")
@click.option("--seeds", default=3, show_default=True, help="Traces that are averaged over.")
@click.option("--first-seed", default=100, show_default=True)
def main(
    tries: int,
    models: tuple[str, ...],
    at_once: tuple[int, ...],
    step: float,
    sequences: int,
    seeds: int,
    first_seed: int,
) -> None:
    """Print baselines and Belady with the present mixes, or search for better ones."""
    over = range(first_seed, first_seed + seeds)
    for shape in (SWITCH, NLLB):
        mix, target = MIXES[shape.name], TARGETS[shape.name]
        if models and shape.name not in models:
            continue
        for count in (at_once or (8, 16, 32, 64)) if tries else (mix.at_once,):
            begun = replace(mix, at_once=count)
            if tries:
                begun, _, _ = search(
                    shape, begun, tries=tries, sequences=sequences, seeds=over, largest=step
                )  # fmt: skip
            found = facts(shape, begun, sequences=sequences, seeds=[seed + 10_000 for seed in over])  # fresh ones
            record = {name: round(value, 2) for name, value in found.items()}
            fit = round(misfit(found, target), 2)
            click.echo(json.dumps({"model": shape.name, "misfit": fit, **record, "mix": asdict(begun)}))


if __name__ == "__main__":
    main()
