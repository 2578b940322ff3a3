"""How long a start takes to its first token, a third of the experts fitting, and how fast the first fill is.

    python -m benchmarks.start_time [--layers 12] [--experts 48] [--rounds 3]

A Mixtral of random weights and its pack are there already. Turns are processes of their own: *behind* serves at once
and fills behind, *ahead* waits for a full cache before the first request, as greenroom did before. Times count from the
beginning of the process. ``start_ratio`` is the time to the first token over the time in which the disk alone reads the
dense weights and the experts that the prompt is routed to. Of that, the time until Python has imported everything is
told apart: it does not depend on the model.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from typing import Any, Final

import click

from benchmarks.harness.inputs.checkpoints import RandomMixtral, random_mixtral
from benchmarks.harness.machine import cache_folder, describe_machine
from benchmarks.harness.reporting.progress import progress
from benchmarks.harness.reporting.statistics import Spread, spread_json
from benchmarks.harness.reporting.tables import median_range
from benchmarks.harness.rounds import in_turns
from greenroom.core.generation import SamplingParams

ARMS: Final = ("ahead", "behind")
PROMPT: Final = tuple(7 * number % 1000 + 5 for number in range(16))
SHARE: Final = "33%"
MEASURED: Final = ("imported_s", "ready_s", "first_token_s", "read_s", "fill_gb_s", "start_ratio", "loaded_ratio")
FILL_S: Final = 120.0
TURN_S: Final = 300


@dataclass(frozen=True, slots=True)
class Start:
    """Seconds from the beginning of the process: when all is imported, when requests are taken, the first token.
    ``read_s``: the disk alone. ``fill_gb_s``: of the first fill; None where the request overtook it."""

    imported_s: float
    ready_s: float
    first_token_s: float
    read_s: float
    fill_gb_s: float | None

    @property
    def start_ratio(self) -> float:
        return self.first_token_s / self.read_s

    @property
    def loaded_ratio(self) -> float:
        """As ``start_ratio``, from when all is imported."""
        return (self.first_token_s - self.imported_s) / self.read_s


def start(arm: str, folder: str, began: float) -> Start:
    """In this process, which has begun at ``began`` (time.time)."""
    from greenroom.llm import LLM
    from greenroom.worker.model.config import WorkerConfig

    imported = time.time()
    config = WorkerConfig(folder, expert_memory=SHARE, policy="lru", warm_start=False, progress=False)
    with LLM(config=config) as llm:
        worker = llm.worker
        if arm == "ahead" and not worker.wait_filled(FILL_S):
            raise TimeoutError("the experts did not come")
        filled, ready = worker.experts.fill_progress, time.time()
        llm.generate([PROMPT], SamplingParams(temperature=0.0, max_tokens=1))
        first = time.time()
        if not worker.wait_filled(FILL_S):
            raise TimeoutError("the experts did not come")
        lookups = worker.experts.counters.prefill.lookups
        link = worker.link
        if link is None:
            raise ValueError("the model is too small: its disk is not measured")
        needed = worker.plan.dense + lookups * int(worker.experts.catalogue.bytes_of.max())
        return Start(
            imported - began,
            ready - began,
            first - began,
            needed / link.bytes_per_s,
            filled.nbytes / filled.seconds / 1e9 if arm == "ahead" else None,
        )


def row_of(arm: str, starts: list[Start]) -> dict[str, Any]:
    """Medians and ranges over the turns of an arm."""
    row: dict[str, Any] = {"filled": arm}
    for name in MEASURED:
        values = [value for one in starts if (value := getattr(one, name)) is not None]
        row[name] = spread_json(Spread.of(values), 2) if values else None
    return row


def table(rows: list[dict[str, Any]]) -> str:
    lines = [f"{'filled':<8}" + "".join(f"{name:>20}" for name in MEASURED)]
    lines += [f"{row['filled']:<8}" + "".join(f"{median_range(row[name]):>20}" for name in MEASURED) for row in rows]
    return "\n".join(lines)


def _turn(arm: str, folder: str) -> Start:
    command = [sys.executable, "-m", "benchmarks.micro.start_time", "--turn", arm, "--folder", folder]
    began = {**os.environ, _BEGAN: repr(time.time())}
    done = subprocess.run(command, env=began, capture_output=True, text=True, timeout=TURN_S, check=False)
    if done.returncode:
        raise click.ClickException(f"a turn has failed: {done.stderr[-2000:]}")
    return Start(**json.loads(done.stdout.splitlines()[-1]))


_BEGAN: Final = "GREENROOM_START_BEGAN"


@click.command(help=__doc__)
@click.option("--layers", type=click.IntRange(min=1), default=12, show_default=True)
@click.option("--experts", type=click.IntRange(min=4), default=48, show_default=True, help="A layer, of 9 MiB each.")
@click.option("--rounds", type=click.IntRange(min=1), default=3, show_default=True)
@click.option("--turn", "alone", type=click.Choice(ARMS), help="Only one turn, in this process, as JSON.")
@click.option("--folder", help="Of a turn: the checkpoint.")
def main(layers: int, experts: int, rounds: int, alone: str | None, folder: str | None) -> None:
    if alone is not None:
        click.echo(json.dumps(asdict(start(alone, folder or "", float(os.environ.get(_BEGAN, time.time()))))))
        return
    model = RandomMixtral(layers=layers, experts=experts, top_k=4, intermediate=1536)
    path = str(random_mixtral(model))
    _turn(ARMS[0], path)  # makes the pack, and measures the disk
    starts: dict[str, list[Start]] = {arm: [] for arm in ARMS}
    with progress(rounds * len(ARMS), "starts", "start") as bar:
        for _, arm in in_turns(ARMS, rounds, float("inf"), warm_up=False):
            starts[arm].append(_turn(arm, path))
            bar.update()
    rows = [row_of(arm, own) for arm, own in starts.items()]
    click.echo(table(rows))
    size = layers * experts * model.expert_bytes
    machine = describe_machine(cache_folder())
    click.echo(json.dumps({"expert_bytes": size, "share": SHARE, "rows": rows, "machine": machine}))


if __name__ == "__main__":
    main()
