"""The form ``t5`` out of recorded routing (ExpertFlow, sections 3.1.2 and 5.2)."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from greenroom.core.artifacts.paths_file import PathsFile
from greenroom.core.artifacts.paths_forms.t5 import T5, UNKNOWN, T5Shape
from greenroom.core.artifacts.reuse_file import ReuseFile
from greenroom.core.errors import InvalidConfig
from greenroom.predictor.kinds.paths.t5 import T5PathNetwork
from greenroom.predictor.kinds.paths.t5_past import RowsWithLogits, weighed_with_past
from greenroom.predictor.kinds.paths.t5_samples import Batch, Piece, TokenSamples
from greenroom.predictor.kinds.paths.t5_start import counted_start
from greenroom.replay.traces.held_out import sequences_to_learn_from
from greenroom.replay.traces.routing_trace import RoutingTrace
from greenroom.replay.traces.token_numbers import texts_digest

LEAST_TOKENS: Final = 500
"""Fewer say less of a token than chance does."""
_MEASURED: Final = 4000
"""Held-out tokens that recall is measured on after an epoch."""
_MEASURED_LAST: Final = 30_000
"""The same after the last."""
_LONGEST: Final = 512
"""Tokens of a sequence that are computed at once where nothing is learnt."""
_MOST_LOGITS: Final = 2**25
"""Rows × experts by which the network is weighed against the past."""
Progress = Callable[[float], object]
"""Is told which share of the training is done."""


@dataclass(frozen=True, slots=True)
class T5Options:
    """``batch``, ``learning_rate`` and ``weight_decay`` are the paper's. Sequences are cut into pieces of ``piece``
    tokens, elsewhere in each epoch; a batch has ``batch`` of them. ``unknown``: this share of the tokens is learnt from
    as if it were not known, and ``unprompted`` of the pieces as if their prompt were not. ``believed_after``: see
    ``counted_start``. ``held_out``: the share of the sequences that are not learnt from, the last ones. ``weighed``:
    the share of the others by which the network is weighed against the past, and which it does not learn from.
    ``least_sequences``: a token that fewer sequences have is not listed, and learnt from as one that is not known.
    ``seconds``: in which it is to be done; the rate of learning has then fallen to 0, whatever was seen.
    """

    shape: T5Shape = field(default_factory=T5Shape)
    epochs: int = 6
    batch: int = 16
    piece: int = 64
    learning_rate: float = 1e-3
    weight_decay: float = 0.01
    dropout: float = 0.1
    unknown: float = 0.1
    unprompted: float = 0.5
    believed_after: float = 2.0
    held_out: float = 0.1
    weighed: float = 0.1
    least_sequences: int = 1
    seed: int = 0
    seconds: float | None = None


def fit_t5(
    trace: RoutingTrace,
    prompts: Sequence[NDArray[np.integer]] | None = None,
    options: T5Options | None = None,
    *,
    reuse: ReuseFile | None = None,
    on_progress: Progress = lambda _: None,
    now: Callable[[], float] = time.monotonic,
) -> PathsFile:
    """``prompts``: of each sequence, in the trace's token ids, where the trace has no rows of them. ``reuse`` says what
    is known of each token's sequence; without it only tokens count.

    The same routing, seed and number of threads give the same network on the same machine, where ``seconds`` suffice.
    Raises InvalidConfig where there is too little to learn from, or ``reuse`` is another model's; TraceError for a
    trace without tokens.
    """
    began, options = now(), options or T5Options()
    options.shape.check()
    widths = tuple(trace.experts_per_layer.tolist())
    if reuse is not None and reuse.experts_per_layer != widths:
        raise InvalidConfig("reuse", reuse.shape, f"coefficients of the traced model, {trace.layers} layers")
    measured = learnt = sequences_to_learn_from(trace, options.held_out, least=LEAST_TOKENS)
    if reuse is not None:
        learnt = sequences_to_learn_from(trace.part(0, measured), options.weighed, least=LEAST_TOKENS)
    samples = TokenSamples.of(trace, prompts, options.shape.prompt, learnt, options.least_sequences)
    random = np.random.default_rng(options.seed)
    before = torch.get_rng_state()
    torch.manual_seed(options.seed)
    try:
        network = T5PathNetwork(options.shape, len(samples.tokens), samples.size, dropout=options.dropout)
        count, picks = samples.counted(learnt)
        popularity = picks.sum(axis=0) / max(1, int(count.sum()))
        network.begin_with(counted_start(count, picks, options.shape.width, options.believed_after, random))
        recalls = _learn(network, samples, range(learnt), range(measured, trace.sequences), options, random,
                         on_progress, now)  # fmt: skip
    finally:
        torch.set_rng_state(before)
    recall: Mapping[str, float] = {"alone": recalls[-1]}
    past: Mapping[str, NDArray[Any]] = {}
    if reuse is not None:
        rows = _with_logits(network, samples, trace, learnt, measured)
        past, recall = weighed_with_past(rows, popularity, reuse)
    shape = np.array(options.shape, dtype=np.uint16)
    return PathsFile(
        model=trace.model,
        experts_per_layer=widths,
        sequences=trace.sequences,
        form=T5,
        vocabulary=samples.vocabulary,
        tensors={"shape": shape, "tokens": samples.tokens.astype(np.uint32), **network.tensors(), **past},
        report={
            "epochs": len(recalls) - 1,
            "parameters": sum(one.numel() for one in network.parameters()),
            "known_tokens": len(samples.tokens),
            "least_sequences": options.least_sequences,
            "tokens": int(trace.seq_starts[learnt]),
            "held_out_tokens": trace.tokens - int(trace.seq_starts[measured]),
            "recall": {name: round(one, 4) for name, one in recall.items()},
            "recall_by_epoch": [round(one, 4) for one in recalls],
            "numbered_texts": texts_digest(trace),
            "seconds": round(now() - began, 1),
        },
    )


def _with_logits(
    network: T5PathNetwork, samples: TokenSamples, trace: RoutingTrace, learnt: int, measured: int
) -> RowsWithLogits:
    """Of the sequences that were not learnt from, as far as memory is for them; those from ``measured`` on are measured
    by."""
    starts, room = trace.seq_starts, _MOST_LOGITS // samples.size // 2
    first = max(learnt, int(np.searchsorted(starts[: measured + 1], starts[measured] - room)))
    last = int(np.searchsorted(starts, starts[measured] + room, side="right")) - 1
    part = range(min(first, measured - 1), max(last, measured + 1))
    rows = slice(int(starts[part.start]), int(starts[part.stop]))
    network.eval()
    logits = np.empty((rows.stop - rows.start, samples.size), dtype=np.float32)
    picked = np.empty_like(logits)
    for piece in samples.pieces(part, _LONGEST, None):
        batch, place = samples.batch([piece]), slice(piece.begin - rows.start, piece.end - rows.start)
        with torch.inference_mode():
            logits[place] = network(batch.prompts, batch.tokens)[0].numpy()
        picked[place] = batch.picked[0].numpy()
    weighed = int(starts[measured]) - rows.start
    return RowsWithLogits(trace.part(part.start, part.stop), logits, picked, samples.unknown(rows), weighed)


class _Schedule:
    """How much of the training is done: by steps, or by time where that ends sooner."""

    def __init__(self, seconds: float | None, now: Callable[[], float]) -> None:
        self._seconds, self._now, self._began = seconds, now, now()

    def share(self, by_steps: float) -> float:
        by_time = 0.0 if self._seconds is None else (self._now() - self._began) / max(self._seconds, 1e-9)
        return min(1.0, max(by_steps, by_time))


def _learn(
    network: T5PathNetwork,
    samples: TokenSamples,
    learnt: range,
    measured: range,
    options: T5Options,
    random: np.random.Generator,
    on_progress: Progress,
    now: Callable[[], float],
) -> list[float]:
    """Recall on the ``measured`` sequences, before the first and after each epoch. The rate of learning falls to 0
    along a cosine."""
    optimiser = torch.optim.AdamW(network.parameters(), options.learning_rate, weight_decay=options.weight_decay)
    schedule, done = _Schedule(options.seconds, now), 0.0
    recalls = [_recall(network, samples, measured, _MEASURED)]
    for epoch in range(options.epochs):
        network.train()
        batches = list(_batches(samples.pieces(learnt, options.piece, random), options.batch, random))
        for number, pieces in enumerate(batches):
            for group in optimiser.param_groups:
                group["lr"] = options.learning_rate * (1 + math.cos(math.pi * done)) / 2
            _step(network, optimiser, _hidden(samples.batch(pieces), options))
            done = schedule.share((epoch + (number + 1) / len(batches)) / options.epochs)
            on_progress(done)
            if done >= 1:
                break
        recalls.append(_recall(network, samples, measured, _MEASURED_LAST if done >= 1 else _MEASURED))
        if done >= 1:
            break
    return recalls


def _batches(pieces: list[Piece], size: int, random: np.random.Generator) -> Iterator[list[Piece]]:
    order = random.permutation(len(pieces))
    for start in range(0, len(pieces), size):
        yield [pieces[place] for place in order[start : start + size]]


def _hidden(batch: Batch, options: T5Options) -> Batch:
    """The same, with tokens and prompts that are not known."""
    prompts, tokens, picked = batch
    unprompted = torch.rand(len(prompts), 1) < options.unprompted
    prompts, tokens = (
        torch.where((one != 0) & (torch.rand(one.shape) < options.unknown), UNKNOWN, one) for one in (prompts, tokens)
    )
    filled = (torch.arange(prompts.shape[1]) == 0).long() * UNKNOWN
    return Batch(torch.where(unprompted, filled, prompts), tokens, picked)


def _step(network: T5PathNetwork, optimiser: torch.optim.Optimizer, batch: Batch) -> None:
    real = batch.tokens != 0
    logits = network(batch.prompts, batch.tokens)[real]
    # A sum over layers, as Eq. 3 has it, is the same but for a factor, which Adam does not feel.
    loss = nn.functional.binary_cross_entropy_with_logits(logits, batch.picked[real])
    optimiser.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call]
    nn.utils.clip_grad_norm_(network.parameters(), 1.0)
    optimiser.step()


def _recall(network: T5PathNetwork, samples: TokenSamples, sequences: range, most: int) -> float:
    """Of at most so many tokens' picks the share that is among the likeliest of its layer, as many as were picked."""
    network.eval()
    hits, total, rows = 0.0, 0.0, 0
    for piece in samples.pieces(sequences, _LONGEST, None):
        batch = samples.batch([piece])
        with torch.inference_mode():
            found = network(batch.prompts, batch.tokens)[0].numpy()
        hit, count = samples.hits(found, batch.picked[0].numpy())
        hits, total, rows = hits + hit, total + count, rows + len(found)
        if rows >= most:
            break
    return hits / max(1, total)
