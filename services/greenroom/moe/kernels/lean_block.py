"""A layer's router and experts without the Python overhead of their modules.

For blocks that consist of a router and experts alone, as in Mixtral, Qwen3-MoE and OLMoE. The router must be one linear
map, its softmax, and the top-k of it. The picks equal the router's up to rounding of its logits. They are the same with
any budget, because all steps come through here. If all picked experts are resident, the layer is two compiled calls.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeGuard

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from greenroom.experts.source import ResidentInRam
from greenroom.moe.kernels.expert_hooks import LayerHook, hook_of
from greenroom.moe.kernels.expert_products import all_products_of
from greenroom.moe.native.rows import Lasting, NativeRows

_PROBES = 64
_SAME_ROWS = 0.75
"""Share of random rows that must be routed as by the router. In the others two logits may differ by rounding."""


class LeanBlock:
    """Computes the block's own forward, and adds it to the residual stream."""

    def __init__(self, block: Any, native: NativeRows, *, normalise: bool, rounded: bool) -> None:
        self._block = block
        self._native = native
        self._hook: LayerHook = hook_of(block.experts)
        self._weight: torch.Tensor = block.gate.weight
        self._experts = len(self._weight)
        self._top_k = int(block.gate.top_k)
        self._normalise = normalise
        self._rounded = rounded
        self._inner = int(block.experts.intermediate_dim)
        products = all_products_of(native, self._hook.products)
        assert products is not None, "``lean_block`` asks for it"
        self._all_experts = products
        self._allowed = self._addresses = Lasting(np.empty(0))  # the last ones that the source gave
        self._rerouted = Lasting(np.empty(1, dtype=np.bool_))

    def add(self, rows: torch.Tensor, stream: torch.Tensor) -> None:
        """Adds the block's output for the normalised ``rows[T, H]`` to ``stream[T, H]``."""
        hooks = self._hook.model_hooks
        routed = None if hooks.on_router_logits is not None else self.route(rows)
        if routed is None:
            stream += self._block(rows[None])[0]
        else:
            self.experts(rows, *routed, stream)

    def route(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Picks and scales ``[T, k]`` under the source's mask. None: it can not be applied, and the module says why."""
        source, layer = self._hook.model_hooks.source, self._hook.layer
        allowed = None if source is None else source.allowed_experts(layer)
        if allowed is None:
            return self._native.route(self._weight, rows, self._top_k, normalise=self._normalise, rounded=self._rounded)
        count = rows.shape[0]  # torch's own len() is slow
        if self._hook.masking is not None or not _fits(allowed, count, self._experts):
            return None
        if allowed is not self._allowed.array:
            self._allowed = Lasting(allowed)
        if count > len(self._rerouted.array):
            self._rerouted = Lasting(np.empty(count, dtype=np.bool_))
        picks, scales, rerouted = self._native.route_confined(
            *(self._weight, rows, self._top_k, self._allowed, self._rerouted),
            normalise=self._normalise, rounded=self._rounded,
        )  # fmt: skip
        if rerouted < 0:
            return None
        if rerouted:
            assert source is not None
            source.rerouted(layer, self._rerouted.array[:count])
        return picks, scales

    def experts(self, rows: torch.Tensor, picks: torch.Tensor, scales: torch.Tensor, stream: torch.Tensor) -> None:
        """Adds the picked experts' sum to ``stream[T, H]``."""
        source, layer = self._hook.model_hooks.source, self._hook.layer
        if _may_be_resident(source) and (addresses := source.resident_addresses(layer, picks.numpy())) is not None:
            if addresses is not self._addresses.array:
                self._addresses = Lasting(addresses)
            busy = self._all_experts(self._addresses, self._inner, picks, scales, rows, stream)
            source.layer_ran(layer, busy)
        else:
            stream += self._block.experts.forward(rows, picks, scales)


def _fits(allowed: NDArray[np.bool_], rows: int, experts: int) -> bool:
    return allowed.ndim == 2 and allowed.shape[1] == experts and len(allowed) in (1, rows)


def _may_be_resident(source: object) -> TypeGuard[ResidentInRam]:
    return _has_methods(type(source))  # type: ignore[arg-type]  # mypy takes classes for unhashable


@functools.cache
def _has_methods(kind: type[Any]) -> bool:  # checking a protocol in every layer would take longer than the rest
    return issubclass(kind, ResidentInRam)


def lean_block(block: Any, native: NativeRows) -> LeanBlock | None:
    """For a block of the usual build whose router gives the same picks in a trial. None: its modules run."""
    if {name for name, _ in block.named_children()} != {"gate", "experts"} or not _is_plain(block, native):
        return None
    gate: Any = block.gate
    rows = torch.randn(_PROBES, gate.weight.shape[1], generator=torch.Generator().manual_seed(0)).bfloat16()
    with torch.inference_mode():
        _, scales, picks = type(gate).forward(gate, rows)
        rounded = scales.dtype is torch.bfloat16
        for normalise in (False, True):
            own = native.route(gate.weight, rows, gate.top_k, normalise=normalise, rounded=rounded)
            if _agree(own, (picks, scales), len(gate.weight)) and _adds_nothing(block, rows, picks, scales):
                return LeanBlock(block, native, normalise=normalise, rounded=rounded)
    return None


def _is_plain(block: Any, native: NativeRows) -> bool:
    gate = block.gate
    weight = getattr(gate, "weight", None)
    return (
        [name for name, _ in gate.named_parameters()] == ["weight"]
        and not [*block.parameters(recurse=False), *block.buffers(recurse=False), *gate.buffers()]
        and weight is not None
        and weight.dtype is torch.bfloat16
        and weight.device.type == "cpu"
        and weight.ndim == 2
        and weight.shape[1] % 2 == 0
        and isinstance(getattr(gate, "top_k", None), int)
        and hook_of(block.experts).native is native
        and hook_of(block.experts).gate is None
        and all_products_of(native, hook_of(block.experts).products) is not None
    )


def _agree(own: tuple[torch.Tensor, torch.Tensor], theirs: tuple[torch.Tensor, torch.Tensor], experts: int) -> bool:
    """Whether both give the same experts the same scales, in any order."""
    if own[0].shape != theirs[0].shape or own[1].shape != theirs[1].shape:
        return False
    ours, expected = (
        torch.zeros(len(picks), experts).scatter_(1, picks, scales.float()) for picks, scales in (own, theirs)
    )
    same = torch.isclose(ours, expected, rtol=3e-2, atol=1e-6).all(dim=1)
    return bool(same.float().mean() >= _SAME_ROWS)


def _adds_nothing(block: Any, rows: torch.Tensor, picks: torch.Tensor, scales: torch.Tensor) -> bool:
    """Whether the block's output is exactly its experts' output for the router's picks."""

    def stand_in(rows: torch.Tensor, picks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        return rows * scales.sum(dim=-1, keepdim=True).to(rows.dtype) + picks[:, :1].to(rows.dtype)

    with _replaced(block.experts, "forward", stand_in):
        out = block(rows[None])
    return isinstance(out, torch.Tensor) and torch.equal(out[0], stand_in(rows, picks, scales))


@contextmanager
def _replaced(module: nn.Module, name: str, value: Any) -> Iterator[None]:
    own = vars(module).get(name)
    setattr(module, name, value)
    try:
        yield
    finally:
        if own is None:
            delattr(module, name)
        else:
            setattr(module, name, own)
