"""Quantised checkpoints: which there are, and what to do about each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from greenroom.core.errors import UnsupportedModel

_ADVICE = {
    "mxfp4": "make a bf16 copy once with transformers: from_pretrained(…, quantization_config=Mxfp4Config("
    "dequantize=True)), then save_pretrained",
    "fp8": "make a bf16 copy once with transformers: from_pretrained(…, quantization_config=FineGrainedFP8Config("
    "dequantize=True)), then save_pretrained",
    "bitsandbytes": "use the checkpoint that it was quantised from, or dequantize() it with transformers and save that",
    "bitsandbytes_4bit": "use the checkpoint that it was quantised from, or dequantize() it with transformers and save "
    "that",
    "bitsandbytes_8bit": "use the checkpoint that it was quantised from, or dequantize() it with transformers and save "
    "that",
}
_DEFAULT_ADVICE = "use the unquantised checkpoint that it was made from"


def quantization_method(config: Mapping[str, Any]) -> str | None:
    """The method named by a checkpoint's ``config.json``, ``"unnamed"`` if it names none, None if not quantised."""
    for holder in (config, config.get("text_config") or {}):
        settings = holder.get("quantization_config") or holder.get("compression_config")
        if settings:
            return str(settings.get("quant_method") or "unnamed")
    return None


def refuse_quantized(config: Mapping[str, Any], model: str) -> None:
    """Raises UnsupportedModel, with what to do, if the checkpoint is quantised."""
    method = quantization_method(config)
    if method is None:
        return
    advice = _ADVICE.get(method, _DEFAULT_ADVICE)
    raise UnsupportedModel(
        f"{model} is quantised ({method}); greenroom serves checkpoints in float32, bfloat16 and float16: {advice}"
    )
