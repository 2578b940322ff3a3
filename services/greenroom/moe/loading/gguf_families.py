"""The families whose GGUF files are served: what the metadata says of a model, as transformers says it, and under which
of transformers' names its tensors go.

llama.cpp leaves some things of a family unsaid, because its code has them: which of two softmaxes a router takes, where
a window slides. They are said here. What would be computed otherwise than transformers does is refused by its key.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from transformers.core_model_loading import Concatenate, ConversionOps, WeightConverter

from greenroom.core.errors import CorruptCheckpoint, UnsupportedModel
from greenroom.gguf.header import GgufTensor
from greenroom.gguf.metadata import Metadata

Tensors = Mapping[str, GgufTensor]

Places = Mapping[str, tuple[str, str]]
"""From a tensor's name to transformers' name, or that by which a converter knows it, and its dimensions: H hidden, V
vocabulary, A heads, D of a head, Q of all, K of all of keys, E experts, I inside an expert, S inside the shared one."""

_EMBEDDING, _HEAD = "token_embd.weight", "output.weight"
_OUTSIDE: Final[Places] = {
    _EMBEDDING: ("model.embed_tokens.weight", "VH"),
    "output_norm.weight": ("model.norm.weight", "H"),
    _HEAD: ("lm_head.weight", "VH"),
}
_ATTENTION: Final[Places] = {
    "attn_norm.weight": ("input_layernorm.weight", "H"),
    "attn_q.weight": ("self_attn.q_proj.weight", "QH"),
    "attn_k.weight": ("self_attn.k_proj.weight", "KH"),
    "attn_v.weight": ("self_attn.v_proj.weight", "KH"),
    "attn_output.weight": ("self_attn.o_proj.weight", "HQ"),
}
_EXPERTS: Final[Places] = {
    "ffn_gate_exps.weight": ("mlp.experts.gate_exps", "EIH"),
    "ffn_up_exps.weight": ("mlp.experts.up_exps", "EIH"),
}
_MOE_LAYER: Final[Places] = {
    **_ATTENTION,
    **_EXPERTS,
    "ffn_norm.weight": ("post_attention_layernorm.weight", "H"),
    "ffn_gate_inp.weight": ("mlp.gate.weight", "EH"),
    "ffn_down_exps.weight": ("mlp.experts.down_proj", "EHI"),
}
_NORMS_OF_A_HEAD: Final[Places] = {
    "attn_q_norm.weight": ("self_attn.q_norm.weight", "D"),
    "attn_k_norm.weight": ("self_attn.k_norm.weight", "D"),
}
_NORMS_OF_ALL_HEADS: Final[Places] = {
    "attn_q_norm.weight": ("self_attn.q_norm.weight", "Q"),
    "attn_k_norm.weight": ("self_attn.k_norm.weight", "K"),
}
_BIASES: Final[Places] = {
    "attn_q.bias": ("self_attn.q_proj.bias", "Q"),
    "attn_k.bias": ("self_attn.k_proj.bias", "K"),
    "attn_v.bias": ("self_attn.v_proj.bias", "K"),
}
_SHARED_EXPERT: Final[Places] = {
    "ffn_gate_inp_shexp.weight": ("mlp.shared_expert_gate.weight", "1H"),
    "ffn_gate_shexp.weight": ("mlp.shared_expert.gate_proj.weight", "SH"),
    "ffn_up_shexp.weight": ("mlp.shared_expert.up_proj.weight", "SH"),
    "ffn_down_shexp.weight": ("mlp.shared_expert.down_proj.weight", "HS"),
}
_GPT_OSS_LAYER: Final[Places] = {
    **_ATTENTION,
    **_BIASES,
    **_EXPERTS,
    "attn_output.bias": ("self_attn.o_proj.bias", "H"),
    "attn_sinks.weight": ("self_attn.sinks", "A"),
    "post_attention_norm.weight": ("post_attention_layernorm.weight", "H"),
    "ffn_gate_inp.weight": ("mlp.router.weight", "EH"),
    "ffn_gate_inp.bias": ("mlp.router.bias", "E"),
    "ffn_down_exps.weight": ("mlp.experts.down_exps", "EHI"),
    "ffn_gate_exps.bias": ("mlp.experts.bias_of_gate", "EI"),
    "ffn_up_exps.bias": ("mlp.experts.bias_of_up", "EI"),
    "ffn_down_exps.bias": ("mlp.experts.down_proj_bias", "EH"),
}

_ELSEWHERE_COMPUTED: Final = (
    "attention.clamp_kqv",
    "attention.max_alibi_bias",
    "attention.scale",
    "attn_logit_softcapping",
    "embedding_scale",
    "expert_group_count",
    "expert_group_used_count",
    "expert_shared_count",
    "expert_weights_scale",
    "final_logit_softcapping",
    "interleave_moe_layer_step",
    "leading_dense_block_count",
    "logit_scale",
    "moe_every_n_layers",
    "nextn_predict_layers",
    "residual_scale",
)
"""Keys with which llama.cpp computes something that the served families do not have. At 0 it does not."""

_FACTORS: Final = ("embedding_scale", "expert_weights_scale", "logit_scale", "residual_scale")
"""Those of them that do nothing at 1 either."""

_SOFTMAX: Final = (0, 1)
"""Of ``expert_gating_func``: unsaid, or softmax."""


@dataclass(frozen=True, slots=True)
class GgufFamily:
    """``architecture``: llama.cpp's name, with which its keys begin. ``layer``: a layer's tensors, by what follows
    ``blk.N.``, and their names in transformers' layer. ``own``: what its configuration says beside what all say.
    ``converters``: for experts that are not stored as they lie in memory. ``pairs_neighbours``: rows of queries and
    keys lie as llama.cpp rotates them, pairs side by side.
    """

    architecture: str
    model_type: str
    layer: Places
    own: Callable[[Metadata, Tensors, str], dict[str, Any]]
    converters: Callable[[], list[WeightConverter]]
    pairs_neighbours: bool = False
    windows: bool = False
    rope_types: Sequence[str] = field(default=("none", "default"))


def configuration(family: GgufFamily, metadata: Metadata, tensors: Tensors) -> dict[str, Any]:
    """What transformers' configuration of the family is made with. Raises CorruptCheckpoint for a key that is missing
    or contradicts a tensor, UnsupportedModel for one by which a model is computed otherwise than transformers does.
    """
    at = family.architecture
    _refuse_what_differs(family, metadata)
    hidden = metadata.count(f"{at}.embedding_length")
    heads = metadata.count(f"{at}.attention.head_count")
    head = metadata.count(f"{at}.attention.key_length", hidden // heads)
    for key in (f"{at}.attention.value_length", f"{at}.rope.dimension_count"):
        if metadata.count(key, head) != head:
            raise UnsupportedModel(
                f"{key} in {metadata.path} is {metadata[key]}, and a head has {head}: {family.model_type} has no "
                "such heads"
            )
    vocabulary = _rows(metadata, tensors, _EMBEDDING)
    for key, value in (
        (f"{at}.vocab_size", metadata.count(f"{at}.vocab_size", vocabulary)),
        ("tokenizer.ggml.tokens", len(metadata.texts("tokenizer.ggml.tokens", [])) or vocabulary),
    ):
        if value != vocabulary:
            raise CorruptCheckpoint(f"{key} in {metadata.path} has {value} tokens, and {_EMBEDDING} has {vocabulary}")
    return {
        "vocab_size": vocabulary,
        "hidden_size": hidden,
        "num_hidden_layers": metadata.count(f"{at}.block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": metadata.count(f"{at}.attention.head_count_kv", heads),
        "max_position_embeddings": metadata.count(f"{at}.context_length"),
        "rms_norm_eps": metadata.number(f"{at}.attention.layer_norm_rms_epsilon", above=0),
        "num_experts_per_tok": metadata.count(f"{at}.expert_used_count"),
        "tie_word_embeddings": _HEAD not in tensors,
        "head_dim": head,
        "rope_parameters": _rope(family, metadata),
        **family.own(metadata, tensors, at),
    }


def places(family: GgufFamily, metadata: Metadata, tensors: Tensors) -> dict[str, tuple[str, str]]:
    """transformers' name of each tensor, or the one that a converter of the family knows it by, and its dimensions.

    Raises CorruptCheckpoint for tensors that are missing or of further layers, UnsupportedModel for one that the family
    does not have.
    """
    layers = metadata.count(f"{family.architecture}.block_count")
    known = dict(_OUTSIDE)
    for layer in range(min(layers, len(tensors))):
        for name, (own, dimensions) in family.layer.items():
            known[f"blk.{layer}.{name}"] = f"model.layers.{layer}.{own}", dimensions
    for name in tensors:
        if name in known:
            continue
        number, leaf = [*name.split(".", 2)[1:], "", ""][:2]
        if name.startswith("blk.") and number.isdecimal() and leaf in family.layer:
            raise CorruptCheckpoint(
                f"{metadata.path} has {name}, and {family.architecture}.block_count is {layers}: part of the model "
                "would be left out"
            )
        raise UnsupportedModel(
            f"{metadata.path} has {name}, which models of the architecture {family.architecture!r} do not have here"
            + ("; an old converter made it, convert the checkpoint anew" if _ONE_EXPERT.fullmatch(leaf) else "")
        )
    missing = [name for name in known if name not in tensors and name != _HEAD]
    if missing or layers > len(tensors):
        raise CorruptCheckpoint(f"{metadata.path} lacks {len(missing)} tensors or more: {', '.join(missing[:5])}")
    return {name: known[name] for name in tensors}


def shape_of(dimensions: str, config: Mapping[str, Any]) -> tuple[int, ...]:
    """What a tensor of these dimensions has the shape of, by ``configuration``."""
    heads, head = config["num_attention_heads"], config["head_dim"]
    sizes = {
        "1": 1,
        "H": config["hidden_size"],
        "V": config["vocab_size"],
        "A": heads,
        "D": head,
        "Q": heads * head,
        "K": config["num_key_value_heads"] * head,
        "E": config.get("num_experts") or config["num_local_experts"],
        "I": config.get("moe_intermediate_size") or config["intermediate_size"],
        "S": config.get("shared_expert_intermediate_size"),
    }
    return tuple(sizes[dimension] for dimension in dimensions)


def family_named(architecture: str, metadata: Metadata) -> GgufFamily:
    """Raises UnsupportedModel, listing what is served, for another one and for a dense model."""
    if architecture not in FAMILIES:
        raise UnsupportedModel(
            f"{metadata.path} is of the architecture {architecture!r}; GGUF files of these are served: "
            f"{', '.join(sorted(FAMILIES))} (llama with experts, which is Mixtral): use the checkpoint that it was "
            "made from"
        )
    if not metadata.count(f"{architecture}.expert_count", 0, least=0):
        raise UnsupportedModel(f"{metadata.path} is a dense model: only models with experts are served")
    return FAMILIES[architecture]


def halves_paired(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows of queries or keys whose pairs lie side by side, in transformers' order: all first ones of a head, then all
    second ones."""
    pairs = weight.view(heads, -1, 2, *weight.shape[1:])
    return pairs.transpose(1, 2).reshape(weight.shape)


