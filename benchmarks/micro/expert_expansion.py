"""What stored experts cost on a GPU: to make numbers of them, and in a layer's step. Needs an NVIDIA GPU.

    python -m benchmarks.expert_expansion [--format mxfp4] [--shape 2880x2880] [--picks 4] [--rows 1] [--rounds 9]

Arms take turns: experts that are numbers already (plain), expanded one at a time by torch (torch), those that were
picked in one launch of Triton (ring), and, where there is one, the format's own product (own). Of FP8 that is torch's
scaled_grouped_mm, which also rounds the rows to FP8. Of MXFP4 it is gpt-oss's kernels (pip install kernels; they come
from the hub), of records in their layout. It computes other numbers than the others, so only its speed is compared.

All experts lie on the GPU, in more memory than its caches hold. GB/s are of the records' own bytes. A step is a layer's
products and sums, with all that its thread does for them; rows pick other experts in each.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any, Final

import click
import numpy as np
import torch
from torch.nn import functional
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

from benchmarks.harness.machine import cache_folder, describe_machine
from benchmarks.harness.reporting.progress import progress
from benchmarks.harness.reporting.statistics import Spread, spread_json
from benchmarks.harness.reporting.tables import median_range
from benchmarks.harness.rounds import in_turns
from benchmarks.micro.format_products import GATE, GPT_OSS, RANDOM, gpt_oss_layer, swiglu_layer
from benchmarks.micro.row_products import shape_of
from greenroom.core.errors import InvalidConfig
from greenroom.core.units import MIB
from greenroom.experts.pack.layout import PLAIN, ExpertWeights
from greenroom.moe.architecture.moe_layers import MoeLayer
from greenroom.moe.formats.expert_format import Expander, Expands, ExpertFormat
from greenroom.moe.formats.fp8 import FP8_BLOCKS, FP8_ROWS
from greenroom.moe.formats.int4.record import Int4
from greenroom.moe.formats.int8 import INT8
from greenroom.moe.formats.invented import invented_record
from greenroom.moe.formats.k_quants import Q4_K, Q6_K
from greenroom.moe.formats.lossless.codes import LOSSLESS
from greenroom.moe.formats.mxfp4 import BLOCK, MXFP4
from greenroom.moe.kernels.expert_products import Compute, Grouped, TorchSum
from greenroom.moe.kernels.expert_ring import ExpertRing
from greenroom.moe.kernels.experts_forward import combine, expert_by_torch

ROWS: Final = (1, 4, 16, 64)
MEMORY: Final = 512 * MIB
"""Of all experts together, as they are stored: ten times a large GPU's second-level cache."""
TIMES: Final = 20
"""Layers of a turn."""
TORCH, RING, OWN = "torch", "ring", "own"

FORMATS: Final[dict[str, ExpertFormat]] = {
    one.name: one for one in (MXFP4, LOSSLESS, FP8_BLOCKS, FP8_ROWS, INT8, Q4_K, Q6_K, Int4(128, zeros=True))
}

Step = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""A layer's experts, of rows ``[T, H]``, picks and scales ``[T, k]``, all on the device."""


class Unavailable(Exception):
    """The format's own product can not be measured here. The message says why."""


