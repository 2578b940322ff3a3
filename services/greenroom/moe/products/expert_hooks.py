"""What ties the modules of a loaded model to the source of its experts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch

from greenroom.experts.source import ExpertSource
from greenroom.moe.products.native.rows import NativeRows

RouterObserver = Callable[[int, torch.Tensor], None]
"""Told ``(layer, logits[T, experts])`` by every router, before any mask; the tensor is the router's own."""

_ATTRIBUTE = "_greenroom_seat"


class Foresight(Protocol):
    """Told of a layer's rows; may have an answer for the source of experts, then or later."""

    def __call__(self, layer: int, rows: torch.Tensor) -> None:
        """The experts of ``layer`` have been asked for, and get these ``rows[T, H]``; none of them runs yet."""
        ...

    def answer(self) -> None:
        """Give the answer that is pending, if there is one and it is there by now. Does not wait for the device."""
        ...


class Stage:
    """One loaded model's link to whoever holds its experts; all None until attached."""

    def __init__(self) -> None:
        self.source: ExpertSource | None = None
        self.on_router_logits: RouterObserver | None = None
        self.look_ahead: Foresight | None = None


class Seat:
    """What an experts module knows: the number of its MoE layer (from 0), the stage that it belongs to, the compiled
    products that compute it (None: torch does), and why its router can not be masked (None: it can).

    ``rerouted[T]``: what the layer's router found on a device under a mask, until the picks are copied from there; it
    travels with them.
    """

    __slots__ = ("layer", "masking", "native", "rerouted", "stage")

    def __init__(self, layer: int, stage: Stage, native: NativeRows | None = None, masking: str | None = None) -> None:
        self.layer = layer
        self.masking = masking
        self.stage = stage
        self.native = native
        self.rerouted: torch.Tensor | None = None

    @property
    def source(self) -> ExpertSource:
        """Raises RuntimeError before one was attached."""
        if self.stage.source is None:
            raise RuntimeError("this model's experts are elsewhere: attach a source of experts before running it")
        return self.stage.source


def take_seat(module: torch.nn.Module, seat: Seat) -> None:
    object.__setattr__(module, _ATTRIBUTE, seat)


def seat_of(module: torch.nn.Module) -> Seat:
    seat: Any = getattr(module, _ATTRIBUTE, None)
    if not isinstance(seat, Seat):
        raise RuntimeError(f"{type(module).__name__} was not loaded by greenroom: it has no seat")
    return seat