def _refuse_what_differs(family: GgufFamily, metadata: Metadata) -> None:
    at = family.architecture
    for name in _ELSEWHERE_COMPUTED:
        key = f"{at}.{name}"
        idle = (0, 1) if name in _FACTORS else (0,)
        if key in metadata and metadata[key] not in idle:
            raise UnsupportedModel(
                f"{key} in {metadata.path} is {metadata[key]}, which {family.model_type} does not have"
            )
    gating = metadata.count(f"{at}.expert_gating_func", 0, least=0)
    if gating not in _SOFTMAX:
        raise UnsupportedModel(
            f"{at}.expert_gating_func in {metadata.path} is {gating}; {family.model_type} has 1, softmax"
        )
    window = metadata.count(f"{at}.attention.sliding_window", 0, least=0)
    if window and not family.windows and window < metadata.count(f"{at}.context_length"):
        raise UnsupportedModel(
            f"{at}.attention.sliding_window in {metadata.path} is {window}, and llama.cpp's {at} has no windows"
        )


def _rope(family: GgufFamily, metadata: Metadata) -> dict[str, Any]:
    at = f"{family.architecture}.rope"
    base = {"rope_type": "default", "rope_theta": metadata.number(f"{at}.freq_base", 10000.0, above=0)}
    kind = metadata.text(f"{at}.scaling.type", "none")
    if kind not in family.rope_types:
        raise UnsupportedModel(
            f"{at}.scaling.type in {metadata.path} is {kind!r}; served for {family.model_type}: "
            f"{', '.join(family.rope_types)}"
        )
    if kind != "yarn":
        return base
    return {
        **base,
        "rope_type": "yarn",
        "factor": metadata.number(f"{at}.scaling.factor", above=0),
        "original_max_position_embeddings": metadata.count(f"{at}.scaling.original_context_length"),
        "beta_fast": metadata.number(f"{at}.scaling.yarn_beta_fast", 32.0, above=0),
        "beta_slow": metadata.number(f"{at}.scaling.yarn_beta_slow", 1.0, above=0),
        "truncate": False,  # gpt-oss's own; the file does not say
    }


