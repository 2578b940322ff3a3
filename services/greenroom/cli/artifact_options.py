"""The files that expert policies predict by, as options of the commands that run a policy."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final, NamedTuple

import click

from greenroom.cli.option_stack import stack


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
    "path": PolicyArtifact("duoserve", "greenroom path fit", "duoserve predicts as reuse does"),
    "reuse": PolicyArtifact(
        "reuse or duoserve", "greenroom reuse fit", "reuse predicts by another model's coefficients"
    ),
}
"""By kind, as in ``ARTIFACT_FILES``, which is not imported for each --help."""

artifact_options = stack(
    *(
        click.option(
            f"--{kind.replace('_', '-')}",
            type=click.Path(dir_okay=False, path_type=Path),
            help=f"What `{one.made_by}` made, for --policy {one.policies}.  "
            f"[default: {kind}.safetensors in its folder]",
        )
        for kind, one in POLICY_ARTIFACTS.items()
    )
)

replayed_artifact_options = stack(
    *(
        click.option(
            f"--{kind.replace('_', '-')}",
            type=click.Path(exists=True, dir_okay=False, path_type=Path),
            help=f"What {one.policies} predicts by, a file of `{one.made_by}`.  [default: none: {one.without}]",
        )
        for kind, one in POLICY_ARTIFACTS.items()
    )
)


def artifacts_from(options: dict[str, Any]) -> dict[str, Path]:
    """Takes the given files out of ``options``, by kind."""
    given = {kind: options.pop(kind) for kind in POLICY_ARTIFACTS}
    return {kind: path for kind, path in given.items() if path is not None}
