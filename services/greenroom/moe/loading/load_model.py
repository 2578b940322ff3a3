"""A checkpoint as a model whose experts come from an ExpertSource.

::

    checkpoint = resolve("mistralai/Mixtral-8x7B-v0.1")
    pack = ensure_pack(checkpoint)               # once; cached by content
    loaded = load(checkpoint)                    # dense weights only
    attach(loaded, source)                       # any ExpertSource over that pack
    loaded.model.generate(...)
"""

from __future__ import annotations

import logging
import types
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers.activations import ACT2FN

from greenroom.core.artifacts.residual_file import ResidualFile
from greenroom.experts.source import ExpertSource
from greenroom.moe.architecture.families import Family, family_of
from greenroom.moe.architecture.moe_layers import MoeLayer
from greenroom.moe.formats.expert_format import PLAIN_FORMAT, ExpertFormat
from greenroom.moe.kernels.expert_hooks import LayerHook, ModelHooks, RouterObserver, set_hook
from greenroom.moe.kernels.expert_products import clamped_gate_of, native_for, products_of, use_native
from greenroom.moe.kernels.experts_forward import switch_expert, switch_experts_forward
from greenroom.moe.loading.checkpoint import Checkpoint
from greenroom.moe.loading.conversion import ExpertPlan
from greenroom.moe.loading.kept_format import keeps_dense
from greenroom.moe.loading.packing import resolve_dtype
from greenroom.moe.loading.skeleton import load_skeleton
from greenroom.moe.native.onednn import bound_primitives
from greenroom.moe.native.rows import ANY_ROWS, NativeRows
from greenroom.moe.native.tiles import avoid_tiles_without_shape
from greenroom.moe.routing.residual_maps import ResidualMaps, check_fits
from greenroom.moe.routing.router_look_ahead import LookAhead, look_ahead_of
from greenroom.moe.routing.routers import find_router, wrap_router

_DEFAULT_MODEL_LEN = 2048

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LoadedMoE:
    """A model without its experts. ``layers``: its MoE layers in the order in which they run.

    ``formats``: of their records. ``masking``: why its routers can not be confined to allowed experts (None: they can).
    Routers that were not found can not; they do not show their logits either. ``native``: the compiled products that
    compute its experts (None: torch does). ``routers_found``: whether all routers were, which those products compute
    too. ``dense_formats``: of linear layers that stay as they are stored; empty: none does.
    """

    model: Any
    checkpoint: Checkpoint
    family: Family
    layers: tuple[MoeLayer, ...]
    dtype: torch.dtype
    masking: str | None
    hooks: ModelHooks = field(repr=False)
    native: NativeRows | None = field(default=None, repr=False)
    routers_found: bool = False
    formats: tuple[ExpertFormat, ...] = ()
    dense_formats: tuple[str, ...] = ()

    @property
    def expanding_bytes(self) -> int:
        """What making numbers of a record takes, under the present limits of the compiled products. 0: nobody does."""
        if self.native is not None and self.native.limits.product >= ANY_ROWS:
            return 0
        return sum(expander.nbytes for expander in self.hooks.expanders.values())

    @property
    def decoder_only(self) -> bool:
        """Whether it can join the batch loop. ``families.ENCODER_DECODER_REASON`` says why others can not."""
        return self.family.decoder_only

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """From the checkpoint's generation settings, or else from its configuration. May be empty."""
        for holder in (self.model.generation_config, self.model.config.get_text_config()):
            value = getattr(holder, "eos_token_id", None)
            if value is not None:
                return tuple(value) if isinstance(value, list | tuple) else (int(value),)
        return ()

    @property
    def max_model_len(self) -> int:
        """The model's limit of prompt and output together, in tokens."""
        limit = getattr(self.model.config.get_text_config(), "max_position_embeddings", None)
        return int(limit or _DEFAULT_MODEL_LEN)

    @property
    def vocab_size(self) -> int:
        return int(self.model.get_output_embeddings().out_features)


