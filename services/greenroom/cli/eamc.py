"""``greenroom eamc``: the expert activation matrix collection that the policy moe-infinity predicts by."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from greenroom.cli.numbers import SEED
from greenroom.cli.recorded_sources import Recorded, check_source, recorded_of, source_options, write_artifact

if TYPE_CHECKING:
    from greenroom.core.artifacts.eamc_file import EamcFile


@click.group()
def eamc() -> None:
    """The expert activation matrix collection (EAMC) of --policy moe-infinity."""


@eamc.command()
@click.option(
    "--out",
    type=click.Path(dir_okay=False, path_type=Path),
    default=Path("eamc.safetensors"),
    show_default=True,
    help="The file to write.",
)
@click.option(
    "--capacity", type=click.IntRange(min=1), default=100, show_default=True, help="Most members of the collection."
)
@click.option("--seed", type=SEED, default=0, show_default=True, help="The same sequences and seed choose the same.")
@source_options
def build(out: Path, capacity: int, seed: int, **options: Any) -> None:
    """Choose, of many sequences' expert activation matrices, those that stand for all of them.

    The matrix of a sequence says how many of its tokens each expert got. K-means puts alike ones together, and of each
    cluster the one nearest to its centre is kept. MODEL, a folder or a hub id, is what runs the prompts, as --model is;
    without either it is the bundled model. With --trace none runs, and it is a name where the traces have none.

    \b
    Examples:
      greenroom eamc build --prompts prompts.jsonl
      greenroom eamc build ./checkpoint --prompts prompts.txt --out ./checkpoint/eamc.safetensors
      greenroom eamc build --trace monday.npz --trace tuesday.npz --capacity 200
      greenroom replay tuesday.npz --eamc eamc.safetensors --policy moe-infinity --link 2GiB/s --expert-bytes 11MiB
    """
    from greenroom.predictor.kinds.eamc.members import check_library

    check_source(options, out)
    check_library()
    made = _chosen(recorded_of(options), capacity, seed)
    write_artifact(made, out)
    click.echo(f"{out}: {_said(made)}")


@eamc.command()
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="As one JSON object.")
def show(file: Path, as_json: bool) -> None:
    """What is in FILE.

    \b
    Example:
      greenroom eamc show eamc.safetensors
    """
    from greenroom.core.artifacts.eamc_file import EamcFile

    found = EamcFile.read(file)
    if as_json:
        click.echo(
            json.dumps(
                {
                    "model": found.model, "members": len(found.matrices), "sequences": found.sequences,
                    "experts_per_layer": found.experts_per_layer, "version": found.version,
                    "created_ms": found.created_ms, "bytes": found.matrices.nbytes, **found.report,
                }
            )
        )  # fmt: skip
    else:
        click.echo(f"{file}: {_said(found)}")


def _chosen(recorded: Recorded, capacity: int, seed: int) -> EamcFile:
    import numpy as np

    from greenroom.core.artifacts.eamc_file import EamcFile
    from greenroom.predictor.kinds.eamc.members import choose_members
    from greenroom.replay.traces.activation_matrices import activation_matrices

    began = time.monotonic()
    matrices = np.concatenate([activation_matrices(one) for one in recorded.traces])
    members = choose_members(recorded.experts_per_layer, matrices, capacity=capacity, seed=seed)
    report = {"capacity": capacity, "seed": seed, "seconds": round(time.monotonic() - began, 3)}
    return EamcFile(
        model=recorded.model,
        experts_per_layer=recorded.experts_per_layer,
        matrices=matrices[members],
        sequences=len(matrices),
        report=report,
    )


def _said(found: EamcFile) -> str:
    from greenroom.core.units import format_bytes

    of = f" of {found.model}" if found.model else ""
    return (
        f"{len(found.matrices)} members chosen from {found.sequences} sequences{of}, {found.shape}, "
        f"{format_bytes(found.matrices.nbytes)}"
    )
