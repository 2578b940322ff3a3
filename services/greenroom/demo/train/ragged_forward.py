"""A fast training forward of a Qwen3-MoE: the same function as transformers' own, on rows without padding.

Tokens of all rows lie flat, `[T, H]`; only attention sees padded rows, in a few groups of similar length. Experts run
one matrix product each over tokens sorted by expert. `tests/unit/demo/train/test_ragged_forward.py` holds it to
transformers'.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor
from torch.nn import functional as F

if TYPE_CHECKING:
    from transformers import Qwen3MoeForCausalLM

_ROW_GROUPS: Final = 3


class _Gather(torch.autograd.Function):
    """`states[index]` whose gradient is a gather too.

    `inverse`, `[T]` or `[T, k]`, says where each row of `states` went.

    autograd's own rule scatters and adds, one row at a time, which takes a quarter of a step here.
    """

    @staticmethod
    def forward(ctx: Any, states: Tensor, index: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(inverse)
        return states.index_select(0, index)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (inverse,) = ctx.saved_tensors
        grad = grads[0].index_select(0, inverse.flatten())
        if inverse.dim() == 2:
            grad = grad.view(*inverse.shape, *grad.shape[1:]).sum(1)
        return grad, None, None


def _gather(states: Tensor, index: Tensor, inverse: Tensor) -> Tensor:
    apply: Any = _Gather.apply  # typed in some versions of torch and not in others
    gathered: Tensor = apply(states, index, inverse)
    return gathered


@dataclass(frozen=True)
class Ragged:
    """Rows of tokens laid flat.

    Attributes:
        ids: `[T]` token ids.
        positions: `[T]` position of each token in its row.
        shapes: rows and longest row of each attention group.
        padded: the groups' padded slots, one after the other: the flat index of each slot's token, 0 beyond a
            row's end.
        slots: `[T]`, where among the padded slots each token lies.
    """

    ids: Tensor
    positions: Tensor
    shapes: tuple[tuple[int, int], ...]
    padded: Tensor
    slots: Tensor


def lay_flat(rows: Sequence[Sequence[int]]) -> Ragged:
    """Rows in their order, grouped by length for attention."""
    lengths = [len(row) for row in rows]
    starts = [0]
    for length in lengths:
        starts.append(starts[-1] + length)
    by_length = sorted(range(len(rows)), key=lengths.__getitem__)
    size = -(-len(rows) // _ROW_GROUPS)
    shapes, padded = [], []
    slots = torch.empty(starts[-1], dtype=torch.int64)
    base = 0
    for first in range(0, len(rows), size):
        members = by_length[first : first + size]
        longest = lengths[members[-1]]
        index = torch.zeros(len(members), longest, dtype=torch.int64)
        for line, row in enumerate(members):
            index[line, : lengths[row]] = torch.arange(starts[row], starts[row + 1])
            slots[starts[row] : starts[row + 1]] = torch.arange(lengths[row]) + (base + line * longest)
        base += index.numel()
        shapes.append((len(members), longest))
        padded.append(index.flatten())
    ids = torch.tensor([token for row in rows for token in row], dtype=torch.int64)
    positions = torch.cat([torch.arange(length) for length in lengths])
    return Ragged(ids, positions, tuple(shapes), torch.cat(padded), slots)


@dataclass(frozen=True)
class Pass:
    """What a forward computed.

    Attributes:
        hidden: `[T, H]`, the last hidden states after the final norm.
        balance: `[layers]`, the balance loss of each layer.
        router: `[layers, T, experts]`, the router's probabilities.
    """

    hidden: Tensor
    balance: Tensor
    router: Tensor


def forward(model: Qwen3MoeForCausalLM, batch: Ragged) -> Pass:
    """One forward over all rows.

    The balance loss of a layer is that of Switch Transformers (Fedus et al. 2021, Eq. 4) for top-k: experts × Σ
    (share of picks × mean router probability), 1 when balanced; one a layer, where the library's pools all layers.
    """
    decoder: Any = model.model
    hidden = decoder.embed_tokens(batch.ids)
    cos, sin = decoder.rotary_emb(hidden[None], batch.positions[None])
    balance, router = [], []
    for layer in decoder.layers:
        hidden = hidden + _attention(layer.self_attn, layer.input_layernorm(hidden), cos, sin, batch)
        update, loss, probabilities = _experts(layer.mlp, layer.post_attention_layernorm(hidden))
        hidden = hidden + update
        balance.append(loss)
        router.append(probabilities)
    return Pass(decoder.norm(hidden), torch.stack(balance), torch.stack(router))


def group_information(router: Tensor, groups: Tensor, count: int) -> Tensor:
    """How much a token's expert tells about its group, in bits, by layer: `[layers]`.

    The generalised Jensen–Shannon divergence (Lin 1991, Eq. 5.1) of the groups' mean router probabilities, groups
    weighed equally: 0 if all route alike. `groups` is `[T]`, from 0; negative tokens and absent groups do not count.
    """
    members = torch.stack([(groups == group) for group in range(count)]).to(router.dtype)
    sizes = members.sum(1)
    means = (members @ router)[:, sizes > 0] / sizes[sizes > 0, None]

    def entropy(shares: Tensor) -> Tensor:
        return -(shares * shares.clamp(min=1e-9).log2()).sum(-1)

    return entropy(means.mean(1)) - entropy(means).mean(1)


def _attention(module: Any, hidden: Tensor, cos: Tensor, sin: Tensor, batch: Ragged) -> Tensor:
    from transformers.models.qwen3_moe.modeling_qwen3_moe import apply_rotary_pos_emb

    tokens, dim, shared = len(hidden), module.head_dim, module.num_key_value_groups
    query = module.q_norm(module.q_proj(hidden).view(tokens, -1, dim))
    key = module.k_norm(module.k_proj(hidden).view(tokens, -1, dim))
    value = module.v_proj(hidden).view(tokens, -1, dim)
    query, key = apply_rotary_pos_emb(query, key, cos[0], sin[0], unsqueeze_dim=1)
    heads = [query.shape[1], key.shape[1], value.shape[1]]
    # A row's slots beyond its end repeat token 0; being last, no real token attends to them.
    padded = _gather(torch.cat((query, key, value), dim=1), batch.padded, batch.slots)
    parts = []
    for (rows, longest), states in zip(
        batch.shapes, torch.split(padded, [rows * longest for rows, longest in batch.shapes]), strict=True
    ):
        q, k, v = torch.split(states.view(rows, longest, -1, dim).transpose(1, 2), heads, dim=1)
        k, v = k.repeat_interleave(shared, dim=1), v.repeat_interleave(shared, dim=1)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=module.scaling)
        parts.append(out.transpose(1, 2).reshape(rows * longest, -1))
    projected: Tensor = module.o_proj(torch.cat(parts).index_select(0, batch.slots))
    return projected


def _experts(block: Any, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    tokens, width = hidden.shape
    count, top_k = block.gate.num_experts, block.gate.top_k
    probabilities = F.linear(hidden, block.gate.weight).softmax(-1, dtype=torch.float32)
    weights, picked = probabilities.topk(top_k, dim=-1)
    weights = (weights / weights.sum(-1, keepdim=True)).to(hidden.dtype)
    loads = torch.bincount(picked.flatten(), minlength=count)
    balance = count * ((loads / loads.sum()) * probabilities.mean(0)).sum()

    order = picked.flatten().argsort(stable=True)  # picks, sorted by expert
    places = order.argsort()  # where each pick went
    rows = loads.tolist()
    inputs = torch.split(_gather(hidden, order // top_k, places.view(tokens, top_k)), rows)
    gate_up, down = block.experts.gate_up_proj.unbind(0), block.experts.down_proj.unbind(0)
    gate, up = torch.cat([F.linear(x, w) for x, w in zip(inputs, gate_up, strict=True)]).chunk(2, dim=-1)
    inner = torch.split(F.silu(gate) * up, rows)
    outputs = torch.cat([F.linear(x, w) for x, w in zip(inner, down, strict=True)])
    picks = _gather(outputs, places, order).view(tokens, top_k, width)
    return (picks * weights[..., None]).sum(1), balance, probabilities
