"""With which embedding and heads the training of the form ``t5`` begins: what was counted of each token."""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

_LEAST: Final = 1e-4
"""A chance that was never seen; its logarithm is taken."""
_MARGIN: Final = 1.05
_OVERSAMPLED: Final = 16
_POWERS: Final = 3


class Start(NamedTuple):
    """``embedding[V, width]``, ``head[N, width]`` and ``bias[N]``: what the network knows before it has learnt."""

    embedding: NDArray[np.float32]
    head: NDArray[np.float32]
    bias: NDArray[np.float32]


def counted_start(
    count: NDArray[np.integer],
    picks: NDArray[np.float32],
    width: int,
    believed_after: float,
    random: np.random.Generator,
) -> Start:
    """Of rows of the embedding that were seen ``count[V]`` times, and then picked each expert ``picks[V, N]`` times.

    For each row the logits of how often it picked each expert, as if it had picked like all tokens in another
    ``believed_after`` places. What they differ from those of all tokens by is of ``width`` − 1 dimensions at most, the
    ones that say most over all places. All embeddings are of one length, as T5 divides by it: the last dimension fills
    up, and heads do not read it. Overwrites ``picks``.
    """
    usual = np.clip(picks.sum(axis=0, dtype=np.float64) / max(1, int(count.sum())), _LEAST, 1 - _LEAST)
    bias = np.log(usual / (1 - usual)).astype(np.float32)
    unlike = picks
    unlike += (believed_after * usual).astype(np.float32)
    unlike /= (count + believed_after)[:, None].astype(np.float32)
    np.clip(unlike, _LEAST, 1 - _LEAST, out=unlike)
    unlike /= 1 - unlike
    np.log(unlike, out=unlike)
    unlike -= bias
    directions = _directions(unlike, count, min(width - 1, len(bias)), random)
    spread = unlike @ directions
    longest = float(np.sqrt((spread**2).sum(axis=1)).max()) * _MARGIN + 1e-6
    scale = np.float32(np.sqrt(width) / longest)
    embedding = np.zeros((len(count), width), dtype=np.float32)
    embedding[:, : spread.shape[1]] = spread * scale
    embedding[:, -1] = np.sqrt(width - (embedding**2).sum(axis=1))
    head = np.zeros((len(bias), width), dtype=np.float32)
    head[:, : spread.shape[1]] = directions / scale
    return Start(embedding, head, bias)


def _directions(
    unlike: NDArray[np.float32], count: NDArray[np.integer], wanted: int, random: np.random.Generator
) -> NDArray[np.float32]:
    """``[N, wanted]``: the first right singular vectors of the rows, each weighing as often as it was seen.

    Found by powers of a random start (Halko, Martinsson and Tropp, 2011), since there may be thousands of experts.
    """
    weight = np.sqrt(count).astype(np.float32)[:, None]
    more = min(unlike.shape[1], wanted + _OVERSAMPLED)
    basis, _ = np.linalg.qr(random.normal(size=(unlike.shape[1], more)).astype(np.float32))
    for _ in range(_POWERS):
        basis, _ = np.linalg.qr(unlike.T @ (weight * (weight * (unlike @ basis))))
    _, _, turned = np.linalg.svd(weight * (unlike @ basis), full_matrices=False)
    found: NDArray[np.float32] = basis @ turned.T[:, :wanted]
    return found
