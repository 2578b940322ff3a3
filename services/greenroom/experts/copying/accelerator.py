"""What the engine needs of a device with memory and an order of work of its own: the seam for CUDA.

Such a device has two queues of work, CUDA's streams. The *compute* queue is the one that the model's forward fills,
from the thread that owns the model. The *copy* queue is the engine's own, filled from the movers' threads. Work of one
queue runs in the order in which it was given; between the two only marks order anything. Nothing here waits for a
whole device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch


class Mark(Protocol):
    """A point in a queue, CUDA's event: reached when all work given to the queue before it is done."""

    def reached(self) -> bool: ...

    def wait(self) -> None:
        """The calling thread, and no other, waits until it is reached."""
        ...


class Accelerator(Protocol):
    """Thread-safe, but for ``mark`` and ``wait_for``: those belong to the thread that owns the model."""

    @property
    def device(self) -> torch.device: ...

    def allocate(self, nbytes: int) -> torch.Tensor:
        """Device memory: uint8 ``[nbytes]``."""
        ...

    def lock_pages(self, region: memoryview) -> Callable[[], None]:
        """Let the device copy from this RAM while threads go on; call what is returned before it is freed."""
        ...

    def copy(self, target: torch.Tensor, source: torch.Tensor, after: Mark | None) -> Mark:
        """Queue a copy from page-locked RAM, to run once ``after`` is reached; returns at once, with its mark."""
        ...

    def mark(self) -> Mark:
        """Of all that the compute queue has been given so far."""
        ...

    def wait_for(self, mark: Mark) -> None:
        """What the compute queue is given from now on runs once ``mark`` is reached; returns at once."""
        ...
