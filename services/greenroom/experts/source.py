"""What a model's forward pass asks of whoever holds the experts."""

from __future__ import annotations

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


class ExpertSource(Protocol):
    """Held by the model's hooks. Called from the one thread that owns the model, layers in ascending order.

    ``layer`` counts the MoE layers from 0 (a dense first layer is not counted); experts are numbered from 0
    within their layer.
    """

    def step(self, sequences: NDArray[np.int64], prefill: NDArray[np.bool_]) -> AbstractContextManager[None]:
        """One forward. ``sequences[T]``: which sequence each row belongs to; ``prefill[T]``: its phase."""
        ...

    def layer_entered(self, layer: int) -> None:
        """The layer's attention is about to run."""
        ...

    def allowed_experts(self, layer: int) -> NDArray[np.bool_] | None:
        """Row mask ``[T, experts]`` of the experts the router may pick from, ``[1, experts]`` where it is the same for
        all rows; None: all. One that was given before may be given again, written anew in between.
        """
        ...

    def rerouted(self, layer: int, rows: NDArray[np.bool_]) -> None:
        """Which ``rows[T]``, if any, were given other experts than they would have been without the mask."""
        ...

    def routed(self, layer: int, picks: NDArray[np.int64]) -> AbstractContextManager[Arriving]:
        """The layer's router picked ``picks[T, k]`` (a pick at or above the number of experts is none).

        Every distinct picked expert comes exactly once with its weights, in an order of the source's own choosing. A
        list: all are here, and stay until the context is left. An iterator: asking for the next one says that the
        previous is done with. Raises TransferFailed where one can not be had. Leaving the context releases whatever
        is still held.
        """
        ...


@runtime_checkable
class PredictsFor(Protocol):
    """A source whose policy asks for predictions; what can make them takes the requests and answers.

    ``asks``: the kinds it may ask for, fixed while it lives; no other need be looked for.
    """

    asks: frozenset[str]

    def take_request(self, kind: str) -> PredictionRequest | None:
        """The newest request of this kind that nobody has taken, if there is one."""
        ...

    def predicted(self, prediction: Prediction) -> None:
        """The answer to one; on the thread that owns the source."""
        ...

    def mark(self) -> Mark:
        """Of all that the device has been given so far. Raises RuntimeError where the model computes in RAM."""
        ...


@runtime_checkable
class ResidentInRam(Protocol):
    """A source that may have all that a layer's router picks in memory that computes: then one call runs it."""

    def resident_addresses(self, layer: int, picks: NDArray[np.int64]) -> NDArray[np.int64] | None:
        """Addresses ``[E, n]`` of the tensors of the layer's experts, of those at least that ``picks[T, k]`` names,
        valid until ``layer_ran``; None: ask ``routed``. One array that was given before may be given again, as above.
        """
        ...

    def layer_ran(self, layer: int, experts: int) -> None:
        """The layer has run; so many different experts were picked."""
        ...
