"""``greenroom pack``: make a checkpoint's expert pack ahead of its first use."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path

import click

from greenroom.cli.model_options import checkpoint_options, computing_options


@click.command()
@click.argument("model")
@checkpoint_options
@computing_options
@click.option("--force", is_flag=True, help="Make it anew even if it is there.")
@click.option("--measure", is_flag=True, help="Measure again how it is read best, even if that is known.")
@click.option("--verify", is_flag=True, help="Read all of it and check every record.")
def pack(
    model: str,
    revision: str | None,
    offline: bool,
    dtype: str,
    experts_as: str,
    cache_dir: Path | None,
    device: str,
    products: str,
    force: bool,
    measure: bool,
    verify: bool,
) -> None:
    """Write the packed expert file of MODEL (a folder, a GGUF file or a hub id) and print its path.

    `serve` and `generate` do this by themselves at first use. Give it their --dtype, --experts-as, --device and
    --products, by which experts are packed, and by the processor here. How the pack is read best here is measured as
    well, and kept beside it.

    \b
    Examples:
      greenroom pack mistralai/Mixtral-8x7B-Instruct-v0.1
      greenroom pack ./my-model --dtype bfloat16 --verify
      greenroom pack ./my-model --experts-as expanded      for processors of several kinds
      greenroom pack ./my-model --measure                  the machine was busy when its disk was measured
    """
    from tqdm import tqdm

    from greenroom.experts.copying.cuda import device_type
    from greenroom.experts.copying.disk_calibration import load_or_measure
    from greenroom.experts.pack.pack_file import PackFile
    from greenroom.moe.loading.checkpoint import resolve
    from greenroom.moe.loading.kept_pack import kept_pack

    found = resolve(model, revision=revision, offline=offline)
    kept = kept_pack(found, dtype, experts_as, cache_dir, products=products, device=device_type(device), force=force)
    with contextlib.closing(PackFile.open(kept.path)) as opened:
        if verify:
            with tqdm(
                total=opened.manifest.record_bytes, desc="verifying", unit="B", unit_scale=True, unit_divisor=1024,
                disable=not sys.stderr.isatty(),
            ) as bar:  # fmt: skip
                opened.verify(bar.update)
        link = load_or_measure(opened, on_measure=lambda line: click.echo(line, err=True), anew=measure)
        if link is not None:
            click.echo(f"read best in {link.describe()}", err=True)
    click.echo(kept.path)
