"""Routers whose logits can be observed, and whose picks can be confined to allowed experts.

A router computes logits by one linear map, followed by its family's own softmax, top-k and normalisation. A mask is
applied to the result of that map while the family's own code runs. Without a mask the router runs unchanged.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.overrides import TorchFunctionMode

from greenroom.core.errors import GreenroomError, UnsupportedModel
from greenroom.moe.architecture.moe_layers import MoeLayer
from greenroom.moe.kernels.device_copies import to_device
from greenroom.moe.kernels.expert_hooks import LayerHook


class MaskRefused(GreenroomError):
    """A mask of allowed experts has the wrong shape, or too few experts in a row."""


class Router(NamedTuple):
    """A router module, and which of its outputs are the logits."""

    module: nn.Module
    logits_index: int


def find_router(model: Any, layer: MoeLayer) -> Router | None:
    """The router of a layer. None: it was not found.

    transformers declares the class and the index, for its ``output_router_logits``.
    """
    block = model.get_submodule(layer.name.rpartition(".")[0])
    recorders = [
        (module._can_record_outputs or {}).get("router_logits")
        for module in model.modules()
        if getattr(module, "_can_record_outputs", None)
    ]
    for recorder in recorders:
        target: Any = getattr(recorder, "target_class", recorder)
        for child in block.modules() if isinstance(target, type) else ():
            if isinstance(child, target):
                return Router(child, int(getattr(recorder, "index", 0)))
    return None


def wrap_router(router: Router, layer: MoeLayer, hook: LayerHook, refusal: str | None) -> None:
    """From now on this router shows its logits and obeys masks. ``refusal``: why it can obey none."""
    inner = router.module.forward
    one_hot = not layer.stacked

    def forward(_: nn.Module, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        hooks = hook.model_hooks
        source = hooks.source
        allowed = None if source is None else source.allowed_experts(hook.layer)
        hook.rerouted = None
        if source is None or allowed is None:
            outputs = inner(hidden_states, *args, **kwargs)
            logits = outputs[router.logits_index]
        else:
            if refusal is not None:
                raise UnsupportedModel(f"the routers of this model can not be confined to some experts: {refusal}")
            forbidden = _forbidden(allowed, layer, hidden_states.device)
            outputs, logits = _masked(inner, (hidden_states, *args), kwargs, forbidden, layer, one_hot)
            rerouted = _rerouted(logits.reshape(-1, layer.experts), forbidden, layer.top_k)
            if rerouted.device.type == "cpu":
                source.rerouted(hook.layer, rerouted.numpy())
            else:
                hook.rerouted = rerouted
            logits = logits.to(outputs[router.logits_index].dtype)
        if hooks.on_router_logits is not None:
            hooks.on_router_logits(hook.layer, logits.reshape(-1, layer.experts))
        return outputs

    router.module.forward = types.MethodType(forward, router.module)


def _forbidden(allowed: NDArray[np.bool_], layer: MoeLayer, device: torch.device) -> torch.Tensor:
    """``[T, E]`` or ``[1, E]``, on the device. Raises MaskRefused."""
    if allowed.ndim != 2 or allowed.shape[1] != layer.experts:
        raise MaskRefused(f"the mask for {layer.name} has the shape {allowed.shape}, not (rows or 1, {layer.experts})")
    if len(allowed) and (fewest := int(allowed.sum(axis=1).min())) < layer.top_k:
        raise MaskRefused(f"a row may pick from {fewest} experts of {layer.name}, fewer than its top-{layer.top_k}")
    return to_device(torch.from_numpy(~allowed), device)


def _masked(
    inner: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    forbidden: torch.Tensor,
    layer: MoeLayer,
    one_hot: bool,
) -> tuple[Any, torch.Tensor]:
    """The router's outputs under the mask, and its logits before it."""
    mode = _MaskedLogits(forbidden, layer)
    with mode:
        outputs = inner(*args, **kwargs)
    if mode.logits is None:
        raise UnsupportedModel(f"the router of {layer.name} does not compute its logits by a linear map")
    if one_hot:
        return outputs, mode.logits
    logits, weights, picks = outputs
    return (logits, weights, picks.masked_fill(weights == 0, layer.experts)), mode.logits


def _rerouted(logits: torch.Tensor, forbidden: torch.Tensor, top_k: int) -> torch.Tensor:
    """``[T]``: rows for which a forbidden expert has a larger logit (``[T, E]``) than the last picked one."""
    last = logits.masked_fill(forbidden, -torch.inf).topk(top_k, dim=1).values[:, -1]
    best = logits.masked_fill(~forbidden, -torch.inf).amax(dim=1)
    return best > last


class _MaskedLogits(TorchFunctionMode):
    """Sets forbidden logits to minus infinity, in the one linear map whose outputs are as many as the experts.

    Affects only the thread that enters it.
    """

    def __init__(self, forbidden: torch.Tensor, layer: MoeLayer) -> None:
        super().__init__()
        self._forbidden = forbidden
        self._layer = layer
        self.logits: torch.Tensor | None = None

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is not nn.functional.linear or result.shape[-1] != self._layer.experts:
            return result
        if self.logits is not None:
            raise UnsupportedModel(f"the router of {self._layer.name} has more than one linear map: which to mask?")
        rows = result.numel() // self._layer.experts
        if len(self._forbidden) not in (1, rows):
            raise MaskRefused(f"the mask for {self._layer.name} has {len(self._forbidden)} rows, not {rows}")
        self.logits = result
        return result.masked_fill(self._forbidden.expand(rows, -1).view(result.shape), -torch.inf)
