"""What is said of the artifacts that expert policies predict by, for each --help: it imports no file and no policy."""

from __future__ import annotations

from typing import Final, NamedTuple


class PolicyArtifact(NamedTuple):
    """``policies``: which take it. ``made_by``: the command that makes it. ``without``: what they do where there is
    none. ``needed``: whether that is much worse. ``refused``: whether they can not do without (``ExpertPolicy.needs``).
    """

    policies: str
    made_by: str
    without: str
    needed: bool = False
    refused: bool = False


POLICY_ARTIFACTS: Final = {
    "eamc": PolicyArtifact("moe-infinity", "greenroom eamc build", "moe-infinity only caches", needed=True),
    "expert_mlp": PolicyArtifact(
        "duoserve:literal=true", "greenroom expert-mlp fit", "duoserve:literal=true is refused", refused=True
    ),
    "path": PolicyArtifact(
        "duoserve or expertflow", "greenroom path fit", "a token's earlier layers say nothing of its later ones"
    ),
    "paths": PolicyArtifact(
        "expertflow or expertflow:literal=true",
        "greenroom paths fit",
        "expertflow foretells nothing from tokens",
        needed=True,
    ),
    "reuse": PolicyArtifact(
        "reuse or duoserve or expertflow", "greenroom reuse fit", "reuse predicts by another model's coefficients"
    ),
}
"""By kind, as in ``ARTIFACT_FILES``."""
