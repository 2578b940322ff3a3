"""The simulator's costs beside a step's own (``core/step_costs.py``): what a server takes, and loading experts."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from greenroom.core.model_profile import ModelProfile


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingOverhead:
    """What a server takes beyond its engine's forwards, milliseconds.

    ``request_ms``: on a request's way in and out, while the engine goes on. ``step_ms``: with every step. ``row_ms``:
    with every sequence in it.
    """

    request_ms: float = 0.0
    step_ms: float = 0.0
    row_ms: float = 0.0

    def of_step(self, sequences: int) -> float:
        return self.step_ms + self.row_ms * sequences


class ExpertSets:
    """The experts that a worker with a share of them holds for a mix of tasks (eMoE, Eq. 2), and ΔE of another mix.

    ``share`` of all experts fit. f is the profile's popularity; each layer keeps at least the router's k.
    """

    def __init__(self, profile: ModelProfile, share: float) -> None:
        self.profile = profile
        self.budget = round(share * profile.layers * profile.experts)
        self._wanted: dict[str, NDArray[np.float64]] = {}
        self.resident: NDArray[np.bool_] = self._chosen(
            sum((self._shares(task, known.prompts) for task, known in profile.tasks.items()), self._nothing())
        )
        """``[layers, experts]``"""

    @property
    def everything(self) -> bool:
        return self.budget >= self.profile.layers * self.profile.experts

    def missing(self, tokens_by_task: dict[str, float]) -> int:
        """Experts that the mix wants and that are not here."""
        return int((self._target(tokens_by_task) & ~self.resident).sum())

    def bring(self, tokens_by_task: dict[str, float]) -> int:
        """Hold what the mix wants; returns how many experts were brought."""
        if self.everything:
            return 0
        target = self._target(tokens_by_task)
        brought = int((target & ~self.resident).sum())
        self.resident = target
        return brought

    def load_ms_by_task(self, tokens_by_task: dict[str, float]) -> dict[str, float]:
        """ΔE of one more request of each task type, on what runs."""
        costs = self.profile.costs
        if self.everything or costs is None:
            return {}
        found = {}
        for task, known in self.profile.tasks.items():
            more = known.input_tokens.mean + known.generated_tokens.mean
            found[task] = costs.load_ms(self.missing({**tokens_by_task, task: tokens_by_task.get(task, 0.0) + more}))
        return found

    def _target(self, tokens_by_task: dict[str, float]) -> NDArray[np.bool_]:
        """A layer of which nothing is said keeps what it has."""
        wanted = sum((self._shares(task, tokens) for task, tokens in tokens_by_task.items()), self._nothing())
        return self._chosen(wanted + 1e-9 * self.resident)

    def _chosen(self, wanted: NDArray[np.float64]) -> NDArray[np.bool_]:
        """The router's k of every layer, then the largest over all layers."""
        layers, experts = wanted.shape
        least = np.argsort(-wanted, axis=1, kind="stable")[:, : self.profile.top_k]
        first = np.zeros((layers, experts), dtype=np.bool_)
        np.put_along_axis(first, least, True, axis=1)
        order = np.argsort(-np.where(first, np.inf, wanted).ravel(), kind="stable")
        chosen = np.zeros(layers * experts, dtype=np.bool_)
        chosen[order[: max(self.budget, int(first.sum()))]] = True
        return chosen.reshape(layers, experts)

    def _shares(self, task: str, tokens: float) -> NDArray[np.float64]:
        """N of ``tokens`` tokens of the task; 0 at the layers where it is insensitive."""
        if task not in self._wanted:
            popularity = np.array(self.profile.popularity(task), dtype=np.float64)
            popularity[: self.profile.insensitive_layers(task)] = 0.0
            self._wanted[task] = popularity
        return self._wanted[task] * tokens

    def _nothing(self) -> NDArray[np.float64]:
        return np.zeros((self.profile.layers, self.profile.experts), dtype=np.float64)
