"""``greenroom pack``: make a checkpoint's expert pack ahead of its first use."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from greenroom.cli.model_options import checkpoint_options


@click.command()
@click.argument("model")
@checkpoint_options
@click.option("--force", is_flag=True, help="Make it anew even if it is there.")
@click.option("--verify", is_flag=True, help="Read all of it and check every record.")
def pack(
    model: str, revision: str | None, offline: bool, dtype: str, cache_dir: Path | None, force: bool, verify: bool
) -> None:
    """Write the packed expert file of MODEL (a folder or a hub id) and print its path.

    `serve` and `generate` do this by themselves at first use.

    \b
    Examples:
      greenroom pack mistralai/Mixtral-8x7B-Instruct-v0.1
      greenroom pack ./my-model --dtype bfloat16 --verify
    """
    from tqdm import tqdm

    from greenroom.experts.pack import PackFile
    from greenroom.moe.checkpoint import resolve
    from greenroom.moe.packing import ensure_pack

    path = ensure_pack(resolve(model, revision=revision, offline=offline), dtype, cache_dir, force=force)
    if verify:
        opened = PackFile.open(path)
        with tqdm(
            total=opened.manifest.record_bytes, desc="verifying", unit="B", unit_scale=True, unit_divisor=1024,
            disable=not sys.stderr.isatty(),
        ) as bar:  # fmt: skip
            opened.verify(bar.update)
        opened.close()
    click.echo(path)
