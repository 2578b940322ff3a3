"""Maps from the residual stream to later picks: logistic regressions through a narrow layer, fitted with Adam.

A probe of each layer's rows: picks are all that it is told of the layers between.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from greenroom.core.artifacts.residual_file import LayerMaps, ResidualFile, ResidualForm
from greenroom.core.errors import InvalidConfig
from greenroom.moe.routing.residual_maps import ResidualMaps
from greenroom.policies.base.events import Phase
from greenroom.replay.traces.held_out import sequences_to_learn_from
from greenroom.replay.traces.routing_trace import RoutingTrace

LEAST_TOKENS: Final = 500
"""Fewer leave a map of a hundred inputs with little but noise."""
_DECODE_SHARE: Final = 0.8
"""Of a batch. Prompts have most rows, and what is fetched ahead is mostly for answers."""


@dataclass(frozen=True, slots=True)
class FitOptions:
    """``rank``: width of the inner layer, 0: none. ``silu``: whether it is bent. ``ahead``: layers ahead. ``steps`` of
    ``batch`` rows. ``held_out``: the share of the sequences, the last ones, at least one, that only the report is of.
    """

    rank: int = 64
    silu: bool = True
    ahead: int = 3
    steps: int = 3000
    batch: int = 512
    learning_rate: float = 6e-3
    held_out: float = 0.1
    seed: int = 0


def fit(
    trace: RoutingTrace,
    rows: NDArray[np.float16],
    options: FitOptions | None = None,
    *,
    on_layer: Callable[[int], object] = lambda _: None,
) -> ResidualFile:
    """``rows[T, layers, H]``: what each layer's router got of the tokens of ``trace``. ``on_layer`` is called when a
    layer is done, with how many are. Raises InvalidConfig where there is too little to learn from.
    """
    began, options = time.monotonic(), options or FitOptions()
    if trace.layers < 2:
        raise InvalidConfig("model", f"{trace.layers} MoE layer", "at least two: there is nothing ahead of one")
    learnt = int(
        trace.seq_starts[sequences_to_learn_from(trace, options.held_out, least=LEAST_TOKENS, field="prompts")]
    )
    form = ResidualForm(rows.shape[2], options.rank, min(options.ahead, trace.layers - 1), options.silu)
    shares = _shares(trace, learnt)
    picked = [_picked(trace, layer) for layer in range(trace.layers)]
    maps = []
    for layer in range(trace.layers - 1):
        wanted = torch.cat([picked[target] for target in form.targets(layer, trace.layers)], dim=1)
        inputs = torch.from_numpy(rows[:, layer].astype(np.float32))
        maps.append(_fitted(inputs[:learnt], wanted[:learnt], shares, form, options, seed=options.seed + layer))
        on_layer(layer + 1)
    made = ResidualFile.of_layers(
        form, maps, model=trace.model, experts_per_layer=tuple(trace.experts_per_layer.tolist()),
        sequences=int(np.count_nonzero(np.diff(trace.seq_starts))),
    )  # fmt: skip
    report = {
        "tokens": learnt,
        "held_out_tokens": trace.tokens - learnt,
        "held_out_recall": _recall(made, rows[learnt:], [one[learnt:] for one in picked]),
        "seconds": round(time.monotonic() - began, 1),
    }
    return replace(made, report=report)


def _picked(trace: RoutingTrace, layer: int) -> torch.Tensor:
    """``[T, experts of the layer]``: 1 where the token was routed."""
    width = int(trace.experts_per_layer[layer])
    picks = np.minimum(trace.experts[:, layer].astype(np.int64), width)
    found = torch.zeros(len(picks), width + 1)
    found.scatter_(1, torch.from_numpy(picks), 1.0)
    return found[:, :width]


def _shares(trace: RoutingTrace, learnt: int) -> torch.Tensor:
    """How often each of the first ``learnt`` rows is drawn. Those that decode have ``_DECODE_SHARE`` in all."""
    decodes = np.ones(learnt, dtype=np.bool_)
    if trace.phase is not None:
        decodes = trace.phase[:learnt] == Phase.DECODE
    count = int(decodes.sum())
    if count in (0, learnt):
        return torch.full((learnt,), 1 / learnt)
    return torch.from_numpy(np.where(decodes, _DECODE_SHARE / count, (1 - _DECODE_SHARE) / (learnt - count)))


def _fitted(
    inputs: torch.Tensor, wanted: torch.Tensor, shares: torch.Tensor, form: ResidualForm, options: FitOptions, seed: int
) -> LayerMaps:
    """``inputs[n, H]``, ``wanted[n, M]`` of ones where an expert was picked."""
    random = torch.Generator().manual_seed(seed)
    mean, spread = inputs.mean(dim=0), inputs.std(dim=0)
    spread = spread.clamp_min(max(1e-3 * float(spread.max()), 1e-6))
    inner = form.rank or form.hidden
    up, bias = torch.zeros(inner, wanted.shape[1]), torch.zeros(wanted.shape[1])
    parameters = [up, bias]
    down, offset = torch.zeros(0), torch.zeros(form.rank)
    if form.rank:
        down = torch.randn(form.hidden, form.rank, generator=random) / form.hidden**0.5
        up.normal_(0, form.rank**-0.5, generator=random)
        parameters += [down, offset]

    def logits(some: torch.Tensor) -> torch.Tensor:
        if form.rank:
            some = some @ down + offset
        return (nn.functional.silu(some) if form.silu else some) @ up + bias

    for one in parameters:
        one.requires_grad_()
    adam = torch.optim.Adam(parameters, lr=options.learning_rate)
    falling = torch.optim.lr_scheduler.OneCycleLR(adam, options.learning_rate, total_steps=options.steps)
    with torch.enable_grad():
        for _ in range(options.steps):
            some = torch.multinomial(shares, options.batch, replacement=True, generator=random)
            found = logits((inputs[some] - mean) / spread)
            loss = nn.functional.binary_cross_entropy_with_logits(found, wanted[some])
            adam.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            adam.step()
            falling.step()
    for one in parameters:
        one.requires_grad_(False)
    # The rows' own scale is multiplied into the first matrix.
    first = (down if form.rank else up) / spread[:, None]
    shift = mean @ first
    if form.rank:
        return LayerMaps(_half(first), (offset - shift).numpy(), _half(up), bias.numpy())
    return LayerMaps(None, offset.numpy(), _half(first), (bias - shift).numpy())


def _half(matrix: torch.Tensor) -> NDArray[np.float16]:
    most = float(np.finfo(np.float16).max)
    found: NDArray[np.float16] = matrix.clamp(-most, most).half().numpy()
    return found


def _recall(made: ResidualFile, rows: NDArray[np.float16], picked: Sequence[torch.Tensor]) -> list[float]:
    """By layers ahead, the share of the picks that are among a row's likeliest, as many as the row picked."""
    maps = ResidualMaps(made, dtype=torch.float32)
    named: dict[int, list[float]] = {ahead: [] for ahead in range(1, made.of.ahead + 1)}
    for layer in range(len(picked) - 1):
        inputs = torch.from_numpy(rows[:, layer].astype(np.float32))
        for target in maps.targets(layer):
            found, right = maps.logits(layer, target, target + 1, inputs), picked[target]
            count = right.sum(dim=1, keepdim=True)
            places = found.argsort(dim=1, descending=True).argsort(dim=1)
            hits = ((places < count) * right).sum()
            named[target - layer].append(float(hits / count.sum().clamp_min(1)))
    return [round(float(np.mean(each)), 4) for each in named.values()]
