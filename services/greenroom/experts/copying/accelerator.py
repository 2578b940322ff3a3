"""What the engine needs of a device that has its own memory and works asynchronously: the seam for CUDA.

Such a device has three queues of work (CUDA's streams). The *compute* queue is filled by the model's forward, on the
thread that owns the model. The *copy* queue belongs to the engine and is filled by the movers' threads. The
*prediction* queue is for what is computed beside the model (DuoServe-MoE §5.3), by the thread that owns it. Work in one
queue runs in the order in which it was queued. Only marks order work between the queues. Nothing here waits for a whole
device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch


class Mark(Protocol):
    """A point in a queue (CUDA's event). It is reached when all work queued before it is done."""

    def reached(self) -> bool: ...

    def wait(self) -> None:
        """Block the calling thread, and no other, until it is reached."""
        ...


class Accelerator(Protocol):
    """Thread-safe, except ``mark``, ``wait_for`` and ``beside``, which only the thread that owns the model may call."""

    @property
    def device(self) -> torch.device: ...

    def allocate(self, nbytes: int) -> torch.Tensor:
        """Device memory: uint8 ``[nbytes]``."""
        ...

    def lock_pages(self, region: memoryview) -> Callable[[], None]:
        """Let the device copy from this RAM asynchronously. Call the returned function before the RAM is freed."""
        ...

    def copy(self, target: torch.Tensor, source: torch.Tensor, after: Mark | None) -> Mark:
        """Queue a copy from page-locked RAM, to run once ``after`` is reached. Returns its mark at once."""
        ...

    def mark(self) -> Mark:
        """Of all work in the compute queue so far."""
        ...

    def wait_for(self, mark: Mark) -> None:
        """Let all later work of the compute queue run only once ``mark`` is reached. Returns at once."""
        ...

    def beside(self, work: Callable[[], None]) -> Mark:
        """Queue what ``work`` does to the device in the prediction queue. Returns its mark at once.

        Tensors that it makes are for work of this queue alone. What it reads must have been made there, or be
        page-locked RAM that stays as it is until the mark is reached.
        """
        ...
