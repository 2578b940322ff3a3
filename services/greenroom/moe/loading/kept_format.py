"""Whether a checkpoint's experts stay as they are stored, or become numbers of the model's dtype in their pack; and
whether its other linear layers do."""

from __future__ import annotations

from typing import Final

import torch

from greenroom.checkpoints.shard_reader import ShardReader
from greenroom.core.errors import InvalidConfig
from greenroom.moe.architecture.moe_layers import blueprint, experts_modules
from greenroom.moe.formats.expert_format import PLAIN_FORMAT, ExpertFormat
from greenroom.moe.formats.grouped_format import GroupedFormat
from greenroom.moe.formats.lossless.codes import LOSSLESS
from greenroom.moe.formats.lossless.planes import LOSSLESS_PLANES
from greenroom.moe.formats.lossless.record import EXPERTS_AS_LOSSLESS
from greenroom.moe.formats.registry import shipped
from greenroom.moe.formats.stored_matrix import Shipped
from greenroom.moe.kernels.expert_products import PRODUCTS, are_compiled
from greenroom.moe.loading.checkpoint import Checkpoint
from greenroom.moe.loading.conversion import ExpertPlan
from greenroom.moe.loading.packing import resolve_dtype
from greenroom.moe.native.library import NativeUnavailable
from greenroom.moe.native.rows import native_rows, native_rows_or_none

EXPERTS_AS: Final = ("auto", "stored", "expanded", EXPERTS_AS_LOSSLESS)
DENSE_AS: Final = ("auto", "stored", "expanded")


def kept_format(
    checkpoint: Checkpoint,
    dtype: str = "auto",
    experts_as: str = "auto",
    *,
    products: str = "auto",
    device: str = "cpu",
) -> ExpertFormat:
    """The format of the records that a checkpoint's experts are packed in.

    ``experts_as``: "stored" keeps them as the checkpoint has them, "expanded" makes numbers of them. "auto" keeps them
    where compiled products take them so; torch's would have to expand an expert each time that it is used. "lossless"
    keeps numbers of bf16 in three quarters of their bytes, or in 0.72 where that is faster here. ``products``
    and ``device`` (its type): what it will be computed by.

    Raises InvalidConfig for a name that is not in EXPERTS_AS or PRODUCTS, for a dtype that experts can not have, for
    "stored" where there is no record for them as they are, and for "lossless" where they are quantised or are not
    computed in bf16.
    """
    if experts_as not in EXPERTS_AS:
        raise InvalidConfig("experts_as", experts_as, f"allowed: {', '.join(EXPERTS_AS)}")
    if products not in PRODUCTS:
        raise InvalidConfig("products", products, f"allowed: {', '.join(PRODUCTS)}")
    gguf = checkpoint.gguf
    found = shipped(checkpoint.config, checkpoint.tensors) if gguf is None else Shipped(gguf.format)
    if experts_as == "stored":
        if found.why_expanded:
            raise InvalidConfig("experts_as", experts_as, f"{found.why_expanded}; allowed: auto, expanded")
        return found.format
    computed_in = resolve_dtype(checkpoint, dtype)
    if experts_as == EXPERTS_AS_LOSSLESS:
        if found.format is not PLAIN_FORMAT or found.why_expanded:
            raise InvalidConfig(
                "experts_as", experts_as, f"these experts are quantised ({found.format.name}): use stored"
            )
        if computed_in is not torch.bfloat16:
            raise InvalidConfig("experts_as", experts_as, f"it keeps bfloat16, and these experts are {computed_in}")
        return LOSSLESS_PLANES if products != "torch" and device == "cpu" and _is_for_planes() else LOSSLESS
    if experts_as == "expanded" or found.format is PLAIN_FORMAT:
        return PLAIN_FORMAT
    computed = computed_in is torch.bfloat16 and products != "torch" and device == "cpu"
    return found.format if computed and native_rows_or_none() and _taken(checkpoint, found.format) else PLAIN_FORMAT


def keeps_dense(dtype: torch.dtype, dense_as: str = "auto", *, products: str = "auto", device: str = "cpu") -> bool:
    """Whether linear layers outside the experts stay as they are stored, where their codes are known.

    ``dense_as``: "auto" and "stored" keep them, "expanded" makes numbers of ``dtype`` of them. They can stay where
    compiled products compute them; elsewhere "auto" expands. ``products`` and ``device`` (its type): what the model
    will be computed by.

    Raises InvalidConfig for a name that is not in DENSE_AS, and for "stored" where they can not stay.
    """
    if dense_as not in DENSE_AS:
        raise InvalidConfig("dense_as", dense_as, f"allowed: {', '.join(DENSE_AS)}")
    if dense_as == "expanded":
        return False
    why = None
    if dtype is not torch.bfloat16:
        why = f"the model is computed in {dtype}"
    elif products == "torch" or device != "cpu":
        why = f"torch computes its products on {device}"
    else:
        try:
            native_rows()
        except NativeUnavailable as reason:
            why = str(reason)
    if why is not None and dense_as == "stored":
        raise InvalidConfig(
            "dense_as", dense_as, f"only compiled products take codes, in bfloat16 on a CPU, and {why}: auto, expanded"
        )
    return why is None


def _taken(checkpoint: Checkpoint, own: ExpertFormat) -> bool:
    """Whether compiled products take all of the model's experts as they are shipped."""
    modules = experts_modules(blueprint(checkpoint.config, torch.bfloat16))
    if not all(are_compiled(experts, own.of(name)) for name, experts in modules):
        return False
    ordered = isinstance(own, GroupedFormat) and own.products[0].ordered
    return not ordered or not checkpoint.tensors or _share_orders(checkpoint)


def _share_orders(checkpoint: Checkpoint) -> bool:
    """Whether gate and up of each expert have their inputs in one order. Reads that of all of them."""
    plan = ExpertPlan(checkpoint, torch.bfloat16)
    with ShardReader() as reader:
        for recipe in (recipe for recipes in plan.recipes for recipe in recipes):
            orders = [feed.tensors for feed in recipe.feeds if feed.part.endswith("g_idx")]
            for of_expert in zip(*orders, strict=True):
                first, *others = map(reader.read, of_expert)
                if not all(torch.equal(first, other) for other in others):
                    return False
    return True


def _is_for_planes() -> bool:
    native = native_rows_or_none()
    return native is not None and native.is_for_planes
