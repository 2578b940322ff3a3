"""What the token scheduler's decisions cost, and the experts that its groups save.

    python -m benchmarks.grouping_cost [--rounds N] [--trace TRACE] [--json PATH]

A decision divides the rows that decode into two forwards, 64 rows into four and eight too, on paths of a model's
shape: rows of eight kinds, with paths as a predictor foretells them, or binary. Milliseconds are the thread's processor
time; `wall` is what the clock says, which has what else runs on the machine. With a trace: distinct experts a layer of
two batches of 8, 16 and 32 rows, drawn from it at random and grouped by true paths (the paper's Table 3). The last line
is one JSON object.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import time
from pathlib import Path
from typing import Any, Final

import click
import numpy as np

from benchmarks.harness.machine import cache_folder, describe_machine
from benchmarks.harness.reporting.statistics import percentile
from greenroom.policies.base.array_types import Scores
from greenroom.policies.batching.batch_policy import BatchLimits, BatchState, RunningSequence, SequencePaths
from greenroom.policies.expertflow.grouping import active_experts, grouped
from greenroom.policies.expertflow.token_scheduler import TokenScheduler
from greenroom.replay.traces.routing_trace import RoutingTrace
from greenroom.replay.traces.scheduled_steps import true_paths

LAYERS, EXPERTS, TOP_K = 48, 128, 8
AIM_MS = 5.0
KINDS = 8
BATCHES = (8, 16, 32)
DIVIDED = ((16, 2), (32, 2), (64, 2), (64, 4), (64, 8))
"""Rows, and into how many forwards."""
_ONE_THREAD: Final = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


def drawn_paths(rows: int, random: np.random.Generator, *, known: bool) -> Scores:
    """``[rows, LAYERS · EXPERTS]``: each row leans to the experts of its kind."""
    kinds = random.normal(size=(KINDS, LAYERS, EXPERTS)) * 1.2
    leaning = kinds[random.integers(KINDS, size=rows)] + random.gumbel(size=(rows, LAYERS, EXPERTS))
    if known:
        found = np.zeros(leaning.shape, dtype=np.float32)
        np.put_along_axis(found, np.argsort(-leaning, axis=2)[:, :, :TOP_K], 1, axis=2)
    else:
        weights = np.exp(leaning)
        found = np.minimum(TOP_K * weights / weights.sum(axis=2, keepdims=True), 0.97).astype(np.float32)
    return found.reshape(rows, -1)


def measure(rows: int, rounds: int, *, known: bool, literal: bool, forwards: int = 2) -> dict[str, Any]:
    """One decision a round, each on other paths."""
    random = np.random.default_rng(rows)
    policy = TokenScheduler(literal=literal)
    limits = BatchLimits(4 * rows, rows, kv_total=0, rows_per_forward=-(-rows // forwards))
    running = tuple(RunningSequence(number, prefill_left=0) for number in range(rows))
    taken, wall = [], []
    for _ in range(rounds + 3):
        paths = SequencePaths(np.arange(rows), drawn_paths(rows, random, known=known))
        resident = random.random(LAYERS * EXPERTS) < 1 / 3
        state = BatchState((), running, 0, limits, paths=paths, resident=resident)
        began, began_wall = time.thread_time(), time.perf_counter()
        policy.decide(state)
        taken.append(1000 * (time.thread_time() - began))
        wall.append(1000 * (time.perf_counter() - began_wall))
    taken, wall = taken[3:], wall[3:]
    return {
        "rows": rows,
        "forwards": forwards,
        "paths": "known" if known else "foretold",
        "groups": "literal" if literal else "ours",
        "ms_p50": percentile(taken, 0.5),
        "ms_p99": percentile(taken, 0.99),
        "wall_ms_p50": percentile(wall, 0.5),
        "wall_ms_p99": percentile(wall, 0.99),
    }


def distinct_experts(trace: RoutingTrace, batch: int, draws: int) -> dict[str, Any]:
    """Experts a layer of two batches of ``batch`` rows of different sequences: Table 3."""
    random = np.random.default_rng(batch)
    full = np.flatnonzero(np.diff(trace.seq_starts))
    sums = {"random": 0.0, "literal": 0.0, "ours": 0.0, "one forward": 0.0}
    for _ in range(draws):
        sequences = random.choice(full, size=2 * batch, replace=False)
        paths = true_paths(trace, random.integers(trace.seq_starts[sequences], trace.seq_starts[sequences + 1]))
        order = random.permutation(2 * batch)
        sums["random"] += active_experts(paths, [order[:batch], order[batch:]])
        for name in ("literal", "ours"):
            sums[name] += active_experts(paths, grouped(paths, [batch, batch], literal=name == "literal"))
        sums["one forward"] += active_experts(paths, [order])
    return {"batch": batch} | {name: total / draws / trace.layers for name, total in sums.items()}


@click.command(help=__doc__)
@click.option("--rounds", type=click.IntRange(min=20), default=300, show_default=True, help="Decisions of each kind.")
@click.option("--draws", type=click.IntRange(min=1), default=200, show_default=True, help="Of rows from the trace.")
@click.option("--trace", "trace", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--json", "out", type=click.Path(dir_okay=False, path_type=Path), help="Write the figures there too.")
def main(rounds: int, draws: int, trace: Path | None, out: Path | None) -> None:
    if any(os.environ.get(name) != value for name, value in _ONE_THREAD.items()):
        # numpy has its threads already: once more, with one.
        os.execve(
            sys.executable,
            [sys.executable, "-m", "benchmarks.grouping_cost", *sys.argv[1:]],
            {**os.environ, **_ONE_THREAD},
        )
    machine = describe_machine(cache_folder())
    click.echo(f"{machine['processor']}, one thread; {LAYERS} layers × {EXPERTS} experts")
    click.echo(
        f"{'rows':>5}{'forwards':>10}{'paths':>10}{'groups':>9}"
        f"{'ms p50':>9}{'ms p99':>9}{'wall p50':>10}{'wall p99':>10}"
    )
    rows = []
    for (count, forwards), known, literal in itertools.product(DIVIDED, (False, True), (True, False)):
        row = measure(count, rounds, known=known, literal=literal, forwards=forwards)
        rows.append(row)
        click.echo(
            f"{count:5}{forwards:10}{row['paths']:>10}{row['groups']:>9}{row['ms_p50']:9.2f}{row['ms_p99']:9.2f}"
            f"{row['wall_ms_p50']:10.2f}{row['wall_ms_p99']:10.2f}"
        )
    worst = max(row["ms_p99"] for row in rows if row["rows"] == 64)
    click.echo(f"64 rows: {worst:.2f} ms at p99, aim ≤ {AIM_MS:g}: {'met' if worst <= AIM_MS else 'missed'}")
    table = []
    if trace is not None:
        recorded = RoutingTrace.load(trace)
        click.echo("distinct experts a layer of two batches, by true paths")
        click.echo(f"{'rows':>5}{'random':>9}{'literal':>9}{'ours':>9}{'one forward':>13}{'saved':>8}")
        for batch in BATCHES:
            row = distinct_experts(recorded, batch, draws)
            table.append(row)
            click.echo(
                f"{batch:5}{row['random']:9.2f}{row['literal']:9.2f}{row['ours']:9.2f}{row['one forward']:13.2f}"
                f"{100 * (1 - row['ours'] / row['random']):7.1f}%"
            )
    figures = {"scheduler_ms_at_64": worst, "aim_ms": AIM_MS, "decisions": rows, "table3": table, "machine": machine}
    if out is not None:
        out.write_text(json.dumps(figures) + "\n")
    click.echo(json.dumps(figures))


if __name__ == "__main__":
    main()
