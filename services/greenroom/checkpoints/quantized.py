"""Quantised checkpoints: what tells them, and what to do about each kind. Without torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

_SETTINGS: Final = ("quantization_config", "compression_config")
"""What a configuration tells it in. The second one is older."""

_UNNAMED: Final = "unnamed"
"""The method of settings that name none."""

_BITSANDBYTES: Final = (
    "use the checkpoint that it was quantised from, or dequantize() it with transformers and save that"
)
_ADVICE: Final = {
    "fp8": "make a bf16 copy once with transformers: from_pretrained(…, quantization_config=FineGrainedFP8Config("
    "dequantize=True)), then save_pretrained",
    _UNNAMED: 'its settings have no quant_method: add that ("gptq" to those that older tools of GPTQ wrote)',
    "bitsandbytes": _BITSANDBYTES,
    "bitsandbytes_4bit": _BITSANDBYTES,
    "bitsandbytes_8bit": _BITSANDBYTES,
}
_DEFAULT_ADVICE: Final = "use the unquantised checkpoint that it was made from"


def settings_of(config: Any) -> dict[str, Any]:
    """The part of ``config.json`` that is about quantisation, of transformers' configuration."""
    own, text = ({name: getattr(of, name, None) for name in _SETTINGS} for of in (config, config.get_text_config()))
    return own | {"text_config": text}


def quantization_settings(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """What ``config.json`` says of it. Empty: the checkpoint is not quantised."""
    for holder in (config, config.get("text_config") or {}):
        for name in _SETTINGS:
            if holder.get(name):
                return holder[name]  # type: ignore[no-any-return]
    return {}


def quantization_method(config: Mapping[str, Any]) -> str | None:
    """The method that ``config.json`` names, or ``"unnamed"`` where its settings name none. None: the checkpoint is
    not quantised."""
    settings = quantization_settings(config)
    return str(settings.get("quant_method") or _UNNAMED) if settings else None


def advice(method: str) -> str:
    """What to do about a checkpoint that is quantised so and not served."""
    return _ADVICE.get(method, _DEFAULT_ADVICE)
