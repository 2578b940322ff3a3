"""Whether a checkpoint's experts stay as they are stored, or become numbers of the model's dtype in their pack; and
whether its other linear layers do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch

from greenroom.checkpoints.shard_reader import ShardReader
from greenroom.core.errors import InvalidConfig
from greenroom.experts.pack.layout import PLAIN
from greenroom.moe.architecture.moe_layers import MoeLayer, blueprint, describe_layers, experts_modules
from greenroom.moe.formats.expert_format import PLAIN_FORMAT, ExpertFormat, of_layers
from greenroom.moe.formats.grouped_format import GroupedFormat
from greenroom.moe.formats.lossless.codes import LOSSLESS
from greenroom.moe.formats.lossless.planes import LOSSLESS_PLANES
from greenroom.moe.formats.lossless.record import EXPERTS_AS_LOSSLESS, LosslessFormat
from greenroom.moe.formats.registry import shipped
from greenroom.moe.formats.stored_matrix import Shipped
from greenroom.moe.kernels.expert_products import PRODUCTS, are_compiled
from greenroom.moe.loading.checkpoint import Checkpoint
from greenroom.moe.loading.conversion import ExpertPlan
from greenroom.moe.loading.packing import resolve_dtype
from greenroom.moe.native.library import NativeUnavailable
from greenroom.moe.native.rows import NativeRows, native_rows, native_rows_or_none

_LOSSLESS: Final = {"lossless-codes": LOSSLESS, "lossless-planes": LOSSLESS_PLANES}
"""What asks for one of them whatever computes here, as for a pack that another machine is to serve."""

EXPERTS_AS: Final = ("auto", "stored", "expanded", EXPERTS_AS_LOSSLESS, *_LOSSLESS)
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
    keeps numbers of bf16 in three quarters of their bytes, or in 0.72 where that is faster here. "auto" does so too
    where products were measured to be faster then. Layers in which that saves no page stay numbers. ``products`` and
    ``device`` (its type): what it will be computed by.

    Raises InvalidConfig for a name that is not in EXPERTS_AS or PRODUCTS, for a dtype that experts can not have, for
    "stored" where there is no record for them as they are, and for lossless ones where they are quantised or are not
    computed in bf16.
    """
    if experts_as not in EXPERTS_AS:
        raise InvalidConfig("experts_as", experts_as, f"allowed: {', '.join(EXPERTS_AS)}")
    if products not in PRODUCTS:
        raise InvalidConfig("products", products, f"allowed: {', '.join(PRODUCTS)}")
    found = _shipped(checkpoint)
    if experts_as == "stored":
        if found.why_expanded:
            raise InvalidConfig("experts_as", experts_as, f"{found.why_expanded}; allowed: auto, expanded")
        return found.format
    computed_in = resolve_dtype(checkpoint, dtype)
    native = native_rows_or_none() if products != "torch" and device == "cpu" else None
    if experts_as == EXPERTS_AS_LOSSLESS or experts_as in _LOSSLESS:
        if found.why_expanded:
            why = f"these experts are quantised, and {found.why_expanded}: use auto or expanded"
            raise InvalidConfig("experts_as", experts_as, why)
        if found.format is not PLAIN_FORMAT:
            raise InvalidConfig(
                "experts_as", experts_as, f"these experts are quantised ({found.format.name}): use stored"
            )
        if computed_in is not torch.bfloat16:
            own = str(computed_in).removeprefix("torch.")
            why = f"it keeps bfloat16, and these experts are {own}: use auto, or the dtype bfloat16"
            raise InvalidConfig("experts_as", experts_as, why)
        if experts_as in _LOSSLESS:
            return _with_fewest_bytes(checkpoint, [_LOSSLESS[experts_as]])
        planes = [LOSSLESS_PLANES] if native is not None and native.is_for_planes else []
        return _with_fewest_bytes(checkpoint, [*planes, LOSSLESS])
    if experts_as == "expanded" or native is None or computed_in is not torch.bfloat16:
        return PLAIN_FORMAT
    if found.format is not PLAIN_FORMAT:
        return found.format if _taken(checkpoint, found.format) else PLAIN_FORMAT
    faster = _faster_than_numbers(native)
    return PLAIN_FORMAT if found.why_expanded or faster is None else _where_fast(checkpoint, faster)


