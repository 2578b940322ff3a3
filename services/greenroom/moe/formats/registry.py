"""The formats by name, and the one that a checkpoint ships its experts in."""

from __future__ import annotations

from typing import Any, Final

from greenroom.checkpoints.quantized import quantization_method
from greenroom.core.errors import UnknownName
from greenroom.moe.formats.expert_format import PLAIN_FORMAT, ExpertFormat
from greenroom.moe.formats.lossless import LOSSLESS
from greenroom.moe.formats.mxfp4 import MXFP4

FORMATS: Final[dict[str, ExpertFormat]] = {one.name: one for one in (PLAIN_FORMAT, MXFP4, LOSSLESS)}

_BY_METHOD: Final[dict[str, ExpertFormat]] = {"mxfp4": MXFP4}
"""By the quantisation method that a configuration names."""


def format_named(name: str) -> ExpertFormat:
    """Raises UnknownName."""
    if name not in FORMATS:
        raise UnknownName("format", name, FORMATS)
    return FORMATS[name]


def shipped_format(config: Any) -> ExpertFormat:
    """What a checkpoint with this configuration of transformers has its experts in."""
    settings = getattr(config, "quantization_config", None)
    method = None if settings is None else quantization_method({"quantization_config": settings})
    return _BY_METHOD.get(method or "", PLAIN_FORMAT)
