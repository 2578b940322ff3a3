"""What it costs that OpenMP's threads wait for more work before they sleep: tokens/s by how long they do.

    python -m benchmarks.openmp_waits [--rounds N]

The bundled model widened to experts of 11 MiB, with all experts in memory and with a third of them, one prompt at a
time and eight at once, under `look-ahead`. Turns are processes of their own, since OpenMP reads the setting when it is
loaded. *As it comes* is GNU's own default, *soon* what greenroom's processes set, *at once* sleeps after every product.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any, Final

import click

from benchmarks.harness.arms.disk_link import DiskLink
from benchmarks.harness.arms.engine_arm import EngineArm
from benchmarks.harness.arms.policy_kind import Kind
from benchmarks.harness.inputs.checkpoints import EXPERT_MIB, widened
from benchmarks.harness.inputs.shared_model import SharedModel
from benchmarks.harness.inputs.task_prompts import in_turn
from benchmarks.harness.reporting.progress import progress
from benchmarks.harness.reporting.statistics import Spread, spread_json
from greenroom.moe.openmp_waits import SPINS, VARIABLE

WAITS: Final = {"as it comes": "300000", "soon": str(SPINS), "at once": "0"}
SHARES: Final = {"all": 1.0, "a third": 0.33}
ONE: Final = 8
MANY: Final = 16
AT_ONCE: Final = 8
TURN_S: Final = 240


def turn(expert_mib: float) -> dict[str, float]:
    """Tokens/s by what is resident and how many run, and GB/s of the disk alone and while experts are waited for."""
    found: dict[str, float] = {}
    with SharedModel(widened(expert_mib)) as shared, DiskLink(shared.pack.path, shared.expert_bytes) as link:
        prompts = in_turn(shared, MANY)
        for name, share in SHARES.items():
            with EngineArm(Kind("look-ahead", "look-ahead"), shared, share) as arm:
                arm.run(prompts[:AT_ONCE], AT_ONCE)
                one, many = arm.run(prompts[:ONE], 1), arm.run(prompts, AT_ONCE)
                found[f"{name}, one"] = one.tokens / one.seconds
                found[f"{name}, {AT_ONCE}"] = many.tokens / many.seconds
                moved, busy = arm.experts.movers[0].bytes_moved, arm.experts.movers[0].busy_seconds
                if share < 1:
                    found["reads, GB/s"] = moved / busy / 1e9
            shared.detach()
        found["disk alone, GB/s"] = link.bytes_per_s() / 1e9
    return found


@click.command(help=__doc__)
@click.option("--rounds", type=click.IntRange(min=1), default=5, show_default=True)
@click.option("--expert-mib", type=float, default=EXPERT_MIB, show_default=True, hidden=True)
@click.option("--turn", "alone", is_flag=True, help="Only one turn, in this process, as JSON.")
def main(rounds: int, expert_mib: float, alone: bool) -> None:
    if alone:
        click.echo(json.dumps(turn(expert_mib)))
        return
    widened(expert_mib)
    found: dict[str, list[dict[str, float]]] = {name: [] for name in WAITS}
    with progress(rounds * len(WAITS), "waits", "turn") as bar:
        for round_ in range(rounds):
            names = list(WAITS)
            for name in names[round_ % len(names) :] + names[: round_ % len(names)]:
                found[name].append(_in_a_process(WAITS[name], expert_mib))
                bar.update()
    figures = {name: spreads(turns, found["as it comes"]) for name, turns in found.items()}
    for name, own in figures.items():
        click.echo(name)
        for what, one in own.items():
            click.echo(f"  {what:<18} {_said(one['rate'])}, over as it comes {_said(one['over'])}")
    click.echo(json.dumps({"rounds": rounds, "waits": figures}))


def _said(spread: dict[str, float]) -> str:
    return f"{spread['median']} ({spread['min']}–{spread['max']})"


def _in_a_process(spins: str, expert_mib: float) -> dict[str, float]:
    environment = {**os.environ, VARIABLE: spins}
    environment.pop("OMP_WAIT_POLICY", None)
    command = [sys.executable, "-m", "benchmarks.openmp_waits", "--turn", "--expert-mib", str(expert_mib)]
    done = subprocess.run(command, check=True, timeout=TURN_S, stdout=subprocess.PIPE, text=True, env=environment)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def spreads(turns: list[dict[str, float]], base: list[dict[str, float]]) -> dict[str, Any]:
    """Of each figure its spread over the rounds, and that of its ratio ``over`` the ``base`` in the same round."""
    return {
        what: {
            "rate": spread_json(Spread.of([own[what] for own in turns]), 2),
            "over": spread_json(
                Spread.of([own[what] / other[what] for own, other in zip(turns, base, strict=True)]), 3
            ),
        }
        for what in turns[0]
    }


if __name__ == "__main__":
    main()
