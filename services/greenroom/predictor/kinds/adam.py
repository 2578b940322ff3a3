"""Adam, by which coefficients are fitted without torch."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float32]


class Adam:
    """Kingma and Ba (ICLR 2015), with their constants. ``rate`` may be changed between steps."""

    def __init__(self, parameters: list[Array], rate: float) -> None:
        self._parameters = parameters
        self._means = [np.zeros_like(one) for one in parameters]
        self._squares = [np.zeros_like(one) for one in parameters]
        self.rate = rate
        self._steps = 0

    def step(self, gradients: list[Array]) -> None:
        """Changes the parameters in place."""
        self._steps += 1
        rate = self.rate * (1 - 0.999**self._steps) ** 0.5 / (1 - 0.9**self._steps)
        for parameter, mean, square, gradient in zip(
            self._parameters, self._means, self._squares, gradients, strict=True
        ):
            mean += 0.1 * (gradient - mean)
            square += 0.001 * (np.square(gradient) - square)
            parameter -= (rate * mean / (np.sqrt(square) + 1e-8)).astype(np.float32)
