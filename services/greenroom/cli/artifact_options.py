"""The files that expert policies predict by, as options of the commands that run a policy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from greenroom.cli.option_stack import stack
from greenroom.core.artifacts.policy_artifacts import POLICY_ARTIFACTS

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
