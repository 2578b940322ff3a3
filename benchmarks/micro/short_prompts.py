"""A step of a short prompt: attention row by row, or as products of matrices, in turns.

python -m benchmarks.short_prompts            # the bundled model
python -m benchmarks.short_prompts --model widened
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click

from benchmarks.harness.inputs.checkpoints import random_mixtral, widened
from greenroom import LLM
from greenroom.core.generation import GenerationRequest, SamplingParams
from greenroom.demo import bundled_model_path
from greenroom.moe.attention import ragged_attention
from greenroom.moe.batch.completions import complete

ALWAYS, NEVER = 1 << 30, 0
_TIMEOUT_S = 120.0
_FOLDERS: dict[str, Callable[[], Path]] = {
    "bundled": bundled_model_path,
    "widened": widened,
    "random": random_mixtral,
}


@click.command()
@click.option("--model", type=click.Choice(tuple(_FOLDERS)), default="bundled", show_default=True)
@click.option("--rounds", type=click.IntRange(1), default=25, show_default=True)
def main(model: str, rounds: int) -> None:
    """Print for prompts of several lengths how long their step takes either way."""
    drawn = random.Random(0)
    with LLM(str(_FOLDERS[model]())) as llm:
        loop = llm.worker.loop
        seconds: list[float] = []
        forward = loop.engine.model.forward

        def timed(chunks: Sequence[Any], *paths: Any) -> Any:
            begin = time.perf_counter()
            try:
                return forward(chunks, *paths)
            finally:
                seconds.append(time.perf_counter() - begin)

        loop.engine.model.forward = timed  # type: ignore[method-assign]
        for rows in (12, 20, 30, 44, 64):
            found: dict[int, list[float]] = {ALWAYS: [], NEVER: []}
            for turn in range(rounds):
                for pairs, times in found.items():
                    ragged_attention._PAIRS_WORTH_A_PRODUCT = pairs
                    seconds.clear()
                    prompt = tuple(drawn.randrange(4, 250) for _ in range(rows))
                    sampling = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
                    request = GenerationRequest(f"{rows}-{turn}-{pairs}", prompt, sampling)
                    complete(loop, [request], timeout_s=_TIMEOUT_S)
                    times.append(1e3 * seconds[0])
            by_row, by_product = (statistics.median(found[pairs]) for pairs in (ALWAYS, NEVER))
            ratios = [product / row for product, row in zip(found[NEVER], found[ALWAYS], strict=True)]
            spread = statistics.quantiles(ratios, n=4) if rounds > 1 else ratios * 3
            click.echo(
                f"{model} {rows:3d} tokens, {rows * (rows + 1) // 2:4d} pairs: row by row {by_row:.2f} ms, "
                f"products {by_product:.2f} ms, ratio {spread[1]:.2f} (quartiles {spread[0]:.2f} to {spread[2]:.2f})"
            )


if __name__ == "__main__":
    main()
