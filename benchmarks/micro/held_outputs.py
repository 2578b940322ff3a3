"""What the experts' outputs that wait for their turn add to a long prompt's memory: `duoserve`, which bounds them,
beside `reuse`, which does not.

    python -m benchmarks.held_outputs [--rows N] [--top-k K]

A Mixtral of random weights in fp32 with 32 small experts a layer, a third of them in memory. The policies take turns on
one prompt, each turn in a process of its own. *Peak* is of the process's resident set over what it was before the
prompt; *planned* is the memory plan's workspace. The tokens have to be the same.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from random import Random
from typing import Any, Final

import click

from benchmarks.harness.arms.filled_memory import filled
from benchmarks.harness.children.process_memory import memory, peak_bytes, reset_peak
from benchmarks.harness.inputs.checkpoints import RandomMixtral, random_mixtral
from benchmarks.harness.inputs.token_streams import SPECIAL_IDS
from benchmarks.harness.reporting.progress import progress
from greenroom.core.generation import SamplingParams
from greenroom.core.units import MIB
from greenroom.llm import LLM

POLICIES: Final = ("reuse", "duoserve")
ROUNDS: Final = 3
ANSWER: Final = 4
TURN_S: Final = 200


def model_of(rows: int, top_k: int) -> RandomMixtral:
    return RandomMixtral(layers=4, experts=32, top_k=top_k, intermediate=256, max_positions=rows + ANSWER)


def turn(policy: str, rows: int, top_k: int) -> dict[str, Any]:
    """MiB, and the answer's tokens."""
    model, random = model_of(rows, top_k), Random(0)
    prompt = [random.randrange(SPECIAL_IDS, model.vocabulary) for _ in range(rows)]
    with LLM(
        str(random_mixtral(model)), dtype="float32", policy=policy, expert_memory="33%", tokens_per_step=rows,
        prefill_chunk=rows, max_model_len=rows + ANSWER, max_running=1, warm_start=False, progress=False,
    ) as llm:  # fmt: skip
        filled(llm)
        before = memory()["rss"]
        reset_peak()
        (answer,) = llm.generate([prompt], SamplingParams(temperature=0, max_tokens=ANSWER), progress=False)
        return {
            "peak": (peak_bytes() - before) / MIB,
            "planned": llm.worker.plan.workspace / MIB,
            "tokens": list(answer.token_ids),
        }


@click.command(help=__doc__)
@click.option("--rows", type=click.IntRange(min=16), default=3000, show_default=True, help="Tokens of the prompt.")
@click.option("--top-k", type=click.IntRange(min=1, max=16), default=8, show_default=True)
@click.option("--turn", "policy", type=click.Choice(POLICIES), help="Only one turn of this policy, as JSON.")
def main(rows: int, top_k: int, policy: str | None) -> None:
    if policy is not None:
        click.echo(json.dumps(turn(policy, rows, top_k)))
        return
    random_mixtral(model_of(rows, top_k))
    found: dict[str, list[dict[str, Any]]] = {policy: [] for policy in POLICIES}
    command = [sys.executable, "-m", "benchmarks.held_outputs", "--rows", str(rows), "--top-k", str(top_k), "--turn"]
    with progress(ROUNDS * len(POLICIES), "prompts", "turn") as bar:
        for _ in range(ROUNDS):
            for name, turns in found.items():
                done = subprocess.run([*command, name], check=True, timeout=TURN_S, stdout=subprocess.PIPE, text=True)
                turns.append(json.loads(done.stdout.splitlines()[-1]))
                bar.update()
    hidden = model_of(rows, top_k).hidden
    click.echo(f"one prompt of {rows:,} rows, top-{top_k} of 32 experts, hidden {hidden}, fp32, {ROUNDS} rounds")
    click.echo(f"outputs of all experts: {rows * top_k * hidden * 4 / MIB:.0f} MiB a layer")
    for name, turns in found.items():
        peaks = [own["peak"] for own in turns]
        spread = f"{statistics.median(peaks):.0f} ({min(peaks):.0f}–{max(peaks):.0f})"
        click.echo(f"{name:<10} peak {spread:>16} MiB   planned {turns[0]['planned']:.0f} MiB")
    answers = {tuple(own["tokens"]) for turns in found.values() for own in turns}
    click.echo(f"same tokens: {'yes' if len(answers) == 1 else 'no'}")


if __name__ == "__main__":
    main()
