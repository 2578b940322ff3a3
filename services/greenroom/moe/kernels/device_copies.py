"""Small copies between RAM and the device within a model's step, for which no thread waits.

A copy from or to pageable memory blocks the thread until all earlier work of the device is done, uploads of experts
included. A copy from page-locked memory is queued like other work. torch does not reuse the memory of a page-locked
tensor before the copy has ended.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from greenroom.experts.copying.accelerator import Mark


def page_locked(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """RAM that a GPU can copy from and to asynchronously, from torch's pool."""
    return torch.empty(shape, dtype=dtype, pin_memory=True)


def in_ram(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """RAM for what ``device`` computes; page-locked unless that is the CPU."""
    return torch.empty(shape, dtype=dtype) if device.type == "cpu" else page_locked(shape, dtype)


def to_device(host: torch.Tensor, device: torch.device) -> torch.Tensor:
    """``host`` on the device, for work that is queued from now on. On the CPU it is ``host`` itself."""
    if device.type == "cpu":
        return host
    return page_locked(tuple(host.shape), host.dtype).copy_(host).to(device, non_blocking=True)


class Download:
    """A copy of ``tensor`` to RAM for which no thread waits. ``mark()``: marks all work queued so far."""

    def __init__(self, tensor: torch.Tensor, mark: Callable[[], Mark]) -> None:
        self._host = page_locked(tuple(tensor.shape), tensor.dtype)
        self._host.copy_(tensor, non_blocking=True)
        self._done = mark()

    def take(self) -> torch.Tensor | None:
        """The copy, once it has arrived; None before."""
        return self._host if self._done.reached() else None
