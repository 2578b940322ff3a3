"""Which families of MoE models are known to work, and the peculiarities of each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from greenroom.core.errors import UnsupportedModel

ENCODER_DECODER_REASON = (
    "it is an encoder-decoder: a request has an encoder pass and cross-attention states of its own, which the batch "
    "loop's flattened rows do not have yet; it loads, packs and generates one batch at a time through "
    "`greenroom.moe.loading.load_model` and transformers' own generate"
)


def _sound(_: Any) -> str | None:
    return None


def _deepseek_v2_masking(config: Any) -> str | None:
    if config.topk_method == "greedy":
        return None
    return (
        "its router first keeps whole groups of experts by their best score, so that fewer than top-k of the kept "
        "experts may be allowed ones"
    )


def _deepseek_v3_masking(_: Any) -> str | None:
    return (
        "its router picks by score plus a correction bias within the best groups, so that a masked expert, whose "
        "score is 0, still wins by its bias"
    )


@dataclass(frozen=True, slots=True)
class Family:
    """``masking``: why a router may not be masked, given its model's configuration (None: it may).

    The test suite compares ``proven`` families with transformers' own model. Any other family is loaded and run in the
    same way, after the same checks, but its routers are never masked.
    """

    model_type: str
    masking: Callable[[Any], str | None]
    decoder_only: bool = True
    proven: bool = True


PROVEN: dict[str, Family] = {
    family.model_type: family
    for family in (
        Family("mixtral", _sound),
        Family("qwen2_moe", _sound),
        Family("qwen3_moe", _sound),
        Family("olmoe", _sound),
        Family("deepseek_v2", _deepseek_v2_masking),
        Family("deepseek_v3", _deepseek_v3_masking),
        Family("gpt_oss", _sound),
        Family("granitemoe", _sound),
        Family("phimoe", _sound),
        Family("switch_transformers", _sound, decoder_only=False),
    )
}


def _unproven_masking(config: Any) -> str | None:
    return f"masking is proven for {', '.join(sorted(PROVEN))} only, not for {config.model_type}"


def family_of(config: Any) -> Family:
    """The family of a transformers configuration. One that is not in the list is unproven."""
    known = PROVEN.get(config.model_type)
    return known or Family(config.model_type, _unproven_masking, not config.is_encoder_decoder, proven=False)


def unsupported(model_type: str, reason: str) -> UnsupportedModel:
    """The error for a family that is not served. It lists the families that are."""
    return UnsupportedModel(
        f"models of type {model_type!r} are not supported: {reason}; known to work: {', '.join(sorted(PROVEN))}, and "
        "any other whose experts use transformers' experts interface"
    )
