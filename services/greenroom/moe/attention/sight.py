"""What the rows of a chunk see of their sequence, by the family's own mask function."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from transformers.masking_utils import causal_mask_function

from greenroom.moe.kernels.device_copies import to_device

MaskFunction = Callable[..., torch.Tensor]
"""Of transformers: whether a row may see a key, from the batch row, the head, and the positions of row and key."""


class Sight:
    """What ``rows`` rows behind ``before`` others see: the keys from ``first`` on that ``mask`` does not hide.

    ``firsts[rows]``: the first key that each row sees, where it sees all keys from there up to its own. None: a row
    sees others.
    """

    first: int
    firsts: NDArray[np.int64] | None

    def __init__(self, mask_function: MaskFunction, before: int, rows: int, device: torch.device) -> None:
        self._before, self._rows, self._device = before, rows, device
        self._seen: torch.Tensor | None = None  # as the mask; None: all keys up to each row's own
        if mask_function is causal_mask_function:
            self.first, self.firsts = 0, np.zeros(rows, dtype=np.int64)
            return
        # On the CPU in any case, because the result decides which slice is read.
        nothing = torch.zeros((), dtype=torch.int64)
        own = torch.arange(before, before + rows)[:, None]
        seen = mask_function(nothing, nothing, own, torch.arange(before + rows)[None, :]).expand(rows, before + rows)
        numbers = seen.to(torch.uint8)
        firsts = numbers.argmax(dim=1)
        self.first = int(numbers.amax(dim=0).argmax())
        run = lower_triangle(rows, seen.device, before) & (torch.arange(before + rows)[None, :] >= firsts[:, None])
        self.firsts = firsts.numpy() if torch.equal(seen, run) else None
        if self.firsts is None or self.firsts.any():
            self._seen = seen[:, self.first :]

    @cached_property
    def mask(self) -> torch.Tensor | None:
        """``[1, 1, rows, keys]``: True where a row sees a key. None: each row sees all keys up to its own, and is the
        only one or comes first in its sequence.

        Made when it is asked for, because the compiled attention does without.
        """
        seen = self._seen
        if seen is None:
            if self._rows == 1 or self._before == 0:
                return None
            seen = lower_triangle(self._rows, torch.device("cpu"), self._before)
        elif self._rows == 1 and bool(seen.all()):
            return None
        return to_device(seen[None, None], self._device)


def lower_triangle(rows: int, device: torch.device, before: int = 0) -> torch.Tensor:
    """``[rows, before + rows]``: each row sees all keys up to its own."""
    return torch.ones(rows, before + rows, dtype=torch.bool, device=device).tril_(before)