def _rows(metadata: Metadata, tensors: Tensors, name: str) -> int:
    if name not in tensors or len(tensors[name].shape) < 2:
        raise CorruptCheckpoint(f"{metadata.path} has no {name}, or it is no matrix")
    return tensors[name].shape[-2]


def _mixtral(metadata: Metadata, tensors: Tensors, at: str) -> dict[str, Any]:
    return {
        "num_local_experts": metadata.count(f"{at}.expert_count"),
        "intermediate_size": metadata.count(f"{at}.feed_forward_length"),
    }


def _olmoe(metadata: Metadata, tensors: Tensors, at: str) -> dict[str, Any]:
    return {
        "num_experts": metadata.count(f"{at}.expert_count"),
        "intermediate_size": metadata.count(f"{at}.feed_forward_length"),
        "norm_topk_prob": metadata.flag(f"{at}.expert_weights_norm", False),
    }


def _expert_widths(metadata: Metadata, tensors: Tensors, at: str) -> dict[str, Any]:
    width = metadata.count(f"{at}.expert_feed_forward_length", None)  # older files do not say
    width = width or _rows(metadata, tensors, "blk.0.ffn_gate_exps.weight")
    return {
        "num_experts": metadata.count(f"{at}.expert_count"),
        "moe_intermediate_size": width,
        "intermediate_size": metadata.count(f"{at}.feed_forward_length", width),
    }


