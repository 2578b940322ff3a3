"""The kinds of artifact files that policies predict by."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from greenroom.core.artifact_file import ArtifactFile
from greenroom.core.eamc_file import EamcFile
from greenroom.core.reuse_file import ReuseFile

ARTIFACT_FILES: Final[Mapping[str, type[ArtifactFile]]] = {kind.KIND: kind for kind in (EamcFile, ReuseFile)}
