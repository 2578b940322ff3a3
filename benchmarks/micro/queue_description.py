"""What a step pays before the batch policy decides: describing all requests, beside what deciding costs.

    python -m benchmarks.queue_description [--rounds N] [--batching NAME:OPTION=VALUE]

Nothing is computed: the model only says where its keys and values would be. Prints microseconds a step, the median of
the rounds, and one JSON object on its last line.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Sequence
from typing import cast

import click
import torch

from benchmarks.harness.machine import cache_folder, describe_machine
from greenroom.core.generation import Event, GenerationRequest, SamplingParams
from greenroom.moe.attention.kv_layout import KVLayout, LayerKV
from greenroom.moe.attention.ragged_attention import Chunk
from greenroom.moe.batch.batch_config import BatchConfig
from greenroom.moe.batch.batch_engine import BatchEngine
from greenroom.moe.forward.ragged_model import RaggedModel
from greenroom.policies.batching.batch_policy import BatchDecision, BatchPolicy, BatchState
from greenroom.policies.registry import create_batch_policy, spelt

CASES = ((1, 0), (8, 0), (64, 0), (64, 256))
PROMPT, LAYERS, VOCABULARY = (1, 2, 3), 24, 8


class _Model:
    layout = KVLayout((LayerKV(8, 64, 8, 64),) * LAYERS, torch.bfloat16, torch.device("cpu"))
    vocab_size = VOCABULARY
    max_positions = 1 << 22

    def forward(self, chunks: Sequence[Chunk]) -> torch.Tensor:
        return torch.zeros(sum(chunk.wants_logits for chunk in chunks), VOCABULARY)


class _Timed(BatchPolicy):
    """Notes when it is told, and how long it takes to decide."""

    def __init__(self, batching: str) -> None:
        self.told = 0.0
        self.decided = 0.0
        name, options = spelt("batching", batching)
        self._policy = create_batch_policy(name, options=options)
        self.reads_waits = self._policy.reads_waits

    def decide(self, state: BatchState) -> BatchDecision:
        self.told = time.perf_counter()
        decision = self._policy.decide(state)
        self.decided = time.perf_counter()
        return decision


def _ignore(event: Event) -> None:
    pass


def measure(running: int, waiting: int, rounds: int, batching: str) -> tuple[float, float]:
    """Microseconds of describing and of deciding, with so many requests that decode and so many that wait."""
    policy = _Timed(batching)
    config = BatchConfig(kv_budget_bytes=1 << 50, max_running=running)
    engine = BatchEngine(cast(RaggedModel, _Model()), config, policy)
    sampling = SamplingParams(temperature=0.0, max_tokens=rounds + 10, ignore_eos=True)
    for number in range(running + waiting):
        engine.add(engine.new_sequence(GenerationRequest(f"r{number}", PROMPT, sampling), _ignore))
    describing, deciding = [], []
    engine.step()
    for _ in range(rounds):
        begin = time.perf_counter()
        engine.step()
        describing.append(policy.told - begin)
        deciding.append(policy.decided - policy.told)
    assert (len(engine.running), len(engine.waiting)) == (running, waiting)
    engine.abort("measured")
    return statistics.median(describing) * 1e6, statistics.median(deciding) * 1e6


@click.command(help=__doc__)
@click.option("--rounds", type=click.IntRange(min=10), default=300, show_default=True, help="Steps of each case.")
@click.option("--batching", default="fcfs", show_default=True, help="The batch policy, as for `greenroom serve`.")
def main(rounds: int, batching: str) -> None:
    click.echo(describe_machine(cache_folder()))
    click.echo(f"{'running':>8}{'waiting':>9}{'describing':>13}{'deciding':>11}   µs a step")
    results = []
    for running, waiting in CASES:
        describing, deciding = measure(running, waiting, rounds, batching)
        click.echo(f"{running:8}{waiting:9}{describing:13.1f}{deciding:11.1f}")
        results.append(
            {"running": running, "waiting": waiting, "describing_us": describing, "deciding_us": deciding}
        )  # fmt: skip
    click.echo(json.dumps(results))


if __name__ == "__main__":
    main()
