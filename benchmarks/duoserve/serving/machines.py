"""What is served on: a GPU behind PCIe by published figures, and this disk and processor as measured now.

Sizes are those of gpt-oss-20b: hidden and inner width 2,880, 64 heads of 64 numbers, 8 of keys and values.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final

import torch

from greenroom.core.units import MIB
from greenroom.experts.copying.disk_calibration import measure
from greenroom.experts.pack.pack_file import PackFile
from greenroom.replay.simulation.simulated_hardware import LinkProfile
from greenroom.replay.simulation.timed_replay import ComputeProfile

HIDDEN: Final = 2880
HEADS, KV_HEADS, HEAD = 64, 8, 64
VOCABULARY: Final = 201_088
EXPERT_BYTES: Final = 12 * MIB
"""In MXFP4, 4.25 bits a number."""

EXPERT_FLOPS: Final = 2 * 3 * HIDDEN * HIDDEN
"""Of a row."""
ATTENTION_NUMBERS: Final = HIDDEN * HEAD * (2 * HEADS + 2 * KV_HEADS)
"""Of the projections of a layer. What grows with the context is not counted."""

GPU_FLOPS: Final = 0.5 * 154.8e12
"""Half of what NVIDIA gives for an RTX A6000's bfloat16 without sparsity. Products of some hundred rows reach about
that."""
GPU_BYTES_PER_S: Final = 768e9
LAUNCHES_S: Final = 15e-6
"""Of the kernels of an expert; a layer's own have twice that."""

ROWS: Final = (1, 64)
"""Between them a row's time is a line."""
_TURNS = 9


@dataclass(frozen=True, slots=True)
class Machine:
    """``link``: to the lowest tier, which holds all experts. ``share``: how many are resident with 512 rows a step."""

    name: str
    link: LinkProfile
    compute: ComputeProfile
    share: float = 1 / 3

    def with_all(self) -> Machine:
        """The same where all experts fit."""
        return replace(self, name=f"{self.name}, all resident", share=1.0)


GPU: Final = Machine(
    "GPU behind PCIe",
    LinkProfile(25e9, 20e-6),
    ComputeProfile(
        layer_s=2 * ATTENTION_NUMBERS / GPU_BYTES_PER_S + 2 * LAUNCHES_S,
        expert_s=EXPERT_BYTES / GPU_BYTES_PER_S + LAUNCHES_S,
        row_s=EXPERT_FLOPS / GPU_FLOPS,
        layer_row_s=2 * ATTENTION_NUMBERS / GPU_FLOPS,
        step_s=2 * HIDDEN * VOCABULARY / GPU_BYTES_PER_S,
    ),
)
"""At 25 GB/s, what PCIe 4 × 16 gives in practice. One row reads all weights once, and more rows multiply."""


def this_machine(pack: PackFile) -> Machine:
    """Its disk as ``pack`` is read now, and bfloat16 products of these sizes by torch on all of its threads. Products
    of weights that fit no cache; the vocabulary's counts as of one row."""
    link = measure(pack)
    gate_up, down = _weights(HIDDEN, 2 * HIDDEN), _weights(HIDDEN, HIDDEN)
    inward, outward = _weights(HIDDEN, HEAD * (HEADS + 2 * KV_HEADS)), _weights(HEAD * HEADS, HIDDEN)
    one, many = ROWS
    expert = {rows: _seconds(gate_up, down, rows) for rows in ROWS}
    layer = {rows: _seconds(inward, outward, rows) for rows in ROWS}
    row_s = max(0.0, (expert[many] - expert[one]) / (many - one))
    layer_row_s = max(0.0, (layer[many] - layer[one]) / (many - one))
    return Machine(
        "this disk and processor",
        LinkProfile(link.bytes_per_s, link.latency_s),
        ComputeProfile(
            layer_s=max(0.0, layer[one] - layer_row_s),
            expert_s=max(0.0, expert[one] - row_s),
            row_s=row_s,
            layer_row_s=layer_row_s,
            step_s=layer[one] * HIDDEN * VOCABULARY / ATTENTION_NUMBERS,
        ),
    )


def _weights(inward: int, outward: int) -> list[torch.Tensor]:
    """Several, in turn, so that none is in a cache when its turn comes."""
    return [torch.full((outward, inward), 0.01, dtype=torch.bfloat16) for _ in range(4)]


def _seconds(first: list[torch.Tensor], second: list[torch.Tensor], rows: int) -> float:
    """Of both products, one after the other: the median."""
    into = torch.randn(rows, first[0].shape[1]).bfloat16()
    between = torch.randn(rows, second[0].shape[1]).bfloat16()

    def run(turn: int) -> None:
        torch.nn.functional.linear(into, first[turn % len(first)])
        torch.nn.functional.linear(between, second[turn % len(second)])

    return statistics.median(_timed(run, turn) for turn in range(-len(first), _TURNS))


def _timed(run: Callable[[int], None], turn: int) -> float:
    began = time.perf_counter()
    run(turn)
    return time.perf_counter() - began
