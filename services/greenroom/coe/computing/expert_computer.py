"""What one executor does: a batch of inputs through one expert."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from greenroom.coe.computing.expert_result import ExpertResult
from greenroom.coe.computing.inputs import (
    ImagePreparation,
    Input,
    Preparation,
    Preparations,
    Prepared,
    TextPreparation,
)
from greenroom.coe.computing.outputs import classifications, detections, embeddings
from greenroom.coe.computing.skeleton import Skeleton
from greenroom.coe.loading.architecture import Architecture
from greenroom.coe.loading.collaboration import Collaboration
from greenroom.coe.loading.expert_checkpoint import InputKind, Task
from greenroom.coe.loading.pooling import Pooling, read_pooling
from greenroom.core.errors import ExpertFailed, GreenroomError, InvalidRequest
from greenroom.experts.pack.layout import ExpertWeights

Computed = ExpertResult | GreenroomError
"""What became of one input: InvalidRequest where it is at fault, ExpertFailed where the expert is."""


class ExpertComputer:
    """For one thread at a time: each executor has its own. ``preparations`` may be shared by all of them.

    Experts are numbered as in the collaboration's graph. Weights are views of a record of the expert's architecture.
    """

    def __init__(
        self,
        collaboration: Collaboration,
        architectures: Mapping[str, Architecture],
        preparations: Preparations,
        device: torch.device | None = None,
    ) -> None:
        """``device``: where weights lie; None is the CPU. Raises CorruptCheckpoint, UnsupportedModel."""
        self.device = device or torch.device("cpu")
        self._names = collaboration.graph.names
        self._checkpoints = collaboration.experts
        self._skeletons = {key: Skeleton(one, self.device) for key, one in architectures.items()}
        self._preparations: list[Preparation] = []
        self._poolings: list[Pooling] = []
        for name, checkpoint in zip(self._names, self._checkpoints, strict=True):
            try:
                self._preparations.append(preparations.of(checkpoint, architectures[checkpoint.architecture]))
                pooled = checkpoint.task is Task.EMBEDDING and checkpoint.takes is InputKind.TEXT
                self._poolings.append(read_pooling(checkpoint.folder, checkpoint.model) if pooled else Pooling())
            except GreenroomError as error:
                raise type(error)(f"{collaboration.file}: experts.{name}: {error}") from error

    def compute(self, expert: int, inputs: Sequence[Input], weights: ExpertWeights) -> list[Computed]:
        """What becomes of each input. One that can not be read or prepared leaves the batch. The others are computed,
        together unless their sizes differ once they are prepared.

        What else is raised is a defect of the expert or of the machine, after which none of the batch has a result.
        """
        outcomes: dict[int, Computed] = {}
        read: dict[int, Prepared] = {}
        preparation = self._preparations[expert]
        for place, given in enumerate(inputs):
            try:
                read[place] = preparation.read(given, "the input")
            except InvalidRequest as error:
                outcomes[place] = _without_frames(error)
        places, parts = list(read), preparation.together(list(read.values()))
        read.clear()  # the parts have it
        for part in parts:
            prepared = self._placed(expert, part)
            computed = self.results(expert, prepared, self.forward(expert, prepared, weights))
            outcomes.update(zip((places[at] for at in part.places), computed, strict=True))
        return [outcomes[place] for place in range(len(inputs))]

    def prepare(self, expert: int, inputs: Sequence[Input]) -> list[Prepared]:
        """The batch as the expert's own processor or tokenizer makes it, on the device: for each size that inputs have
        then a part, which is computed by itself. Raises InvalidRequest.
        """
        preparation = self._preparations[expert]
        read = [preparation.read(given, f"inputs[{place}]") for place, given in enumerate(inputs)]
        return [self._placed(expert, part) for part in preparation.together(read)]

    @property
    def preparing_bytes(self) -> int:
        """What reading an input takes at most, of whichever expert."""
        return max(preparation.nbytes for preparation in self._preparations)

    def longest(self, expert: int) -> int | None:
        """How many tokens a text for it may have. None: it takes images."""
        preparation = self._preparations[expert]
        return preparation.longest if isinstance(preparation, TextPreparation) else None

    def largest(self, expert: int) -> tuple[int, int] | None:
        """Width and height of an image of which its processor makes the most pixels. None: it takes texts."""
        preparation = self._preparations[expert]
        return preparation.largest if isinstance(preparation, ImagePreparation) else None

    def prepared_alike(self, experts: Iterable[int]) -> list[list[int]]:
        """These experts, those together whose inputs are prepared alike."""
        found: dict[int, list[int]] = {}
        for expert in experts:
            found.setdefault(id(self._preparations[expert]), []).append(expert)
        return list(found.values())

    def forward(self, expert: int, prepared: Prepared, weights: ExpertWeights) -> Any:
        """The model's own outputs for a prepared batch."""
        with torch.inference_mode(), self._skeleton(expert).using(weights) as model:
            return model(**prepared.tensors)

    def results(self, expert: int, prepared: Prepared, outputs: Any) -> list[ExpertResult | ExpertFailed]:
        """What ``outputs`` say of each input of the batch."""
        name, checkpoint = self._names[expert], self._checkpoints[expert]
        with torch.inference_mode():
            if checkpoint.task is Task.OBJECT_DETECTION:
                preparation = self._preparations[expert]
                assert isinstance(preparation, ImagePreparation), "only images have boxes"
                return detections(outputs, checkpoint.labels, prepared.sizes, preparation.boxes, name)
            if checkpoint.task is Task.EMBEDDING:
                mask = prepared.tensors["attention_mask"] if checkpoint.takes is InputKind.TEXT else None
                return embeddings(outputs, mask, self._poolings[expert], name)
            return classifications(outputs.logits, checkpoint.labels, checkpoint.problem_type, name)

    def _placed(self, expert: int, prepared: Prepared) -> Prepared:
        return prepared.to(self.device, self._skeleton(expert).architecture.dtype)

    def _skeleton(self, expert: int) -> Skeleton:
        return self._skeletons[self._checkpoints[expert].architecture]


def _without_frames(error: InvalidRequest) -> InvalidRequest:
    """What is kept of an input that is refused: frames would hold all that was decoded of it, for a whole batch."""
    error.__cause__ = error.__context__ = None
    return error.with_traceback(None)
