"""``greenroom residual``: maps from the residual stream, which foresee picks in the place of routers run ahead."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from greenroom.cli.numbers import SEED
from greenroom.cli.option_stack import without
from greenroom.cli.recorded_sources import check_source, prompt_options, run_prompts, write_artifact

if TYPE_CHECKING:
    from greenroom.core.artifacts.residual_file import ResidualFile


@click.group()
def residual() -> None:
    """What foresees picks in the place of routers run ahead."""


@residual.command()
@click.option(
    "--out",
    type=click.Path(dir_okay=False, path_type=Path),
    default=Path("residual.safetensors"),
    show_default=True,
    help="The file to write.",
)
@click.option(
    "--rank",
    type=click.IntRange(0, 4096),
    default=64,
    show_default=True,
    help="Numbers that a row is narrowed to; 0: none, a linear map.",
)
@click.option("--seed", type=SEED, default=0, show_default=True, help="The same prompts and seed give the same.")
@without("residual")
@prompt_options
def fit(out: Path, rank: int, seed: int, **options: Any) -> None:
    """Run prompts, and fit to them what each layer's rows say of the picks one, two and three layers on.

    A policy that runs routers ahead asks these maps instead: --policy look-ahead, reuse, duoserve. MODEL, a folder or a
    hub id, is what runs the prompts, as --model is; without either it is the bundled model. Recorded routing holds no
    rows, so there is no --trace. Rows are kept in memory until they are fitted to, up to 2 GiB of them: leave room with
    --expert-memory.

    \b
    Examples:
      greenroom residual fit --prompts prompts.jsonl
      greenroom residual fit ./checkpoint --prompts prompts.txt --out ./checkpoint/residual.safetensors
      greenroom serve --expert-memory 2GiB --policy duoserve --residual residual.safetensors
    """
    from tqdm import tqdm

    from greenroom.cli.recording import record_rows
    from greenroom.moe.routing.residual_fit import FitOptions
    from greenroom.moe.routing.residual_fit import fit as fit_maps

    check_source(options, out)
    trace, rows = run_prompts(options, record_rows)
    with tqdm(total=trace.layers - 1, desc="fitting", unit="layer", disable=not sys.stderr.isatty()) as bar:
        made = fit_maps(
            trace, rows, FitOptions(rank=rank, silu=rank > 0, seed=seed), on_layer=lambda _: bar.update()
        )  # fmt: skip
    write_artifact(made, out)
    click.echo(f"{out}: {_said(made)}")
    _say_recalls(made)


@residual.command()
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="As one JSON object.")
def show(file: Path, as_json: bool) -> None:
    """What is in FILE.

    \b
    Example:
      greenroom residual show residual.safetensors
    """
    from greenroom.core.artifacts.residual_file import ResidualFile

    found = ResidualFile.read(file)
    if as_json:
        click.echo(
            json.dumps(
                {
                    "model": found.model, "sequences": found.sequences, "experts_per_layer": found.experts_per_layer,
                    "version": found.version, "created_ms": found.created_ms, **found.of._asdict(), **found.report,
                }
            )
        )  # fmt: skip
        return
    click.echo(f"{file}: {_said(found)}")
    _say_recalls(found)


def _say_recalls(found: ResidualFile) -> None:
    for ahead, recall in enumerate(found.report.get("held_out_recall", ()), start=1):
        click.echo(f"  {ahead} ahead: {100 * recall:.1f} % of the picks of sequences held out, prompts' too")


def _said(found: ResidualFile) -> str:
    from greenroom.core.units import format_bytes

    of = f" of {found.model}" if found.model else ""
    form = found.of
    kind = f"rank {form.rank}{', SiLU' if form.silu else ''}" if form.rank else "linear"
    size = format_bytes(found.up.nbytes + found.down.nbytes)
    return f"{kind}, {size}, fitted to {found.sequences} sequences{of}, {found.shape}, rows of {form.hidden}"
