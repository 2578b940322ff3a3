"""Files that policies predict by, by the policy that takes them."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from greenroom.core.artifacts.artifact_file import ArtifactFile
from greenroom.policies.base.artifacts import artifact_of
from greenroom.policies.base.events import Artifact
from greenroom.policies.base.expert_keys import Catalogue
from greenroom.policies.registry import EXPERT_POLICIES


@dataclass(frozen=True)
class Learnt:
    """``files``: what the policies know beforehand. ``facts``: how they came to be."""

    files: tuple[ArtifactFile, ...]
    facts: dict[str, Any] = field(default_factory=dict)

    def of(self, policy: str) -> tuple[ArtifactFile, ...]:
        """Those that the policy of this name takes."""
        return tuple(file for file in self.files if file.KIND in EXPERT_POLICIES[policy].artifacts)

    def artifacts(self, policy: str, catalogue: Catalogue) -> tuple[Artifact, ...]:
        return tuple(artifact_of(catalogue, file, "recorded") for file in self.of(policy))

    def write(self, folder: Path, policy: str) -> dict[str, str]:
        """As files, by kind."""
        paths = {file.KIND: folder / f"{file.KIND}.safetensors" for file in self.of(policy)}
        for file in self.of(policy):
            file.write(paths[file.KIND])
        return {kind: str(path) for kind, path in paths.items()}
