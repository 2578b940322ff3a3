"""How fast an expert's products are, by the number of its rows: the compiled ones of each instruction set, and torch's.

    python -m benchmarks.row_products [--shape 768x2048] [--kind swiglu] [--threads 1] [--rows 1] [--rounds 5]

Experts (bf16) take turns, more of them than the processor's caches hold. GB/s are of their weights; products
are multiplications of a weight and a number of a row.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from functools import partial
from typing import Any, Final

import click
import numpy as np
import torch
from torch.nn import functional as F

from benchmarks.harness.machine import cache_folder, describe_machine
from benchmarks.harness.reporting.progress import progress
from benchmarks.harness.reporting.statistics import Spread, spread_json
from benchmarks.harness.reporting.tables import median_range
from benchmarks.harness.rounds import in_turns
from greenroom.core.errors import InvalidConfig
from greenroom.core.units import MIB
from greenroom.experts.pack.layout import ExpertWeights
from greenroom.moe.native.rows import ClampedGate, NativeRows, native_rows

ROWS: Final = (1, 2, 4, 8, 16, 64, 256, 900)
MEMORY: Final = 256 * MIB
"""Of all experts together."""
WORK: Final = 3e9
"""Products of a turn, about."""
TORCH: Final = "torch"


class Experts:
    """SwiGLU. ``hidden`` and ``inner``: an expert's sizes. ``memory``: bytes of all of them."""

    def __init__(self, hidden: int, inner: int, memory: int = MEMORY) -> None:
        generator = torch.Generator().manual_seed(0)
        self.bytes = 3 * hidden * inner * 2
        self.hidden = hidden

        def drawn(*shape: int) -> torch.Tensor:
            return torch.empty(shape, dtype=torch.bfloat16).normal_(0.0, 0.02, generator=generator)

        shapes = self.shapes(hidden, inner)
        count = max(2, memory // self.bytes)
        self.weights: list[ExpertWeights] = [tuple(drawn(*shape) for shape in shapes) for _ in range(count)]

    def shapes(self, hidden: int, inner: int) -> list[tuple[int, ...]]:
        """Of an expert's tensors."""
        return [(2 * inner, hidden), (hidden, inner)]

    def products(self, native: NativeRows) -> Callable[..., None]:
        """What computes them, of the arguments of ``NativeRows.experts``."""
        return native.experts

    def compiled(self, native: NativeRows, instruction_set: str, rows: torch.Tensor) -> Callable[[int], torch.Tensor]:
        """Runs the expert of a number by the kernels."""
        tokens, scales, out = np.arange(len(rows)), np.ones(len(rows), dtype=np.float32), torch.empty_like(rows)
        starts, products = np.array([0, len(rows)]), self.products(native)

        def run(number: int) -> torch.Tensor:
            if native.instruction_set != instruction_set:
                native.use(instruction_set)
            products([self.weights[number]], starts, rows, tokens, scales, out, add=False)
            return out

        return run

    def by_torch(self, rows: torch.Tensor) -> Callable[[int], torch.Tensor]:
        def run(number: int) -> torch.Tensor:
            up, down = self.weights[number]
            gate, inner = F.linear(rows, up).chunk(2, dim=-1)
            return F.linear(F.silu(gate) * inner, down)

        return run


class ClampedExperts(Experts):
    """As gpt-oss has them: stored ``[inputs, outputs]``, with biases, gate and up in turns."""

    gate = ClampedGate(alpha=1.702, limit=7.0)

    def shapes(self, hidden: int, inner: int) -> list[tuple[int, ...]]:
        return [(hidden, 2 * inner), (2 * inner,), (inner, hidden), (hidden,)]

    def products(self, native: NativeRows) -> Callable[..., None]:
        return partial(native.clamped_experts, self.gate)

    def by_torch(self, rows: torch.Tensor) -> Callable[[int], torch.Tensor]:
        """As ``GptOssExperts._apply_gate``."""
        alpha, limit = self.gate

        def run(number: int) -> torch.Tensor:
            up, up_bias, down, down_bias = self.weights[number]
            both = rows @ up + up_bias
            gate, through = both[..., ::2].clamp(max=limit), both[..., 1::2].clamp(min=-limit, max=limit)
            return (through + 1) * (gate * torch.sigmoid(gate * alpha)) @ down + down_bias

        return run


KINDS: Final = {"swiglu": Experts, "gpt-oss": ClampedExperts}


def measured(experts: Experts, counts: tuple[int, ...], rounds: int, work: float = WORK) -> list[dict[str, Any]]:
    """A row for each number of rows and each arm, of which the first is the fastest instruction set."""
    native = native_rows()
    found: list[dict[str, Any]] = []
    try:
        with progress((rounds + 1) * len(counts) * (len(native.instruction_sets) + 1), "products", "turn") as bar:
            for count in counts:
                rows = torch.randn(count, experts.hidden, generator=torch.Generator().manual_seed(1)).bfloat16()
                arms = {name: experts.compiled(native, name, rows) for name in native.instruction_sets}
                arms[TORCH] = experts.by_torch(rows)
                products = experts.bytes // 2 * count
                times = max(2, min(len(experts.weights), round(work / products)))
                seconds: dict[str, list[float]] = {name: [] for name in arms}
                for round_, name in in_turns(list(arms), rounds, float("inf")):
                    began = time.perf_counter()
                    for number in range(times):
                        arms[name](number)
                    if round_:
                        seconds[name].append((time.perf_counter() - began) / times)
                    bar.update()
                found += [row_of(name, count, own, seconds[TORCH], experts.bytes) for name, own in seconds.items()]
    finally:
        native.use(native.instruction_sets[0])
    return found


def row_of(name: str, count: int, seconds: list[float], torchs: list[float], nbytes: int) -> dict[str, Any]:
    return {
        "products_by": name,
        "rows": count,
        "microseconds": spread_json(Spread.of([1e6 * one for one in seconds]), 1),
        "gb_s": spread_json(Spread.of([nbytes / one / 1e9 for one in seconds]), 1),
        "g_products_s": spread_json(Spread.of([nbytes / 2 * count / one / 1e9 for one in seconds]), 1),
        "over_torch": spread_json(Spread.of([torch_s / own for own, torch_s in zip(seconds, torchs, strict=True)]), 2),
    }


def table(found: list[dict[str, Any]]) -> str:
    lines = [f"{'rows':>5}  {'by':<12}{'µs':>28}{'GB/s':>20}{'G products/s':>26}{'over torch':>22}"]
    for row in found:
        lines.append(
            f"{row['rows']:>5}  {row['products_by']:<12}{median_range(row['microseconds']):>28}"
            f"{median_range(row['gb_s']):>20}{median_range(row['g_products_s']):>26}{median_range(row['over_torch']):>22}"
        )
    return "\n".join(lines)


def shape_of(text: str) -> tuple[int, int]:
    """Raises InvalidConfig."""
    hidden, _, inner = text.partition("x")
    sizes = [int(part) if part.isdecimal() else 0 for part in (hidden, inner)]
    if any(size < 2 or size % 2 for size in sizes):
        raise InvalidConfig("shape", text, "HIDDENxINNER, such as 768x2048, both even")
    return sizes[0], sizes[1]


@click.command(help=__doc__)
@click.option("--shape", default="768x2048", show_default=True, help="HIDDENxINNER of an expert.")
@click.option("--kind", type=click.Choice(list(KINDS)), default="swiglu", show_default=True, help="Of experts.")
@click.option("--threads", type=click.IntRange(min=1), default=1, show_default=True)
@click.option("--rows", "counts", type=click.IntRange(min=1), multiple=True, default=ROWS, show_default=True)
@click.option("--rounds", type=click.IntRange(min=1), default=5, show_default=True)
def main(shape: str, kind: str, threads: int, counts: tuple[int, ...], rounds: int) -> None:
    try:
        hidden, inner = shape_of(shape)
    except InvalidConfig as error:
        raise click.UsageError(str(error)) from error
    torch.set_num_threads(threads)
    found = measured(KINDS[kind](hidden, inner), counts, rounds)
    click.echo(table(found))
    described = {"shape": shape, "kind": kind, "threads": threads, "rows": found}
    click.echo(json.dumps(described | {"machine": describe_machine(cache_folder())}))


if __name__ == "__main__":
    main()
