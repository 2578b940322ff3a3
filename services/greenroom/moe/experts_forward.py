"""The experts' forward pass over experts that arrive in any order.

Transformers' "eager" implementation runs the picked experts in ascending order and adds each one's weighted output to
the rows that picked it, in the output's dtype. Floating-point addition is not associative, so the same order of
additions is kept here whatever the order of arrival: what arrived early waits. All else is computed as there, from the
same rows in the same order, so that the result is the same to the bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from greenroom.experts.source import ExpertWeights
from greenroom.moe.seats import seat_of

IMPLEMENTATION = "greenroom"
"""The name in transformers' experts registry."""

Compute = Callable[[torch.Tensor, ExpertWeights], torch.Tensor]


def experts_forward(
    module: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """What the registry calls: rows ``[T, H]``, picks and weights ``[T, k]``; returns ``[T, H]``.

    A pick at or above the number of experts is none. Raises TransferFailed where an expert can not be had.
    """
    seat = seat_of(module)
    picks = top_k_index.cpu().numpy()
    with seat.source.routed(seat.layer, picks) as arriving:
        if seat.stage.look_ahead is not None:
            seat.stage.look_ahead(seat.layer, hidden_states)
        return combine(
            hidden_states,
            picks,
            top_k_weights,
            module.num_experts,
            arriving,
            lambda rows, weights: _expert(module, rows, weights),
        )


def combine(
    hidden_states: torch.Tensor,
    picks: NDArray[np.int64],
    scales: torch.Tensor,
    experts: int,
    arriving: Iterator[tuple[int, ExpertWeights]],
    compute: Compute,
) -> torch.Tensor:
    """Sum over each row's picks of ``scale * expert(row)``, added in ascending order of the experts."""
    output = torch.zeros_like(hidden_states)
    rows = len(picks)
    slots = picks.T.reshape(-1)  # slot after slot: an expert's rows in the order in which eager takes them
    order = np.argsort(slots, kind="stable")
    wanted, starts = np.unique(slots[order], return_index=True)
    ends = [*starts[1:], len(order)]
    turns = {
        int(expert): (turn, slice(int(start), int(end)))
        for turn, (expert, start, end) in enumerate(zip(wanted, starts, ends, strict=True))
        if expert < experts
    }
    index = torch.from_numpy(order).to(hidden_states.device)
    tokens = index % rows
    ordered_scales = scales.t().reshape(-1)[index].unsqueeze(-1)

    early: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    turn = 0
    for expert, weights in arriving:
        own, span = turns.pop(expert)
        token = tokens[span]
        product = compute(hidden_states[token], weights) * ordered_scales[span]
        early[own] = token, product.to(output.dtype)
        while turn in early:
            output.index_add_(0, *early.pop(turn))
            turn += 1
    if turns or early:
        raise RuntimeError(f"the source left out the experts {sorted(turns)}")
    return output


def _expert(module: Any, rows: torch.Tensor, weights: ExpertWeights) -> torch.Tensor:
    """One expert as transformers' interface describes it; ``weights`` in the order of the layer's record."""
    if module.has_bias:
        up, up_bias, down, down_bias = weights
    else:
        (up, down), up_bias, down_bias = weights, None, None
    inner = _linear(rows, up, up_bias, module.is_transposed)
    inner = module._apply_gate(inner) if module.has_gate else module.act_fn(inner)
    outer = _linear(inner, down, down_bias, module.is_transposed)
    return module.post_expert_norm(outer) if module.has_post_expert_norm else outer


def _linear(rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, transposed: bool) -> torch.Tensor:
    product = rows @ weight if transposed else nn.functional.linear(rows, weight)
    return product if bias is None else product + bias  # added apart, as eager does: fused it rounds once less


def switch_experts_forward(
    module: Any, hidden_states: torch.Tensor, selected_experts: torch.Tensor, routing_weights: torch.Tensor
) -> torch.Tensor:
    """The same for Switch Transformers, whose experts are not in the registry.

    ``selected_experts`` is one-hot ``[T, 1, experts]``, all zero for a row beyond its expert's capacity;
    ``routing_weights[T, 1]``.
    """
    seat = seat_of(module)
    one_hot = selected_experts[:, 0]
    picks = torch.where(one_hot.any(dim=-1), one_hot.argmax(dim=-1), module.num_experts)[:, None].cpu().numpy()
    with seat.source.routed(seat.layer, picks) as arriving:
        return combine(hidden_states, picks, routing_weights, module.num_experts, arriving, module.greenroom_expert)


def switch_expert(activation: nn.Module) -> Compute:
    """A Switch Transformers expert: two projections with an activation between, no biases."""

    def compute(rows: torch.Tensor, weights: ExpertWeights) -> torch.Tensor:
        inner, outer = weights
        hidden = activation(nn.functional.linear(rows, inner)).to(outer.dtype)
        return nn.functional.linear(hidden, outer)

    return compute


ALL_EXPERTS_FUNCTIONS.register(IMPLEMENTATION, experts_forward)