def stays_in_bfloat16(
    checkpoint: Checkpoint,
    dtype: str = "auto",
    experts_as: str = "auto",
    *,
    products: str = "auto",
    device: str = "cpu",
) -> ExpertFormat | None:
    """The format in which experts would stay as they are stored if the dtype, which nobody has chosen, were bfloat16.
    None: they do stay, or would not then either. Most GPTQ and AWQ checkpoints say that they are float16."""
    if (dtype, experts_as) != ("auto", "auto") or _shipped(checkpoint).format is PLAIN_FORMAT:
        return None
    if resolve_dtype(checkpoint) is torch.bfloat16:
        return None
    kept = kept_format(checkpoint, "bfloat16", products=products, device=device)
    return None if kept is PLAIN_FORMAT else kept


def of_same_numbers(checkpoint: Checkpoint, dtype: str = "auto") -> list[ExpertFormat]:
    """Formats that "auto" chooses from on one processor or another. Records of each mean the same numbers."""
    found = _shipped(checkpoint)
    if found.format is not PLAIN_FORMAT or found.why_expanded or resolve_dtype(checkpoint, dtype) is not torch.bfloat16:
        return []
    return [PLAIN_FORMAT, *(_where_fast(checkpoint, own) for own in (LOSSLESS, LOSSLESS_PLANES))]


def describe_kept(formats: Sequence[str], experts_as: str) -> str:
    """For a person: what experts are kept as, and why where that was not asked for. Empty: as numbers."""
    if tuple(formats) == (PLAIN,):
        return ""
    chosen = experts_as == "auto" and {LOSSLESS.name, LOSSLESS_PLANES.name} & set(formats)
    why = ": the same bits in fewer bytes, and faster on this processor than bfloat16" if chosen else ""
    return f", as {' and '.join(formats)}{why}"


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
        why = f"the model is computed in {str(dtype).removeprefix('torch.')}"
    elif products == "torch" or device != "cpu":
        why = f"torch computes its products on {device}"
    else:
        try:
            native_rows()
        except NativeUnavailable as reason:
            why = str(reason)
    if why is not None and dense_as == "stored":
        raise InvalidConfig(
            *("dense_as", dense_as),
            f"only compiled products take codes, in bfloat16 on a CPU, and {why}; allowed: auto, expanded",
        )
    return why is None


def _shipped(checkpoint: Checkpoint) -> Shipped:
    gguf = checkpoint.gguf
    return shipped(checkpoint.config, checkpoint.tensors) if gguf is None else Shipped(gguf.format)


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


def _with_fewest_bytes(checkpoint: Checkpoint, formats: Sequence[LosslessFormat]) -> ExpertFormat:
    """In each layer the one of these, or numbers, whose record has the fewest bytes: that of a small expert may take
    more pages as codes. Raises InvalidConfig for experts that they do not take."""
    model = blueprint(checkpoint.config, torch.bfloat16)
    by_layer: dict[str, ExpertFormat] = {}
    for layer in describe_layers(model, checkpoint.config, torch.bfloat16):
        nbytes = {own: own.record(layer).nbytes for own in (PLAIN_FORMAT, *formats)}
        by_layer[layer.name] = min(nbytes, key=nbytes.__getitem__)
    return of_layers(by_layer)


def _faster_than_numbers(native: NativeRows) -> LosslessFormat | None:
    """The lossless format whose products were measured to be faster than those of numbers, by few rows and by many, on
    processors as this one is (docs/decisions/0046, 0054). None: they were slower, or were not measured.

    Where torch multiplies many rows by tiles, an expert would have to be expanded for it.
    """
    if native.has_tiles:
        return None
    if native.is_for_planes:
        return LOSSLESS_PLANES
    return LOSSLESS if native.instruction_set == "avx512" and not native.multiplies_bf16 else None


def _where_fast(checkpoint: Checkpoint, own: LosslessFormat) -> ExpertFormat:
    """``own`` in the layers in which it saves bytes and is fast, numbers in the others."""
    model = blueprint(checkpoint.config, torch.bfloat16)
    if not all(are_compiled(experts, own) for _, experts in experts_modules(model)):
        return PLAIN_FORMAT
    layers = describe_layers(model, checkpoint.config, torch.bfloat16)
    return of_layers({layer.name: own if _is_fast(own, layer) else PLAIN_FORMAT for layer in layers})


def _is_fast(own: LosslessFormat, layer: MoeLayer) -> bool:
    if any(tensor.shape[-1] % own.inputs_at_once for tensor in layer.tensors):
        return False
    try:
        return own.record(layer).nbytes < PLAIN_FORMAT.record(layer).nbytes
    except InvalidConfig:  # experts that it does not take
        return False
