"""How fast the attention of a chunk of a prompt is: the compiled one of each instruction set, and sdpa.

    python -m benchmarks.chunk_attention [--heads 32x4x128] [--threads 2] [--chunk 512 --before 4096] [--rounds 5]

One layer's bf16 attention of one sequence, its keys and values as the batch loop keeps them. Products are
multiplications of two numbers, of those that the causal mask leaves. Over sdpa: times faster.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any, Final

import click
import numpy as np
import torch
from torch import nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from benchmarks.harness.machine import cache_folder, describe_machine
from benchmarks.harness.reporting.progress import progress
from benchmarks.harness.reporting.statistics import Spread, spread_json
from benchmarks.harness.reporting.tables import median_range
from benchmarks.harness.rounds import in_turns
from greenroom.core.errors import InvalidConfig
from greenroom.moe.attention.sight import lower_triangle
from greenroom.moe.native.rows import NativeRows, native_rows

CHUNKS: Final = (1, 16, 64, 256, 512)
BEFORE: Final = (0, 512, 4096, 8192)
WORK: Final = 2e8
"""Products of a turn, about."""
SDPA: Final = "sdpa"


class Sequence:
    """``chunk`` rows behind ``before`` others. ``heads``: of queries, of keys, and their width."""

    def __init__(self, heads: tuple[int, int, int], chunk: int, before: int) -> None:
        generator = torch.Generator().manual_seed(0)
        (self.query_heads, self.key_heads, self.dim), self.chunk, self.before = heads, chunk, before

        def drawn(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator).bfloat16()

        total = before + chunk
        self.keys, self.values = (drawn(1, self.key_heads, total, self.dim) for _ in range(2))
        self.query, self.new_keys, self.new_values = (
            drawn(chunk, count, self.dim) for count in (self.query_heads, self.key_heads, self.key_heads)
        )
        self.products = 2 * self.query_heads * self.dim * sum(before + row + 1 for row in range(chunk))

    def compiled(self, native: NativeRows, instruction_set: str) -> Callable[[], torch.Tensor]:
        table = np.zeros((self.chunk, 6), dtype=np.int64)
        table[:, 0] = np.arange(self.chunk)
        table[:, 1:4] = self.keys.data_ptr(), self.values.data_ptr(), self.before + self.chunk
        table[:, 4] = self.before + table[:, 0]

        def run() -> torch.Tensor:
            if native.instruction_set != instruction_set:
                native.use(instruction_set)
            out = torch.empty_like(self.query)
            native.attention(self.query, self.new_keys, self.new_values, table, out, self.dim**-0.5)
            return out

        return run

    def by_sdpa(self) -> Callable[[], torch.Tensor]:
        """As the batch loop calls it."""
        module = nn.Module()
        module.is_causal, module.num_key_value_groups = True, self.query_heads // self.key_heads  # type: ignore[assignment]
        query = self.query[None].transpose(1, 2)
        plain = self.chunk == 1 or self.before == 0
        mask = None if plain else lower_triangle(self.chunk, torch.device("cpu"), self.before)[None, None]

        def run() -> torch.Tensor:
            self.keys[0, :, self.before :] = self.new_keys.transpose(0, 1)
            self.values[0, :, self.before :] = self.new_values.transpose(0, 1)
            options = {"dropout": 0.0, "scaling": self.dim**-0.5}
            out: torch.Tensor = sdpa_attention_forward(module, query, self.keys, self.values, mask, **options)[0][0]
            return out

        return run


def measured(heads: tuple[int, int, int], chunks: tuple[int, ...], befores: tuple[int, ...], rounds: int) -> list[Any]:
    """A row for each chunk, number of keys before it, and arm."""
    native = native_rows()
    found: list[dict[str, Any]] = []
    turns = (rounds + 1) * len(chunks) * len(befores) * (len(native.instruction_sets) + 1)
    try:
        with progress(turns, "attention", "turn") as bar, torch.inference_mode():
            for chunk in chunks:
                for before in befores:
                    sequence = Sequence(heads, chunk, before)
                    arms = {name: sequence.compiled(native, name) for name in native.instruction_sets}
                    arms[SDPA] = sequence.by_sdpa()
                    times = max(2, round(WORK / sequence.products))
                    seconds: dict[str, list[float]] = {name: [] for name in arms}
                    for round_, name in in_turns(list(arms), rounds, float("inf")):
                        began = time.perf_counter()
                        for _ in range(times):
                            arms[name]()
                        if round_:
                            seconds[name].append((time.perf_counter() - began) / times)
                        bar.update()
                    found += [row_of(name, sequence, own, seconds[SDPA]) for name, own in seconds.items()]
    finally:
        native.use(native.instruction_sets[0])
    return found


def row_of(name: str, of: Sequence, seconds: list[float], sdpas: list[float]) -> dict[str, Any]:
    return {
        "attention_by": name,
        "chunk": of.chunk,
        "before": of.before,
        "microseconds": spread_json(Spread.of([1e6 * one for one in seconds]), 1),
        "g_products_s": spread_json(Spread.of([of.products / one / 1e9 for one in seconds]), 1),
        "over_sdpa": spread_json(Spread.of([sdpa / own for own, sdpa in zip(seconds, sdpas, strict=True)]), 2),
    }


def table(found: list[dict[str, Any]]) -> str:
    lines = [f"{'chunk':>6}{'before':>8}  {'by':<12}{'µs':>30}{'G products/s':>24}{'over sdpa':>22}"]
    for row in found:
        lines.append(
            f"{row['chunk']:>6}{row['before']:>8}  {row['attention_by']:<12}{median_range(row['microseconds']):>30}"
            f"{median_range(row['g_products_s']):>24}{median_range(row['over_sdpa']):>22}"
        )
    return "\n".join(lines)


def heads_of(text: str) -> tuple[int, int, int]:
    """Raises InvalidConfig."""
    sizes = [int(part) if part.isdecimal() else 0 for part in text.split("x")]
    if len(sizes) != 3 or min(sizes) < 1 or sizes[0] % sizes[1] or sizes[2] % 32:
        raise InvalidConfig("heads", text, "QUERYxKEYxWIDTH, such as 32x4x128: a multiple of KEY, a multiple of 32")
    return sizes[0], sizes[1], sizes[2]


@click.command(help=__doc__)
@click.option("--heads", default="32x4x128", show_default=True, help="Query heads x key heads x width.")
@click.option("--threads", type=click.IntRange(min=1), default=None, help="[default: all cores]")
@click.option("--chunk", "chunks", type=click.IntRange(min=1), multiple=True, default=CHUNKS, show_default=True)
@click.option("--before", "befores", type=click.IntRange(min=0), multiple=True, default=BEFORE, show_default=True)
@click.option("--rounds", type=click.IntRange(min=1), default=5, show_default=True)
def main(heads: str, threads: int | None, chunks: tuple[int, ...], befores: tuple[int, ...], rounds: int) -> None:
    try:
        sizes = heads_of(heads)
    except InvalidConfig as error:
        raise click.UsageError(str(error)) from error
    if threads is not None:
        torch.set_num_threads(threads)
    found = measured(sizes, chunks, befores, rounds)
    click.echo(table(found))
    described = {"heads": heads, "threads": torch.get_num_threads(), "rows": found}
    click.echo(json.dumps(described | {"machine": describe_machine(cache_folder())}))


if __name__ == "__main__":
    main()
