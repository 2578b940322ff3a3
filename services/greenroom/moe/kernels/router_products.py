"""A router's linear map by the compiled products, while the family's own code runs around it.

torch sums a row's products in another order when other rows are beside it, so that a pick between two experts that are
nearly as good would depend on them. Its sigmoid of floats depends on the place of a number among all of them.
"""

from __future__ import annotations

import types
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from greenroom.moe.native.rows import NativeRows


def use_native_linear(router: nn.Module, native: NativeRows) -> None:
    """From now on the compiled products compute the linear maps of this ``router``, whose weights are on the CPU, and
    its sigmoids do not depend on the rows beside them.
    """
    inner = router.forward

    def forward(_: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with _SameInCompany(native):
            return inner(*args, **kwargs)

    router.forward = types.MethodType(forward, router)


class _SameInCompany(TorchFunctionMode):
    """Affects only the thread that enters it."""

    def __init__(self, native: NativeRows) -> None:
        super().__init__()
        self._native = native

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is nn.functional.linear:
            found = self._linear(*args, **(kwargs or {}))
            if found is not None:
                return found
        elif func in _SIGMOIDS and not kwargs:
            return _sigmoid(*args)
        return func(*args, **(kwargs or {}))

    def _linear(
        self, input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor | None:
        """None: not by the compiled products."""
        inputs = weight.shape[-1]
        rows = input.reshape(-1, inputs).contiguous()
        if input.dtype is not weight.dtype or not weight.is_contiguous() or len(rows) > self._native.most_rows:
            return None
        if weight.dtype is torch.float32:
            out = self._native.linear_floats(rows, weight)
            if bias is not None:
                out += bias
        elif weight.dtype is torch.bfloat16 and inputs % 2 == 0:
            out = self._native.linear(rows, weight, bias)
        else:
            return None
        return out.view(*input.shape[:-1], len(weight))


def _sigmoid(numbers: torch.Tensor) -> torch.Tensor:
    """torch computes whole vectors of floats in one way, and what is left of a thread's share in another, which differs
    by an ulp. Here no share has a rest.
    """
    count = numbers.numel()
    if numbers.dtype is not torch.float32:  # of bf16 all numbers come out alike, since both are rounded
        return torch.sigmoid(numbers)
    flat = nn.functional.pad(numbers.reshape(-1), (0, -count % _WHOLE_VECTORS))
    return torch.cat([torch.sigmoid(share) for share in torch.split(flat, _ONE_SHARE)])[:count].view(numbers.shape)


_SIGMOIDS = {torch.sigmoid, torch.Tensor.sigmoid}

_WHOLE_VECTORS = 64
"""A multiple of what torch takes at once: two vectors of sixteen floats at most."""

_ONE_SHARE = 1 << 14
"""Numbers that torch does not share among its threads: fewer than 32,768."""
