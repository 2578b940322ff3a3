"""Connects the modules of a loaded model with the source of its experts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch

from greenroom.experts.source import ExpertSource
from greenroom.moe.architecture.moe_layers import ExpertTensor, MoeLayer
from greenroom.moe.formats.expert_format import Expands, ExpertFormat
from greenroom.moe.kernels.expert_products import Products
from greenroom.moe.kernels.expert_ring import expander_for
from greenroom.moe.native.rows import ClampedGate, NativeRows

RouterObserver = Callable[[int, torch.Tensor], None]
"""Gets ``(layer, logits[T, experts])`` from every router, before any mask. The tensor belongs to the router."""

_ATTRIBUTE = "_greenroom_hook"


class LookAheadHook(Protocol):
    """Hears of each layer's rows; may answer the source of experts, then or later."""

    def __call__(self, layer: int, rows: torch.Tensor) -> None:
        """The experts of ``layer`` have been asked for and will get these ``rows[T, H]``; none runs yet."""
        ...

    def answer(self) -> None:
        """Give the pending answer, if there is one and it has come. Does not wait for the device."""
        ...


class ModelHooks:
    """What one loaded model's layers share: the source of its experts and its observers, all None until attached, and
    what expands records (``expanders``, by its format and the tensors of an expert).
    """

    def __init__(self) -> None:
        self.source: ExpertSource | None = None
        self.on_router_logits: RouterObserver | None = None
        self.look_ahead: LookAheadHook | None = None
        self.expanders: dict[tuple[str, tuple[ExpertTensor, ...]], Expands] = {}

    def expander(self, expert_format: ExpertFormat, layer: MoeLayer, device: torch.device | None = None) -> Expands:
        """One for all layers that are built like this one. ``device``: where they compute; None: on the CPU."""
        key = expert_format.name, layer.tensors
        if key not in self.expanders:
            self.expanders[key] = expander_for(expert_format, layer, device)
        return self.expanders[key]


class LayerHook:
    """What an experts module knows of its MoE layer.

    ``layer``: its number, from 0. ``native``: the compiled products that compute it (None: torch does), and ``gate``:
    of experts that are not SwiGLU. ``products``: those of ``native`` for its records (None: ``NativeRows.experts``).
    ``expand``: makes numbers of its records for torch's products (None: they hold numbers). ``masking``: why its router
    can not be masked (None: it can). ``rerouted[T]``: which rows the router's mask has changed, still on the device; it
    is copied to RAM together with the picks.
    """

    __slots__ = ("expand", "gate", "layer", "masking", "model_hooks", "native", "products", "rerouted")

    def __init__(
        self,
        layer: int,
        model_hooks: ModelHooks,
        native: NativeRows | None = None,
        masking: str | None = None,
        gate: ClampedGate | None = None,
        products: Products | None = None,
        expand: Expands | None = None,
    ) -> None:
        self.expand = expand
        self.gate = gate
        self.layer = layer
        self.masking = masking
        self.model_hooks = model_hooks
        self.native = native
        self.products = products
        self.rerouted: torch.Tensor | None = None

    @property
    def source(self) -> ExpertSource:
        """Raises RuntimeError before one was attached."""
        if self.model_hooks.source is None:
            raise RuntimeError("this model's experts are elsewhere: attach a source of experts before running it")
        return self.model_hooks.source


def set_hook(module: torch.nn.Module, hook: LayerHook) -> None:
    object.__setattr__(module, _ATTRIBUTE, hook)


def hook_of(module: torch.nn.Module) -> LayerHook:
    hook: Any = getattr(module, _ATTRIBUTE, None)
    if not isinstance(hook, LayerHook):
        raise RuntimeError(f"{type(module).__name__} was not loaded by greenroom: it has no hook")
    return hook
