"""What a model's forward pass asks of the source of its experts."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from greenroom.experts.copying.accelerator import Mark
from greenroom.experts.pack.layout import ExpertWeights
from greenroom.policies.base.events import Prediction, PredictionRequest

Arriving = list[tuple[int, ExpertWeights]] | Iterator[tuple[int, ExpertWeights]]
"""A layer's picked experts: see ExpertSource.routed."""


class Landing(Iterator[tuple[int, ExpertWeights]]):
    """Experts as they land, of a source that says which come next.

    ``coming``: the weights of those that come next, in this order, as far as they have arrived: work on them waits for
    no copy. Their slots are not filled anew before each of them has been handed out and has run.
    """

    __slots__ = ("_experts", "coming")

    def __init__(self, experts: Iterator[tuple[int, ExpertWeights]], coming: deque[ExpertWeights]) -> None:
        self._experts = experts
        self.coming = coming

    def __next__(self) -> tuple[int, ExpertWeights]:
        return next(self._experts)


class ExpertSource(Protocol):
    """Held by the model's hooks. Called by the one thread that owns the model, for layers in ascending order.

    ``layer`` counts the MoE layers from 0, without dense layers. Experts are numbered from 0 within their layer.
    """

    def step(
        self,
        sequences: NDArray[np.int64],
        prefill: NDArray[np.bool_],
        tokens: NDArray[np.int64] | None = None,
        paths: NDArray[np.float32] | None = None,
    ) -> AbstractContextManager[None]:
        """One forward. ``sequences[T]``: which sequence each row belongs to; ``prefill[T]``: its phase; ``tokens[T]``
        and ``paths[T, N]``: see ``policies.base.events.Step``.
        """
        ...

    def layer_entered(self, layer: int) -> None:
        """The layer's attention is about to run."""
        ...

    def allowed_experts(self, layer: int) -> NDArray[np.bool_] | None:
        """A mask of the experts that the router may pick: ``[T, experts]``, or ``[1, experts]`` for all rows alike.
        None: all experts. The same array may be returned again with new contents.
        """
        ...

    def rerouted(self, layer: int, rows: NDArray[np.bool_]) -> None:
        """``rows[T]``: whether the mask has changed the row's picks."""
        ...

    def routed(self, layer: int, picks: NDArray[np.int64]) -> AbstractContextManager[Arriving]:
        """The layer's router picked ``picks[T, k]``. A pick at or above the number of experts is none.

        Yields each distinct picked expert once with its weights, in any order. From a list: all are resident, and stay
        so until the context is left. From an iterator: asking for the next expert says that the last one has run; if
        it is a ``Landing`` it says which come next.
        Raises TransferFailed if an expert can not be fetched. Leaving the context releases all.
        """
        ...


@runtime_checkable
class HearsPlans(Protocol):
    """A source that is told of the forward after the one that is about to start."""

    def step_planned(
        self,
        sequences: NDArray[np.int64],
        prefill: NDArray[np.bool_],
        tokens: NDArray[np.int64] | None = None,
        paths: NDArray[np.float32] | None = None,
    ) -> None:
        """Arguments as of ``ExpertSource.step``. Called before the ``step`` that it follows. It may come with fewer
        rows, or never.
        """
        ...


@runtime_checkable
class PredictsFor(Protocol):
    """A source whose policy asks for predictions. A provider takes its requests and answers them.

    ``asks``: the kinds of predictions that it may ask for. They do not change.
    """

    asks: frozenset[str]

    def take_request(self, kind: str) -> PredictionRequest | None:
        """The newest request of this kind that was not taken yet. None: there is none."""
        ...

    def answers_at_once(self, kind: str) -> None:
        """A provider says so where it answers each request of this kind as soon as the layer has been entered
        (``routed``), before any expert runs. Policies then decide by it and by what they know already together.
        """
        ...

    def predicted(self, prediction: Prediction) -> None:
        """The answer to a request. To be called on the thread that owns the source."""
        ...

    def mark(self) -> Mark:
        """Of all work that the device has queued so far. Raises RuntimeError if the device tier is RAM."""
        ...


@runtime_checkable
class ResidentInRam(Protocol):
    """A source that may hold all picked experts of a layer in RAM. Compiled code then runs the layer in one call."""

    def resident_addresses(self, layer: int, picks: NDArray[np.int64]) -> NDArray[np.int64] | None:
        """Addresses ``[E, n]`` of the n tensors of the layer's E experts, valid until ``layer_ran``. None: call
        ``routed``. Experts that ``picks[T, k]`` does not name may be missing. The same array may be returned again with
        new contents.
        """
        ...

    def layer_ran(self, layer: int, experts: int) -> None:
        """The layer has run. ``experts``: how many distinct ones were picked."""
        ...
