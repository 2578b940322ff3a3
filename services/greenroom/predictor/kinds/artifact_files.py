"""What the kinds have in common that the expert policies of workers take as files."""

from __future__ import annotations

from typing import TypeVar

from greenroom.core.artifacts.artifact_file import ArtifactFile
from greenroom.predictor.making.job import Job
from greenroom.predictor.making.kind import Kind
from greenroom.predictor.traces.counts import Shape
from greenroom.predictor.versions.artifact import Codec

F = TypeVar("F", bound=ArtifactFile)


class ArtifactFileKind(Kind[F]):
    """``file``: what workers read."""

    def __init__(self, file: type[F]) -> None:
        self.codec = Codec(file.KIND, file.dump, file.parse)

    def fits(self, artifact: F, job: Job) -> bool:
        return super().fits(artifact, job) and artifact.experts_per_layer == experts_of(job.shape)


def experts_of(shape: Shape) -> tuple[int, ...]:
    """By layer."""
    return (shape.experts,) * shape.layers
