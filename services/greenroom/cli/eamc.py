"""``greenroom eamc``: the expert activation matrix collection that the policy moe-infinity predicts by."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from greenroom.cli.model_options import model_options, worker_config
from greenroom.cli.prompts import read_prompts

if TYPE_CHECKING:
    from greenroom.core.eamc_file import EamcFile
    from greenroom.replay import RoutingTrace


@click.group()
def eamc() -> None:
    """The expert activation matrix collection (EAMC) of --policy moe-infinity."""


@eamc.command()
@click.argument("named", metavar="[MODEL]", required=False)
@click.option(
    "--prompts",
    "file",
    type=click.Path(exists=True, dir_okay=False, allow_dash=True, path_type=Path),
    help="Run these prompts, like those to come: one a line, text or JSON with `prompt` or `messages`; - is stdin.",
)
@click.option(
    "--trace",
    "traces",
    multiple=True,
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Take recorded routing instead, an .npz of `greenroom trace`; may be given several times.",
)
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
@click.option("--seed", type=int, default=0, show_default=True, help="The same sequences and seed choose the same.")
@click.option("--max-tokens", default=128, show_default=True, help="Most tokens of an answer, with --prompts.")
@click.option("--concurrency", default=8, show_default=True, help="Sequences at once, with --prompts.")
@click.option("--raw", is_flag=True, help="Complete the text as it is, without the chat template.")
@model_options
def build(
    named: str | None,
    file: Path | None,
    traces: tuple[Path, ...],
    out: Path,
    capacity: int,
    seed: int,
    max_tokens: int,
    concurrency: int,
    raw: bool,
    **options: Any,
) -> None:
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
    from greenroom.core.errors import InvalidConfig
    from greenroom.predictor.eamc.members import check_library

    if named is not None and options["model"] not in (None, named):
        raise click.UsageError(f"MODEL is {named}, and --model is {options['model']}: give one of them")
    model = options["model"] = named or options["model"]
    if (file is None) == (not traces):
        raise click.UsageError("give either --prompts, to run them, or --trace, of routing that was recorded")
    if not out.parent.is_dir():
        raise click.BadParameter(f"there is no folder {out.parent}", param_hint="--out")
    check_library()
    if file is not None:
        recorded = [_run(file, max_tokens, concurrency, raw, options)]
    else:
        from greenroom.replay import RoutingTrace

        recorded = [RoutingTrace.load(path) for path in traces]
    made = _chosen(recorded, capacity, seed, Path(model or "").name)
    try:
        made.write(out)
    except OSError as error:
        raise InvalidConfig("out", str(out), f"it must be a place that can be written: {error.strerror}") from error
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
    from greenroom.core.eamc_file import EamcFile

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


def _run(file: Path, max_tokens: int, concurrency: int, raw: bool, options: dict[str, Any]) -> RoutingTrace:
    prompts = read_prompts(file)
    if not prompts:
        raise click.UsageError("no prompts in the file")
    options["max_running"] = concurrency
    config = worker_config(options)

    # torch takes seconds: what can be refused without it, was.
    from greenroom.cli.recording import record, requests_of
    from greenroom.core.generation import SamplingParams
    from greenroom.worker.worker import Worker

    with Worker(config) as worker:
        click.echo(worker.describe(), err=True)
        sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens)
        asked = requests_of(worker, prompts, sampling, raw=raw, system=None, skip_too_long=True)
        trace, _ = record(worker, asked)
    return trace


def _chosen(traces: list[RoutingTrace], capacity: int, seed: int, name: str) -> EamcFile:
    import numpy as np

    from greenroom.core.eamc_file import EamcFile
    from greenroom.core.errors import InvalidConfig
    from greenroom.predictor.eamc.members import choose_members
    from greenroom.replay.activations import activation_matrices

    shapes = [tuple(one.experts_per_layer.tolist()) for one in traces]
    if len(set(shapes)) > 1:
        raise InvalidConfig("trace", " and ".join(f"{len(one)} layers" for one in shapes), "traces of one model")
    began = time.monotonic()
    matrices = np.concatenate([activation_matrices(one) for one in traces])
    members = choose_members(shapes[0], matrices, capacity=capacity, seed=seed)
    report = {"capacity": capacity, "seed": seed, "seconds": round(time.monotonic() - began, 3)}
    models = {one.model for one in traces if one.model}
    return EamcFile(
        model=models.pop() if len(models) == 1 else name,
        experts_per_layer=shapes[0],
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
