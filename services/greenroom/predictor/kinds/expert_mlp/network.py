"""The network itself, ExpertMLP (DuoServe-MoE, §4.2)."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from greenroom.core.artifacts.expert_mlp_file import HIDDEN, ExpertMlpFile
from greenroom.moe.routing.expert_mlp import FoldedMlp
from greenroom.policies.duoserve.mlp_states import StateConstructor

DROPOUT = 0.1


class ExpertMlp(nn.Module):
    """Linear layers from a state to a logit an expert. Each but the last is followed by batch norm, ReLU, dropout."""

    def __init__(self, width: int, experts: int) -> None:
        super().__init__()
        self.hidden = nn.ModuleList(
            nn.Sequential(nn.Linear(before, after), nn.BatchNorm1d(after), nn.ReLU(), nn.Dropout(DROPOUT))
            for before, after in pairwise((width, *HIDDEN))
        )
        self.leave = nn.Linear(HIDDEN[-1], experts)

    def forward(self, states: Tensor) -> Tensor:
        """``[n, experts]`` of ``states[n, width]``."""
        for layer in self.hidden:
            states = layer(states)
        logits: Tensor = self.leave(states)
        return logits

    def folded(self) -> npt.NDArray[np.float32]:
        """Matrices and biases as in ``ExpertMlpFile.weights``: what it computes once it is trained."""
        parts: list[Tensor] = []
        with torch.no_grad():
            for layer in self.hidden:
                assert isinstance(layer, nn.Sequential)
                linear, norm = layer[0], layer[1]
                assert isinstance(linear, nn.Linear)
                assert isinstance(norm, nn.BatchNorm1d)
                mean, variance = norm.running_mean, norm.running_var
                assert mean is not None
                assert variance is not None
                gain = norm.weight / torch.sqrt(variance + norm.eps)
                parts += [(linear.weight * gain[:, None]).ravel(), (linear.bias - mean) * gain + norm.bias]
            parts += [self.leave.weight.ravel(), self.leave.bias]
            found: npt.NDArray[np.float32] = torch.cat(parts).numpy()
        return found


class ExpertMlpPredictor:
    """A file, ready to predict."""

    def __init__(self, file: ExpertMlpFile) -> None:
        self.states = StateConstructor.of_file(file)
        self._widths = file.experts_per_layer
        self._network = FoldedMlp(file)

    def logits(self, picks: npt.NDArray[np.integer], layer: int) -> npt.NDArray[np.float32]:
        """``[n, experts of the layer]``, of tokens with ``picks[n, L, k]``: see ``StateConstructor.states``."""
        states = torch.from_numpy(self.states.states(picks, np.full(len(picks), layer)))
        found: npt.NDArray[np.float32] = self._network(states).numpy()[:, : self._widths[layer]]
        return found
