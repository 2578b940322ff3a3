"""ExpertMLP while the model runs: what decoding rows' picks so far foresee of the next layer (DuoServe-MoE §5.3)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from greenroom.core.artifacts.expert_mlp_file import ExpertMlpFile
from greenroom.core.errors import InvalidConfig
from greenroom.experts.copying.accelerator import Accelerator
from greenroom.moe.kernels.device_copies import in_ram, to_device
from greenroom.policies.base.events import Artifact, LayerRouting, Prediction, PredictionRequest, Step
from greenroom.policies.base.expert_keys import Catalogue
from greenroom.policies.base.expert_policy import ExpertPolicy
from greenroom.policies.base.picks_predictor import PicksPredictor
from greenroom.policies.duoserve.literal import EXPERT_MLP
from greenroom.policies.duoserve.mlp_states import StateConstructor

_ARRAYS = {"form", "popularity", "affinity", "weights"}


class FoldedMlp:
    """The seven linear layers of a file, in single precision, on the CPU until they are moved."""

    def __init__(self, file: ExpertMlpFile) -> None:
        self._layers = [
            (torch.from_numpy(matrix.astype(np.float32)), torch.from_numpy(bias.astype(np.float32)))
            for matrix, bias in file.linear_layers
        ]

    def __call__(self, states: torch.Tensor) -> torch.Tensor:
        """Logits ``[n, E]`` of ``states[n, width]``."""
        with torch.inference_mode():
            for place, (matrix, bias) in enumerate(self._layers):
                states = nn.functional.linear(states, matrix, bias)
                if place < len(self._layers) - 1:
                    states = states.relu_()
        return states

    def move(self, device: torch.device) -> None:
        """No thread waits for it."""
        self._layers = [(to_device(matrix, device), to_device(bias, device)) for matrix, bias in self._layers]


class _Version:
    """A network in use: its inputs, and where a token's picks are kept."""

    def __init__(self, file: ExpertMlpFile, version: str) -> None:
        self.name = version
        self.network = FoldedMlp(file)
        self.states = StateConstructor.of_file(file)
        self.experts = file.experts_per_layer
        self.unpicked = np.full((1, len(file.experts_per_layer), file.of.top_k), max(self.experts), dtype=np.int64)


class _Pending:
    """An answer that a device computes. No thread waits for it."""

    def __init__(self, request: PredictionRequest, version: _Version, states: torch.Tensor, on: Accelerator) -> None:
        self._request, self._version = request, version
        self._logits = logits = in_ram((len(states), max(version.experts)), torch.float32, on.device)

        def compute() -> None:
            logits.copy_(version.network(to_device(states, on.device)), non_blocking=True)

        self._done = on.beside(compute)

    def take(self) -> Prediction | None:
        """None: it has not arrived."""
        return _prediction(self._request, self._version, self._logits) if self._done.reached() else None


class ExpertMlpProvider(PicksPredictor):
    """Answers for steps of decoding rows alone; prompts ask nothing.

    On the CPU (``accelerator`` None) it answers at once. On a device it computes in the prediction queue, and the
    answer is polled; a new question replaces one that has not been answered. Without a network it does not answer.
    """

    kind = EXPERT_MLP

    def __init__(self, catalogue: Catalogue, accelerator: Accelerator | None = None) -> None:
        self._catalogue = catalogue
        self._accelerator = accelerator
        self._next: _Version | None = None  # from the next step on
        self._version: _Version | None = None
        self._picks: NDArray[np.int64] = np.empty((0, 0, 0), dtype=np.int64)  # [T, L, k] of the step
        self._pending: _Pending | None = None

    def prepare(self, artifact: Artifact) -> Artifact:
        if artifact.kind != EXPERT_MLP or isinstance(artifact.prepared, _Version):
            return artifact
        return replace(artifact, prepared=_Version(file_of(self._catalogue, artifact), artifact.version))

    def on_artifact_swapped(self, artifact: Artifact) -> None:
        if artifact.kind != EXPERT_MLP:
            return
        try:
            version = self.prepare(artifact).prepared
        except InvalidConfig:
            return  # its sender has reported it
        assert isinstance(version, _Version), "so it was prepared"
        if self._accelerator is not None:
            device = self._accelerator.device
            self._accelerator.beside(lambda: version.network.move(device))
        self._next = version

    def on_step_started(self, step: Step) -> None:
        self._pending = None
        self._version = None if step.has_prompt_rows else self._next
        if self._version is not None:
            self._picks = self._version.unpicked.repeat(step.rows, axis=0)

    def on_layer_routed(self, routing: LayerRouting) -> None:
        if self._version is None:
            return
        picks = routing.picks
        if picks is None or len(picks) != len(self._picks):
            self._version = None  # which row picked what is not known
            return
        width = int(self._catalogue.experts_per_layer[routing.layer])
        own = self._picks[:, routing.layer, : picks.shape[1]]
        own[:] = np.where(picks < width, picks, max(self._version.experts))

    def answer(self, request: PredictionRequest) -> Prediction | None:
        version = self._version
        if version is None or not len(self._picks):
            return None
        (layer,) = range(*request.layers)
        states = torch.from_numpy(version.states.states(self._picks, np.full(len(self._picks), layer)))
        if self._accelerator is None:
            return _prediction(request, version, version.network(states))
        self._pending = _Pending(request, version, states, self._accelerator)
        return None

    def poll(self) -> Prediction | None:
        found = None if self._pending is None else self._pending.take()
        if found is not None:
            self._pending = None
        return found


def _prediction(request: PredictionRequest, version: _Version, logits: torch.Tensor) -> Prediction:
    values: NDArray[np.float32] = logits.numpy()[:, : version.experts[request.layers[0]]]
    return Prediction(request, version.name, values)


def file_of(catalogue: Catalogue, artifact: Artifact) -> ExpertMlpFile:
    """The network as a file. Raises InvalidConfig where it is not one that foresees this pool's next layer."""
    widths, name = tuple(catalogue.experts_per_layer.tolist()), f"version {artifact.version}"
    if artifact.arrays.keys() != _ARRAYS:
        raise InvalidConfig(EXPERT_MLP, name, f"the arrays {', '.join(sorted(_ARRAYS))}")
    arrays: dict[str, Any] = dict(artifact.arrays)
    file = ExpertMlpFile(model=catalogue.pool, experts_per_layer=widths, sequences=0, **arrays)
    top_k = int(catalogue.top_k.max())
    if (file.of.ahead, file.of.top_k) != (1, top_k):
        found = f"{name}: {file.of.ahead} layers ahead, top-{file.of.top_k}"
        raise InvalidConfig(EXPERT_MLP, found, f"a network that foresees one layer ahead in a model of top-{top_k}")
    return file


def predictors_for(policy: ExpertPolicy, accelerator: Accelerator | None = None) -> Sequence[PicksPredictor]:
    """What the policy asks of networks that are computed by torch."""
    return (ExpertMlpProvider(policy.catalogue, accelerator),) if EXPERT_MLP in policy.asks else ()