def load(
    checkpoint: Checkpoint,
    dtype: str = "auto",
    attn_implementation: str | None = None,
    products: str = "auto",
    device: torch.device | None = None,
    expert_format: ExpertFormat | Sequence[ExpertFormat] = PLAIN_FORMAT,
    dense_as: str = "auto",
) -> LoadedMoE:
    """Load the dense weights and install the hooks. The model can run once a source is attached.

    ``products``: one of ``expert_products.PRODUCTS``; on another ``device`` than the CPU always torch's.
    ``expert_format``: that of the pack whose experts it will be given, or of each of its layers. ``dense_as``: whether
    other linear layers stay as they are stored (``keeps_dense``).

    Raises UnsupportedModel for a model that is not served, CorruptCheckpoint if tensors are missing, InvalidConfig for
    an unknown dtype.
    """
    avoid_tiles_without_shape()
    bound_primitives()
    family = family_of(checkpoint.config)
    kept = resolve_dtype(checkpoint, dtype)
    stays = keeps_dense(kept, dense_as, products=products, device="cpu" if device is None else device.type)
    plan = ExpertPlan(
        checkpoint, kept, expert_format, dense_as_stored=stays, dense_required=stays and dense_as == "stored"
    )
    model = load_skeleton(plan, attn_implementation)
    if device is not None and device.type != "cpu":
        model.to(device)
        products = "torch"
    routers = [find_router(model, layer) for layer in plan.layers]
    masking = family.masking(checkpoint.config)
    if None in routers:
        masking = "its routers are not where transformers' own declarations say"
    hooks = ModelHooks()
    native = None
    own: NativeRows | None = None  # this model's own, because its limits are
    for number, (layer, stored, router) in enumerate(zip(plan.layers, plan.formats, routers, strict=True)):
        experts = model.get_submodule(layer.name)
        native = native_for(experts, kept, products, stored) if layer.stacked else None
        compiled = None
        if native is not None:
            native = own = own or native.for_a_model()
            compiled = products_of(native, experts, stored)
        expand = None if stored is PLAIN_FORMAT else hooks.expander(stored, layer, device)
        hook = LayerHook(number, hooks, native, masking, clamped_gate_of(experts), compiled, expand)
        _install(hook, model, layer)
        if router is not None:
            wrap_router(router, layer, hook, masking)
    if native is not None:
        use_native(model, native, [router.module for router in routers if router is not None])
    return LoadedMoE(
        *(model, checkpoint, family, plan.layers, kept, masking, hooks, native),
        routers_found=None not in routers,
        formats=tuple(plan.formats),
        dense_formats=plan.dense_formats,
    )


def attach(loaded: LoadedMoE, source: ExpertSource | None, on_router_logits: RouterObserver | None = None) -> None:
    """From now on the model takes its experts from ``source`` (None: from nowhere). No forward may run meanwhile."""
    loaded.hooks.source = source
    loaded.hooks.on_router_logits = on_router_logits
    loaded.hooks.look_ahead = look_ahead_of(loaded.model, loaded.layers, source, native=loaded.native)


def use_residual(loaded: LoadedMoE, path: Path) -> None:
    """From now on a ``ResidualFile`` foresees picks in the place of routers that are run ahead. Where they can not be
    run ahead it is logged that it does nothing.

    Raises InvalidConfig where it can not be read, or is of another model.
    """
    file = ResidualFile.read(path)
    embedding = loaded.model.get_input_embeddings().weight
    hidden = loaded.model.config.get_text_config().hidden_size
    check_fits(file, str(path), tuple(layer.experts for layer in loaded.layers), hidden)
    if isinstance(loaded.hooks.look_ahead, LookAhead):
        loaded.hooks.look_ahead.use(ResidualMaps(file, device=embedding.device, dtype=embedding.dtype))
    else:
        log.warning("%s does nothing here: the model's routers, in whose place it answers, are not run ahead", path)


def _install(hook: LayerHook, model: Any, layer: MoeLayer) -> None:
    experts = model.get_submodule(layer.name)
    set_hook(experts, hook)
    if not layer.stacked:
        experts.greenroom_expert = switch_expert(ACT2FN[model.config.dense_act_fn])
        experts.forward = types.MethodType(switch_experts_forward, experts)
    _decoder_layer(model, layer.name).register_forward_pre_hook(lambda *_: _entered(hook))


def _entered(hook: LayerHook) -> None:
    if hook.model_hooks.source is not None:
        hook.model_hooks.source.layer_entered(hook.layer)


def _decoder_layer(model: torch.nn.Module, name: str) -> torch.nn.Module:
    """The outermost member of a module list on the path ``name``. It contains the layer's attention."""
    parts = name.split(".")
    for depth in range(1, len(parts)):
        if isinstance(model.get_submodule(".".join(parts[:depth])), torch.nn.ModuleList):
            return model.get_submodule(".".join(parts[: depth + 1]))
    return model.get_submodule(name.rpartition(".")[0])
