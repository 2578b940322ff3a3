"""What happens to a pool: the events and questions that its policies get.

Arrays in events are the caller's: read them during the call, copy what is kept, never write to them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum
from typing import Final

import numpy as np
from numpy.typing import NDArray

from greenroom.policies.base.array_types import NO_KEYS, Counts, Ids, Keys, Mask, Scores
from greenroom.policies.base.expert_keys import Catalogue

UNKNOWN_TASK: Final = "unknown"

ROUTER: Final = "router"
"""The kind of prediction that layers' own routers give, run on the rows of an earlier layer of the same step."""


class Phase(IntEnum):
    """What a row of a step is part of."""

    PREFILL = 0
    DECODE = 1
    ENCODE = 2
    """The encoder pass of an encoder-decoder."""


class Tier(IntEnum):
    """Where an expert can be, nearest to the computation first.

    On a machine without an accelerator DEVICE is the arena in RAM, DISK lies under it and HOST is absent.
    """

    DEVICE = 0
    HOST = 1
    DISK = 2


class Reason(StrEnum):
    """Why an expert is moved, or why room is made."""

    ON_DEMAND = "on-demand"
    """The running layer waits for it."""
    PREFETCH = "prefetch"
    """The policy's ``prefetch`` priorities."""
    TARGET = "target"
    """The policy's ``target`` set, or experts that are brought and waited for before anything runs."""
    FILL = "fill"
    """The first fill, behind everything else. On the device it takes free slots alone. On the host, experts that the
    device has too make room for it."""
    BUDGET = "budget"
    """The tier's budget shrank."""


class SequenceEnd(StrEnum):
    """How a sequence ended."""

    FINISHED = "finished"
    CANCELLED = "cancelled"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class SequenceInfo:
    """A request that is queued or generated here. ``sequence`` is never used again while the process lives.

    ``expected_tokens``: how many tokens it is expected to generate (profiled for its task, or the request's
    own limit). ``expert``: in a graph of whole models, the key of the one that it waits for.
    """

    sequence: int
    task: str = UNKNOWN_TASK
    prompt_tokens: int = 0
    expected_tokens: int = 0
    expert: int | None = None


_DECODE: Final = np.uint8(Phase.DECODE)
"""Comparing with the enum's member takes ten times as long."""


class Step:
    """One forward: which sequence and which phase each of its rows belongs to.

    ``number`` rises from step to step; two steps may be in flight. ``row_sequences[T]`` are sequence ids,
    ``row_phases[T]`` values of Phase. Rows of one sequence need not lie side by side. ``row_tokens[T]``: the token that
    each row is of. ``row_paths[T, N]``: the chance that each row picks each expert, foretold before the forward
    (``TokenPaths``). None: not known.
    """

    __slots__ = ("_rows_of", "_sequences", "number", "pool", "row_paths", "row_phases", "row_sequences", "row_tokens")

    def __init__(
        self,
        pool: str,
        number: int,
        row_sequences: Ids,
        row_phases: NDArray[np.uint8],
        row_tokens: Ids | None = None,
        row_paths: Scores | None = None,
    ) -> None:
        self.pool = pool
        self.number = number
        self.row_sequences = row_sequences
        self.row_phases = row_phases
        self.row_tokens = row_tokens
        self.row_paths = row_paths
        self._sequences: Ids | None = None
        self._rows_of: Ids | None = None

    @property
    def rows(self) -> int:
        """Number of rows."""
        return len(self.row_sequences)

    @property
    def phase(self) -> Phase | None:
        """The phase of all rows, None where they differ or there is none."""
        if len(self.row_phases) == 0 or (self.row_phases != self.row_phases[0]).any():
            return None
        return Phase(int(self.row_phases[0]))

    @property
    def has_prompt_rows(self) -> bool:
        """Whether a row belongs to a prompt, which one of an encoder does too."""
        return bool(np.count_nonzero(self.row_phases != _DECODE))

    @property
    def sequences(self) -> Ids:
        """The distinct sequences ``[S]``, ascending. Found when first asked for."""
        if self._sequences is None:
            self._sequences, self._rows_of = np.unique(self.row_sequences, return_inverse=True)
        return self._sequences

    @property
    def sequence_of_row(self) -> Ids:
        """For each row the position of its sequence in ``sequences``: ``[T]``."""
        if self._rows_of is None:
            self._sequences, self._rows_of = np.unique(self.row_sequences, return_inverse=True)
        return self._rows_of


_ONES: Counts = np.ones(1024, dtype=np.int64)
_ONES.setflags(write=False)


