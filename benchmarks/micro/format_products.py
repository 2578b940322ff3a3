"""How fast an expert's products are as it is stored, over those of the same expert in bf16, by the number of its rows.

    python -m benchmarks.format_products [--format mxfp4] [--shape 2880x2880] [--threads 1] [--rows 1] [--rounds 5]
    python -m benchmarks.format_products --format fp8-blocks --linear 4096x2048
    python -m benchmarks.format_products --format q4_k --beside OTHER/services/greenroom/moe/native/_rows….so

gpt-oss's experts in MXFP4, SwiGLU experts in the other formats. With --linear it is a linear layer of so many outputs
and inputs. --instructions leaves slower instruction sets out.

Experts take turns, more of them than the processor's caches hold. Each instruction set computes both, in turns. GB/s
are of the record's own bytes. With --beside another build's compiled library takes turns with this one's.
"""

from __future__ import annotations

import ctypes
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, cast

import click
import numpy as np
import torch

from benchmarks.harness.machine import cache_folder, describe_machine
from benchmarks.harness.reporting.progress import progress
from benchmarks.harness.reporting.statistics import Spread, spread_json
from benchmarks.harness.reporting.tables import median_range
from benchmarks.harness.rounds import in_turns
from benchmarks.micro.row_products import shape_of
from greenroom.core.errors import InvalidConfig
from greenroom.core.units import MIB
from greenroom.experts.pack.layout import PLAIN, ExpertWeights
from greenroom.moe.architecture.moe_layers import ExpertTensor, MoeLayer
from greenroom.moe.formats.expert_format import ExpertFormat
from greenroom.moe.formats.fp4 import FP4
from greenroom.moe.formats.fp8 import FP8_BLOCKS, FP8_ROWS
from greenroom.moe.formats.grouped_format import GroupedFormat, MatrixFormat
from greenroom.moe.formats.int4.record import Int4
from greenroom.moe.formats.int8 import INT8
from greenroom.moe.formats.k_quants import Q4_K, Q6_K
from greenroom.moe.formats.k_quants import SUPER as K_QUANT
from greenroom.moe.formats.lossless.codes import LOSSLESS
from greenroom.moe.formats.lossless.planes import LOSSLESS_PLANES
from greenroom.moe.formats.lossless.record import LosslessFormat
from greenroom.moe.formats.mxfp4 import MXFP4
from greenroom.moe.native.library import native_library
from greenroom.moe.native.rows import (
    ClampedGate,
    GroupedExpert,
    GroupedMatrix,
    LosslessExpert,
    NativeRows,
    native_rows,
)

ROWS: Final = (1, 2, 4, 8, 32, 128)
MEMORY: Final = 128 * MIB
"""Of all experts together, as they are stored."""
WORK: Final = 2e9
"""Products of a turn, about."""
GATE: Final = ClampedGate(alpha=1.702, limit=7.0)

Products = Callable[..., None]


BESIDE: Final = "beside"
"""The arm of another build's library."""


@dataclass(frozen=True, slots=True)
class Arm:
    """``weights``: of each expert. ``nbytes``: of one."""

    native: NativeRows
    products: Products
    weights: list[Any]
    nbytes: int


class OtherBuild:
    """Another build's library. Whatever function it lacks is this build's: products are compared, not what is around
    them."""

    def __init__(self, path: Path) -> None:
        self._own = ctypes.CDLL(str(path))

    def __getattr__(self, name: str) -> Any:
        try:
            return getattr(self._own, name)
        except AttributeError:
            return getattr(native_library(), name)


def other_build(path: Path) -> NativeRows:
    """Raises OSError for what is no library, AttributeError for one without the products."""
    return NativeRows(cast(ctypes.CDLL, OtherBuild(path)))


def gpt_oss_layer(hidden: int, inner: int) -> MoeLayer:
    return _layer(
        gate_up_proj=(hidden, 2 * inner), gate_up_proj_bias=(2 * inner,), down_proj=(inner, hidden),
        down_proj_bias=(hidden,),
    )  # fmt: skip


def swiglu_layer(hidden: int, inner: int) -> MoeLayer:
    return _layer(gate_up_proj=(2 * inner, hidden), down_proj=(hidden, inner))


def _layer(**shapes: tuple[int, ...]) -> MoeLayer:
    tensors = tuple(ExpertTensor(name, shape, torch.bfloat16) for name, shape in shapes.items())
    return MoeLayer("experts", 1, 1, tensors, stacked=True)