@dataclass(frozen=True)
class Bench:
    """A layer's experts on the device, all alike: ``records``, and some as numbers, which are more bytes.

    ``nbytes``: of a record.
    """

    expert_format: ExpertFormat
    layer: MoeLayer
    records: list[ExpertWeights]
    numbers: list[ExpertWeights]
    nbytes: int
    device: torch.device

    @classmethod
    def of(cls, name: str, hidden: int, inner: int, picks: int, device: torch.device, memory: int = MEMORY) -> Bench:
        own = FORMATS[name]
        made = gpt_oss_layer(hidden, inner) if name == MXFP4.name else swiglu_layer(hidden, inner)
        layout = own.record(made)
        count = max(2 * picks, -(-memory // layout.nbytes))
        layer = MoeLayer(made.name, count, picks, made.tensors, stacked=True)
        arena = torch.empty(count, layout.nbytes, dtype=torch.uint8, device=device)
        arena[:] = invented_record(own, layer).to(device)
        records = [layout.views(record) for record in arena]
        one = Expander(own, layer)(records[0])
        copies = max(2 * picks, -(-memory // sum(tensor.nbytes for tensor in one)))
        numbers = [tuple(tensor.clone() for tensor in one) for _ in range(min(count, copies))]
        return cls(own, layer, records, numbers, layout.weight_bytes, device)

    @property
    def module(self) -> Any:
        """What ``expert_by_torch`` reads of an experts module of transformers."""
        coded = self.expert_format is MXFP4
        clamped = partial(GptOssExperts._apply_gate, SimpleNamespace(alpha=GATE.alpha, limit=GATE.limit))
        return SimpleNamespace(
            has_bias=coded, is_transposed=coded, has_gate=True, has_post_expert_norm=False,
            _apply_gate=clamped if coded else _silu_and_multiply,
        )  # fmt: skip

    def step(self, expands: Expands | None) -> Step:
        """As ``experts_forward`` runs a layer. None: of experts that are numbers."""

        def run(rows: torch.Tensor, picks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
            there = picks.cpu().numpy()
            grouped = Grouped.of(there, len(self.records))
            arriving = [(expert, self._weights(expert, plain=expands is None)) for expert in sorted(grouped.spans)]
            compute: Compute = partial(expert_by_torch, self.module)
            if expands is not None:
                expand = expands.for_layer(lambda: [weights for _, weights in arriving])
                compute = lambda rows, weights: expert_by_torch(self.module, rows, expand(weights))  # noqa: E731
            return combine(grouped, arriving, TorchSum(rows, scales, grouped, compute))

        return run

    def _weights(self, expert: int, *, plain: bool) -> ExpertWeights:
        return self.numbers[expert % len(self.numbers)] if plain else self.records[expert]

    def arms(self) -> dict[str, Step]:
        """By name; first those that compute the same."""
        ring = ExpertRing(self.expert_format, self.layer, self.device)
        return {
            PLAIN: self.step(None),
            TORCH: self.step(Expander(self.expert_format, self.layer)),
            RING: self.step(ring),
        }


def _silu_and_multiply(both: torch.Tensor) -> torch.Tensor:
    gate, up = both.chunk(2, dim=-1)
    return functional.silu(gate) * up


def own_product(bench: Bench, hidden: int, inner: int) -> Step:
    """The format's own product, of as many experts in its own layout. Raises Unavailable."""
    if bench.device.type != "cuda":
        raise Unavailable("it needs a GPU")
    experts = len(bench.records)
    if bench.expert_format is FP8_ROWS:
        if not hasattr(functional, "scaled_grouped_mm") or torch.cuda.get_device_capability(bench.device) < (9, 0):
            raise Unavailable("scaled_grouped_mm needs torch 2.10 and compute capability 9.0")
        return _scaled_grouped(experts, hidden, inner, bench.device)
    if bench.expert_format is MXFP4:
        return _gpt_oss_kernels(experts, hidden, inner, bench.device)
    raise Unavailable(f"torch has none of {bench.expert_format.name}")


def _scaled_grouped(experts: int, hidden: int, inner: int, device: torch.device) -> Step:
    def matrix(outputs: int, inputs: int) -> tuple[torch.Tensor, torch.Tensor]:
        codes = torch.randint(0, 0x70, (experts, outputs, inputs), dtype=torch.uint8, device=device)
        return codes.view(torch.float8_e4m3fn).transpose(-2, -1), torch.full((experts, outputs), 1e-3, device=device)

    up, down = matrix(2 * inner, hidden), matrix(hidden, inner)
    by_torch: Any = functional  # has it since 2.10
    by_row = by_torch.ScalingType.RowWise

    def product(rows: torch.Tensor, weight: tuple[torch.Tensor, torch.Tensor], ends: torch.Tensor) -> torch.Tensor:
        scales = (rows.abs().amax(dim=-1).float() / 448).clamp_(min=1e-12)
        coded = (rows.float() / scales[:, None]).to(torch.float8_e4m3fn)
        made: torch.Tensor = by_torch.scaled_grouped_mm(
            coded, weight[0], scales, by_row, weight[1], by_row, offs=ends, output_dtype=torch.bfloat16
        )
        return made

    def run(rows: torch.Tensor, picks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        flat, order = picks.flatten().sort(stable=True)
        ends = torch.searchsorted(flat, torch.arange(experts, device=device), right=True).to(torch.int32)
        tokens = order // picks.shape[1]
        made = product(_silu_and_multiply(product(rows[tokens], up, ends)), down, ends)
        return torch.zeros_like(rows).index_add_(0, tokens, made * scales.flatten()[order][:, None])

    return run


def _gpt_oss_kernels(experts: int, hidden: int, inner: int, device: torch.device) -> Step:
    try:
        from kernels import get_kernel
        from transformers.integrations import mxfp4 as theirs

        theirs.triton_kernels_hub = get_kernel("kernels-community/gpt-oss-triton-kernels", version=1)
    except Exception as reason:  # no package, no network, no build for this GPU
        raise Unavailable(f"gpt-oss's kernels: {type(reason).__name__}: {reason}") from reason
    config = SimpleNamespace(
        num_local_experts=experts, intermediate_size=inner, hidden_size=hidden, swiglu_limit=GATE.limit
    )
    with torch.device("meta"):
        module = theirs.Mxfp4GptOssExperts(config)
    for name, outputs, inputs in (("gate_up_proj", 2 * inner, hidden), ("down_proj", hidden, inner)):
        shape = experts, outputs, inputs // BLOCK
        blocks = torch.randint(0, 256, (*shape, BLOCK // 2), dtype=torch.uint8, device=device)
        scales = torch.randint(116, 122, shape, dtype=torch.uint8, device=device)
        theirs.swizzle_mxfp4_convertops(blocks, scales, module, name, device, theirs.triton_kernels_hub)
        bias = torch.zeros(experts, outputs, device=device)
        setattr(module, f"{name}_bias", torch.nn.Parameter(bias, requires_grad=False))
    return module  # type: ignore[no-any-return]


def seconds_of(run: Callable[[], object], device: torch.device) -> float:
    """From the first work that it queues to the end of the last one."""
    if device.type != "cuda":
        begin = time.perf_counter()
        run()
        return time.perf_counter() - begin
    events: list[Any] = [torch.cuda.Event(enable_timing=True) for _ in range(2)]  # type: ignore[no-untyped-call]
    events[0].record()
    run()
    events[1].record()
    events[1].synchronize()
    return float(events[0].elapsed_time(events[1])) / 1e3


def expansion(bench: Bench, rounds: int, times: int = TIMES) -> list[dict[str, Any]]:
    """Of a row's picks, a row for each arm."""
    arms: dict[str, Expands] = {
        TORCH: Expander(bench.expert_format, bench.layer),
        RING: ExpertRing(bench.expert_format, bench.layer, bench.device),
    }
    picks = bench.layer.top_k
    launches = [
        [bench.records[(at + n) % len(bench.records)] for n in range(picks)] for at in range(0, times * picks, picks)
    ]

    def run(expands: Expands) -> None:
        for records in launches:
            one = expands.for_layer(partial(list, records))
            for record in records:
                one(record)

    seconds: dict[str, list[float]] = {name: [] for name in arms}
    for round_, name in in_turns(list(arms), rounds, float("inf")):
        taken = seconds_of(partial(run, arms[name]), bench.device) / times
        if round_:
            seconds[name].append(taken)
    return [
        {
            "arm": name,
            "picks": picks,
            "microseconds": spread_json(Spread.of([1e6 * one for one in own]), 1),
            "gb_s": spread_json(Spread.of([picks * bench.nbytes / one / 1e9 for one in own]), 2),
            "over_torch": spread_json(Spread.of([o / s for s, o in zip(own, seconds[TORCH], strict=True)]), 2),
        }
        for name, own in seconds.items()
    ]


def steps(
    bench: Bench, arms: dict[str, Step], counts: Sequence[int], rounds: int, times: int = TIMES
) -> list[dict[str, Any]]:
    """A row for each number of rows and arm."""
    hidden = bench.layer.tensors[-1].shape[-1] if bench.expert_format is MXFP4 else bench.layer.tensors[-1].shape[0]
    found: list[dict[str, Any]] = []
    with progress((rounds + 1) * len(counts) * len(arms), "steps", "turn") as bar, torch.inference_mode():
        for count in counts:
            drawn = np.random.default_rng(count)
            rows = torch.randn(count, hidden, generator=torch.Generator().manual_seed(1)).bfloat16().to(bench.device)
            scales = torch.full((count, bench.layer.top_k), 1 / bench.layer.top_k, dtype=rows.dtype).to(bench.device)
            layers = [
                torch.from_numpy(
                    np.stack([drawn.permutation(len(bench.records))[: bench.layer.top_k] for _ in range(count)])
                ).to(bench.device)
                for _ in range(times)
            ]

            def run(step: Step, rows: torch.Tensor = rows, scales: torch.Tensor = scales, layers: Any = layers) -> None:
                for picks in layers:
                    step(rows, picks, scales)

            seconds: dict[str, list[float]] = {name: [] for name in arms}
            for round_, name in in_turns(list(arms), rounds, float("inf")):
                taken = seconds_of(partial(run, arms[name]), bench.device) / times
                if round_:
                    seconds[name].append(taken)
                bar.update()
            found += [
                {
                    "arm": name,
                    "rows": count,
                    "microseconds": spread_json(Spread.of([1e6 * one for one in own]), 1),
                    "over_torch": spread_json(Spread.of([o / s for s, o in zip(own, seconds[TORCH], strict=True)]), 2),
                }
                for name, own in seconds.items()
            ]
    return found


def table(expanded: list[dict[str, Any]], stepped: list[dict[str, Any]]) -> str:
    lines = [f"{'expanding':<10}{'µs a layer':>28}{'GB/s':>22}{'over torch':>22}"]
    lines += [
        f"{row['arm']:<10}{median_range(row['microseconds']):>28}{median_range(row['gb_s'], 2):>22}"
        f"{median_range(row['over_torch'], 2):>22}"
        for row in expanded
    ]
    lines.append(f"{'step':<10}{'µs a layer':>28}{'rows':>22}{'over torch':>22}")
    lines += [
        f"{row['arm']:<10}{median_range(row['microseconds']):>28}{row['rows']:>22}"
        f"{median_range(row['over_torch'], 2):>22}"
        for row in stepped
    ]
    return "\n".join(lines)


@click.command(help=__doc__)
@click.option("--format", "name", type=click.Choice(list(FORMATS)), default=MXFP4.name, show_default=True)
@click.option("--shape", help="HIDDENxINNER of an expert.  [default: gpt-oss's, or that of the model `random`]")
@click.option("--picks", type=click.IntRange(min=1), default=4, show_default=True, help="Experts of a row.")
@click.option("--rows", "counts", type=click.IntRange(min=1), multiple=True, default=ROWS, show_default=True)
@click.option("--rounds", type=click.IntRange(min=1), default=9, show_default=True)
def main(name: str, shape: str | None, picks: int, counts: tuple[int, ...], rounds: int) -> None:
    if not torch.cuda.is_available():
        why = "this torch is built without CUDA" if torch.version.cuda is None else "torch finds no CUDA device"
        raise click.ClickException(
            f"it measures an NVIDIA GPU, and {why}. On a CPU: python -m benchmarks.format_products"
        )
    shape = shape or (GPT_OSS if name == MXFP4.name else RANDOM)
    try:
        hidden, inner = shape_of(shape)
    except InvalidConfig as error:
        raise click.UsageError(str(error)) from error
    device = torch.device("cuda", torch.cuda.current_device())
    bench = Bench.of(name, hidden, inner, picks, device)
    arms, own = bench.arms(), "measured"
    try:
        arms[OWN] = own_product(bench, hidden, inner)
    except Unavailable as reason:
        own = f"not measured: {reason}"
    expanded = expansion(bench, rounds)
    stepped = steps(bench, arms, counts, rounds)
    click.echo(table(expanded, stepped))
    click.echo(f"the format's own product: {own}")
    described = {"format": name, "shape": shape, "picks": picks, "expanding": expanded, "steps": stepped, "own": own}
    click.echo(json.dumps(described | {"machine": describe_machine(cache_folder())}))


if __name__ == "__main__":
    main()