def _qwen2_moe(metadata: Metadata, tensors: Tensors, at: str) -> dict[str, Any]:
    shared = metadata.count(f"{at}.expert_shared_feed_forward_length", None)
    return _expert_widths(metadata, tensors, at) | {
        "shared_expert_intermediate_size": shared or _rows(metadata, tensors, "blk.0.ffn_gate_shexp.weight"),
        "norm_topk_prob": metadata.flag(f"{at}.expert_weights_norm", False),
    }


def _qwen3_moe(metadata: Metadata, tensors: Tensors, at: str) -> dict[str, Any]:
    # llama.cpp scales the picked experts' weights to 1 whatever the file says.
    return _expert_widths(metadata, tensors, at) | {"norm_topk_prob": True}


def _gpt_oss(metadata: Metadata, tensors: Tensors, at: str) -> dict[str, Any]:
    layers = metadata.count(f"{at}.block_count")
    width = metadata.count(f"{at}.expert_feed_forward_length", None)
    return {
        "num_local_experts": metadata.count(f"{at}.expert_count"),
        "intermediate_size": width or metadata.count(f"{at}.feed_forward_length"),
        "sliding_window": metadata.count(f"{at}.attention.sliding_window"),
        "layer_types": ["full_attention" if layer % 2 else "sliding_attention" for layer in range(min(layers, 10_000))],
    }


