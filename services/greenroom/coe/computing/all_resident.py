"""A collaboration with all of its experts in memory: what every other way of computing it is compared with."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path

import torch

from greenroom.coe.computing.expert_computer import ExpertComputer
from greenroom.coe.computing.expert_result import Stage
from greenroom.coe.computing.inputs import Input, Preparations
from greenroom.coe.graph.expert_graph import END
from greenroom.coe.loading.architecture import build_architectures
from greenroom.coe.loading.collaboration import Collaboration
from greenroom.coe.loading.packing import ensure_pack
from greenroom.core.errors import ExpertFailed, GreenroomError, InvalidRequest
from greenroom.experts.pack.direct_io import page_aligned
from greenroom.experts.pack.layout import ExpertWeights
from greenroom.experts.pack.pack_file import PackFile


class AllResident:
    """For one thread at a time."""

    def __init__(
        self, collaboration: Collaboration, computer: ExpertComputer, weights: Sequence[ExpertWeights]
    ) -> None:
        """``weights[N]``: of each expert, numbered as in the graph."""
        self.collaboration = collaboration
        self.computer = computer
        self.weights = tuple(weights)

    @classmethod
    def load(cls, collaboration: Collaboration, dtype: str = "auto", cache_dir: Path | None = None) -> AllResident:
        """All experts read out of the pack, which is made first if it is missing. On the CPU.

        Raises GreenroomError.
        """
        architectures = build_architectures(collaboration, dtype)
        computer = ExpertComputer(collaboration, architectures, Preparations())
        with contextlib.closing(PackFile.open(ensure_pack(collaboration, architectures, cache_dir))) as pack:
            return cls(collaboration, computer, resident_weights(pack))

    def run(self, given: Input, value: str = "") -> list[Stage]:
        """One request from its first expert to its last, each stage alone. ``value``: the router's parameter.

        Raises InvalidRequest for an unknown value or a bad input, ExpertFailed if an expert's output is none.
        """
        graph = self.collaboration.graph
        try:
            expert: int | None = graph.first(value)
        except LookupError:
            raise InvalidRequest(f"{value!r} is no value of the router", param="value", code="unknown_value") from None
        stages: list[Stage] = []
        while expert is not END:
            (outcome,) = self.computer.compute(expert, [given], self.weights[expert])
            if isinstance(outcome, GreenroomError):
                raise outcome
            stages.append(Stage(graph.names[expert], outcome))
            try:
                expert = graph.after(expert, outcome.label, outcome.score)
            except LookupError as error:
                raise ExpertFailed(str(error)) from error
        return stages


def resident_weights(pack: PackFile) -> list[ExpertWeights]:
    """Every expert's tensors, each record in memory of its own. Raises PackError, OSError."""
    weights = []
    for number, layer in enumerate(pack.manifest.layers):
        record = page_aligned(layer.layout.nbytes)
        pack.read_into(number, 0, record)
        weights.append(layer.layout.views(torch.frombuffer(record, dtype=torch.uint8)))
    return weights
