"""Where training starts: weights that already copy, so that the few steps of a small run go into the tasks.

Heads that find "what followed this word before" need two layers to agree (Olsson et al. 2022, "In-context Learning and
Induction Heads"), and from random weights they form after thousands of steps. Here one pair of heads of the first layer
starts by looking one and two tokens back, and heads of the next layers by looking for a token whose predecessor equals
the current one, all of them copying what they see. Training is free to change all of it.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor

if TYPE_CHECKING:
    from transformers import Qwen3MoeForCausalLM

_EMBEDDING: Final = 0.1  # standard deviation of an embedding's entries
_COMMON: Final = 0.07  # of the part that all tokens share, by which a head can look at positions alone
_QK_SCALE: Final = 1.4
_FIRST_QK_SCALE: Final = 2.0  # sharper, since neighbouring positions differ little
_TRACE: Final = 0.25  # how strongly a token notes its predecessor
_COPY: Final = 0.1  # how strongly a matching head writes what it saw
_MATCHING_LAYERS: Final = slice(1, 4)


def start_copying(model: Qwen3MoeForCausalLM, seed: int) -> None:
    """Overwrites parts of a fresh model's embedding and attention weights; `seed` draws the random bases."""
    config: Any = model.config
    hidden, dim = config.hidden_size, config.head_dim
    generator = torch.Generator().manual_seed(seed)
    pairs = dim // 2
    # RoPE turns pair i of a head by position × theta^(-i / pairs): the first pairs tell near positions apart, the
    # last hardly turn, so content is compared in those.
    near = list(range(pairs // 4))
    still = [*range(pairs // 2, pairs), *range(pairs + pairs // 2, dim)]
    bases = _orthonormal(hidden, 3 * len(still), generator)
    content, before, before_that = torch.split(bases, len(still), dim=1)
    common = torch.ones(hidden) * torch.randn(hidden, generator=generator).sign()

    with torch.no_grad():
        for layer in model.model.layers:
            # Normed to 1, 32 channels bound an attention score by 5.7: too flat to single out one token of a hundred.
            layer.self_attn.q_norm.weight.fill_(_QK_SCALE)
            layer.self_attn.k_norm.weight.fill_(_QK_SCALE)
        model.model.embed_tokens.weight.copy_(
            torch.randn(config.vocab_size, hidden, generator=generator) * _EMBEDDING + common * _COMMON
        )
        first: Any = model.model.layers[0].self_attn
        angles = model.model.rotary_emb.inv_freq[: len(near)]
        for head, (back, basis) in enumerate(((1, before), (2, before_that))):
            first.q_proj.weight[head * dim : (head + 1) * dim] = _steady(near, angles * -back, dim, common)
            first.o_proj.weight[:, head * dim : head * dim + len(still)] = _TRACE * basis
        first.k_proj.weight[:dim] = _steady(near, angles * 0, dim, common)
        first.v_proj.weight[: len(still)] = content.T
        first.q_norm.weight.fill_(_FIRST_QK_SCALE)
        first.k_norm.weight.fill_(_FIRST_QK_SCALE)
        for layer in list(model.model.layers)[_MATCHING_LAYERS]:
            module: Any = layer.self_attn
            seen = _orthonormal(hidden, dim, generator)
            for rows in (range(dim), range(dim, 2 * dim)):
                module.q_proj.weight[[rows[place] for place in still]] += content.T
                module.o_proj.weight[:, rows.start : rows.stop] = _COPY * seen / 2
            module.k_proj.weight[still] += before.T
            module.v_proj.weight[:dim] = seen.T


def _orthonormal(rows: int, columns: int, generator: torch.Generator) -> Tensor:
    basis: Tensor = torch.linalg.qr(torch.randn(rows, columns, generator=generator))[0]
    return basis


def _steady(pairs: list[int], angles: Tensor, dim: int, common: Tensor) -> Tensor:
    """A projection `[dim, hidden]` of the common part to a vector turned by `angles` in the given pairs."""
    vector = torch.zeros(dim)
    vector[pairs] = angles.cos()
    vector[[pair + dim // 2 for pair in pairs]] = angles.sin()
    return torch.outer(vector, common) / math.sqrt(common.numel())
