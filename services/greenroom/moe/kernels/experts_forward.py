"""The experts' forward pass over experts that arrive in any order.

Transformers' "eager" implementation runs the picked experts in ascending order. It adds each expert's weighted output
to the rows that picked it, in the output's dtype. Floating-point addition is not associative, so the same order of
additions is kept here: the contribution of an expert that arrives early waits for its turn. With torch's products the
result equals transformers' to the bit, because the same rows are computed in the same order. The compiled products sum
in another order; with them results are equal to the bit between budgets, policies and orders of arrival.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from greenroom.experts.pack.layout import ExpertWeights
from greenroom.experts.source import Arriving, Landing
from greenroom.moe.kernels.expert_hooks import LayerHook, LookAheadHook, hook_of
from greenroom.moe.kernels.expert_products import Compute, ExpertSum, Grouped, NativeSum, PickedExpert, TorchSum

IMPLEMENTATION = "greenroom"
"""The name in transformers' experts registry."""


def experts_forward(
    module: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """Called by the registry with rows ``[T, H]``, picks and scales ``[T, k]``. Returns ``[T, H]``.

    A pick at or above the number of experts is none. Raises TransferFailed if an expert can not be fetched.
    """
    hook = hook_of(module)
    picks = _picks_in_ram(hook, top_k_index)
    grouped = Grouped.of(picks, module.num_experts)
    look_ahead = hook.model_hooks.look_ahead
    if look_ahead is not None:
        look_ahead.answer()  # gives what the layer before asked for
    with hook.source.routed(hook.layer, picks) as arriving:
        compute = expert_of(module, arriving)
        if look_ahead is not None:
            look_ahead(hook.layer, hidden_states)
            if not isinstance(arriving, list):
                arriving = _answering(arriving, look_ahead)
        if hook.native is not None:
            total = NativeSum(hidden_states, top_k_weights, grouped, compute, hook.native, hook.products)
            return combine(grouped, arriving, total)
        return combine(grouped, arriving, TorchSum(hidden_states, top_k_weights, grouped, compute))


def _picks_in_ram(hook: LayerHook, picks: torch.Tensor) -> NDArray[np.int64]:
    """The picks ``[T, k]``. This is the one copy of a layer that the thread waits for, so it also brings
    which rows a mask has changed.
    """
    rerouted, hook.rerouted = hook.rerouted, None
    if rerouted is None:
        return picks.cpu().numpy()
    both = torch.cat([picks, rerouted[:, None].to(picks.dtype)], dim=1).cpu().numpy()
    hook.source.rerouted(hook.layer, both[:, -1] != 0)
    return np.ascontiguousarray(both[:, :-1])


def _answering(
    arriving: Iterator[tuple[int, ExpertWeights]], look_ahead: LookAheadHook
) -> Iterator[tuple[int, ExpertWeights]]:
    """After each expert whose work was queued, give the look-ahead's answer if it has arrived by now."""
    for one in arriving:
        yield one
        look_ahead.answer()


def combine(grouped: Grouped, arriving: Iterable[tuple[int, ExpertWeights]], total: ExpertSum) -> torch.Tensor:
    """Sum over each row's picks of ``scale * expert(row)``, added in ascending order of the experts."""
    if isinstance(arriving, list):
        return _all_at_once(grouped, arriving, total)
    waiting = dict(grouped.spans)
    early: dict[int, tuple[int, int, torch.Tensor]] = {}
    turn = 0
    for expert, weights in arriving:
        own, start, end = waiting.pop(expert)
        if own == turn:
            total.run([PickedExpert(start, end, weights)])
            turn += 1
        else:
            early[own] = start, end, total.contribution(PickedExpert(start, end, weights))
        while turn in early:
            total.add(*early.pop(turn))
            turn += 1
    if waiting or early:
        raise _left_out(waiting)
    return total.output


def _all_at_once(grouped: Grouped, here: list[tuple[int, ExpertWeights]], total: ExpertSum) -> torch.Tensor:
    weights = dict(here)
    if missing := grouped.spans.keys() - weights.keys():
        raise _left_out(missing)
    in_turn = sorted((turn, start, end, expert) for expert, (turn, start, end) in grouped.spans.items())
    total.run([PickedExpert(start, end, weights[expert]) for _, start, end, expert in in_turn])
    return total.output


def _left_out(experts: Iterable[int]) -> RuntimeError:
    return RuntimeError(f"the source left out the experts {sorted(experts)}")


def expert_of(module: Any, arriving: Arriving) -> Compute:
    """An expert of a module by torch, of the records that its source has."""
    expands = hook_of(module).expand
    if expands is None:
        return partial(expert_by_torch, module)
    expand = expands.for_layer(partial(_coming, arriving))
    return lambda rows, weights: expert_by_torch(module, rows, expand(weights))


def _coming(arriving: Arriving) -> Sequence[ExpertWeights]:
    """See ``Expands.for_layer``. Of a list all: those that have run are not asked for again."""
    if isinstance(arriving, Landing):
        return arriving.coming
    return [weights for _, weights in arriving] if isinstance(arriving, list) else ()


def expert_by_torch(module: Any, rows: torch.Tensor, weights: ExpertWeights) -> torch.Tensor:
    """One expert as described by transformers' interface. ``weights``: numbers, as ``MoeLayer.tensors``."""
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
    return product if bias is None else product + bias  # not fused, because eager rounds before it adds


def switch_experts_forward(
    module: Any, hidden_states: torch.Tensor, selected_experts: torch.Tensor, routing_weights: torch.Tensor
) -> torch.Tensor:
    """As ``experts_forward`` for Switch Transformers, whose experts are not in the registry.

    ``selected_experts``: one-hot ``[T, 1, experts]``, all zero for a row beyond its expert's capacity.
    ``routing_weights[T, 1]``.
    """
    hook = hook_of(module)
    one_hot = selected_experts[:, 0]
    chosen = torch.where(one_hot.any(dim=-1), one_hot.argmax(dim=-1), module.num_experts)[:, None]
    picks = _picks_in_ram(hook, chosen)
    grouped = Grouped.of(picks, module.num_experts)
    with hook.source.routed(hook.layer, picks) as arriving:
        total = TorchSum(hidden_states, routing_weights, grouped, module.greenroom_expert)
        return combine(grouped, arriving, total)


def switch_expert(activation: nn.Module) -> Compute:
    """A Switch Transformers expert: two projections without biases, and an activation between them."""

    def compute(rows: torch.Tensor, weights: ExpertWeights) -> torch.Tensor:
        inner, outer = weights
        hidden = activation(nn.functional.linear(rows, inner)).to(outer.dtype)
        return nn.functional.linear(hidden, outer)

    return compute


ALL_EXPERTS_FUNCTIONS.register(IMPLEMENTATION, experts_forward)
