"""The kinds of artifact files that policies predict by."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from greenroom.core.artifacts.artifact_file import ArtifactFile
from greenroom.core.artifacts.eamc_file import EamcFile
from greenroom.core.artifacts.expert_mlp_file import ExpertMlpFile
from greenroom.core.artifacts.path_file import PathFile
from greenroom.core.artifacts.paths_file import PathsFile
from greenroom.core.artifacts.reuse_file import ReuseFile

ARTIFACT_FILES: Final[Mapping[str, type[ArtifactFile]]] = {
    kind.KIND: kind for kind in (EamcFile, ExpertMlpFile, PathFile, PathsFile, ReuseFile)
}
