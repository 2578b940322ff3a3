"""The formats by name, and the one that a checkpoint ships its experts in."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, Final

from greenroom.checkpoints.quantized import quantization_method, quantization_settings, settings_of
from greenroom.checkpoints.safetensors_headers import StoredTensor
from greenroom.moe.formats.compressed_tensors import compressed_tensors
from greenroom.moe.formats.expert_format import PLAIN_FORMAT, ExpertFormat
from greenroom.moe.formats.fp4 import FP4
from greenroom.moe.formats.fp8 import FP8_BLOCKS, FP8_ROWS
from greenroom.moe.formats.fp8_storage import fine_grained_fp8
from greenroom.moe.formats.gguf_storage import GGUF_PAIRS
from greenroom.moe.formats.int4.awq import awq
from greenroom.moe.formats.int4.gptq import gptq
from greenroom.moe.formats.int8 import INT8
from greenroom.moe.formats.k_quants import Q4_K, Q6_K
from greenroom.moe.formats.lossless.codes import LOSSLESS
from greenroom.moe.formats.lossless.planes import LOSSLESS_PLANES
from greenroom.moe.formats.mxfp4 import MXFP4
from greenroom.moe.formats.stored_matrix import NotServed, Shipped

FORMATS: Final[dict[str, ExpertFormat]] = {
    one.name: one
    for one in (
        *(PLAIN_FORMAT, MXFP4, LOSSLESS, LOSSLESS_PLANES, INT8, FP4, FP8_BLOCKS, FP8_ROWS, Q4_K, Q6_K),
        *GGUF_PAIRS,
    )
}
"""Whatever a pack may name, but int4: those formats depend on a checkpoint's settings (``int4/record.py``). A model's
formats come from its checkpoint, not from here. By this the tests know which have to be tried."""

_BY_METHOD: Final[dict[str, Callable[[Mapping[str, Any]], Shipped]]] = {
    "mxfp4": lambda _: Shipped(MXFP4),
    "fp8": fine_grained_fp8,
    "compressed-tensors": compressed_tensors,
    "gptq": gptq,
    "awq": awq,
}
"""By the quantisation method that a configuration names, from its settings. They raise NotServed."""

_LAYER: Final = re.compile(r"\blayers\.(\d+)\.")


def shipped_of(config: Mapping[str, Any]) -> Shipped | None:
    """What a checkpoint with this ``config.json`` has its experts in. None: a quantisation that no format is for.

    Raises NotServed for settings of a method that are not served.
    """
    method = quantization_method(config)
    if method is None:
        return Shipped(PLAIN_FORMAT)
    make = _BY_METHOD.get(method)
    if make is None:
        return None
    try:
        return make(quantization_settings(config))
    except (TypeError, ValueError, AttributeError, KeyError, re.error) as error:  # the JSON is untrusted
        raise NotServed(f"its quantization_config can not be read ({error!r})") from error


def shipped(config: Any, tensors: Mapping[str, StoredTensor]) -> Shipped:
    """As ``shipped_of``, of a configuration of transformers that was not refused when it was read. ``tensors``: of the
    checkpoint, none if there is only its configuration."""
    found = shipped_of(settings_of(config)) or Shipped(PLAIN_FORMAT)
    return found if found.of_tensors is None else found.of_tensors(_of_its_layers(config, tensors))


def _of_its_layers(config: Any, tensors: Mapping[str, StoredTensor]) -> Mapping[str, StoredTensor]:
    """Without those of layers behind the last one, such as one that predicts several tokens ahead: they are left out,
    and may be numbers where the others are codes."""
    layers = getattr(config.get_text_config(), "num_hidden_layers", None)
    if not isinstance(layers, int):
        return tensors
    numbers = ((name, _LAYER.search(name)) for name in tensors)
    return {name: tensors[name] for name, number in numbers if number is None or int(number[1]) < layers}
