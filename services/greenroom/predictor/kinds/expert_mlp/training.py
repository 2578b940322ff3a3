"""ExpertMLP out of recorded routing (DuoServe-MoE, §4.2): binary cross-entropy over experts (Eq. 6)."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from greenroom.core.artifacts.expert_mlp_file import ExpertMlpFile
from greenroom.policies.duoserve.mlp_states import StateConstructor
from greenroom.predictor.kinds.expert_mlp.network import ExpertMlp
from greenroom.predictor.kinds.expert_mlp.shares import ExpertShares, many_hot
from greenroom.replay.traces.held_out import sequences_to_learn_from
from greenroom.replay.traces.routing_trace import RoutingTrace

LEAST_TOKENS: Final = 500
"""Fewer say less of a pair of experts than chance does."""
_HELD_OUT_SAMPLES: Final = 20_000


@dataclass(frozen=True, slots=True)
class TrainingOptions:
    """``ahead``: layers. ``many_hot``: how the input has earlier picks, see ``StateConstructor``. A sample is one layer
    of one token; ``samples`` of them are drawn by ``seed``, if there are as many, and seen ``epochs`` times in batches
    of ``batch``. ``held_out``: the share of the sequences that are not learnt from, the last ones, at least one.
    ``bfloat16``: multiply in that precision, which is faster on processors that can.
    """

    ahead: int = 1
    many_hot: bool = False
    samples: int = 200_000
    epochs: int = 6
    batch: int = 512
    learning_rate: float = 2e-3
    held_out: float = 0.1
    seed: int = 0
    bfloat16: bool = False


def train(
    trace: RoutingTrace, options: TrainingOptions | None = None, *, on_batch: Callable[[int], object] = lambda _: None
) -> ExpertMlpFile:
    """``on_batch`` is told how many samples were seen. The rate of learning falls to 0 along a cosine.

    The same routing and seed give the same network on the same machine. Raises InvalidConfig where there is too little
    to learn from.
    """
    began, options = time.monotonic(), options or TrainingOptions()
    learnt_sequences = sequences_to_learn_from(trace, options.held_out, least=LEAST_TOKENS)
    learnt = trace.part(0, learnt_sequences)
    states = StateConstructor(
        ExpertShares.of_trace(learnt, options.ahead), int(trace.experts.shape[2]), options.many_hot
    )
    random = np.random.default_rng(options.seed)
    samples = _drawn(learnt, states, options.samples, random)
    held_out = _drawn(trace.part(learnt_sequences), states, _HELD_OUT_SAMPLES, random)
    before = torch.get_rng_state()
    torch.manual_seed(options.seed)
    try:
        network = ExpertMlp(states.width, states.shares.popularity.shape[1])
        _learn(network, samples, options, random, on_batch)
    finally:
        torch.set_rng_state(before)
    return ExpertMlpFile(
        model=trace.model,
        experts_per_layer=tuple(trace.experts_per_layer.tolist()),
        sequences=trace.sequences,
        form=np.array(states.form, dtype=np.uint16),
        popularity=states.shares.popularity.astype(np.float16),
        affinity=states.shares.affinity.astype(np.float16),
        weights=network.folded().astype(np.float16),
        report={
            "samples": len(samples),
            "epochs": options.epochs,
            "held_out_samples": len(held_out),
            "held_out_loss": round(_loss_on(network, held_out, options.batch), 5),
            "seconds": round(time.monotonic() - began, 1),
        },
    )


@dataclass(frozen=True, slots=True, eq=False)
class _Samples:
    """Layers ``layers[n]`` of tokens with ``picks[n, L, k]``. States are put together batch by batch: all at once
    would take a gigabyte."""

    states: StateConstructor
    picks: NDArray[np.integer]
    layers: NDArray[np.intp]

    def __len__(self) -> int:
        return len(self.layers)

    def some(self, places: NDArray[np.intp]) -> tuple[Tensor, Tensor]:
        """States and targets, ``[n, width]`` and ``[n, experts]``."""
        picks, layers = self.picks[places], self.layers[places]
        targets = many_hot(picks[np.arange(len(picks)), layers], self.states.shares.popularity.shape[1])
        return torch.from_numpy(self.states.states(picks, layers)), torch.from_numpy(targets)


def _drawn(trace: RoutingTrace, states: StateConstructor, most: int, random: np.random.Generator) -> _Samples:
    """At most so many of the trace's layers from ``ahead`` on, in which the token picked something, each once."""
    ahead = states.shares.ahead
    routed = (trace.experts[:, ahead:] < trace.experts_per_layer[ahead:, None]).any(axis=2)
    rows, layers = np.nonzero(routed)
    chosen = random.permutation(len(rows))[:most]
    return _Samples(states, trace.experts[rows[chosen]], layers[chosen] + ahead)


def _learn(
    network: ExpertMlp,
    samples: _Samples,
    options: TrainingOptions,
    random: np.random.Generator,
    on_batch: Callable[[int], object],
) -> None:
    """Leaves the network as it predicts, without dropout."""
    optimiser = torch.optim.Adam(network.parameters(), options.learning_rate, fused=True)
    starts = range(0, max(1, len(samples) - options.batch + 1), options.batch)  # whole batches, for batch norm
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, max(1, options.epochs * len(starts)))
    network.train()
    for _ in range(options.epochs):
        order = random.permutation(len(samples))
        for start in starts:
            states, targets = samples.some(order[start : start + options.batch])
            optimiser.zero_grad()
            with torch.autocast("cpu", torch.bfloat16, enabled=options.bfloat16):
                logits = network(states)
            loss = nn.functional.binary_cross_entropy_with_logits(logits.float(), targets)
            loss.backward()  # type: ignore[no-untyped-call]
            optimiser.step()
            schedule.step()
            on_batch(len(states))
    network.eval()


def _loss_on(network: ExpertMlp, samples: _Samples, batch: int) -> float:
    """Log loss an expert."""
    total = 0.0
    with torch.inference_mode():
        for start in range(0, len(samples), batch):
            states, targets = samples.some(np.arange(start, min(start + batch, len(samples))))
            loss = nn.functional.binary_cross_entropy_with_logits(network(states), targets)
            total += float(loss) * len(states)
    return total / max(1, len(samples))
