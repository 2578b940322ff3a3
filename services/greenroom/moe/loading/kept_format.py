"""Whether a checkpoint's experts stay as they are stored, or become numbers of the model's dtype in their pack."""

from __future__ import annotations

from typing import Final

import torch

from greenroom.core.errors import InvalidConfig
from greenroom.moe.formats.expert_format import PLAIN_FORMAT, ExpertFormat
from greenroom.moe.formats.lossless import LOSSLESS
from greenroom.moe.formats.registry import shipped_format
from greenroom.moe.kernels.expert_products import COMPILED_FORMATS, PRODUCTS
from greenroom.moe.kernels.native.library import NativeUnavailable
from greenroom.moe.kernels.native.rows import native_rows
from greenroom.moe.loading.checkpoint import Checkpoint
from greenroom.moe.loading.packing import resolve_dtype

EXPERTS_AS: Final = ("auto", "stored", "expanded", "lossless")


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
    keeps numbers of bf16 in three quarters of their bytes. ``products`` and ``device`` (its type): what it will be
    computed by.

    Raises InvalidConfig for a name that is not in EXPERTS_AS or PRODUCTS, for a dtype that experts can not have, and
    for "lossless" where they are quantised or are not computed in bf16.
    """
    if experts_as not in EXPERTS_AS:
        raise InvalidConfig("experts_as", experts_as, f"allowed: {', '.join(EXPERTS_AS)}")
    if products not in PRODUCTS:
        raise InvalidConfig("products", products, f"allowed: {', '.join(PRODUCTS)}")
    shipped = shipped_format(checkpoint.config)
    if experts_as == "stored":
        return shipped
    computed_in = resolve_dtype(checkpoint, dtype)
    if experts_as == LOSSLESS.name:
        if shipped is not PLAIN_FORMAT:
            raise InvalidConfig("experts_as", experts_as, f"these experts are quantised ({shipped.name}): use stored")
        if computed_in is not torch.bfloat16:
            raise InvalidConfig("experts_as", experts_as, f"it keeps bfloat16, and these experts are {computed_in}")
        return LOSSLESS
    computed = computed_in is torch.bfloat16 and products != "torch" and device == "cpu"
    taken = experts_as == "auto" and computed and shipped.name in COMPILED_FORMATS and _compiled()
    return shipped if taken else PLAIN_FORMAT


def _compiled() -> bool:
    try:
        native_rows()
    except NativeUnavailable:
        return False
    return True
