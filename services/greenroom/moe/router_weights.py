"""Hearing what weights the routers give to the experts that they pick."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

import torch

from greenroom.moe.seats import Seat, has_seat, seat_of

WeightsObserver = Callable[[int, torch.Tensor, torch.Tensor], None]
"""Told ``(layer, picks[T, k], weights[T, k])`` before the layer's experts run; a pick at or above the number of experts
is none."""


class RouterWeights:
    """While it is open, ``observer`` hears of every layer of ``model``, which was loaded by greenroom.

    Rows go through the model's modules meanwhile, whose experts are handed picks and weights in every family. To be
    opened and closed while no forward runs.
    """

    def __init__(self, model: torch.nn.Module, observer: WeightsObserver) -> None:
        self._experts: list[Any] = [one for one in model.modules() if has_seat(one)]
        self._observer = observer
        self._closing: list[Callable[[], object]] = []

    def __enter__(self) -> Self:
        for experts in self._experts:
            self._closing.append(experts.register_forward_pre_hook(self._hook(seat_of(experts))).remove)
        stage = seat_of(self._experts[0]).stage
        before = stage.on_router_logits
        if before is None:
            stage.on_router_logits = _nothing  # compiled layers pass the modules by where nobody wants their outputs
        self._closing.append(lambda: setattr(stage, "on_router_logits", before))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        while self._closing:
            self._closing.pop()()

    def _hook(self, seat: Seat) -> Callable[..., None]:
        def hear(_: torch.nn.Module, args: tuple[torch.Tensor, ...]) -> None:
            picks, weights = args[1:]
            if picks.dim() == 3:  # Switch Transformers: one-hot [T, 1, experts], all zero where there was no room
                one_hot = picks[:, 0]
                picks = torch.where(one_hot.any(dim=-1), one_hot.argmax(dim=-1), one_hot.shape[-1])[:, None]
            self._observer(seat.layer, picks, weights)

        return hear


def _nothing(layer: int, logits: torch.Tensor) -> None:
    pass
