"""The models and machines that prefetching is simulated on: the size of an expert, the time of a layer."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import numpy as np

from benchmarks.moe_infinity.synthetic_routing import MIXES, NLLB, SWITCH, Mix, Shape
from greenroom.core.units import MIB
from greenroom.replay import RoutingTrace

FLOAT32_BYTES: Final = 4
PCIE4_BYTES_PER_S: Final = 32e9
"""Of the paper's server (§8.3)."""


@dataclass(frozen=True, slots=True)
class Model:
    """``expert_bytes``: of one in float32, as the checkpoints have it. ``slots``: experts that the device holds.

    ``layer_s``: from one MoE layer's router to the next one's if nothing is waited for, dense layers included;
    independent of the link, as with the paper's simulated bandwidths (§8.3). Routing is drawn by ``mix``, or was
    recorded as ``trace``.
    """

    shape: Shape
    mix: Mix
    expert_bytes: int
    slots: int
    layer_s: float
    trace: Path | None = None

    @property
    def name(self) -> str:
        return self.shape.name

    @property
    def experts(self) -> int:
        return self.shape.layers * self.shape.experts

    def a_layer(self, link: float) -> float:
        """Experts that a link of so many bytes a second brings while a layer runs."""
        return self.layer_s * link / self.expert_bytes


def _ffn_bytes(width: int, inner: int) -> int:
    """Two matrices; biases are lost beside them."""
    return 2 * width * inner * FLOAT32_BYTES


# 97 ms a token over the decoder's 12 MoE layers, where six nodes hold everything (Fig. 13); 535 of 3,072 (§8.4).
SWITCH_LARGE: Final = Model(SWITCH, MIXES[SWITCH.name], _ffn_bytes(1024, 4096), slots=535, layer_s=97e-3 / 12)

# 122 ms a token over the decoder's 6, "as if all parameters needed are in GPU" (§8.2); 60 of 1,536 (§8.4).
NLLB_MOE: Final = Model(NLLB, MIXES[NLLB.name], _ffn_bytes(2048, 8192), slots=60, layer_s=122e-3 / 6)


def switch_base(experts: int) -> Model:
    """Switch-base with so many experts a layer: half as many layers, each as long; the same share of experts held."""
    shape = replace(SWITCH, name=f"switch-base-{experts}", layers=12, decoder_start=6, experts=experts)
    slots = round(shape.layers * experts * SWITCH_LARGE.slots / SWITCH_LARGE.experts)
    return replace(SWITCH_LARGE, shape=shape, expert_bytes=_ffn_bytes(768, 3072), slots=max(slots, experts))


def recorded(path: Path) -> Model:
    """Of a recorded trace: experts of its size, else 12 MiB (gpt-oss-20b's), and a third of them held.

    A layer takes as long as `docs/architecture/policies.md` has it.
    """
    trace = RoutingTrace.load(path)
    experts = int(trace.experts_per_layer.max())
    shape = Shape(path.stem, trace.layers, experts, int(trace.experts.shape[2]), trace.decoder_start)
    size = 12 * MIB if trace.expert_bytes is None else int(np.max(trace.expert_bytes))
    return Model(shape, MIXES[SWITCH.name], size, trace.layers * experts // 3, layer_s=3e-3, trace=path)


MODELS: Final = {model.name: model for model in (SWITCH_LARGE, NLLB_MOE)}