def _joined() -> list[WeightConverter]:
    """Gate and up of an expert are one tensor in memory, the gate first."""
    return [
        WeightConverter(
            source_patterns=[r"\.experts\.gate_exps", r"\.experts\.up_exps"],
            target_patterns=".experts.gate_up_proj",
            operations=[Concatenate(dim=1)],
        )
    ]


class _Interleave(ConversionOps):  # type: ignore[misc]
    """Outputs of gate and up in turns; matrices ``[experts, outputs, inputs]`` become ``[experts, inputs,
    outputs]``."""

    dim = 1  # it acts along dimensions from this one on, so experts stay independent

    def convert(
        self, input_dict: dict[str, Any], source_patterns: list[str], target_patterns: list[str], **kwargs: Any
    ) -> dict[str, torch.Tensor]:
        ((gate,), (up,)) = (input_dict[pattern] for pattern in source_patterns)
        made = torch.stack([gate, up], dim=2).flatten(1, 2)
        return {target_patterns[0]: made if made.dim() == 2 else made.transpose(1, 2).contiguous()}

    def __repr__(self) -> str:
        return "Interleave(dim=1)"


class _Turned(ConversionOps):  # type: ignore[misc]
    """Matrices ``[experts, outputs, inputs]`` become ``[experts, inputs, outputs]``."""

    dim = 1

    def convert(
        self, input_dict: dict[str, Any], source_patterns: list[str], target_patterns: list[str], **kwargs: Any
    ) -> dict[str, torch.Tensor]:
        ((weight,),) = input_dict.values()
        return {target_patterns[0]: weight.transpose(1, 2).contiguous()}

    def __repr__(self) -> str:
        return "Turned(dim=1)"


def _interleaved() -> list[WeightConverter]:
    return [
        WeightConverter(
            source_patterns=[r"\.experts\.gate_exps", r"\.experts\.up_exps"],
            target_patterns=".experts.gate_up_proj",
            operations=[_Interleave()],
        ),
        WeightConverter(
            source_patterns=[r"\.experts\.bias_of_gate", r"\.experts\.bias_of_up"],
            target_patterns=".experts.gate_up_proj_bias",
            operations=[_Interleave()],
        ),
        WeightConverter(
            source_patterns=r"\.experts\.down_exps", target_patterns=".experts.down_proj", operations=[_Turned()]
        ),
    ]


_ONE_EXPERT: Final = re.compile(r"ffn_(gate|up|down)\.\d+\.weight")

FAMILIES: Final[dict[str, GgufFamily]] = {
    family.architecture: family
    for family in (
        GgufFamily("llama", "mixtral", _MOE_LAYER, _mixtral, _joined, pairs_neighbours=True),
        GgufFamily("qwen2moe", "qwen2_moe", {**_MOE_LAYER, **_BIASES, **_SHARED_EXPERT}, _qwen2_moe, _joined),
        GgufFamily("qwen3moe", "qwen3_moe", {**_MOE_LAYER, **_NORMS_OF_A_HEAD}, _qwen3_moe, _joined),
        GgufFamily("olmoe", "olmoe", {**_MOE_LAYER, **_NORMS_OF_ALL_HEADS}, _olmoe, _joined),
        GgufFamily(
            *("gpt-oss", "gpt_oss", _GPT_OSS_LAYER, _gpt_oss, _interleaved),
            windows=True, rope_types=("none", "default", "yarn"),
        ),
    )
}  # fmt: skip
"""By llama.cpp's name."""
