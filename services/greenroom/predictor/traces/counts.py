"""What one sequence's trace says: how often each expert was picked, and which pairs followed each other."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from greenroom.core.artifacts.paths_file import LARGEST_VOCABULARY
from greenroom.core.errors import GreenroomError
from greenroom.core.messages import Trace
from greenroom.predictor.traces.samples import Tokens

Floats = npt.NDArray[np.float32]
Counts = npt.NDArray[np.uint16]
Picks = npt.NDArray[np.integer]
"""[rows, layers, k]: the experts that each row picked."""
_PICKS_AT_ONCE = 4_000_000
_PAIRS_AT_ONCE = 1_000_000


class BadTrace(GreenroomError):
    """A trace that contradicts itself or its model; nothing is learnt from it."""


@dataclass(frozen=True, slots=True, order=True)
class Shape:
    """MoE layers, and experts of each."""

    layers: int
    experts: int

    def __str__(self) -> str:
        return f"{self.layers} layers × {self.experts} experts"

    @property
    def nbytes(self) -> int:
        """Of the matrices of one task type."""
        return 4 * (self.layers + (self.layers - 1) * self.experts) * self.experts


@dataclass(frozen=True, slots=True, eq=False)
class SequenceCounts:
    """One sequence.

    ``popularity[l, e]``: share of layer l's picks that were of expert e. ``affinity[l, a, b]``: share of all pairs of
    picks, one in layer l and one in layer l + 1 by the same row, that were of a and b. Both sum to 1 in a layer, or
    to 0 where no row was routed there.
    """

    shape: Shape
    popularity: Floats
    affinity: Floats


def shape_of(trace: Trace) -> Shape:
    return Shape(trace.layers, trace.num_experts)


def picks_of(trace: Trace) -> npt.NDArray[np.uint8 | np.uint16]:
    """The experts, [rows, layers, k]. Raises BadTrace where the trace contradicts itself."""
    dtype = np.dtype(trace.dtype).newbyteorder("<")
    absent = int(np.iinfo(dtype).max)
    if trace.num_experts > absent:
        raise BadTrace(f"{trace.num_experts} experts have no room in {trace.dtype}, whose {absent} stands for none")
    if trace.k > trace.num_experts:
        raise BadTrace(f"{trace.k} picks of {trace.num_experts} experts")
    if trace.prompt_rows > trace.rows:
        raise BadTrace(f"{trace.prompt_rows} rows of a prompt in {trace.rows} rows")
    expected = trace.rows * trace.layers * trace.k * dtype.itemsize
    if len(trace.experts) != expected:
        raise BadTrace(
            f"{len(trace.experts)} bytes of experts, and {trace.rows} rows × {trace.layers} layers × {trace.k} picks "
            f"of {trace.dtype} are {expected}"
        )
    picks = np.frombuffer(trace.experts, dtype).reshape(trace.rows, trace.layers, trace.k)
    wrong = picks[(picks >= trace.num_experts) & (picks != absent)]
    if wrong.size:
        raise BadTrace(f"expert {int(wrong[0])} of a layer that has {trace.num_experts}")
    return picks


def tokens_of(trace: Trace) -> Tokens | None:
    """The id of each row's input, uint32[rows]; None where the worker does not tell them. Raises BadTrace where they
    are not those of the rows, or no ids. It does not say what they are: they are people's text."""
    if not trace.tokens:
        return None
    dtype = np.dtype("<u4")
    expected = trace.rows * dtype.itemsize
    if len(trace.tokens) != expected:
        raise BadTrace(f"{len(trace.tokens)} bytes of tokens, and {trace.rows} rows of uint32 are {expected}")
    tokens = np.frombuffer(trace.tokens, dtype)
    if (beyond := tokens >= LARGEST_VOCABULARY).any():
        raise BadTrace(f"tokens: row {int(beyond.argmax())} must be an id below {LARGEST_VOCABULARY:,}")
    return tokens


def count(trace: Trace) -> SequenceCounts:
    """Raises BadTrace. It takes little memory however many rows there are."""
    return count_picks(picks_of(trace), shape_of(trace))


def count_picks(picks: npt.NDArray[np.integer], shape: Shape) -> SequenceCounts:
    """Of ``picks`` [rows, layers, k]; those from ``shape.experts`` on are none."""
    rows, _, slots = picks.shape
    popularity = np.zeros((shape.layers, shape.experts), np.int64)
    affinity = np.zeros((shape.layers - 1, shape.experts, shape.experts), np.int64)
    step = max(1, _PAIRS_AT_ONCE // (shape.layers * slots * slots))
    for start in range(0, rows, step):
        part = picks[start : start + step].astype(np.int64)
        _add_picks(popularity, part, shape)
        _add_pairs(affinity, part, shape)
    return SequenceCounts(shape, _shares(popularity), _shares(affinity))


def count_slots(picks: Picks, experts: int) -> Counts:
    """[layers, k, experts]: how many rows of ``picks`` [rows, layers, k] went to each expert, by slot: the place among
    a row's picks. Picks from ``experts`` on are none. Scaled down where a count exceeds 65,535."""
    rows, layers, slots = picks.shape
    counts = np.zeros(layers * slots * experts, np.int64)
    offsets = (np.arange(layers * slots) * experts).reshape(layers, slots)
    step = max(1, _PICKS_AT_ONCE // (layers * slots))
    for start in range(0, rows, step):
        part = picks[start : start + step].astype(np.int64)
        counts += np.bincount((part + offsets)[part < experts], minlength=counts.size)
    most = int(counts.max(initial=0))
    if most > 0xFFFF:
        counts = -(-counts * 0xFFFF // most)  # rounded up: what was picked stays picked
    return counts.reshape(layers, slots, experts).astype(np.uint16)


def _add_picks(popularity: npt.NDArray[np.int64], picks: npt.NDArray[np.int64], shape: Shape) -> None:
    codes = picks + (np.arange(shape.layers) * shape.experts)[:, None]
    popularity += np.bincount(codes[picks < shape.experts], minlength=popularity.size).reshape(popularity.shape)


def _add_pairs(affinity: npt.NDArray[np.int64], picks: npt.NDArray[np.int64], shape: Shape) -> None:
    if affinity.size == 0:
        return
    one, other = picks[:, :-1, :, None], picks[:, 1:, None, :]
    codes = ((np.arange(shape.layers - 1) * shape.experts)[:, None, None] + one) * shape.experts + other
    here = (one < shape.experts) & (other < shape.experts)
    affinity += np.bincount(codes[here], minlength=affinity.size).reshape(affinity.shape)


def _shares(counts: npt.NDArray[np.int64]) -> Floats:
    totals = counts.sum(axis=tuple(range(1, counts.ndim)), keepdims=True)
    shares: Floats = (counts / np.maximum(totals, 1)).astype(np.float32)
    return shares