def clamped_arms(
    native: NativeRows, expert_format: ExpertFormat, hidden: int, inner: int, memory: int
) -> dict[str, Arm]:
    """gpt-oss's experts of random codes, and the same numbers in bf16."""
    layer = gpt_oss_layer(hidden, inner)
    layout = expert_format.record(layer)
    generator = torch.Generator().manual_seed(0)
    stored: list[ExpertWeights] = []
    expanded: list[ExpertWeights] = []
    for _ in range(max(2, -(-memory // layout.nbytes))):
        record = layout.views(torch.randint(0, 256, (layout.nbytes,), dtype=torch.uint8, generator=generator))
        for spec, tensor in zip(layout.tensors, record, strict=True):
            if spec.name.endswith("_scales"):
                tensor.random_(116, 122, generator=generator)
            elif tensor.is_floating_point():
                tensor.normal_(0.0, 0.02, generator=generator)
        numbers = tuple(torch.empty(tensor.shape, dtype=tensor.dtype) for tensor in layer.tensors)
        expert_format.expand(layer, record, numbers)
        stored.append(record)
        expanded.append(numbers)
    products = {MXFP4.name: native.mxfp4_experts}[expert_format.name]
    return {
        expert_format.name: Arm(native, partial(products, GATE), stored, layout.weight_bytes),
        PLAIN: Arm(
            native, partial(native.clamped_experts, GATE), expanded, sum(tensor.nbytes for tensor in expanded[0])
        ),
    }


Stored = Callable[[torch.Tensor, int, torch.Generator], tuple[torch.Tensor, ...]]
"""From normal numbers ``[outputs, inputs]`` of a deviation of 1, and how many of them share a scale (0: a row), what is
stored of a matrix. Numbers of codes deviate by about 100 in FP8, 30 in int8, 2.5 in int4, 4 in Q4_K and 10 in Q6_K."""


def _scales(noise: torch.Tensor, group: int, generator: torch.Generator) -> torch.Tensor:
    outputs, inputs = noise.shape
    groups = -(-inputs // group) if group else 1
    return torch.rand(1, groups, generator=generator).expand(outputs, groups) * 2e-4 + 1e-4


def _fp8(noise: torch.Tensor, group: int, generator: torch.Generator) -> tuple[torch.Tensor, ...]:
    codes = (noise * 100).clamp_(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
    return codes, _scales(noise, group, generator)


def _int8(noise: torch.Tensor, group: int, generator: torch.Generator) -> tuple[torch.Tensor, ...]:
    codes = (noise * 30).clamp_(-127, 127).to(torch.int8).view(torch.uint8)
    return codes, _scales(noise, group, generator).half()


def _fp4(noise: torch.Tensor, group: int, generator: torch.Generator) -> tuple[torch.Tensor, ...]:
    codes = (noise * 4 + 8).clamp_(0, 15).to(torch.uint8)
    return codes, torch.full((len(codes), -(-codes.shape[1] // group)), 120, dtype=torch.uint8)


def _q4_k(noise: torch.Tensor, group: int, generator: torch.Generator) -> tuple[torch.Tensor, ...]:
    codes = (noise * 4 + 8).clamp_(0, 15).to(torch.uint8)
    factors = torch.full((len(codes), -(-codes.shape[1] // K_QUANT)), 4e-5).half()
    scales = torch.full((len(codes), factors.shape[1] * K_QUANT // group), 32, dtype=torch.uint8)
    return codes, factors, scales, factors * 8, scales


def _q6_k(noise: torch.Tensor, group: int, generator: torch.Generator) -> tuple[torch.Tensor, ...]:
    codes = (noise * 10 + 32).clamp_(0, 63).to(torch.uint8)
    factors = torch.full((len(codes), -(-codes.shape[1] // K_QUANT)), 8e-6).half()
    return codes, factors, torch.full((len(codes), factors.shape[1] * K_QUANT // group), 64, dtype=torch.int8)


def _int4(noise: torch.Tensor, group: int, generator: torch.Generator) -> tuple[torch.Tensor, ...]:
    codes = (noise * 2.5 + 8).round_().clamp_(0, 15).to(torch.uint8)
    scales = _scales(noise, group, generator).half()
    return codes, scales, torch.randint(7, 10, scales.shape, dtype=torch.uint8, generator=generator)


def grouped_arms(
    native: NativeRows, expert_format: GroupedFormat, stored_as: Stored, hidden: int, inner: int, memory: int
) -> dict[str, Arm]:
    """SwiGLU experts of normal numbers in codes that share scales, and the same numbers in bf16."""
    layer, generator = swiglu_layer(hidden, inner), torch.Generator().manual_seed(0)
    layout = expert_format.record(layer)
    stored: list[ExpertWeights] = []
    expanded: list[ExpertWeights] = []
    for _ in range(max(2, -(-memory // layout.nbytes))):
        made: dict[str, torch.Tensor] = {}
        for tensor, codes in zip(layer.tensors, expert_format.products, strict=True):
            noise = torch.randn(*tensor.shape, generator=generator)
            made |= expert_format.make(tensor, stored_as(noise, codes.group, generator))
        record = layout.views(torch.zeros(layout.nbytes, dtype=torch.uint8))
        for spec, view in zip(layout.tensors, record, strict=True):
            view.copy_(made[spec.name])
        numbers = tuple(torch.empty(tensor.shape, dtype=tensor.dtype) for tensor in layer.tensors)
        expert_format.expand(layer, record, numbers)
        stored.append(record)
        expanded.append(numbers)
    products = partial(native.grouped_experts, GroupedExpert(*expert_format.products, inner))
    return {
        expert_format.name: Arm(native, products, stored, layout.weight_bytes),
        PLAIN: Arm(native, native.experts, expanded, sum(tensor.nbytes for tensor in expanded[0])),
    }


def linear_arms(
    native: NativeRows, matrix_format: MatrixFormat, stored_as: Stored, outputs: int, inputs: int, memory: int
) -> dict[str, Arm]:
    """Linear layers of normal numbers in codes that share scales, and the same numbers in bf16."""
    generator = torch.Generator().manual_seed(0)
    tensor = ExpertTensor("weight", (outputs, inputs), torch.bfloat16)
    layer = MoeLayer("linear", 1, 1, (tensor,), stacked=True)
    layout, codes = matrix_format.record(layer), matrix_format.products[1]
    stored, expanded = [], []
    for _ in range(max(2, -(-memory // layout.nbytes))):
        parts = layout.views(torch.zeros(layout.nbytes, dtype=torch.uint8))
        numbers = torch.empty(tensor.shape, dtype=tensor.dtype)
        noise = torch.randn(outputs, inputs, generator=generator)
        matrix_format.lay_out_alone(stored_as(noise, codes.group, generator), parts)
        matrix_format.expand(layer, parts, (numbers,))
        stored.append((native.linear_weights(GroupedMatrix(codes, outputs, parts)), parts))
        expanded.append((native.linear_weights(numbers), numbers))

    def product(weights: list[Any], starts: object, rows: torch.Tensor, *_: object, add: bool) -> None:
        native.linear_layer(rows, weights[0][0])

    return {
        matrix_format.name: Arm(native, product, stored, layout.weight_bytes),
        PLAIN: Arm(native, product, expanded, 2 * outputs * inputs),
    }


def lossless_arms(
    native: NativeRows, expert_format: LosslessFormat, hidden: int, inner: int, memory: int
) -> dict[str, Arm]:
    """SwiGLU experts of normal noise: its exponents are about as many as a trained expert's, with as few rare ones."""
    layer = swiglu_layer(hidden, inner)
    layout = expert_format.record(layer)
    generator = torch.Generator().manual_seed(0)
    stored: list[ExpertWeights] = []
    numbers: list[ExpertWeights] = []
    for _ in range(max(2, -(-memory // layout.nbytes))):
        own = tuple(
            torch.empty(tensor.shape, dtype=tensor.dtype).normal_(0.0, 0.02, generator=generator)
            for tensor in layer.tensors
        )
        record = layout.views(torch.zeros(layout.nbytes, dtype=torch.uint8))
        parts = [
            part
            for tensor, one in zip(layer.tensors, own, strict=True)
            for part in expert_format.encode(tensor, one).values()
        ]
        for view, part in zip(record, parts, strict=True):
            view.copy_(part)
        stored.append(record)
        numbers.append(own)
    products = partial(native.lossless_experts, LosslessExpert(expert_format.planes, inner))
    return {
        expert_format.name: Arm(native, products, stored, layout.weight_bytes),
        PLAIN: Arm(native, native.experts, numbers, sum(tensor.nbytes for tensor in numbers[0])),
    }


@dataclass(frozen=True, slots=True)
class Kind:
    """``shape``: where none is asked for. Both widths are to be multiples of ``multiple``. ``linear``: of a linear
    layer; None: there is no product of such."""

    arms: Callable[..., dict[str, Arm]]
    shape: str
    multiple: int
    linear: Callable[..., dict[str, Arm]] | None = None


GPT_OSS, RANDOM = "2880x2880", "1024x3584"
"""Shapes of an expert: gpt-oss's, and that of the benchmarks' model `random`."""


def _grouped(of: MatrixFormat, stored_as: Stored, multiple: int = 32) -> Kind:
    return Kind(
        partial(grouped_arms, expert_format=of, stored_as=stored_as), RANDOM, multiple,
        partial(linear_arms, matrix_format=of, stored_as=stored_as),
    )  # fmt: skip


FORMATS: Final = {
    MXFP4.name: Kind(partial(clamped_arms, expert_format=MXFP4), GPT_OSS, 32),
    LOSSLESS.name: Kind(partial(lossless_arms, expert_format=LOSSLESS), RANDOM, 2),
    LOSSLESS_PLANES.name: Kind(partial(lossless_arms, expert_format=LOSSLESS_PLANES), RANDOM, 2),
    FP8_BLOCKS.name: _grouped(FP8_BLOCKS, _fp8),
    FP8_ROWS.name: _grouped(FP8_ROWS, _fp8),
    FP4.name: _grouped(FP4, _fp4),
    INT8.name: _grouped(INT8, _int8),
    Q4_K.name: _grouped(Q4_K, _q4_k, K_QUANT),
    Q6_K.name: _grouped(Q6_K, _q6_k, K_QUANT),
    Int4.name: _grouped(Int4(128, zeros=True), _int4, 128),
}


def measured(
    native: NativeRows,
    arms: dict[str, Arm],
    hidden: int,
    counts: tuple[int, ...],
    rounds: int,
    work: float = WORK,
    sets: tuple[str, ...] = (),
) -> list[dict[str, Any]]:
    """A row for each number of rows, instruction set (of ``sets``; none: all) and arm."""
    found: list[dict[str, Any]] = []
    taken = sets or native.instruction_sets
    turns = [(one, name) for one in taken for name, arm in arms.items() if one in arm.native.instruction_sets]
    largest = max(arm.nbytes for arm in arms.values())
    try:
        with progress((rounds + 1) * len(counts) * len(turns), "products", "turn") as bar:
            for count in counts:
                rows = torch.randn(count, hidden, generator=torch.Generator().manual_seed(1)).bfloat16()
                tokens, scales, out = np.arange(count), np.ones(count, dtype=np.float32), torch.empty_like(rows)
                seconds: dict[tuple[str, str], list[float]] = {turn: [] for turn in turns}
                experts = len(next(iter(arms.values())).weights)
                times = max(2, min(experts, round(work / (largest / 2 * count))))
                for round_, (instructions, name) in in_turns(turns, rounds, float("inf")):
                    arm = arms[name]
                    arm.native.use(instructions)
                    began = time.perf_counter()
                    for number in range(times):
                        arm.products([arm.weights[number]], [0, count], rows, tokens, scales, out, add=False)
                    if round_:
                        seconds[instructions, name].append((time.perf_counter() - began) / times)
                    bar.update()
                found += [
                    row_of(
                        instructions, name, count, own, seconds[instructions, PLAIN], arms[name].nbytes,
                        seconds.get((instructions, BESIDE)),
                    )
                    for (instructions, name), own in seconds.items()
                ]  # fmt: skip
    finally:
        for arm in arms.values():
            arm.native.use(arm.native.instruction_sets[0])
    return found


def same_bits(arm: Arm, other: Arm, hidden: int, rows: int) -> bool:
    """Whether the first expert's results are the same. Both have the same weights."""
    x = torch.randn(rows, hidden, generator=torch.Generator().manual_seed(1)).bfloat16()
    results = [torch.empty_like(x), torch.empty_like(x)]
    for one, out in zip((arm, other), results, strict=True):
        one.products([one.weights[0]], [0, rows], x, np.arange(rows), np.ones(rows, dtype=np.float32), out, add=False)
    return torch.equal(*results)


def row_of(
    instructions: str,
    name: str,
    count: int,
    seconds: list[float],
    plain: list[float],
    nbytes: int,
    beside: list[float] | None = None,
) -> dict[str, Any]:
    """``beside``: seconds of the same by another build's library."""

    def over(others: list[float]) -> dict[str, float] | None:
        return spread_json(Spread.of([other / own for own, other in zip(seconds, others, strict=True)]), 2)

    return {
        "instructions": instructions,
        "format": name,
        "rows": count,
        "microseconds": spread_json(Spread.of([1e6 * one for one in seconds]), 1),
        "gb_s": spread_json(Spread.of([nbytes / one / 1e9 for one in seconds]), 2),
        "over_bf16": over(plain),
        **({} if beside is None or name in (BESIDE, PLAIN) else {"over_beside": over(beside)}),
    }


def table(found: list[dict[str, Any]]) -> str:
    compared = any("over_beside" in row for row in found)
    head = f"{'rows':>5}  {'instructions':<13}{'format':<12}{'µs':>28}{'GB/s':>22}{'over bf16':>22}"
    lines = [head + (f"{'over beside':>22}" if compared else "")]
    for row in found:
        beside = f"{median_range(row['over_beside'], 2):>22}" if "over_beside" in row else ""
        lines.append(
            f"{row['rows']:>5}  {row['instructions']:<13}{row['format']:<12}{median_range(row['microseconds']):>28}"
            f"{median_range(row['gb_s'], 2):>22}{median_range(row['over_bf16'], 2):>22}{beside}"
        )
    return "\n".join(lines)


@click.command(help=__doc__)
@click.option("--shape", help="HIDDENxINNER of an expert.  [default: gpt-oss's, or that of the model `random`]")
@click.option("--linear", help="OUTPUTSxINPUTS of a linear layer, in the place of an expert.")
@click.option("--format", "name", type=click.Choice(list(FORMATS)), default=MXFP4.name, show_default=True)
@click.option("--instructions", "sets", multiple=True, help="An instruction set; may be given several times.  [all]")
@click.option("--threads", type=click.IntRange(min=1), default=1, show_default=True)
@click.option("--rows", "counts", type=click.IntRange(min=1), multiple=True, default=ROWS, show_default=True)
@click.option("--rounds", type=click.IntRange(min=1), default=5, show_default=True)
@click.option(
    "--beside",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    metavar="LIBRARY",
    help="The compiled library of another checkout, with the same layout of codes.",
)
def main(
    shape: str | None,
    linear: str | None,
    name: str,
    sets: tuple[str, ...],
    threads: int,
    counts: tuple[int, ...],
    rounds: int,
    beside: Path | None,
) -> None:
    kind = FORMATS[name]
    if linear is not None and (kind.linear is None or shape is not None):
        raise click.UsageError("--linear is for codes that share scales, and without --shape")
    shape = linear or shape or kind.shape
    try:
        first, second = shape_of(shape)
        if first % kind.multiple or second % kind.multiple:
            raise InvalidConfig("shape", shape, f"of multiples of {kind.multiple}")
        native = native_rows()
        if unknown := [one for one in sets if one not in native.instruction_sets]:
            raise InvalidConfig("instructions", unknown[0], f"here: {', '.join(native.instruction_sets)}")
    except InvalidConfig as error:
        raise click.UsageError(str(error)) from error
    try:
        other = None if beside is None else other_build(beside)
    except (OSError, AttributeError) as error:
        raise click.UsageError(f"--beside: {error}") from error
    torch.set_num_threads(threads)

    def arms_of(native: NativeRows) -> dict[str, Arm]:
        if linear is None:
            return kind.arms(native, hidden=first, inner=second, memory=MEMORY)
        assert kind.linear is not None
        return kind.linear(native, outputs=first, inputs=second, memory=MEMORY)

    arms, inputs = arms_of(native), first if linear is None else second
    if other is not None:
        arms[BESIDE] = arms_of(other)[name]
        if linear is None:
            same = all(same_bits(arms[name], arms[BESIDE], inputs, count) for count in counts)
            click.echo(f"{beside} gives {'the same bits' if same else 'OTHER BITS'}")
    found = measured(native, arms, inputs, counts, rounds, sets=sets)
    click.echo(table(found))
    described = {"shape": shape, "linear": linear is not None, "format": name, "threads": threads, "rows": found}
    click.echo(json.dumps(described | {"machine": describe_machine(cache_folder())}))


if __name__ == "__main__":
    main()