class LayerRouting:
    """A layer's rows are routed; its experts have not run yet.

    ``experts[m]``: the distinct experts picked, in the order in which they count as used (the engine: ascending
    keys). ``rows[m]``: how many rows each of them got. ``picks[T, k]``: the router's own output, expert indices
    *within the layer*, one at or above the number of experts being none; None where it was not recorded.
    """

    __slots__ = ("_by_sequence", "catalogue", "experts", "layer", "picks", "rows", "step")

    def __init__(
        self,
        catalogue: Catalogue,
        step: Step,
        layer: int,
        experts: Keys,
        rows: Counts,
        picks: NDArray[np.integer] | None = None,
    ) -> None:
        self.catalogue = catalogue
        self.step = step
        self.layer = layer
        self.experts = experts
        self.rows = rows
        self.picks = picks
        self._by_sequence: Counts | None = None

    @classmethod
    def from_picks(cls, catalogue: Catalogue, step: Step, layer: int, picks: NDArray[np.integer]) -> LayerRouting:
        """From the router's output ``picks[T, k]``; indices at or above the number of experts are no picks."""
        span = catalogue.spans[layer]
        experts = span.stop - span.start
        if len(picks) == 1:
            own = [pick for pick in picks[0].tolist() if pick < experts]
            distinct = sorted(set(own))
            if len(distinct) == len(own):
                keys = np.array(distinct, dtype=np.int64) + span.start
                return cls(catalogue, step, layer, keys, _ONES[: len(own)], picks)
        counts = np.bincount(picks.ravel(), minlength=experts)[:experts]
        indices = np.flatnonzero(counts)
        return cls(catalogue, step, layer, indices + span.start, counts[indices], picks)

    def by_sequence(self) -> Counts:
        """Rows of each sequence of the step routed to each expert of this layer: ``[S, experts of the layer]``.

        Rows of ``step.sequences``. Computed when first asked for. Raises ValueError where picks were not recorded.
        """
        if self._by_sequence is None:
            if self.picks is None:
                raise ValueError("the router's picks were not recorded with this event")
            experts = int(self.catalogue.experts_per_layer[self.layer])
            sequences = len(self.step.sequences)
            cells = self.step.sequence_of_row[:, None] * experts + self.picks
            flat = np.bincount(cells[self.picks < experts], minlength=sequences * experts)
            self._by_sequence = flat.reshape(sequences, experts)
        return self._by_sequence


@dataclass(frozen=True, slots=True)
class Transfer:
    """One expert on its way, or arrived, from ``source`` to ``target``. ``error`` says why it failed, if it did."""

    expert: int
    source: Tier
    target: Tier
    reason: Reason
    error: str | None = None


@dataclass(frozen=True, slots=True, eq=False)
class VictimRequest:
    """Room is needed in a tier.

    ``bytes_needed``: what the victims must free at least. ``evictable[N]``: experts that may go. Pinned experts, those
    in flight, and those that the running layer still needs may not. ``resident[N]``: experts in the tier. Both without
    experts whose slots are of another size.
    ``incoming``: experts that the room is for, the most urgent first (none when a budget shrinks).
    """

    tier: Tier
    bytes_needed: int
    evictable: Mask
    resident: Mask
    reason: Reason = Reason.ON_DEMAND
    incoming: Keys = field(default_factory=lambda: NO_KEYS)


@dataclass(frozen=True, slots=True, eq=False)
class PredictionRequest:
    """A policy asks a provider (a learned or profiled predictor, or a router run ahead of its layer).

    ``kind``: the provider's name. ``layers``: MoE layers ``[start, stop)`` asked for. ``step``: the step that it is
    for, None where it is for requests to come. ``sequences``: those that it is for (empty: none in particular).
    ``task``: the task type that it is for (None: none in particular). ``features``: the provider's input, where the
    policy knows it.
    """

    kind: str
    layers: tuple[int, int]
    step: int | None = None
    sequences: tuple[int, ...] = ()
    task: str | None = None
    features: NDArray[np.float32] | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Prediction:
    """A provider's answer. ``values[..., M]``: a weight for each of the M experts of ``request.layers``, in key
    order; leading axes, where there are any, run over ``request.sequences``, or for the kind ``router`` over the rows
    of the step. ``version`` is the artifact's.

    It may come late (its step is over), twice or not at all. The policy judges whether to use it.
    """

    request: PredictionRequest
    version: str
    values: NDArray[np.float32]


@dataclass(frozen=True, slots=True, eq=False)
class Artifact:
    """A versioned set of arrays that the predictor service published (an EAMC, popularity, coefficients).

    ``prepared``: what the policy's ``prepare`` made of it (None: it was not called).
    """

    kind: str
    version: str
    arrays: Mapping[str, NDArray[np.generic]]
    prepared: object = None
