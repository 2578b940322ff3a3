"""What compressed-tensors' settings say of a checkpoint's experts."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from greenroom.moe.formats.fp8 import BLOCK
from greenroom.moe.formats.fp8_storage import Fp8Storage
from greenroom.moe.formats.int4.pack_quantized import pack_quantized
from greenroom.moe.formats.settings import names
from greenroom.moe.formats.stored_matrix import NotServed, Shipped


def compressed_tensors(settings: Mapping[str, Any]) -> Shipped:
    """One scheme of weights for all layers. Raises NotServed for any other."""
    groups = settings.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        raise NotServed("its config_groups say nothing of weights")
    schemes = [group.get("weights") if isinstance(group, Mapping) else None for group in groups.values()]
    scheme = schemes[0]
    if not isinstance(scheme, Mapping) or any(other != scheme for other in schemes):
        raise NotServed("its config_groups have several schemes of weights")
    if settings.get("transform_config"):
        raise NotServed("its activations are turned (transform_config): what is served are quantised weights alone")
    if (settings.get("sparsity_config") or {}).get("format", "dense") != "dense":
        raise NotServed("its weights are sparse (sparsity_config): what is served are quantised weights alone")
    ignored = names(settings.get("ignore"))
    excluded = [re.compile(name.removeprefix("re:")) for name in ignored if name.startswith("re:")]

    def leaves_out(module: str) -> bool:
        return module in ignored or any(rule.match(module) for rule in excluded)

    if (scheme.get("type"), scheme.get("num_bits")) == ("int", 4):
        return pack_quantized(settings, scheme, leaves_out)
    if (scheme.get("type"), scheme.get("num_bits")) != ("float", 8):
        raise NotServed(f"its weights are {scheme.get('type')} of {scheme.get('num_bits')} bits")
    strategy, block = scheme.get("strategy"), scheme.get("block_structure")
    blocks = strategy == "block" and list(block or ()) == [BLOCK, BLOCK]
    if blocks or strategy in ("channel", "tensor"):
        return Fp8Storage("weight_scale", blocks=blocks).shipped(leaves_out)
    raise NotServed(f"its scales are by {strategy}{'' if block is None else f' of {block}'}")
