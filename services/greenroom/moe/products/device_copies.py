"""Small copies between RAM and the device that a model's step makes itself, without making its thread wait.

A copy from or to pageable memory blocks the thread until all that the device was given before is done, uploads of
experts among it. From page-locked memory it is queued like any other work. torch keeps a page-locked tensor's memory
from its next user until the copy is over.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from greenroom.experts.copying.accelerator import Mark


def page_locked(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """RAM that a GPU copies from and to by itself, from a pool that torch keeps."""
    return torch.empty(shape, dtype=dtype, pin_memory=True)


def to_device(host: torch.Tensor, device: torch.device) -> torch.Tensor:
    """``host`` on the device, for what is queued there from now on; itself where the device is the CPU."""
    if device.type == "cpu":
        return host
    return page_locked(tuple(host.shape), host.dtype).copy_(host).to(device, non_blocking=True)


class Download:
    """A copy of ``tensor`` to RAM that nobody waits for. ``mark``: of all that the device has been given so far."""

    def __init__(self, tensor: torch.Tensor, mark: Callable[[], Mark]) -> None:
        self._host = page_locked(tuple(tensor.shape), tensor.dtype)
        self._host.copy_(tensor, non_blocking=True)
        self._done = mark()

    def take(self) -> torch.Tensor | None:
        """What was copied, once it is here; None before."""
        return self._host if self._done.reached() else None
