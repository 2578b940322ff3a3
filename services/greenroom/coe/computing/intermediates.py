"""How much memory a batch takes while it is computed, beside the expert's weights."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Final

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from greenroom.coe.computing.expert_computer import ExpertComputer
from greenroom.coe.computing.inputs import Input, Prepared
from greenroom.experts.pack.layout import ExpertWeights

_aten = torch.ops.aten
_REORDERING: Final = frozenset(
    {
        _aten.convolution,
        _aten.addmm,
        _aten.mm,
        _aten.bmm,
        _aten.baddbmm,
        _aten._scaled_dot_product_flash_attention_for_cpu,
    }
)
"""Kernels that may copy what they are given into orders of their own, where torch does not see it."""
_COPIES: Final = 2


def intermediate_bytes(computer: ExpertComputer, expert: int, inputs: list[Input], weights: ExpertWeights) -> int:
    """The most bytes that computing this batch holds at once: its prepared inputs and all that is computed of them.

    Its parts are there together, and are computed one after the other. See ``bytes_of_prepared``.
    """
    parts = computer.prepare(expert, inputs)
    given = sum(_given(part) for part in parts)
    return max(given - _given(part) + bytes_of_prepared(computer, expert, part, weights) for part in parts)


def bytes_of_prepared(computer: ExpertComputer, expert: int, prepared: Prepared, weights: ExpertWeights) -> int:
    """Bytes of a prepared batch, which is of one part, and of all that is computed of it.

    It computes the batch once. On an accelerator it is what its allocator counts. On the CPU it is an estimate: every
    tensor that lives, and two copies of all that a product or convolution is given (docs/decisions/0031).
    """
    given = _given(prepared)

    def forward() -> Any:
        return computer.forward(expert, prepared, weights)

    if computer.device.type == "cuda":
        return given + _counted_by_cuda(forward, computer.device)
    return given + _estimated(forward, [*weights, *prepared.tensors.values()])


def _given(prepared: Prepared) -> int:
    return sum(tensor.nbytes for tensor in prepared.tensors.values())


def _counted_by_cuda(forward: Callable[[], Any], device: torch.device) -> int:
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    forward()  # the allocator counts when work is queued, so nothing has to be waited for
    return int(torch.cuda.max_memory_allocated(device) - before)


def _estimated(forward: Callable[[], Any], there: Iterable[torch.Tensor]) -> int:
    with _LiveBytes(there) as counted:
        forward()
    return int(counted.most)


class _LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Follows the memory of every tensor that an operation makes until it is freed. ``there``: what does not count."""

    def __init__(self, there: Iterable[torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.most = 0
        self._there = {tensor.untyped_storage().data_ptr() for tensor in there}
        self._live = WeakIdKeyDictionary()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        with self:  # inference mode hands on operations that are made of others, whose own tensors count as well
            parts = func.decompose(*args, **(kwargs or {}))
        if parts is not NotImplemented:
            return parts
        made = func(*args, **(kwargs or {}))
        for tensor in _tensors(made):
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in self._there:
                self._live[storage] = storage.nbytes()
        copied = _COPIES * sum(tensor.nbytes for tensor in _tensors(args)) if func.overloadpacket in _REORDERING else 0
        live: int = sum(self._live.values())  # type: ignore[no-untyped-call]
        self.most = max(self.most, live + copied)
        return made


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]
