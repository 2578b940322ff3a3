"""An artifact's file as the Artifact that policies are handed."""

from __future__ import annotations

from greenroom.core.artifacts.artifact_file import ArtifactFile
from greenroom.core.errors import InvalidConfig
from greenroom.policies.base.events import Artifact
from greenroom.policies.base.expert_keys import Catalogue


def artifact_of(catalogue: Catalogue, file: ArtifactFile, name: str) -> Artifact:
    """The artifact in ``file``, called ``name`` in errors. Raises InvalidConfig where it is of another model."""
    if file.experts_per_layer != tuple(catalogue.experts_per_layer.tolist()):
        allowed = f"one of this model, {catalogue.layers} layers with {catalogue.size} experts in all"
        raise InvalidConfig(file.KIND, f"{name}: {file.shape}", allowed)
    return Artifact(file.KIND, str(file.version), file.arrays)
